"""Naive attention: S = Q Kᵀ, (S · scale, mask,) P = softmax(S), O = P V, one kernel each, S and P through memory.

Ledger and schedule: `naive` of `onchip.roofline.attention` and `onchip.simulate.unfused`. The two matmuls are plain tiled GEMMs; the
softmax keeps a row on the chip where a program can hold it, and reads S twice beyond.
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.ladder.kernels.common import LOG2E, Launch, block, cast, dot, finite, load_rows, reciprocal, sizes, start, store_rows, zeros

GEMM = Launch(128, 128, 8, 3)
INNER = 64  # keys of P and V a GEMM step takes
# S: a program owns 128 rows × 512 keys, 64 of them at a time: loads and stores of one step run under the product of another.
SCORES, STRIP = Launch(128, 64, 8, 3), 512
ROW = 32768  # the longest row one program holds: 256 registers of each of 128 threads would be 32 K fp32


@triton.jit
def scores_kernel(q, k, s, seq_q, seq_k, group, scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  STRIP: tl.constexpr):
    """BM rows × STRIP keys of S = scale · Q Kᵀ, rounded to s's dtype, BN keys at a time. Grid: strips · query tiles · heads."""
    strips, tiles_q = tl.cdiv(seq_k, STRIP), tl.cdiv(seq_q, BM)
    head, tile = tl.program_id(0) // (strips * tiles_q), tl.program_id(0) % (strips * tiles_q)
    i0, first = tile // strips * BM, tile % strips * STRIP
    q_tile = load_rows(q, head, i0, seq_q, D, BD, BM)
    i = i0 + tl.arange(0, BM)
    for j0 in tl.range(first, tl.minimum(first + STRIP, seq_k), BN):
        j = j0 + tl.arange(0, BN)
        k_tile = load_rows(k, head // group, j0, seq_k, D, BD, BN)
        s_tile = dot(q_tile, tl.trans(k_tile), tl.zeros([BM, BN], tl.float32), "ieee") * scale  # (BM, BN)
        at = (head.to(tl.int64) * seq_q + i[:, None]) * seq_k + j[None, :]
        tl.store(s + at, cast(s_tile, s.dtype.element_ty), mask=(i[:, None] < seq_q) & (j[None, :] < seq_k))


@triton.jit
def scale_kernel(s, scale, seq_k, BN: tl.constexpr):
    """S ← scale · S, a row a program."""
    row = s + tl.program_id(0).to(tl.int64) * seq_k
    for j0 in tl.range(0, seq_k, BN):
        j = j0 + tl.arange(0, BN)
        x = tl.load(row + j, mask=j < seq_k)
        tl.store(row + j, cast(x.to(tl.float32) * scale, s.dtype.element_ty), mask=j < seq_k)


@triton.jit
def mask_kernel(s, seq_q, seq_k, offset, BN: tl.constexpr):
    """S ← −∞ above the diagonal, a row a program; every element is read and written, as torch's masked_fill does."""
    row = s + tl.program_id(0).to(tl.int64) * seq_k
    last = tl.program_id(0) % seq_q + offset
    for j0 in tl.range(0, seq_k, BN):
        j = j0 + tl.arange(0, BN)
        x = tl.load(row + j, mask=j < seq_k).to(tl.float32)
        tl.store(row + j, cast(tl.where(j <= last, x, float("-inf")), s.dtype.element_ty), mask=j < seq_k)


@triton.jit
def row_kernel(s, p, seq_q, seq_k, offset, factor, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """P = softmax of a row of S that stays on the chip: one read, one write."""
    at, j = tl.program_id(0).to(tl.int64) * seq_k, tl.arange(0, BN)
    x = tl.load(s + at + j, mask=j < seq_k, other=float("-inf")).to(tl.float32) * factor  # (BN,)
    if CAUSAL:
        x = tl.where(j <= tl.program_id(0) % seq_q + offset, x, float("-inf"))
    x = tl.exp2(x - finite(tl.max(x, 0)))
    tl.store(p + at + j, cast(x * reciprocal(tl.sum(x, 0)), p.dtype.element_ty), mask=j < seq_k)


@triton.jit
def long_row_kernel(s, p, seq_q, seq_k, offset, factor, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """The same for a row that does not fit: online (m, l) in a first pass, P in a second. S is read twice."""
    at, last = tl.program_id(0).to(tl.int64) * seq_k, tl.program_id(0) % seq_q + offset
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    for j0 in tl.range(0, seq_k, BN):
        j = j0 + tl.arange(0, BN)
        x = tl.load(s + at + j, mask=j < seq_k, other=float("-inf")).to(tl.float32) * factor
        if CAUSAL:
            x = tl.where(j <= last, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp2(m - finite(m_new)) + tl.sum(tl.exp2(x - finite(m_new)), 0)
        m = m_new
    for j0 in tl.range(0, seq_k, BN):
        j = j0 + tl.arange(0, BN)
        x = tl.load(s + at + j, mask=j < seq_k, other=float("-inf")).to(tl.float32) * factor
        if CAUSAL:
            x = tl.where(j <= last, x, float("-inf"))
        tl.store(p + at + j, cast(tl.exp2(x - finite(m)) * reciprocal(l), p.dtype.element_ty), mask=j < seq_k)


@triton.jit
def output_kernel(p, v, o, seq_q, seq_k, group, scale, DV: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr,
                  BK: tl.constexpr):
    """One tile of BM rows of O = scale · P V. Grid: query tiles · heads."""
    tiles = tl.cdiv(seq_q, BM)
    head, i0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BM
    i = i0 + tl.arange(0, BM)
    o_tile = zeros(BM, BDV, v.dtype.element_ty, WGMMA)
    for j0 in tl.range(0, seq_k, BK):
        j = j0 + tl.arange(0, BK)
        at = (head.to(tl.int64) * seq_q + i[:, None]) * seq_k + j[None, :]
        p_tile = tl.load(p + at, mask=(i[:, None] < seq_q) & (j[None, :] < seq_k), other=0.0)  # (BM, BK)
        o_tile = dot(p_tile, load_rows(v, head // group, j0, seq_k, DV, BDV, BK), o_tile, "ieee")
    store_rows(o, head, i0, seq_q, o_tile * scale, DV, BDV, BM)


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, apart: bool = False) -> Tensor:
    """softmax(scale · q kᵀ) v through memory. `apart`: scale and mask are kernels; else the first kernel scales and the softmax masks.

    q (B, H, Sq, D), k and v (B, Hkv, Sk, ·), contiguous; causal is bottom-right. Memory: S and P, B · H · Sq · Sk elements each.
    """
    return weighted(probabilities(q, k, v, causal, apart=apart), v, sizes(q, k, v))


def products(q: Tensor, k: Tensor, more: dict[str, Any], scale: float) -> Tensor:
    """scale · q kᵀ, (B, H, Sq, Sk)."""
    batch, heads, seq_q, d = q.shape
    s = q.new_empty(batch, heads, seq_q, k.shape[2])
    grid = batch * heads * triton.cdiv(seq_q, SCORES.br) * triton.cdiv(k.shape[2], STRIP)
    start(scores_kernel, grid, SCORES, q, k, s, scale=scale, BM=SCORES.br, BN=SCORES.bc, STRIP=STRIP, **{**more, "D": d, "BD": block(d)})
    return s


def probabilities(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, apart: bool = False) -> Tensor:
    """P, (B, H, Sq, Sk), through S in memory."""
    more = sizes(q, k, v)
    scale, seq_k, rows = q.shape[-1] ** -0.5, k.shape[2], q.shape[:3].numel()
    s = products(q, k, more, 1.0 if apart else scale)
    elementwise = Launch(1, 4096, 4, 1)
    if apart:
        start(scale_kernel, rows, elementwise, s, scale=scale, BN=elementwise.bc, **more)
        if causal:
            start(mask_kernel, rows, elementwise, s, BN=elementwise.bc, **more)
    more["factor"] = LOG2E  # the scale is in S
    p = torch.empty_like(s)
    if seq_k <= ROW:
        start(row_kernel, rows, row_launch(seq_k), s, p, CAUSAL=causal and not apart, BN=row_launch(seq_k).bc, **more)
    else:
        start(long_row_kernel, rows, Launch(1, 8192, 8, 1), s, p, CAUSAL=causal and not apart, BN=8192, **more)
    return p


def row_launch(seq_k: int) -> Launch:
    """Of a kernel that holds a row of scores: 32 elements a thread."""
    width = max(16, triton.next_power_of_2(seq_k))
    return Launch(1, width, min(16, max(1, width // 1024)), 1)


def weighted(p: Tensor, v: Tensor, more: dict[str, Any], scale: float = 1.0) -> Tensor:
    """scale · p v, (B, H, Sq, ·) of p (B, H, Sq, Sk) and v (B, Hkv, Sk, ·)."""
    batch, heads, seq_q, _ = p.shape
    dv = v.shape[-1]
    o = p.new_empty(batch, heads, seq_q, dv)
    start(output_kernel, batch * heads * triton.cdiv(seq_q, GEMM.br), GEMM, p, v, o, scale=scale, BM=GEMM.br, BK=INNER,
          **{**more, "DV": dv, "BDV": block(dv)})
    return o
