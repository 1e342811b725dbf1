"""Forward on Hopper: one persistent thread block an SM; a producer warp copies by TMA, 2 or 3 consumer warpgroups own 64 query rows each.

    producer   Q tile, then K and V blocks, last block first, through a ring of STAGES slots
    consumer   s = q kᵀ (wgmma, both operands in shared memory);  p = 2^(scale·s − shift);  o += p v (wgmma, p in registers)

S of a block is issued before PV of the block before, so softmax of one block runs under a matmul; consumers issue in turn (ping-pong), so
that one's softmax also runs under the others' matmuls. The last PV of a tile goes together with the first S of the next one, under which o
is checked, scaled and stored.

**Anchored softmax.** Softmax is invariant to `shift`. Online softmax makes it the running maximum, at the price of a maximum over every
score and a rescaling of o at every block. Here the maximum is taken only over *edge* blocks: from the first block visited down to the first
one in which every row sees a key, and those the window cuts on the left; then `shift` stays. p may pass 1, which costs a 16-bit p nothing
in relative precision. The result is exact unless a row's sum leaves the range in which fp32 keeps every term that matters, or the output
overflows (so it does when an fp16 p passes 65504): each thread checks both once, at the end of a tile, for its part of the rows, and says
so in global memory. The thread block repeats a tile that failed, after its other tiles, with every block treated as an edge, which is
online softmax, and stores it over the first. `ONLINE` compiles online softmax in, without check or repeat.

**Who takes which tile.** Whoever is free takes the next one, from a counter; a head's tiles follow each other, heaviest first, but those of
the last few heads are mixed (`Call.place`). The producer asks, and tells the consumers through shared memory.

**Few tiles.** `SPLIT` deals a tile's keys out to several tasks. Each is checked and, if need be, repeated for itself, and leaves o in fp32
and its lse in units of log₂; `split.merge_kernel` puts the parts together.

Sources: FlashAttention-3 (arXiv 2407.08608, Alg. 1–2) for the schedule; "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from onchip.attention.hopper.arithmetic import (
    finite,
    hide,
    multiply_pv,
    multiply_qk,
    pack,
    partial_sums,
    raise_maximum,
    score,
    wait_pv,
)
from onchip.attention.hopper.compat import log2, stores_done, thread_block
from onchip.attention.hopper.output import store_part, store_tile
from onchip.attention.hopper.producer import REPORT, STOP, Tensors, barriers, buffers, produce, read_word
from onchip.attention.hopper.schedule import BM, Call, Divisor

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
START = gl.constexpr(-3)  # before the first word
# A row's sum must lie between these: terms 2⁻⁶⁶ of the sum are still normal numbers, and no term nears fp32's overflow.
LOW, HIGH = gl.constexpr(2.0**-60), gl.constexpr(2.0**100)
# fp16's p may not sink: rows are as far above its smallest number as with online softmax (l ≥ 1). One that passes 65504 is infinite in o.
HALF_LOW = gl.constexpr(0.5)


@gluon.jit
def consume(c: gl.constexpr, call, x, lse, sinks, scale, cap, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):
    """The warpgroup that owns rows 64c … 64c + 63 of every tile.

    Scores are in units of log₂ after `scale`: s·scale with scale = log₂e·scale of the call; with a softcap s becomes tanh(s·scale/softcap)
    = 1 − 2/(2^(s·cap) + 1), and scale is log₂e·softcap.
    """
    at = 0  # K/V blocks so far
    told = -1  # words so far, less one
    s = gl.zeros([BM, call.BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BN, 16]))
    if call.PING_PONG and c == 0:
        mbarrier.arrive(x.turns.index(0), count=1)
    word = at + START
    while word != STOP:
        if word >= 0:
            word, s, at, told = attend(c, call, x, lse, sinks, scale, cap, word, s, at, told, SINKS, SOFTCAP)
        else:
            if word == REPORT:
                stores_done()  # what a repeat writes must come after
                mbarrier.arrive(x.verdict.index(0), count=1)
                mbarrier.arrive(x.q_empty.index(call.slot(told)[0] + c), count=1)
            told += 1
            word, slot = listen(c, call, x, told)
            begin(call, x, c, word, at)
            s = multiply_qk(call, x, slot, at % call.STAGES)
            pass_turn(call, x, c, word)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(x.k_empty.index(at % call.STAGES), count=1, pred=word >= 0)
    tma.store_wait(0)


@gluon.jit
def listen(c: gl.constexpr, call, x, told):
    """(the next word, the slot of q that goes with it)."""
    slot, parity = call.slot(told)
    mbarrier.wait(x.q_full.index(slot + c), parity)
    return read_word(x.words, slot + c), slot + c


@gluon.jit
def begin(call, x, c: gl.constexpr, word, at):
    """Wait until the first scores of the tile that `word` names can be worked out; if it names none, go on (and work out nonsense)."""
    mbarrier.wait(x.k_full.index(at % call.STAGES), (at // call.STAGES) & 1, pred=word >= 0)
    if call.PING_PONG:
        mbarrier.wait(x.turns.index(c), at & 1, pred=word >= 0)


@gluon.jit
def pass_turn(call, x, c: gl.constexpr, word):
    """The next consumer may issue its matmuls."""
    if call.PING_PONG:
        mbarrier.arrive(x.turns.index((c + 1) % call.NC), count=1, pred=word >= 0)


@gluon.jit
def step(c: gl.constexpr, call, x, slot, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, EDGE: gl.constexpr, SOFTCAP: gl.constexpr):
    """One block of keys, row … row + BN − 1: o += (p of the block before) v, and the p of this one. EDGE: some row may not see some key, or
    the shift may have to move. Returns at, p, o, o1, m, l."""
    STAGES: gl.constexpr = call.STAGES
    v_stage, v_parity = at % STAGES, (at // STAGES) & 1
    at += 1
    stage, parity = at % STAGES, (at // STAGES) & 1
    mbarrier.wait(x.k_full.index(stage), parity)
    if call.PING_PONG:
        mbarrier.wait(x.turns.index(c), at & 1)
    s = multiply_qk(call, x, slot, stage)
    mbarrier.wait(x.v_full.index(v_stage), v_parity)
    o, o1 = multiply_pv(call, x, p, v_stage, o, o1)
    if call.PING_PONG:
        mbarrier.arrive(x.turns.index((c + 1) % call.NC), count=1)
    if EDGE:  # rare: no overlap, for fewer registers
        s = warpgroup_mma_wait(0, deps=(s,))
        o, o1 = wait_pv(call, 0, o, o1)
        mbarrier.arrive(x.v_empty.index(v_stage), count=1)
    else:
        s = warpgroup_mma_wait(2 if call.V1 > 0 else 1, deps=(s,))
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
        o, o1 = wait_pv(call, 0, o, o1)
        mbarrier.arrive(x.v_empty.index(v_stage), count=1)
    if EDGE or call.ONLINE:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
        if call.V1 > 0:
            o1 = o1 * gl.convert_layout(alpha, gl.SliceLayout(1, o1.type.layout))[:, None]
    return at, pack(p32, x.v_s[0].dtype), o, o1, m, l


@gluon.jit
def attend(c: gl.constexpr, call, x, lse, sinks, scale, cap, word, s, at, told, SINKS: gl.constexpr, SOFTCAP: gl.constexpr):
    """64 rows of o and lse of the task that `word` names; s are the scores of its last block, the `at`-th of all. The scores of the next
    tile's last block are under way while this tile's o leaves. Returns the next word, those scores, at, told."""
    BN: gl.constexpr = call.BN
    STAGES: gl.constexpr = call.STAGES
    V0: gl.constexpr = x.v_s[0].shape[2]
    V1: gl.constexpr = call.V1
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    o1_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V1 if V1 > 0 else V0, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    dtype: gl.constexpr = x.v_s[0].dtype
    slot = call.slot(told)[0] + c
    tile, part = call.tile_of(word >> 1)
    b, h, first = call.place(tile)
    first += c * BM
    rows, keys, _, _ = call.lengths(b, at)
    lo, hi, top, right_edge, left_edge = call.blocks(first - c * BM, rows, keys, part)
    first |= at >> 30  # 0, as in `lengths`: what follows from it is worked out here
    if call.SPLIT:
        keys = hi  # a part without keys has a block all the same: hidden
    right_edge = gl.maximum(right_edge, lo)
    if word & 1:
        right_edge = lo  # every block is an edge

    # The last block, always an edge; nothing to overlap with yet.
    o = gl.zeros([BM, V0], gl.float32, o_layout)
    o1 = o
    if V1 > 0:
        o1 = gl.zeros([BM, V1], gl.float32, o1_layout)
    s = hide(score(s, cap, SOFTCAP), call, first, top, rows, keys)
    m = gl.max(s, 1) * scale
    p32 = gl.exp2(s * scale - finite(m)[:, None])
    l = partial_sums(p32)
    p = pack(p32, dtype)

    # The other blocks: those the right end of the rows' sight cuts, those all rows see, those the left end cuts.
    row = top - BN
    while row >= right_edge:
        at, p, o, o1, m, l = step(c, call, x, slot, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, True, SOFTCAP)
        row -= BN
    if call.LEFT:
        while row >= left_edge:
            at, p, o, o1, m, l = step(c, call, x, slot, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, False, SOFTCAP)
            row -= BN
    while row >= lo:
        at, p, o, o1, m, l = step(c, call, x, slot, row, first, rows, keys, at, p, o, o1, m, l, scale, cap, call.LEFT, SOFTCAP)
        row -= BN

    # One step more, whose scores are the next tile's.
    mbarrier.arrive(x.q_empty.index(slot), count=1)
    told += 1
    following, slot = listen(c, call, x, told)
    v_stage, v_parity = at % STAGES, (at // STAGES) & 1
    at += 1
    stage = at % STAGES
    mbarrier.wait(x.v_full.index(v_stage), v_parity)
    begin(call, x, c, following, at)
    o, o1 = multiply_pv(call, x, p, v_stage, o, o1)
    s = multiply_qk(call, x, slot, stage)
    pass_turn(call, x, c, following)

    # Asking again where the tile lies frees the registers that would carry the answer through the loops.
    word += at >> 30
    task = word >> 1
    tile, part = call.tile_of(task)
    b, h, first = call.place(tile)
    rows, keys, q_begin, _ = call.lengths(b, at)
    if call.SPLIT:
        lo, keys, _, _, _ = call.blocks(first, rows, keys, part)
    first += c * BM
    if not call.PACKED:  # there it costs the producer registers
        first |= at >> 30
    i = first + gl.arange(0, BM, row_layout)
    total = gl.convert_layout(gl.sum(l, 1), row_layout)
    in_range = (total > (HALF_LOW if dtype == gl.float16 else LOW)) & (total < HIGH)
    m0 = finite(m)
    alpha = gl.full([BM], 1.0, gl.float32, row_layout)
    if SINKS:  # one more key, with this logit and value 0
        sink = gl.load(sinks + h).to(gl.float32) * LOG2E
        m0 = finite(gl.maximum(m, sink))
        alpha = gl.exp2(m - m0)
        total = total * alpha + gl.exp2(sink - m0)
    factor = alpha / gl.where(total == 0.0, 1.0, total)  # not "total > 0": NaN must reach the output
    o, o1 = wait_pv(call, 2 if call.D1 > 0 else 1, o, o1)
    mbarrier.arrive(x.v_empty.index(v_stage), count=1)

    keep = True
    if not call.ONLINE:
        if word & 1:
            keep = gl.load(call.failed + task * call.NC + c, volatile=True) != 0
        else:
            finite_o = partial_sums(o * 0.0)  # 0, or NaN where o is not finite
            if V1 > 0:
                finite_o += gl.convert_layout(partial_sums(o1 * 0.0), finite_o.type.layout)
            lowest, highest = call.sight(i, rows, keys)
            if call.SPLIT:
                lowest = gl.maximum(lowest, lo)
            LANES: gl.constexpr = finite_o.type.layout
            ROWS: gl.constexpr = gl.SliceLayout(1, LANES)
            elsewhere = gl.convert_layout((i >= rows) | (highest < lowest), ROWS)[:, None]
            good = elsewhere | (gl.convert_layout(in_range, ROWS)[:, None] & (finite_o == 0.0))
            one = gl.full([BM, 4], 1, gl.int32, LANES)
            gl.store(call.failed + task * call.NC + c + one - 1, one, mask=good == 0)
            gl.store(call.unsure + thread_block() + one - 1, one, mask=good == 0)
    if keep:
        if call.SPLIT:
            before = ((b * call.heads.d + h) * call.parts.d + part).to(gl.int64) * x.lse_step + first
            store_part(call, x, lse, before, rows - first, m0 + log2(total), factor, o, o1)
        else:
            at_row = i + q_begin + (h if call.PACKED else b * call.heads.d + h).to(gl.int64) * x.lse_step
            gl.store(lse + at_row, (m0 + log2(total)) * LN2, mask=i < rows)
            store_tile(c, call, x, b, h, first, rows, q_begin, factor, o, o1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(x.k_empty.index(stage), count=1, pred=following >= 0)
    return following, s, at, told


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


# Not specialised: a new length or an odd address never compiles a new kernel.
@gluon.jit(
    do_not_specialize=["step_q", "step_k", "step_v", "step_o", "lse_step", "len_q", "len_k", "heads", "heads_m", "heads_s", "group_k",
                       "group_k_m", "group_k_s", "group_v", "group_v_m", "group_v_s", "tiles", "tiles_m", "tiles_s", "early_heads",
                       "early_tiles", "last_heads", "last_heads_m", "last_heads_s", "parts", "parts_m", "parts_s", "total", "behind",
                       "ahead"],
    do_not_specialize_on_alignment=["lse", "sinks", "taken", "failed", "unsure", "chain", "cu_q", "cu_k"],
)
def forward_kernel(
    q0, q1, k0, k1, v0, v1, o0, o1, lse, sinks, taken, failed, unsure, chain, cu_q, cu_k, partial,
    step_q, step_k, step_v, step_o, lse_step: gl.int64, len_q, len_k, heads, heads_m, heads_s, group_k, group_k_m, group_k_s, group_v,
    group_v_m, group_v_s, tiles, tiles_m, tiles_s, early_heads, early_tiles, last_heads, last_heads_m, last_heads_s, parts, parts_m,
    parts_s, total, behind, ahead, scale, cap,
    NC: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr,
    ONLINE: gl.constexpr, PING_PONG: gl.constexpr, QUERIES: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):
    """softmax(scores) V and its lse, or those of each part of the keys. Grid: a thread block an SM, or a task if those are fewer."""
    call = Call(cu_q, cu_k, len_q, len_k, Divisor(heads, heads_m, heads_s), Divisor(group_k, group_k_m, group_k_s),
                Divisor(group_v, group_v_m, group_v_s), Divisor(tiles, tiles_m, tiles_s), early_heads, early_tiles,
                Divisor(last_heads, last_heads_m, last_heads_s), Divisor(parts, parts_m, parts_s), total, behind, ahead, taken, failed,
                unsure, chain, NC, BN, STAGES, D1, V1, PACKED, TOP_LEFT, LEFT, RIGHT, ONLINE, PING_PONG, QUERIES, PIECES, SPLIT)
    q_s = buffers(QUERIES * NC, BM, D0, D1, q0.dtype)
    k_s = buffers(STAGES, BN, D0, D1, q0.dtype)
    v_s = buffers(STAGES, BN, V0, V1, q0.dtype)
    o_s = buffers(NC, BM, V0 // PIECES, V1, q0.dtype)
    x = Tensors((q0, q1 if D1 > 0 else q0), (k0, k1 if D1 > 0 else k0), (v0, v1 if V1 > 0 else v0),
                (q0, q0) if SPLIT else (o0, o1 if V1 > 0 else o0),  # with SPLIT there is no o, and its buffer takes no memory
                partial, step_q, step_k, step_v, step_o, lse_step, q_s, k_s, v_s, o_s,
                gl.allocate_shared_memory(gl.int32, [QUERIES * NC, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
                barriers(QUERIES * NC, 1), barriers(QUERIES * NC, 1), barriers(STAGES, 1), barriers(STAGES, NC), barriers(STAGES, 1),
                barriers(STAGES, NC), barriers(NC, 1), barriers(1, NC))
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
