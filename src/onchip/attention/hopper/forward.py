"""Forward on Hopper: one persistent thread block an SM; a producer warp copies by TMA, 2 or 3 consumer warpgroups own 64 query rows each.

    producer   Q tile, then K and V blocks, last block first, through a ring of STAGES slots
    consumer   s = q kᵀ (wgmma, both operands in shared memory);  p = 2^(scale·s − shift);  o += p v (wgmma, p in registers)

S of a block is issued before PV of the block before, so softmax of one block runs under a matmul; consumers issue in turn (ping-pong), so
that one's softmax also runs under the others' matmuls.

**Anchored softmax.** Softmax is invariant to `shift`. Online softmax makes it the running maximum, at the price of a maximum over every
score and a rescaling of o at every block. Here the maximum is taken only over *edge* blocks: from the first block visited down to the first
one in which every row sees a key, and those the window cuts on the left; then `shift` stays. p may pass 1, which costs a bf16 p nothing in
relative precision. The result is exact unless a row's sum leaves the range in which fp32 keeps every term that matters, or the output
overflows: both are checked once, at the end of a tile. A tile that fails is not stored; its thread block repeats it, after its other tiles,
with every block treated as an edge, which is online softmax. fp16 has a narrower range: its p may not pass 65504. `ONLINE` compiles online
softmax in, without check or repeat.

**Who takes which tile.** Whoever is free takes the next one, from a counter; tiles of a few heads together, heaviest first (`Call.place`).
The producer asks, and tells the consumers through shared memory.

**Rows outside.** Descriptors are five-dimensional, (wrap, origin, head, row, dim), so that the hardware clips a copy at any end the caller
chooses: the row axis has extent 2³⁰, and coordinates (2³⁰, begin + length, head, 2³⁰ − length + i) mean row begin + i, out of bounds from
i = length on (the address is right because 2³⁰ times the wrap stride is −2³⁰ rows modulo 2⁶⁴; Triton's `create_ragged_descriptor`
does the same). Rows past a sequence are read as zeros and never written, packed or not; keys no row of the tile sees are not read at all.

Sources: FlashAttention-3 (arXiv 2407.08608, Alg. 1–2) for the schedule; "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from onchip.attention.hopper.compat import aggregate, reinterpret, tma_load, tma_store
from onchip.attention.hopper.schedule import BM, Call

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
HIDDEN = gl.constexpr(float("-inf"))
FAR = gl.constexpr(1 << 30)  # extent of the row axis of every descriptor
REPORT, STOP = gl.constexpr(-1), gl.constexpr(-2)  # words to consumers beside 2 · tile + (is it a repeat)
# A row's sum must lie between these: terms 2⁻⁶⁶ of the sum are still normal numbers, and no term nears fp32's overflow.
LOW, HIGH = gl.constexpr(2.0**-60), gl.constexpr(2.0**100)
# The same for p in fp16: none may pass the largest number, and rows are as far above fp16's smallest as with online softmax (l ≥ 1).
HALF_LOW, HALF_HIGH = gl.constexpr(0.5), gl.constexpr(65504.0)


@aggregate
class Tensors:
    """Descriptors, shared memory, barriers. A head dim that is no power of two is cut in two parts (96 = 64 + 32, 192 = 128 + 64), since
    Triton's tensors are powers of two."""

    q: gl.tuple
    k: gl.tuple
    v: gl.tuple
    o: gl.tuple
    step_q: gl.tensor  # rows from one batch to the next
    step_k: gl.tensor
    step_v: gl.tensor
    step_o: gl.tensor
    lse_step: gl.tensor  # rows from one head to the next in lse, int64
    q_s: gl.tuple  # [consumers, 64, width]
    k_s: gl.tuple  # [stages, keys, width]
    v_s: gl.tuple
    o_s: gl.tuple
    words: gl.shared_memory_descriptor  # [consumers, 1]: what the producer tells each consumer to do next
    failures: gl.shared_memory_descriptor  # [consumers, 1]: did any of its tiles fail
    q_full: gl.shared_memory_descriptor  # a word, and the q tile that goes with it
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor  # whose turn it is to issue matmuls
    verdict: gl.shared_memory_descriptor  # every consumer has answered

    @gluon.constexpr_function
    def __init__(self, q, k, v, o, step_q, step_k, step_v, step_o, lse_step, q_s, k_s, v_s, o_s, words, failures, q_full, q_empty, k_full,
                 k_empty, v_full, v_empty, turns, verdict):
        self.q, self.k, self.v, self.o = q, k, v, o
        self.step_q, self.step_k, self.step_v, self.step_o, self.lse_step = step_q, step_k, step_v, step_o, lse_step
        self.q_s, self.k_s, self.v_s, self.o_s = q_s, k_s, v_s, o_s
        self.words, self.failures = words, failures
        self.q_full, self.q_empty, self.k_full, self.k_empty = q_full, q_empty, k_full, k_empty
        self.v_full, self.v_empty, self.turns, self.verdict = v_full, v_empty, turns, verdict


