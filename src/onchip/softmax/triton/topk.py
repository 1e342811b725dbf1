"""The k largest of each row and log Σ exp of it, from one read: log Σ exp is online (Milakov & Gimelshein, arXiv 1805.02867, Alg. 4), and
sorting sees only a few elements of a row.

    part     a program reads a row, or a part of one, by chunks. Each thread keeps an (m, l) of its own and, of every chunk, the largest of
             its elements: these are a *group*. The k groups with the largest maxima hold the k largest elements; they are read again
    merge    where rows are cut in parts: the k largest of what the parts found

Rows of up to 1024 elements are sorted whole, several by one program. A *key* is an integer in the order of the values, with the place
below it. A NaN need not be among the maxima, nor then among the largest: it makes l NaN, and so all values of its row.
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.softmax.triton.launch import Launch, kind, remembered
from onchip.softmax.triton.rows import fold, locate

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the first m: finite, so that −∞ − m is not NaN
MAXIMA = tl.constexpr(16)  # up to so many are found one by one, in a quarter of the instructions of a bitonic sort
RUN = tl.constexpr(8)  # neighbours that a thread reads at once
WHOLE = 1024  # elements of the longest row that is sorted at once
WARPS = 4
CHUNKS = 16  # of a program at most: a register each
PROGRAMS_PER_SM, MANY_PER_SM = 8, 5  # by 64 registers a thread, and by the 96 that more than MAXIMA are allowed (their 64 · 64 candidates)


@triton.jit
def _keys(s, place, NARROW: tl.constexpr):
    """Keys of x's own values in float32: 16 bits of value above 16 of place for 16-bit types, 32 above 32 for float32."""
    if NARROW == "fp32":
        bits = s.to(tl.int32, bitcast=True)
        keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFFFFFF - place.to(tl.int64))
    else:
        narrow = s.to(tl.bfloat16) if NARROW == "bf16" else s.to(tl.float16)
        bits = narrow.to(tl.int16, bitcast=True).to(tl.int32)
        keys = ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | (0xFFFF - place)
    return keys


@triton.jit
def _place(keys, NARROW: tl.constexpr):
    return (0xFFFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32) if NARROW == "fp32" else 0xFFFF - (keys & 0xFFFF)


@triton.jit
def _value(keys, NARROW: tl.constexpr, LEAST: tl.constexpr):
    """Values of keys in float32, −∞ of LEAST, which is no element's."""
    if NARROW == "fp32":
        bits = (keys >> 32).to(tl.int32)
        s = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        bits = keys >> 16
        bits = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16)
        s = (bits.to(tl.bfloat16, bitcast=True) if NARROW == "bf16" else bits.to(tl.float16, bitcast=True)).to(tl.float32)
    return tl.where(keys > LEAST, s, float("-inf"))


@triton.jit
def _one_by_one(keys, k, I: tl.constexpr, LEAST: tl.constexpr):
    """The k largest of each row of distinct keys, [rows, I], largest first, then LEAST; keys: [repeats, rows, columns]."""
    i = tl.arange(0, I)[None, :]
    best = tl.full([keys.shape[1], I], LEAST, keys.dtype)
    for at in range(k):
        most = tl.max(tl.max(keys, axis=0), axis=1)
        best = tl.where(i == at, most[:, None], best)
        keys = tl.where(keys == most[None, :, None], LEAST, keys)
    return best


