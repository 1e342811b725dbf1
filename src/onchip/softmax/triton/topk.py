"""The k largest of each row and log Σ exp of it, from one read: log Σ exp is online (Milakov & Gimelshein, arXiv 1805.02867, Alg. 4), and
sorting sees only a few elements of a row.

    maxima   reads x once; leaves in memory the largest of every GROUP = 64 neighbours, and (m, l) of every block of them
    select   k groups hold the k largest elements: finds those with the largest maxima, reads them again, sorts k · 64 elements

Rows of up to 1024 elements are sorted whole, several by one program. A *key* is an integer in the order of the values, with the place
below it. A NaN need not be among the maxima, nor then among the largest: it makes l NaN, and so all values of its row.
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.softmax.triton.launch import Launch, kind, remembered
from onchip.softmax.triton.rows import begin, fold, lead, locate

LOG2E = tl.constexpr(1.4426950408889634)
GROUP, BLOCK, WARPS = 64, 8192, 8
MAXIMA = tl.constexpr(16)  # up to so many are found one by one, in a quarter of the instructions of a bitonic sort
WHOLE = 1024  # elements of the longest row that is sorted at once


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
def _largest(keys, k, K: tl.constexpr, LEAST: tl.constexpr):
    """The k largest of each row of distinct keys, [rows, K], largest first, then LEAST or smaller ones."""
    if K <= MAXIMA:
        i = tl.arange(0, K)[None, :]
        best = tl.full([keys.shape[0], K], LEAST, keys.dtype)
        for at in range(k):
            most = tl.max(keys, axis=1)[:, None]
            best = tl.where(i == at, most, best)
            keys = tl.where(keys == most, LEAST, keys)
    else:
        best = tl.topk(keys, K)
    return best


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
    s = tl.load(begin(x, strides_x, i2, i1, i0, 1) + j * strides_x[3], mask=keep, other=float("-inf")).to(tl.float32)
    m = tl.max(s, axis=1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2((s - shift[:, None]) * LOG2E), axis=1)
    best = _largest(tl.where(keep, _keys(s, j, NARROW), LEAST), k, K, LEAST)  # [BLOCK_M, K]
    row, i = (tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None], tl.arange(0, K)[None, :]
    wanted = exists[:, None] & (i < k)
    tl.store(values + row * k + i, _weights(_value(best, NARROW, LEAST), i, shift[:, None], l[:, None], k, RENORMALISE), mask=wanted)
    tl.store(indices + row * k + i, _place(best, NARROW).to(tl.int64), mask=wanted)
    tl.store(sums + row, (shift + tl.log(l))[:, None], mask=exists[:, None])


@triton.jit
def _maxima(x, maxima, statistics, strides_x, n, n0, n1, blocks, VECTOR: tl.constexpr, EDGES: tl.constexpr, GROUP: tl.constexpr,
            BLOCK: tl.constexpr):
    """A block of a row: the largest of each group of it, its m and its l."""
    row, block = tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks
    i2, i1, i0 = row // n0 // n1 + tl.arange(0, 1), row // n0 % n1 + tl.arange(0, 1), row % n0 + tl.arange(0, 1)
    before = lead(strides_x, i2, i1, i0, VECTOR, EDGES)
    g = tl.arange(0, BLOCK // GROUP)
    w = block * BLOCK + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keep = w // VECTOR * VECTOR < before + n
    s = tl.load(begin(x, strides_x, i2, i1, i0, VECTOR) + w * strides_x[3], mask=keep, other=float("-inf")).to(tl.float32)
    if EDGES:
        s = tl.where((w >= before) & (w < before + n), s, float("-inf"))
    largest = tl.max(s, axis=1)
    m = tl.max(largest, axis=0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2((s - shift) * LOG2E))
    tl.store(maxima + (row * blocks + block) * (BLOCK // GROUP) + g, largest)
    tl.store(statistics + (row * blocks + block) * 2, shift)
    tl.store(statistics + (row * blocks + block) * 2 + 1, l)


@triton.jit
def _select(x, maxima, statistics, values, indices, sums, strides_x, n, n0, n1, blocks, k, VECTOR: tl.constexpr, EDGES: tl.constexpr,
            GROUP: tl.constexpr, A_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, LEAST: tl.constexpr,
            RENORMALISE: tl.constexpr):
    """A row: its k largest from A_BLOCK maxima of each of its (at most BLOCKS) blocks."""
    row = tl.cast(tl.program_id(0), tl.int64)
    i2, i1, i0 = row // n0 // n1 + tl.arange(0, 1), row // n0 % n1 + tl.arange(0, 1), row % n0 + tl.arange(0, 1)
    before = lead(strides_x, i2, i1, i0, VECTOR, EDGES)
    b = tl.arange(0, BLOCKS)
    m = tl.load(statistics + (row * blocks + b) * 2, mask=b < blocks, other=float("-inf"))
    l = tl.load(statistics + (row * blocks + b) * 2 + 1, mask=b < blocks, other=0.0)
    shift = tl.max(m, axis=0)
    l = tl.sum(tl.exp2((m - shift) * LOG2E) * l, axis=0)
    tl.store(sums + row, shift + tl.log(l))
    g = tl.arange(0, A_BLOCK * BLOCKS)[None, :]
    largest = tl.load(maxima + row * blocks * A_BLOCK + g, mask=g < blocks * A_BLOCK, other=float("-inf"))
    best = _largest(tl.where(g * GROUP < before + n, _keys(largest, g, NARROW), LEAST), k, K, LEAST)  # [1, K]
    group, i, c = _place(best, NARROW), tl.arange(0, K), tl.arange(0, GROUP)[None, :]
    w = tl.reshape(group, [K, 1]) * GROUP + c  # [K, GROUP]: all candidates
    keep = tl.reshape(best > LEAST, [K, 1]) & (w >= before) & (w < before + n)
    s = tl.load(begin(x, strides_x, i2, i1, i0, VECTOR) + w * strides_x[3], mask=keep, other=0.0).to(tl.float32)
    keys = tl.where(keep, _keys(s, i[:, None] * GROUP + c, NARROW), LEAST)
    first = _largest(tl.reshape(keys, [1, K * GROUP]), k, K, LEAST)  # [1, K]
    place, i = _place(first, NARROW), i[None, :]
    group = tl.sum(tl.where((place // GROUP)[:, :, None] == i[:, None, :], group[:, None, :], 0), axis=2)  # of the group the place is in
    tl.store(values + row * k + i, _weights(_value(first, NARROW, LEAST), i, shift, l, k, RENORMALISE), mask=i < k)
    tl.store(indices + row * k + i, (group * GROUP + place % GROUP - before).to(tl.int64), mask=i < k)


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
    found = remembered(x.device, key, lambda: _launches(x, k, dim, renormalise))
    if found is None:
        return topk(x.contiguous(), k, dim, renormalise, dtype)
    *before, last, blocks = found
    if not before:
        last(x, values, indices, sums)
        return values, indices, sums
    maxima = torch.empty(sums.numel() * blocks * (BLOCK // GROUP), dtype=torch.float32, device=x.device)
    statistics = torch.empty(sums.numel() * blocks * 2, dtype=torch.float32, device=x.device)
    before[0](x, maxima, statistics)
    last(x, maxima, statistics, values, indices, sums)
    return values, indices, sums


def _launches(x: Tensor, k: int, dim: int, renormalise: bool) -> tuple[Any, ...] | None:
    """The launches of a call, and the blocks of a row."""
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
        return Launch(_whole, triton.cdiv(rows.count, block_m), 4, {**place, **sorting, "BLOCK_M": block_m, "BLOCK_N": width},
                      {"num_warps": 4}), 1
    blocks = triton.cdiv(rows.n + (rows.vector - 1) * rows.edges, BLOCK)
    tiles = {**place, "blocks": blocks, "VECTOR": rows.vector, "EDGES": rows.edges, "GROUP": GROUP, "BLOCK": BLOCK,
             "A_BLOCK": BLOCK // GROUP, "BLOCKS": triton.next_power_of_2(blocks)}
    return (Launch(_maxima, rows.count * blocks, 3, tiles, {"num_warps": WARPS}),
            Launch(_select, rows.count, 6, {**tiles, **sorting}, {"num_warps": 1 if most <= MAXIMA.value else 4}), blocks)