@gluon.jit
def load(descriptor, begin, length, head, row, barrier, buffer):
    """Start copying the tile of `descriptor` from `row` of the sequence that is rows begin … begin + length − 1; zeros beyond its end."""
    view = reinterpret(buffer, descriptor.block_shape, descriptor.layout)
    tma_load(descriptor, [FAR, begin + length, head, FAR - length + row, 0], barrier, view)


@gluon.jit
def store(descriptor, begin, length, head, row, buffer):
    """The inverse of `load`: rows beyond the end are not written."""
    view = reinterpret(buffer, descriptor.block_shape, descriptor.layout)
    tma_store(descriptor, [FAR, begin + length, head, FAR - length + row, 0], view)


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
    for c in gl.static_range(call.NC):
        mbarrier.wait(x.q_empty.index(c), (told & 1) ^ 1)
        write_word(x.words, c, word)
        mbarrier.arrive(x.q_full.index(c), count=1)


@gluon.jit
def copy_tile(call, x, tile, redo, told, at):
    """Copy what a tile needs: for each consumer its rows of Q, then K and V blocks from the last to the first. Returns the next tile
    (asked for two blocks before the end, so that the answer has come by then; not in the pass that repeats), told, at."""
    b, h, first = call.place(tile)
    rows, keys, q_begin, k_begin = call.lengths(b)
    following = -1 - redo  # −1: to be asked for
    if first < rows:
        lo, hi, top, _, _ = call.blocks(first, rows, keys)
        v_begin = k_begin + b * x.step_v
        k_begin += b * x.step_k
        h_k, h_v = h // call.group_k, h // call.group_v
        for c in gl.static_range(call.NC):
            mbarrier.wait(x.q_empty.index(c), (told & 1) ^ 1)
            write_word(x.words, c, tile * 2 + redo)
            mbarrier.expect(x.q_full.index(c), size(x.q_s, call.D1))
            load(x.q[0], q_begin + b * x.step_q, rows, h, first + c * BM, x.q_full.index(c), x.q_s[0].index(c))
            if call.D1 > 0:
                load(x.q[1], q_begin + b * x.step_q, rows, h, first + c * BM, x.q_full.index(c), x.q_s[1].index(c))
        told += 1
        for row in range(top, lo - 1, -call.BN):
            if (following == -1) & (row <= lo + 2 * call.BN):
                following = call.another()
            stage, parity = at % call.STAGES, (at // call.STAGES) & 1
            mbarrier.wait(x.k_empty.index(stage), parity ^ 1)
            mbarrier.expect(x.k_full.index(stage), size(x.k_s, call.D1))
            load(x.k[0], k_begin, hi, h_k, row, x.k_full.index(stage), x.k_s[0].index(stage))
            if call.D1 > 0:
                load(x.k[1], k_begin, hi, h_k, row, x.k_full.index(stage), x.k_s[1].index(stage))
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
    """The copying warp: takes tile after tile; when there are no more, repeats those of its own that failed."""
    told = 0  # words given to each consumer
    at = 0  # K/V blocks so far
    tile = gl.program_id(0)
    last = tile * 0 - 1
    redo = tile * 0
    while tile >= 0:
        following = tile * 0
        if call.wanted(tile, redo):
            following, told, at = copy_tile(call, x, tile, redo, told, at)
        if redo == 0:
            if not call.ONLINE:
                gl.store(call.chain + tile, last)
            last = tile
            tile = following
            if tile >= call.total:
                tile = -1
                if not call.ONLINE:
                    tell(call, x, REPORT, told)
                    told += 1
                    mbarrier.wait(x.verdict.index(0), 0)
                    failures = 0
                    for c in gl.static_range(call.NC):
                        failures += read_word(x.failures, c)
                    if failures > 0:
                        redo += 1
                        tile = last
        else:
            tile = gl.load(call.chain + tile, volatile=True)
    tell(call, x, STOP, told)


@gluon.constexpr_function
def size(buffers, second):
    """Bytes of one slot of a pair of 16-bit buffers."""
    rows, width = buffers[0].shape[1:]
    return rows * (width + second) * 2


@gluon.jit
def multiply_qk(x, c: gl.constexpr, stage, zero, D1: gl.constexpr):
    """s = q kᵀ, under way."""
    s = warpgroup_mma(x.q_s[0].index(c), x.k_s[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if D1 > 0:
        s = warpgroup_mma(x.q_s[1].index(c), x.k_s[1].index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def in_lanes(s):
    """s (rows, keys) as (rows, keys / 8, 4, 2): in the accumulator layout axis 2 counts lanes, and axes 1 and 3 a thread's registers."""
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def partial_sums(p):
    """Row sums over the columns one thread holds, (rows, 4)."""
    return gl.sum(gl.sum(in_lanes(p), 3), 1)


@gluon.jit
def finite(m):
    """The shift for a row maximum: 0 where no key was seen yet, so that −∞ − (−∞) never happens."""
    return gl.where(m == HIDDEN, 0.0, m)


@gluon.jit
def raise_maximum(s, m, l, scale):
    """(new maximum, new l, factor by which what was summed before shrinks)."""
    new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - finite(new))
    return new, l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None], alpha


@gluon.jit
def hide(s, call, first, row, rows, keys):
    """s of query rows first, first + 1, … and keys row, row + 1, …, with −∞ where the row does not see the key.

    Written so that a thread compares two numbers for each of its rows with constants: 8a + b ≤ limit − row − 2·lane.
    """
    r = in_lanes(s)
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, r.type.layout))  # (rows, 4)
    REGISTERS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, r.type.layout))  # (keys / 8, 2)
    lowest, highest = call.sight(first + gl.arange(0, BM, gl.SliceLayout(1, LANES)), rows, keys)
    at = row + 2 * gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    a = 8 * gl.arange(0, r.shape[1], gl.SliceLayout(1, REGISTERS))[:, None] + gl.arange(0, 2, gl.SliceLayout(0, REGISTERS))[None, :]
    a = gl.expand_dims(gl.expand_dims(a, 0), 2)
    seen = a <= gl.expand_dims(gl.expand_dims(highest[:, None] - at, 1), 3)
    if call.LEFT:
        seen = seen & (a >= gl.expand_dims(gl.expand_dims(lowest[:, None] - at, 1), 3))
    return gl.convert_layout(gl.reshape(gl.where(seen, r, HIDDEN), s.shape), s.type.layout)


