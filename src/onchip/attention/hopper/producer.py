"""The warp that copies: what the forward keeps in shared memory, how tiles get there and leave, and who takes which task when.

Descriptors are five-dimensional, (wrap, origin, head, row, dim), so that the hardware clips a copy at any end the caller chooses: the row
axis has extent 2³⁰, and coordinates (2³⁰, begin + length, head, 2³⁰ − length + i) mean row begin + i, out of bounds from i = length on (the
address is right because 2³⁰ times the wrap stride is −2³⁰ rows modulo 2⁶⁴; Triton's `create_ragged_descriptor` does the same). Rows past a
sequence are read as zeros and never written, packed or not; keys no row of the tile sees are not read at all.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onchip.attention.hopper.compat import aggregate, reinterpret, thread_block, tma_load, tma_store
from onchip.attention.hopper.schedule import BM

FAR = gl.constexpr(1 << 30)  # extent of the row axis of every descriptor
REPORT, STOP = gl.constexpr(-1), gl.constexpr(-2)  # words to consumers beside 2 · task + (is it a repeat)


@aggregate
class Tensors:
    """Descriptors, shared memory, barriers. A head dim that is no power of two is cut in two parts (96 = 64 + 32, 192 = 128 + 64), since
    Triton's tensors are powers of two."""

    q: gl.tuple
    k: gl.tuple
    v: gl.tuple
    o: gl.tuple
    partial: gl.tensor  # (tiles' heads, parts, rows, V0 + V1) in fp32 instead of o, looked at only if SPLIT
    step_q: gl.tensor  # rows from one batch to the next
    step_k: gl.tensor
    step_v: gl.tensor
    step_o: gl.tensor
    lse_step: gl.tensor  # rows from one head to the next in lse, or from one part of a head, int64
    q_s: gl.tuple  # [slots · consumers, 64, width]
    k_s: gl.tuple  # [stages, keys, width]
    v_s: gl.tuple
    o_s: gl.tuple  # [consumers, 64, width of a piece]
    words: gl.shared_memory_descriptor  # [slots · consumers, 1]: what the producer tells each consumer to do next
    q_full: gl.shared_memory_descriptor  # a word, and the q tile that goes with it
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor  # whose turn it is to issue matmuls
    verdict: gl.shared_memory_descriptor  # every consumer has answered

    @gluon.constexpr_function
    def __init__(self, q, k, v, o, partial, step_q, step_k, step_v, step_o, lse_step, q_s, k_s, v_s, o_s, words, q_full, q_empty,
                 k_full, k_empty, v_full, v_empty, turns, verdict):
        self.q, self.k, self.v, self.o, self.partial = q, k, v, o, partial
        self.step_q, self.step_k, self.step_v, self.step_o, self.lse_step = step_q, step_k, step_v, step_o, lse_step
        self.q_s, self.k_s, self.v_s, self.o_s = q_s, k_s, v_s, o_s
        self.words, self.q_full, self.q_empty = words, q_full, q_empty
        self.k_full, self.k_empty, self.v_full, self.v_empty = k_full, k_empty, v_full, v_empty
        self.turns, self.verdict = turns, verdict


@gluon.jit
def buffers(count: gl.constexpr, rows: gl.constexpr, first: gl.constexpr, second: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for `count` slots of a tile, in one or two parts (an absent second part is the first one again)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, first], dtype)
    part = gl.allocate_shared_memory(dtype, [count, rows, first], layout)
    if second > 0:
        layout2: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, second], dtype)
        return part, gl.allocate_shared_memory(dtype, [count, rows, second], layout2)
    else:  # noqa: RET505  Triton compiles what follows an `if` even when the `if` returned
        return part, part


@gluon.jit
def barriers(slots: gl.constexpr, count: gl.constexpr):
    """`slots` barriers that wait for `count` arrivals each."""
    bars = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(slots):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.constexpr_function
def size(buffers, second):
    """Bytes of one slot of a pair of 16-bit buffers."""
    rows, width = buffers[0].shape[1:]
    return rows * (width + second) * 2


@gluon.jit
def load(descriptor, begin, length, head, row, barrier, buffer):
    """Start copying the tile of `descriptor` from `row` of the sequence that is rows begin … begin + length − 1; zeros beyond its end."""
    view = reinterpret(buffer, descriptor.block_shape, descriptor.layout)
    tma_load(descriptor, [FAR, begin + length, head, FAR - length + row, 0], barrier, view)


