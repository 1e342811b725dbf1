"""Kernels of the k largest: rows that are sorted whole, rows or parts of them by chunks, and what the parts found put together."""
import triton
import triton.language as tl

from onchip.softmax.triton.addresses import INTERPRETED, locate
from onchip.softmax.triton.topk_keys import MAXIMA, are, keys_of, largest_keys, most_of, no_keys, one_by_one, place_of, value_of

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the first m: finite, so that −∞ − m is not NaN
RUN = tl.constexpr(8)  # neighbours that a thread reads at once
NOWHERE = tl.constexpr(2**29)  # a place beyond all rows
WAIT = tl.constexpr("""{
    .reg .pred early;
    .reg .u32 begun, now;
    mov.u32 begun, %clock;
wait:
    mov.u32 now, %clock;
    sub.u32 now, now, begun;
    setp.lt.u32 early, now, $1;
    @early nanosleep.u32 20;
    @early bra wait;
    mov.u32 $0, now;
}""")


@triton.jit
def _weights(s, i, shift, l, k, RENORMALISE: tl.constexpr):
    """exp(s − m) / l, or over the sum of the k first instead; s: [rows, K], largest first; shift and l: [rows, 1]. NaN where l is."""
    if RENORMALISE:
        e = tl.where(i < k, tl.exp2((s - tl.max(s, axis=1)[:, None]) * LOG2E), 0.0)
        w = tl.where(l == l, e / tl.sum(e, axis=1)[:, None], float("nan"))
    else:
        w = tl.exp2((s - shift) * LOG2E) / l
    return w


@triton.jit
def whole(x, values, indices, sums, strides_x, n, n0, n1, groups, tiles_a_group, k: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, RENORMALISE: tl.constexpr):
    """Rows that are sorted at once, a tile of them."""
    i2, i1, i0, exists = locate(tl.program_id(0), n0, n1, groups, tiles_a_group, False, True, BLOCK_M)
    j = tl.arange(0, BLOCK_N)[None, :]
    keep = exists[:, None] & (j < n)
    start = (i2 * strides_x[0] + i1 * strides_x[1] + i0 * strides_x[2])[:, None]
    s = tl.load(x + start + j.to(tl.int64) * strides_x[3], mask=keep, other=float("-inf")).to(tl.float32)
    m = tl.max(s, axis=1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2((s - shift[:, None]) * LOG2E), axis=1)
    keys = tl.where(keep, keys_of(s, j, NARROW), no_keys(j, NARROW))
    best = one_by_one(keys[None, :, :], k, K, True) if K <= MAXIMA else tl.topk(keys, K)  # [BLOCK_M, K]
    row, i = (tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None], tl.arange(0, K)[None, :]
    wanted = exists[:, None] & (i < k)
    tl.store(values + row * k + i, _weights(value_of(best, NARROW), i, shift[:, None], l[:, None], k, RENORMALISE), mask=wanted)
    tl.store(indices + row * k + i, place_of(best, NARROW).to(tl.int64), mask=wanted)
    tl.store(sums + row, (shift + tl.log(l))[:, None], mask=exists[:, None])


@triton.jit
def _larger(a, b, NARROW: tl.constexpr):
    """The larger of a and b, of two 16-bit elements by one instruction; NaN only where both are."""
    if NARROW == "fp32" or INTERPRETED:
        most = tl.maximum(a, b).to(a.dtype)
    elif NARROW == "bf16":
        most = tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)
    else:
        most = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)
    return most


@triton.jit
def _widen(s, NARROW: tl.constexpr):
    """s in float32: two bfloat16 by two instructions; the compiler takes three."""
    if NARROW != "bf16" or INTERPRETED:
        wide = s.to(tl.float32)
    else:
        wide = tl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [s], dtype=tl.float32, is_pure=True,
                                         pack=2)
    return wide


@triton.jit
def _first(group, GROUP: tl.constexpr, THREADS: tl.constexpr):
    """Place of a group's first element. A group's runs lie THREADS runs apart, so that threads read neighbours."""
    return (group // THREADS * (GROUP * THREADS) + group % THREADS) * RUN


@triton.jit
def _away(q, THREADS: tl.constexpr):
    """Places from a group's first element to its q-th one."""
    return q // RUN * (THREADS * RUN) + q % RUN


@triton.jit
def _ends(t, head, end, n, first, VECTOR: tl.constexpr):
    """Place of the t-th element of the vectors before the first whole one and behind the last one, and whether it is the first part's."""
    p = tl.where(t < VECTOR, t, end + t) - VECTOR
    return p, (p >= -head) & (p < n - head) & (t < 2 * VECTOR) & (first == 0)


@triton.jit
def _factor(m):
    """log₂e, by which exp₂ gives exp; 1 where m · log₂e would overflow: whatever lies below such an m lies too far below to count."""
    return tl.where(tl.abs(m) < 2.0**126, LOG2E, 1.0)


@triton.jit
def _fused(a, b, c):
    """a · b − c, rounded once."""
    return (a.to(tl.float64) * b - c).to(tl.float32) if INTERPRETED else tl.fma(a, b, -c)


@triton.jit
def _product(a, b):
    """a · b, rounded even where something is taken off it."""
    return a * b if INTERPRETED else tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True,
                                                               pack=1)