@gluon.jit
def consume(c: gl.constexpr, call, x, lse, sinks, scale, cap, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):
    """The warpgroup that owns rows 64c … 64c + 63 of every tile.

    Scores are in units of log₂ after `scale`: s·scale with scale = log₂e·scale of the call; with a softcap s becomes tanh(s·scale/softcap)
    = 1 − 2/(2^(s·cap) + 1), and scale is log₂e·softcap.
    """
    at = 0  # K/V blocks so far
    told = 0  # words so far
    write_word(x.failures, c, at)
    if call.PING_PONG and c == 0:
        mbarrier.arrive(x.turns.index(0), count=1)
    mbarrier.wait(x.q_full.index(c), 0)
    word = read_word(x.words, c)
    while word != STOP:
        if word == REPORT:
            mbarrier.arrive(x.verdict.index(0), count=1)
            mbarrier.arrive(x.q_empty.index(c), count=1)
        else:
            at = attend(c, call, x, lse, sinks, scale, cap, word, at, SINKS, SOFTCAP)
        told += 1
        mbarrier.wait(x.q_full.index(c), told & 1)
        word = read_word(x.words, c)
    tma.store_wait(0)


@gluon.jit
def score(s, cap, SOFTCAP: gl.constexpr):
    """What `scale` turns into logits: q·k, or its softcap."""
    if SOFTCAP:
        s = 1.0 - 2.0 / (gl.exp2(s * cap) + 1.0)
    return s