@gluon.jit
def store(descriptor, begin, length, head, row, column, buffer):
    """The inverse of `load`, into columns from `column` on: rows beyond the end are not written."""
    view = reinterpret(buffer, descriptor.block_shape, descriptor.layout)
    tma_store(descriptor, [FAR, begin + length, head, FAR - length + row, column], view)


@gluon.jit
def write_word(words, index, word):
    """Put one number into shared memory."""
    words.index(index).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + word)


@gluon.jit
def read_word(words, index):
    """The number in shared memory."""
    return gl.max(words.index(index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def tell(call, x, word, told):
    """Give all consumers a word that comes without a tile."""
    slot, parity = call.slot(told)
    for c in gl.static_range(call.NC):
        mbarrier.wait(x.q_empty.index(slot + c), parity ^ 1)
        write_word(x.words, slot + c, word)
        mbarrier.arrive(x.q_full.index(slot + c), count=1)


@gluon.jit
def copy_task(call, x, task, redo, told, at):
    """Copy what a task needs: the last block of K, for each consumer its rows of Q, then the other blocks from the last to the first.
    Returns the next task (asked for two blocks before the end, so that the answer has come by then; not in the pass that repeats), told,
    at."""
    tile, part = call.tile_of(task)
    b, h, first = call.place(tile)
    rows, keys, q_begin, k_begin = call.lengths(b, at)
    following = -1 - redo  # −1: to be asked for
    if first < rows:
        lo, hi, top, _, _ = call.blocks(first, rows, keys, part)
        v_begin = k_begin + b * x.step_v
        k_begin += b * x.step_k
        h_k, h_v = call.group_k.into(h), call.group_v.into(h)
        for row in range(top, lo - 1, -call.BN):
            if (following == -1) & (row <= lo + 2 * call.BN):
                following = call.another()
            stage, parity = at % call.STAGES, (at // call.STAGES) & 1
            mbarrier.wait(x.k_empty.index(stage), parity ^ 1)
            mbarrier.expect(x.k_full.index(stage), size(x.k_s, call.D1))
            load(x.k[0], k_begin, hi, h_k, row, x.k_full.index(stage), x.k_s[0].index(stage))
            if call.D1 > 0:
                load(x.k[1], k_begin, hi, h_k, row, x.k_full.index(stage), x.k_s[1].index(stage))
            if row == top:
                slot, slot_parity = call.slot(told)
                for c in gl.static_range(call.NC):
                    mbarrier.wait(x.q_empty.index(slot + c), slot_parity ^ 1)
                    write_word(x.words, slot + c, task * 2 + redo)
                    if not call.ONLINE:
                        gl.store(call.failed + task * call.NC + c, 0, mask=redo == 0)
                    mbarrier.expect(x.q_full.index(slot + c), size(x.q_s, call.D1))
                    load(x.q[0], q_begin + b * x.step_q, rows, h, first + c * BM, x.q_full.index(slot + c), x.q_s[0].index(slot + c))
                    if call.D1 > 0:
                        load(x.q[1], q_begin + b * x.step_q, rows, h, first + c * BM, x.q_full.index(slot + c), x.q_s[1].index(slot + c))
                told += 1
            mbarrier.wait(x.v_empty.index(stage), parity ^ 1)
            mbarrier.expect(x.v_full.index(stage), size(x.v_s, call.V1))
            load(x.v[0], v_begin, hi, h_v, row, x.v_full.index(stage), x.v_s[0].index(stage))
            if call.V1 > 0:
                load(x.v[1], v_begin, hi, h_v, row, x.v_full.index(stage), x.v_s[1].index(stage))
            at += 1
    if following == -1:
        following = call.another()
    return following, told, at


@gluon.jit
def produce(call, x):
    """The copying warp: takes task after task; when there are no more, repeats those of its own that failed."""
    told = 0  # words given to each consumer
    at = 0  # K/V blocks so far
    task = gl.program_id(0)
    last = task * 0 - 1
    redo = task * 0
    if not call.ONLINE:
        gl.store(call.unsure + task, 0)
    while task >= 0:
        following = task * 0
        if call.wanted(task, redo):
            following, told, at = copy_task(call, x, task, redo, told, at)
        if redo == 0:
            if not call.ONLINE:
                gl.store(call.chain + task, last)
            last = task
            task = following
            if task >= call.total:
                task = -1
                if not call.ONLINE:
                    tell(call, x, REPORT, told)
                    told += 1
                    mbarrier.wait(x.verdict.index(0), 0)
                    if gl.load(call.unsure + thread_block(), volatile=True) != 0:
                        redo += 1
                        task = last
        else:
            task = gl.load(call.chain + task, volatile=True)
    tell(call, x, STOP, told)