@triton.jit
def _largest(keys, k, rounds, K: tl.constexpr, WARPS: tl.constexpr, LEAST: tl.constexpr):
    """The k largest of distinct keys, [K], largest first, then LEAST; the number of keys is a multiple of 32 · WARPS.

    Each warp finds the `rounds` largest of its own keys without a word to the others: as many as can be among the k. Of these WARPS · K
    a few are put in order by their rank, the number of larger ones, and many by sorting.
    """
    ROW: tl.constexpr = 32 if K < 32 else K
    found = _one_by_one(tl.reshape(keys, [keys.numel // (32 * WARPS), WARPS, 32]), rounds, ROW, LEAST)  # lanes keep one each
    if K > MAXIMA:
        best = tl.reshape(tl.topk(tl.reshape(found, [1, WARPS * ROW]), K), [K])
    else:
        found = tl.reshape(tl.max(tl.reshape(found, [WARPS, ROW // K, K]), axis=1), [WARPS * K])
        rank = tl.sum((found[None, :] > found[:, None]).to(tl.int32), axis=1)
        best = tl.max(tl.where(rank[:, None] == tl.arange(0, K)[None, :], found[:, None], LEAST), axis=0)
    return best


@triton.jit
def _most(good, WARPS: tl.constexpr):
    """Of how many `good` keys of one warp are most."""
    return tl.max(tl.sum(tl.sum(tl.reshape(good.to(tl.int32), [good.numel // (32 * WARPS), WARPS, 32]), axis=0), axis=1), axis=0)


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
def _whole(x, values, indices, sums, strides_x, n, n0, n1, groups, tiles_a_group, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    keys = tl.where(keep, _keys(s, j, NARROW), LEAST)
    best = _one_by_one(keys[None, :, :], k, K, LEAST) if K <= MAXIMA else tl.topk(keys, K)  # [BLOCK_M, K]
    row, i = (tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None], tl.arange(0, K)[None, :]
    wanted = exists[:, None] & (i < k)
    tl.store(values + row * k + i, _weights(_value(best, NARROW, LEAST), i, shift[:, None], l[:, None], k, RENORMALISE), mask=wanted)
    tl.store(indices + row * k + i, _place(best, NARROW).to(tl.int64), mask=wanted)
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
def _part(x, values, indices, sums, strides_x, n, n0, n1, parts, chunks, a_part, k, VECTOR: tl.constexpr, EDGES: tl.constexpr,
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
    best = _largest(tl.where(exists, _keys(maxima, c * THREADS + t, NARROW), LEAST), k, k, K, WARPS, LEAST)  # [K]
    group, i = tl.where(best > LEAST, _place(best, NARROW) + first * THREADS, 0), tl.arange(0, K)
    q = tl.arange(0, K * Q)  # all candidates
    w = _elements(tl.gather(group, q // Q, 0), q % Q // RUN, q % RUN, VECTORS, THREADS)
    keep = (q % Q // RUN < VECTORS) & (w >= before) & (w < before + n) & (tl.gather(best, q // Q, 0) > LEAST)
    s = tl.load(x + (w.to(tl.int64) * strides_x[3] if WIDE else w * strides_x[3]), mask=keep, other=0.0).to(tl.float32)
    keys, rounds = tl.where(keep, _keys(s, q, NARROW), LEAST), k
    if K > MAXIMA:  # the k largest maxima are among them, so nothing below the least of these is
        least = tl.min(tl.where(i < k, _value(best, NARROW, LEAST), float("inf")), axis=0)
        rounds = tl.minimum(k, _most(keep & ~(s < least), WARPS))
    best = _largest(keys, k, rounds, K, WARPS, LEAST)
    s, q = _value(best, NARROW, LEAST), tl.where(best > LEAST, _place(best, NARROW), 0)
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
def _merge(found, places, statistics, values, indices, sums, parts, k, WARPS: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr,
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
    best = _largest(tl.where(exists, _keys(s, q, NARROW), LEAST), k, k, K, WARPS, LEAST)
    w = tl.load(places + row * parts * k + _place(best, NARROW), mask=best > LEAST, other=0)
    s = _value(best, NARROW, LEAST)[None, :]
    tl.store(values + row * k + i, tl.reshape(_weights(s, i[None, :], shift, l, k, RENORMALISE), [K]), mask=i < k)
    tl.store(indices + row * k + i, w.to(tl.int64), mask=i < k)


def topk(x: Tensor, k: int, dim: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, log Σ exp x) with `dim` < 0 moved last; float16, bfloat16 or float32 rows of `dispatch.LONGEST_TOPK` at most.

    Values are those of softmax, in `dtype`, or with `renormalise` over their sum; log Σ exp is float32.
    """
    leading = x.movedim(dim, -1).shape[:-1]
    values, indices = x.new_empty((*leading, k), dtype=dtype), x.new_empty((*leading, k), dtype=torch.int64)
    sums = x.new_empty((*leading, 1), dtype=torch.float32)
    if not sums.numel():
        return values, indices, sums
    key = ("topk", x.shape, *kind(x), k, dim, renormalise, dtype)
    launches = remembered(x.device, key, lambda: _launches(x, k, dim, renormalise))
    if launches is None:
        return topk(x.contiguous(), k, dim, renormalise, dtype)
    if len(launches) == 1:
        launches[0](x, values, indices, sums)
        return values, indices, sums
    part, merge = launches
    found = torch.empty(part.grid * k, dtype=torch.float32, device=x.device)
    places = torch.empty(part.grid * k, dtype=torch.int32, device=x.device)
    statistics = torch.empty(part.grid * 2, dtype=torch.float32, device=x.device)
    part(x, found, places, statistics)
    merge(found, places, statistics, values, indices, sums)
    return values, indices, sums


def chunks_of(runs: int, most: int) -> tuple[int, int]:
    """Runs that a thread reads at once, at most so many, and how often: what leaves the fewest of them empty. A chunk costs half a run."""
    return min(((v, triton.cdiv(runs, v)) for v in range(min(runs, most), most // 2, -1)), key=lambda vc: vc[1] * (vc[0] + 0.5),
               default=(runs, 1))


def parts_of(rows: int, chunks: int, programs: int) -> int:
    """Parts that rows of so many chunks are cut in: as few as registers hold the maxima of, and as leave no SM idle for long,
    where `programs` run at once.

    A last round of few programs takes as long as a full one. Where there are many rounds it hardly matters; else a merge is cheaper.
    """
    parts = triton.cdiv(chunks, CHUNKS)
    while parts < chunks:
        rounds = rows * parts / programs
        if rounds >= 4 or 0.5 <= rounds <= 1 or (rounds > 1 and rounds % 1 >= 0.3):
            break
        parts = min(chunks, 2 * parts)
    return triton.cdiv(chunks, triton.cdiv(chunks, parts))


def _launches(x: Tensor, k: int, dim: int, renormalise: bool) -> tuple[Any, ...] | None:
    """The launches of a call."""
    rows = fold({"x": x}, dim, wide=("x",))
    if rows is None:
        return None
    narrow = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[x.dtype]
    width, most = max(2, triton.next_power_of_2(rows.n)), max(2, triton.next_power_of_2(k))  # a sort leaves no tensor of one
    sorting = {"k": k, "K": most, "NARROW": narrow, "LEAST": -(2**63) if narrow == "fp32" else -(2**31),
               "RENORMALISE": renormalise}
    place = {"strides_x": rows.strides["x"], "n": rows.n, "n0": rows.n0, "n1": rows.n1, "groups": rows.groups, "tiles_a_group": 1}
    if rows.n <= WHOLE:
        block_m = WHOLE // width
        return (Launch(_whole, triton.cdiv(rows.count, block_m), 4, {**place, **sorting, "BLOCK_M": block_m, "BLOCK_N": width},
                       {"num_warps": 4}),)
    run = 32 * WARPS * RUN.value
    window = rows.n + (rows.vector - 1) * rows.edges
    vectors, chunks = chunks_of(triton.cdiv(window, run), 4 if narrow == "fp32" else 8)
    on_card = x.device.type in ("cuda", "meta") and torch.cuda.is_available()  # `onchip inspect` makes launches for meta tensors
    card = torch.cuda.get_device_properties(x.device if x.device.type == "cuda" else None) if on_card else None
    per_sm = MANY_PER_SM if most > MAXIMA.value else PROGRAMS_PER_SM
    parts = parts_of(rows.count, chunks, per_sm * (card.multi_processor_count if card else 1))
    a_part = triton.cdiv(chunks, parts)
    reach = (window + run * vectors) * max(1, rows.strides["x"][3])
    named = {**place, **sorting, "parts": parts, "chunks": chunks, "a_part": a_part, "VECTOR": rows.vector, "EDGES": rows.edges,
             "WIDE": reach >= 2**31, "WARPS": WARPS, "VECTORS": vectors, "CHUNKS": triton.next_power_of_2(a_part),
             "Q": max(triton.next_power_of_2(vectors) * RUN.value, 32 * WARPS // most), "ALONE": parts == 1}
    options = {"num_warps": WARPS} | ({"maxnreg": 96} if most > MAXIMA.value and card else {})
    part = Launch(_part, rows.count * parts, 4, named, options)
    if parts == 1:
        return (part,)
    candidates = max(32 * WARPS, triton.next_power_of_2(parts * k))
    return part, Launch(_merge, rows.count, 6, {**named, "PARTS": triton.next_power_of_2(parts), "CANDIDATES": candidates},
                        {"num_warps": WARPS})