@gluon.jit
def step(c: gl.constexpr, call, x, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, EDGE: gl.constexpr, SOFTCAP: gl.constexpr):
    """One block of keys, row … row + BN − 1: o += (p of the block before) v, and the p of this one. EDGE: some row may not see some key, or
    the shift may have to move. Returns at, p, o, o1, m, l."""
    STAGES: gl.constexpr = call.STAGES
    V1: gl.constexpr = call.V1
    ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    v_stage, v_parity = at % STAGES, (at // STAGES) & 1
    at += 1
    stage, parity = at % STAGES, (at // STAGES) & 1
    zero = gl.zeros([BM, call.BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BN, 16]))
    mbarrier.wait(x.k_full.index(stage), parity)
    if call.PING_PONG:
        mbarrier.wait(x.turns.index(c), at & 1)
    s = multiply_qk(x, c, stage, zero, call.D1)
    mbarrier.wait(x.v_full.index(v_stage), v_parity)
    o = warpgroup_mma(p, x.v_s[0].index(v_stage), o, is_async=True)
    if V1 > 0:
        o1 = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, o1.type.layout, 2)), x.v_s[1].index(v_stage), o1, is_async=True)
    if call.PING_PONG:
        mbarrier.arrive(x.turns.index((c + 1) % call.NC), count=1)
    if EDGE:  # rare: no overlap, for fewer registers
        if V1 > 0:
            s, o, o1 = warpgroup_mma_wait(0, deps=(s, o, o1))
        else:
            s, o = warpgroup_mma_wait(0, deps=(s, o))
        mbarrier.arrive(x.v_empty.index(v_stage), count=1)
    else:
        s = warpgroup_mma_wait(2 if V1 > 0 else 1, deps=(s,))
    mbarrier.arrive(x.k_empty.index(stage), count=1)
    s = score(s, cap, SOFTCAP)
    if EDGE:
        # `at >> 30` is 0, but the compiler does not know: the rows' limits are worked out here, not kept in registers through all loops.
        s = hide(s, call, first + (at >> 30), row, rows, keys)
    if EDGE or call.ONLINE:
        m, l, alpha = raise_maximum(s, m, l, scale)
    p32 = gl.exp2(s * scale - finite(m)[:, None])
    l += partial_sums(p32)
    if not EDGE:
        if V1 > 0:
            o, o1 = warpgroup_mma_wait(0, deps=(o, o1))
        else:
            o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(x.v_empty.index(v_stage), count=1)
    if EDGE or call.ONLINE:
        o = o * gl.convert_layout(alpha, ROW)[:, None]
        if V1 > 0:
            o1 = o1 * gl.convert_layout(alpha, gl.SliceLayout(1, o1.type.layout))[:, None]
    return at, gl.convert_layout(p32.to(x.v_s[0].dtype), p.type.layout), o, o1, m, l


