"""Kernels of the k largest: rows that are sorted whole, rows or parts of them by chunks, and what the parts found put together."""
import triton
import triton.language as tl

from onchip.softmax.triton.rows import INTERPRETED, locate
from onchip.softmax.triton.topk_keys import MAXIMA, keys_of, largest_keys, most_of, one_by_one, place_of, value_of

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
def whole(x, values, indices, sums, strides_x, n, n0, n1, groups, tiles_a_group, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           K: tl.constexpr, NARROW: tl.constexpr, LEAST: tl.constexpr, RENORMALISE: tl.constexpr):
    """Rows that are sorted at once, a tile of them."""
    i2, i1, i0, exists = locate(tl.program_id(0), n0, n1, groups, tiles_a_group, False, True, BLOCK_M)
    j = tl.arange(0, BLOCK_N)[None, :]
    keep = exists[:, None] & (j < n)
    start = (i2 * strides_x[0] + i1 * strides_x[1] + i0 * strides_x[2])[:, None]
    s = tl.load(x + start + j.to(tl.int64) * strides_x[3], mask=keep, other=float("-inf")).to(tl.float32)
    m = tl.max(s, axis=1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2((s - shift[:, None]) * LOG2E), axis=1)
    keys = tl.where(keep, keys_of(s, j, NARROW), LEAST)
    best = one_by_one(keys[None, :, :], k, K, LEAST) if K <= MAXIMA else tl.topk(keys, K)  # [BLOCK_M, K]
    row, i = (tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None], tl.arange(0, K)[None, :]
    wanted = exists[:, None] & (i < k)
    tl.store(values + row * k + i, _weights(value_of(best, NARROW, LEAST), i, shift[:, None], l[:, None], k, RENORMALISE), mask=wanted)
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
def _elements(group, r, e, VECTORS: tl.constexpr, THREADS: tl.constexpr):
    """Places w of element e of run r of groups. A group's runs lie THREADS runs apart, so that threads read neighbours."""
    return (group // THREADS * VECTORS + r) * (THREADS * RUN) + group % THREADS * RUN + e


@triton.jit
def _chunk(row, c, step, before, n, VECTOR: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr, THREADS: tl.constexpr,
           VECTORS: tl.constexpr):
    """The elements of a chunk, VECTORS tensors [THREADS, RUN], −∞ outside the row."""
    xs = ()
    for r in tl.static_range(VECTORS):
        w = _elements(c * THREADS + tl.arange(0, THREADS)[:, None], r, tl.arange(0, RUN)[None, :], VECTORS, THREADS)
        at = row + (w.to(tl.int64) * step if WIDE else w * step)
        xs = xs + (tl.load(at, mask=w // VECTOR * VECTOR < before + n, other=float("-inf")),)  # noqa: RUF005  Triton has no stars
    if EDGES:  # noqa: SIM102  a choice at compile time, and one at run time
        if c == 0 or (c + 1) * (THREADS * RUN * VECTORS) > before + n:
            least = tl.full([1, 1], float("-inf"), tl.float32).to(xs[0].dtype)
            inner = ()
            for r in tl.static_range(VECTORS):
                w = _elements(c * THREADS + tl.arange(0, THREADS)[:, None], r, tl.arange(0, RUN)[None, :], VECTORS, THREADS)
                inner = inner + (tl.where((w >= before) & (w < before + n), xs[r], least),)  # noqa: RUF005
            xs = inner
    return xs


@triton.jit
def part(x, values, indices, sums, strides_x, n, n0, n1, parts, chunks, a_part, k, VECTOR: tl.constexpr, EDGES: tl.constexpr,
          WIDE: tl.constexpr, WARPS: tl.constexpr, VECTORS: tl.constexpr, CHUNKS: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
          NARROW: tl.constexpr, LEAST: tl.constexpr, RENORMALISE: tl.constexpr, ALONE: tl.constexpr):
    """A row, or (not ALONE) a part of one: s and w of its k largest instead of values and indices, and its m and l.

    A part has `a_part` ≤ CHUNKS of the row's `chunks`.
    """
    THREADS: tl.constexpr = 32 * WARPS
    row = tl.cast(tl.program_id(0) // parts, tl.int64)
    start = row // n0 // n1 * strides_x[0] + row // n0 % n1 * strides_x[1] + row % n0 * strides_x[2]
    before = (start % VECTOR).to(tl.int32) if EDGES else 0
    x += start // VECTOR * VECTOR
    first = tl.program_id(0) % parts * a_part
    m = tl.full([THREADS], LOWEST, tl.float32)
    l = tl.zeros([THREADS], tl.float32)
    c, t = tl.arange(0, CHUNKS)[:, None], tl.arange(0, THREADS)[None, :]
    maxima = tl.full([CHUNKS, THREADS], float("-inf"), tl.float32)
    for at in range(first, tl.minimum(first + a_part, chunks)):
        xs = _chunk(x, at, strides_x[3], before, n, VECTOR, EDGES, WIDE, THREADS, VECTORS)
        most = xs[0]
        for r in tl.static_range(1, VECTORS):
            most = _larger(most, xs[r], NARROW)
        largest = tl.max(most.to(tl.float32), axis=1)
        shift = tl.maximum(m, largest)
        e = tl.zeros([THREADS, RUN], tl.float32)
        for r in tl.static_range(VECTORS):
            e += tl.exp2((_widen(xs[r], NARROW) - shift[:, None]) * LOG2E)
        l = l * tl.exp2((m - shift) * LOG2E) + tl.sum(e, axis=1)
        m = shift
        maxima = tl.where(c + first == at, largest[None, :], maxima)
    shift = tl.max(m, axis=0)
    l = tl.sum(l * tl.exp2((m - shift) * LOG2E), axis=0)

    groups = (first + c) * THREADS + t
    exists = (c < a_part) & (_elements(groups, 0, 0, VECTORS, THREADS) < before + n)
    best = largest_keys(tl.where(exists, keys_of(maxima, c * THREADS + t, NARROW), LEAST), k, k, K, WARPS, LEAST)  # [K]
    group, i = tl.where(best > LEAST, place_of(best, NARROW) + first * THREADS, 0), tl.arange(0, K)
    q = tl.arange(0, K * Q)  # all candidates
    w = _elements(tl.gather(group, q // Q, 0), q % Q // RUN, q % RUN, VECTORS, THREADS)
    keep = (q % Q // RUN < VECTORS) & (w >= before) & (w < before + n) & (tl.gather(best, q // Q, 0) > LEAST)
    s = tl.load(x + (w.to(tl.int64) * strides_x[3] if WIDE else w * strides_x[3]), mask=keep, other=0.0).to(tl.float32)
    keys, rounds = tl.where(keep, keys_of(s, q, NARROW), LEAST), k
    if K > MAXIMA:  # the k largest maxima are among them, so nothing below the least of these is
        least = tl.min(tl.where(i < k, value_of(best, NARROW, LEAST), float("inf")), axis=0)
        rounds = tl.minimum(k, most_of(keep & ~(s < least), WARPS))
    best = largest_keys(keys, k, rounds, K, WARPS, LEAST)
    s, q = value_of(best, NARROW, LEAST), tl.where(best > LEAST, place_of(best, NARROW), 0)
    w = _elements(tl.gather(group, q // Q, 0), q % Q // RUN, q % RUN, VECTORS, THREADS) - before
    to = tl.cast(tl.program_id(0), tl.int64)
    if ALONE:
        tl.store(values + to * k + i, tl.reshape(_weights(s[None, :], i[None, :], shift, l, k, RENORMALISE), [K]), mask=i < k)
        tl.store(indices + to * k + i, w.to(tl.int64), mask=i < k)
        tl.store(sums + to, shift + tl.log(l))
    else:
        tl.store(values + to * k + i, s, mask=i < k)
        tl.store(indices + to * k + i, tl.where(best > LEAST, w, -1), mask=i < k)
        tl.store(sums + to * 2, shift)
        tl.store(sums + to * 2 + 1, l)


@triton.jit
def merge(found, places, statistics, values, indices, sums, parts, k, WARPS: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr,
           K: tl.constexpr, NARROW: tl.constexpr, LEAST: tl.constexpr, RENORMALISE: tl.constexpr):
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
    best = largest_keys(tl.where(exists, keys_of(s, q, NARROW), LEAST), k, k, K, WARPS, LEAST)
    w = tl.load(places + row * parts * k + place_of(best, NARROW), mask=best > LEAST, other=0)
    s = value_of(best, NARROW, LEAST)[None, :]
    tl.store(values + row * k + i, tl.reshape(_weights(s, i[None, :], shift, l, k, RENORMALISE), [K]), mask=i < k)
    tl.store(indices + row * k + i, w.to(tl.int64), mask=i < k)