@triton.jit
def _scan(xs, m, shift, l, VECTORS: tl.constexpr, NARROW: tl.constexpr):
    """m, m · log₂e, rounded, and l of threads after xs, and the largest of each thread's xs: [THREADS]."""
    most = xs[0]
    for r in tl.static_range(1, VECTORS):
        most = _larger(most, xs[r], NARROW)
    largest = tl.max(most.to(tl.float32), axis=1)
    m = tl.maximum(m, largest)
    factor = _factor(m)
    new = _product(m, factor)
    e = tl.exp2(_fused(_widen(xs[0], NARROW), factor[:, None], new[:, None]))
    for r in tl.static_range(1, VECTORS):
        e += tl.exp2(_fused(_widen(xs[r], NARROW), factor[:, None], new[:, None]))
    return m, new, l * tl.exp2(shift - new) + tl.sum(e, axis=1), largest


@triton.jit
def _noted(maxima, largest, here, SPAN: tl.constexpr):
    """The maxima of groups, of SPAN chunks, after a chunk of those that are `here`."""
    return tl.where(here, tl.maximum(maxima, largest[None, :]) if SPAN > 1 else largest[None, :], maxima)


@triton.jit
def _one_after_another(first_round, sms, stagger):
    """The programs of an SM that start together, those of the `first_round`, begin `stagger` clocks after each other, so that they do not
    come to their selections all at once, with nothing being read."""
    if not INTERPRETED:  # noqa: SIM102  of the two conditions one is a constant
        if tl.program_id(0) < first_round:
            tl.inline_asm_elementwise(WAIT, "=r,r", [tl.program_id(0) // sms * stagger], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def part(x, values, indices, sums, strides_x, n, n0, n1, parts, chunks, a_part, first_round, sms, stagger, k: tl.constexpr,
          VECTOR: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr, WARPS: tl.constexpr, VECTORS: tl.constexpr,
          GROUP: tl.constexpr, GROUPS: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, RENORMALISE: tl.constexpr,
          ALONE: tl.constexpr):
    """A row, or (not ALONE) a part of one: s and w of its k largest instead of values and indices, and its m and l.

    A part has `a_part` of the row's `chunks`, of VECTORS runs a thread, and each thread at most GROUPS groups of it, of GROUP runs. Chunks
    wholly inside the row are read without masks. Places p count from the row's first whole vector. EDGES: what lies before that and behind
    the last one is read an element a thread, by the first part; it is alone in the last group of its thread.
    """
    _one_after_another(first_round, sms, stagger)
    THREADS: tl.constexpr = 32 * WARPS
    CHUNK: tl.constexpr = THREADS * RUN * VECTORS
    row = tl.cast(tl.program_id(0) // parts, tl.int64)
    start = row * strides_x[2]
    if not FLAT:
        start = row // n0 // n1 * strides_x[0] + row // n0 % n1 * strides_x[1] + row % n0 * strides_x[2]
    head = VECTOR - 1 - ((start + (VECTOR - 1)) % VECTOR).to(tl.int32) if EDGES else 0  # elements before the first whole vector
    end = (n - head) // VECTOR * VECTOR if EDGES else n
    x += (start + (VECTOR - 1) * EDGES) // VECTOR * VECTOR
    step = strides_x[3].to(tl.int64) if WIDE else strides_x[3]
    first = tl.program_id(0) % parts * a_part
    last = tl.minimum(first + a_part, chunks)
    inner = tl.minimum(last, tl.maximum(end // CHUNK, first))
    m, shift = tl.full([THREADS], LOWEST, tl.float32), tl.full([THREADS], LOWEST, tl.float32)
    l = tl.zeros([THREADS], tl.float32)
    SPAN: tl.constexpr = GROUP // VECTORS  # chunks of a group
    g, t = tl.arange(0, GROUPS)[:, None], tl.arange(0, THREADS)
    maxima = tl.full([GROUPS, THREADS], float("-inf"), tl.float32)
    if EDGES:
        place, exists = _ends(t, head, end, n, first, VECTOR)
        alone = tl.load(x + place, mask=exists, other=float("-inf"))
    p0 = t[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for at in range(inner, last):  # the row's last chunk, or two
        xs = ()
        for r in tl.static_range(VECTORS):
            p = p0 + (at * CHUNK + r * (THREADS * RUN))
            xs = xs + (tl.load(x + p * step, mask=p // VECTOR * VECTOR < end, other=float("-inf")),)  # noqa: RUF005  Triton has no stars
        m, shift, l, largest = _scan(xs, m, shift, l, VECTORS, NARROW)
        maxima = _noted(maxima, largest, g == (at - first) // SPAN, SPAN)
    at_chunk = x + (p0 * step + tl.cast(first, tl.int64) * CHUNK * strides_x[3])
    for at in range(first, inner):
        xs = ()
        for r in tl.static_range(VECTORS):
            xs = xs + (tl.load(at_chunk + r * (THREADS * RUN) * step),)  # noqa: RUF005
        at_chunk += CHUNK * step
        m, shift, l, largest = _scan(xs, m, shift, l, VECTORS, NARROW)
        maxima = _noted(maxima, largest, g == (at - first) // SPAN, SPAN)
    if EDGES:
        m, shift, l, largest = _scan((alone.to(tl.float32)[:, None],), m, shift, l, 1, "fp32")
        maxima = _noted(maxima, largest, g == GROUPS - 1, 1)

    keys = keys_of(maxima, g * THREADS + t[None, :], NARROW)
    best = largest_keys(keys, k, k, K, WARPS)  # [K]; groups outside of the row are the last of −∞
    found, group, i = value_of(best, NARROW), place_of(best, NARROW), tl.arange(0, K)
    m = tl.maximum(tl.max(found, axis=0), LOWEST)
    l = tl.sum(l * tl.exp2(-_fused(m, _factor(m), shift)), axis=0)

    bound = tl.minimum(end, last * CHUNK)  # a part's last group may reach beyond it
    p = first * CHUNK + _first(group, GROUP, THREADS)
    exists = p < bound
    if EDGES:
        single = group >= (GROUPS - 1) * THREADS
        lone, there = _ends(group % THREADS, head, end, n, first, VECTOR)
        p, exists = tl.where(single, lone, p), tl.where(single, there, exists)
    place = tl.where(exists & (i < k), p, NOWHERE)
    q = tl.arange(0, K * Q)  # all candidates
    p, away = tl.gather(place, q // Q, 0), tl.where(q % Q // RUN < GROUP, _away(q % Q, THREADS), NOWHERE)
    if EDGES:
        bound = tl.where(p.to(tl.uint32, bitcast=True) < bound, bound, tl.minimum(p + 1, NOWHERE))
    p += away
    keep = p < bound
    s = tl.load(x + (p.to(tl.int64) if WIDE else p) * step, mask=keep, other=0.0).to(tl.float32)
    keys, rounds = tl.where(keep, keys_of(s, q, NARROW), no_keys(q, NARROW)), k
    if K > MAXIMA:  # the k largest maxima are among them, so nothing below the least of these is
        least = tl.min(tl.where(i < k, found, float("inf")), axis=0)
        rounds = tl.minimum(k, most_of(keep & ~(s < least), WARPS))
    best = largest_keys(keys, k, rounds, K, WARPS)
    s, q = value_of(best, NARROW), tl.where(i < k, place_of(best, NARROW), 0)
    w = tl.gather(place, q // Q, 0) + _away(q % Q, THREADS) + head
    to = tl.cast(tl.program_id(0), tl.int64)
    if ALONE:
        tl.store(values + to * k + i, tl.reshape(_weights(s[None, :], i[None, :], m, l, k, RENORMALISE), [K]), mask=i < k)
        tl.store(indices + to * k + i, w.to(tl.int64), mask=i < k)
        tl.store(sums + to, m + tl.log(l))
    else:
        tl.store(values + to * k + i, s, mask=i < k)
        tl.store(indices + to * k + i, tl.where(are(best, NARROW), w, -1), mask=i < k)
        tl.store(sums + to * 2, m)
        tl.store(sums + to * 2 + 1, l)


@triton.jit
def merge(found, places, statistics, values, indices, sums, parts, k: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
           CANDIDATES: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, RENORMALISE: tl.constexpr):
    """A row: its k largest of those of its (at most PARTS) parts."""
    row = tl.cast(tl.program_id(0), tl.int64)
    p = tl.arange(0, PARTS)
    m = tl.load(statistics + (row * parts + p) * 2, mask=p < parts, other=LOWEST)
    l = tl.load(statistics + (row * parts + p) * 2 + 1, mask=p < parts, other=0.0)
    shift = tl.max(m, axis=0)
    l = tl.sum(tl.exp2((m - shift) * LOG2E) * l, axis=0)
    tl.store(sums + row, shift + tl.log(l))
    q, i = tl.arange(0, CANDIDATES), tl.arange(0, K)
    s = tl.load(found + row * parts * k + q, mask=q < parts * k, other=0.0)
    exists = tl.load(places + row * parts * k + q, mask=q < parts * k, other=-1) >= 0
    best = largest_keys(tl.where(exists, keys_of(s, q, NARROW), no_keys(q, NARROW)), k, k, K, WARPS)
    w = tl.load(places + row * parts * k + place_of(best, NARROW), mask=are(best, NARROW), other=0)
    s = value_of(best, NARROW)[None, :]
    tl.store(values + row * k + i, tl.reshape(_weights(s, i[None, :], shift, l, k, RENORMALISE), [K]), mask=i < k)
    tl.store(indices + row * k + i, w.to(tl.int64), mask=i < k)