@gluon.jit
def attend(c: gl.constexpr, call, x, lse, sinks, scale, cap, word, at, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):
    """64 rows of o and lse of the tile that `word` names. Returns the blocks so far."""
    BN: gl.constexpr = call.BN
    STAGES: gl.constexpr = call.STAGES
    V0: gl.constexpr = x.v_s[0].shape[2]
    V1: gl.constexpr = call.V1
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    o1_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V1 if V1 > 0 else V0, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    p1_layout: gl.constexpr = gl.DotOperandLayout(0, o1_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = x.v_s[0].dtype
    b, h, first = call.place(word >> 1)
    first += c * BM
    rows, keys, _, _ = call.lengths(b)
    lo, _, top, right_edge, left_edge = call.blocks(first - c * BM, rows, keys)
    right_edge = gl.maximum(right_edge, lo)
    if word & 1:
        right_edge = lo  # every block is an edge

    # The last block, always an edge; nothing to overlap with yet.
    o = gl.zeros([BM, V0], gl.float32, o_layout)
    o1 = o
    if V1 > 0:
        o1 = gl.zeros([BM, V1], gl.float32, o1_layout)
    mbarrier.wait(x.k_full.index(at % STAGES), (at // STAGES) & 1)
    if call.PING_PONG:
        mbarrier.wait(x.turns.index(c), at & 1)
    s = multiply_qk(x, c, at % STAGES, gl.zeros([BM, BN], gl.float32, s_layout), call.D1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(x.k_empty.index(at % STAGES), count=1)
    if call.PING_PONG:
        mbarrier.arrive(x.turns.index((c + 1) % call.NC), count=1)
    s = hide(score(s, cap, SOFTCAP), call, first, top, rows, keys)
    m = gl.max(s, 1) * scale
    p32 = gl.exp2(s * scale - finite(m)[:, None])
    l = partial_sums(p32)
    p = gl.convert_layout(p32.to(dtype), p_layout)

    # The other blocks: those the right end of the rows' sight cuts, those all rows see, those the left end cuts.
    row = top - BN
    while row >= right_edge:
        at, p, o, o1, m, l = step(c, call, x, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, True, SOFTCAP)
        row -= BN
    if call.LEFT:
        while row >= left_edge:
            at, p, o, o1, m, l = step(c, call, x, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, False, SOFTCAP)
            row -= BN
    while row >= lo:
        at, p, o, o1, m, l = step(c, call, x, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, call.LEFT, SOFTCAP)
        row -= BN

    # Asking again where the tile lies frees the registers that would carry the answer through the loops.
    word += at >> 30
    tile = word >> 1
    b, h, first = call.place(tile)
    rows, keys, q_begin, _ = call.lengths(b)
    i = first + c * BM + gl.arange(0, BM, row_layout)
    if call.OWN_O:
        mbarrier.arrive(x.q_empty.index(c), count=1)
    mbarrier.wait(x.v_full.index(at % STAGES), (at // STAGES) & 1)
    o = warpgroup_mma(p, x.v_s[0].index(at % STAGES), o, is_async=True)
    if V1 > 0:
        o1 = warpgroup_mma(gl.convert_layout(p, p1_layout), x.v_s[1].index(at % STAGES), o1, is_async=True)
    total = gl.convert_layout(gl.sum(l, 1), row_layout)
    in_range = (total > (HALF_LOW if dtype == gl.float16 else LOW)) & (total < (HALF_HIGH if dtype == gl.float16 else HIGH))
    m0 = finite(m)
    alpha = gl.full([BM], 1.0, gl.float32, row_layout)
    if SINKS:  # one more key, with this logit and value 0
        sink = gl.load(sinks + h).to(gl.float32) * LOG2E
        top = finite(gl.maximum(m, sink))
        alpha = gl.exp2(m - top)
        total = total * alpha + gl.exp2(sink - top)
        m0 = top
    factor = alpha / gl.where(total == 0.0, 1.0, total)  # not "total > 0": NaN must reach the output
    if V1 > 0:
        o, o1 = warpgroup_mma_wait(0, deps=(o, o1))
    else:
        o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(x.v_empty.index(at % STAGES), count=1)
    at += 1

    keep = True
    if not call.ONLINE:
        nan = gl.convert_layout(gl.sum(o * 0.0, 1), row_layout)  # 0, or NaN where o is not finite
        if V1 > 0:
            nan += gl.convert_layout(gl.sum(o1 * 0.0, 1), row_layout)
        lowest, highest = call.sight(i, rows, keys)
        good = (in_range & (nan == 0.0)) | (i >= rows) | (highest < lowest)
        bad = gl.max(gl.where(good, 0, 1), 0)
        flag = call.failed + tile * call.NC + c
        keep = bad == 0
        if word & 1:
            keep = gl.load(flag, volatile=True) != 0
        else:
            gl.store(flag, bad)
            if bad != 0:
                write_word(x.failures, c, bad)
    if keep:
        at_row = i + q_begin + (h if call.PACKED else b * call.heads + h).to(gl.int64) * x.lse_step
        gl.store(lse + at_row, (m0 + gl.log2(total)) * LN2, mask=i < rows)
        tma.store_wait(0)
        x.o_s[0].index(c).store((o * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]).to(dtype))
        if V1 > 0:
            x.o_s[1].index(c).store((o1 * gl.convert_layout(factor, gl.SliceLayout(1, o1_layout))[:, None]).to(dtype))
        fence_async_shared()
        store(x.o[0], q_begin + b * x.step_o, rows, h, first + c * BM, x.o_s[0].index(c))
        if V1 > 0:
            store(x.o[1], q_begin + b * x.step_o, rows, h, first + c * BM, x.o_s[1].index(c))
    if not call.OWN_O:
        tma.store_wait(0)
        mbarrier.arrive(x.q_empty.index(c), count=1)
    return at


# The functions below are what `warp_specialize` takes: one a partition, all with the same arguments.


@gluon.jit
def consumer_0(call, x, lse, sinks, scale, cap, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):  # noqa: D103
    consume(0, call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)


@gluon.jit
def consumer_1(call, x, lse, sinks, scale, cap, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):  # noqa: D103
    consume(1, call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)


@gluon.jit
def consumer_2(call, x, lse, sinks, scale, cap, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):  # noqa: D103
    consume(2, call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)


@gluon.jit
def producer(call, x, lse, sinks, scale, cap, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):  # noqa: D103
    produce(call, x)


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


# Not specialised: a new length or an odd address never compiles a new kernel.
@gluon.jit(
    do_not_specialize=["step_q", "step_k", "step_v", "step_o", "lse_step", "len_q", "len_k", "heads", "group_k", "group_v", "tiles",
                       "section", "section_tiles", "last_section", "last_heads", "total", "behind", "ahead"],
    do_not_specialize_on_alignment=["lse", "sinks", "taken", "failed", "chain", "cu_q", "cu_k"],
)
def forward_kernel(
    q0, q1, k0, k1, v0, v1, o0, o1, lse, sinks, taken, failed, chain, cu_q, cu_k,
    step_q, step_k, step_v, step_o, lse_step: gl.int64, len_q, len_k, heads, group_k, group_v, tiles, section, section_tiles, last_section,
    last_heads, total, behind, ahead, scale, cap,
    NC: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr,
    ONLINE: gl.constexpr, PING_PONG: gl.constexpr, OWN_O: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):
    """softmax(scores) V and its lse. Grid: as many thread blocks as SMs, or as tiles if those are fewer."""
    call = Call(cu_q, cu_k, len_q, len_k, heads, group_k, group_v, tiles, section, section_tiles, last_section, last_heads, total,
                behind, ahead, taken, failed, chain, NC, BN, STAGES, D1, V1, PACKED, TOP_LEFT, LEFT, RIGHT, ONLINE, PING_PONG, OWN_O)
    q_s = buffers(NC, BM, D0, D1, q0.dtype)
    k_s = buffers(STAGES, BN, D0, D1, q0.dtype)
    v_s = buffers(STAGES, BN, V0, V1, q0.dtype)
    o_s = buffers(NC, BM, V0, V1, q0.dtype) if OWN_O else q_s
    x = Tensors((q0, q1 if D1 > 0 else q0), (k0, k1 if D1 > 0 else k0), (v0, v1 if V1 > 0 else v0), (o0, o1 if V1 > 0 else o0),
                step_q, step_k, step_v, step_o, lse_step, q_s, k_s, v_s, o_s,
                gl.allocate_shared_memory(gl.int32, [NC, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
                gl.allocate_shared_memory(gl.int32, [NC, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
                barriers(NC, 1), barriers(NC, 1), barriers(STAGES, 1), barriers(STAGES, NC), barriers(STAGES, 1), barriers(STAGES, NC),
                barriers(NC, 1), barriers(1, NC))
    fence_async_shared()
    if NC == 2:
        gl.warp_specialize([(consumer_0, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)),
                            (consumer_1, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)),
                            (producer, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP))],
                           [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([(consumer_0, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)),
                            (consumer_1, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)),
                            (consumer_2, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP)),
                            (producer, (call, x, lse, sinks, scale, cap, SINKS, SOFTCAP))],
                           [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
