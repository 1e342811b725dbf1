"""Kernels of the k largest: rows that are sorted whole, rows or parts of them by chunks, and what the parts found put together."""
import triton
import triton.language as tl

from onchip.softmax.triton.rows import INTERPRETED, locate
from onchip.softmax.triton.topk_keys import MAXIMA, are, keys_of, largest_keys, most_of, no_keys, one_by_one, place_of, value_of

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the first m: finite, so that −∞ − m is not NaN
RUN = tl.constexpr(8)  # neighbours that a thread reads at once


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
    """Place w of a group's first element. A group's runs lie THREADS runs apart, so that threads read neighbours."""
    return (group // THREADS * (GROUP * THREADS) + group % THREADS) * RUN


@triton.jit
def _inside(s, w, n, EDGES: tl.constexpr, NARROW: tl.constexpr):
    """s, −∞ outside of the row where loads do not see to it: two 16-bit elements by one instruction, where selects take them apart."""
    if EDGES:
        keep = w.to(tl.uint32, bitcast=True) < n
        if NARROW == "fp32" or INTERPRETED:
            s = tl.where(keep, s, tl.full([1, 1], float("-inf"), tl.float32).to(s.dtype))
        else:
            infinity: tl.constexpr = "0xff80ff80" if NARROW == "bf16" else "0xfc00fc00"
            s = tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, " + infinity + ", 0xe2;", "=r,r,r", [s, (-keep.to(tl.int32)).to(tl.int16)],
                                          dtype=s.dtype, is_pure=True, pack=2)
    return s


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
def part(x, values, indices, sums, strides_x, n, n0, n1, parts, chunks, a_part, k: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
          WIDE: tl.constexpr, FLAT: tl.constexpr, WARPS: tl.constexpr, VECTORS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
          Q: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, RENORMALISE: tl.constexpr, ALONE: tl.constexpr):
    """A row, or (not ALONE) a part of one: s and w of its k largest instead of values and indices, and its m and l.

    A part has `a_part` of the row's `chunks`, of VECTORS runs a thread, and each thread at most GROUPS groups of it, of GROUP runs. Chunks
    wholly inside the row are read without masks.
    """
    THREADS: tl.constexpr = 32 * WARPS
    CHUNK: tl.constexpr = THREADS * RUN * VECTORS
    row = tl.cast(tl.program_id(0) // parts, tl.int64)
    start = row * strides_x[2]
    if not FLAT:
        start = row // n0 // n1 * strides_x[0] + row // n0 % n1 * strides_x[1] + row % n0 * strides_x[2]
    before = (start % VECTOR).to(tl.int32) if EDGES else 0
    end = before + n
    x += start // VECTOR * VECTOR
    step = strides_x[3].to(tl.int64) if WIDE else strides_x[3]
    first = tl.program_id(0) % parts * a_part
    last = tl.minimum(first + a_part, chunks)
    begin = first + 1 if EDGES and first == 0 else first
    inner = tl.minimum(last, tl.maximum(end // CHUNK, begin))
    m, shift = tl.full([THREADS], LOWEST, tl.float32), tl.full([THREADS], LOWEST, tl.float32)
    l = tl.zeros([THREADS], tl.float32)
    SPAN: tl.constexpr = GROUP // VECTORS  # chunks of a group
    g, t = tl.arange(0, GROUPS)[:, None], tl.arange(0, THREADS)[None, :]
    maxima = tl.full([GROUPS, THREADS], float("-inf"), tl.float32)
    w0 = tl.arange(0, THREADS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for j in range(inner - (begin - first), last):  # the row's first chunk and its last ones
        at = first if j < inner else j
        xs = ()
        for r in tl.static_range(VECTORS):
            w = w0 + (at * CHUNK + r * (THREADS * RUN))
            s = tl.load(x + w * step, mask=w // VECTOR * VECTOR < end, other=float("-inf"))
            xs = xs + (_inside(s, w - before, n, EDGES, NARROW),)  # noqa: RUF005  Triton has no stars
        m, shift, l, largest = _scan(xs, m, shift, l, VECTORS, NARROW)
        maxima = _noted(maxima, largest, g == (at - first) // SPAN, SPAN)
    at_chunk = x + (w0 * step + tl.cast(begin, tl.int64) * CHUNK * strides_x[3])
    for at in range(begin, inner):
        xs = ()
        for r in tl.static_range(VECTORS):
            xs = xs + (tl.load(at_chunk + r * (THREADS * RUN) * step),)  # noqa: RUF005
        at_chunk += CHUNK * step
        m, shift, l, largest = _scan(xs, m, shift, l, VECTORS, NARROW)
        maxima = _noted(maxima, largest, g == (at - first) // SPAN, SPAN)

    best = largest_keys(keys_of(maxima, g * THREADS + t, NARROW), k, k, K, WARPS)  # [K]; groups outside of the row are the last of −∞
    found, i = value_of(best, NARROW), tl.arange(0, K)
    m = tl.maximum(tl.max(found, axis=0), LOWEST)
    l = tl.sum(l * tl.exp2(-_fused(m, _factor(m), shift)), axis=0)

    place = first * CHUNK + _first(place_of(best, NARROW), GROUP, THREADS) - before
    place = tl.where(i < k, place, 2**30)
    q = tl.arange(0, K * Q)  # all candidates
    w = tl.gather(place, q // Q, 0) + tl.where(q % Q // RUN < GROUP, q % Q // RUN * (THREADS * RUN) + q % RUN, 2**30)
    keep = w.to(tl.uint32, bitcast=True) < tl.minimum(n, last * CHUNK - before)  # a part's last group may reach beyond it
    s = tl.load(x + before * step + (w.to(tl.int64) if WIDE else w) * step, mask=keep, other=0.0).to(tl.float32)
    keys, rounds = tl.where(keep, keys_of(s, q, NARROW), no_keys(q, NARROW)), k
    if K > MAXIMA:  # the k largest maxima are among them, so nothing below the least of these is
        least = tl.min(tl.where(i < k, found, float("inf")), axis=0)
        rounds = tl.minimum(k, most_of(keep & ~(s < least), WARPS))
    best = largest_keys(keys, k, rounds, K, WARPS)
    s, q = value_of(best, NARROW), tl.where(i < k, place_of(best, NARROW), 0)
    w = tl.gather(place, q // Q, 0) + (q % Q // RUN * (THREADS * RUN) + q % RUN)
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
