"""Naive attention: S = Q Kᵀ, (S · scale, mask,) P = softmax(S), O = P V, one kernel each, S and P through memory.

Ledger and schedule: `naive` of `onchip.roofline.attention` and `onchip.simulate.unfused`. The two matmuls are plain tiled GEMMs; the
softmax keeps a row on the chip where a program can hold it, and reads S twice beyond.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.ladder.kernels.common import LOG2E, Launch, cast, dot, finite, load_rows, reciprocal, sizes, start, store_rows, zeros

GEMM = Launch(128, 128, 8, 3)
INNER = 64  # keys of P and V a GEMM step takes
ROW = 32768  # the longest row one program holds: 256 registers of each of 128 threads would be 32 K fp32


@triton.jit
def scores_kernel(q, k, s, seq_q, seq_k, group, scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One BM × BN tile of S = scale · Q Kᵀ, rounded to s's dtype. Grid: key tiles · query tiles · heads."""
    tiles_k, tiles_q = tl.cdiv(seq_k, BN), tl.cdiv(seq_q, BM)
    head, tile = tl.program_id(0) // (tiles_k * tiles_q), tl.program_id(0) % (tiles_k * tiles_q)
    i0, j0 = tile // tiles_k * BM, tile % tiles_k * BN
    q_tile = load_rows(q, head, i0, seq_q, D, BD, BM)
    k_tile = load_rows(k, head // group, j0, seq_k, D, BD, BN)
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    at = (head.to(tl.int64) * seq_q + i[:, None]) * seq_k + j[None, :]
    s_tile = dot(q_tile, tl.trans(k_tile), tl.zeros([BM, BN], tl.float32), "ieee") * scale  # (BM, BN)
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
def output_kernel(p, v, o, seq_q, seq_k, group, DV: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr,
                  BK: tl.constexpr):
    """One tile of BM rows of O = P V. Grid: query tiles · heads."""
    tiles = tl.cdiv(seq_q, BM)
    head, i0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BM
    i = i0 + tl.arange(0, BM)
    o_tile = zeros(BM, BDV, v.dtype.element_ty, WGMMA)
    for j0 in tl.range(0, seq_k, BK):
        j = j0 + tl.arange(0, BK)
        at = (head.to(tl.int64) * seq_q + i[:, None]) * seq_k + j[None, :]
        p_tile = tl.load(p + at, mask=(i[:, None] < seq_q) & (j[None, :] < seq_k), other=0.0)  # (BM, BK)
        o_tile = dot(p_tile, load_rows(v, head // group, j0, seq_k, DV, BDV, BK), o_tile, "ieee")
    store_rows(o, head, i0, seq_q, o_tile, DV, BDV, BM)


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, apart: bool = False) -> Tensor:
    """softmax(scale · q kᵀ) v through memory. `apart`: scale and mask are kernels; else the first kernel scales and the softmax masks.

    q (B, H, Sq, D), k and v (B, Hkv, Sk, ·), contiguous; causal is bottom-right. Memory: S and P, B · H · Sq · Sk elements each.
    """
    more = sizes(q, k, v)
    batch, heads, seq_q, d = q.shape
    seq_k, n = k.shape[2], batch * heads
    s = q.new_empty(batch, heads, seq_q, seq_k)
    p, o = torch.empty_like(s), q.new_empty(batch, heads, seq_q, v.shape[-1])
    tiles_q, tiles_k = triton.cdiv(seq_q, GEMM.br), triton.cdiv(seq_k, GEMM.bc)
    start(scores_kernel, n * tiles_q * tiles_k, GEMM, q, k, s, scale=1.0 if apart else d**-0.5, BM=GEMM.br, BN=GEMM.bc, **more)
    rows, elementwise = n * seq_q, Launch(1, 4096, 4, 1)
    if apart:
        start(scale_kernel, rows, elementwise, s, scale=d**-0.5, BN=elementwise.bc, **more)
        if causal:
            start(mask_kernel, rows, elementwise, s, BN=elementwise.bc, **more)
    more["factor"] = LOG2E  # the scale is in S
    if seq_k <= ROW:
        width = max(16, triton.next_power_of_2(seq_k))
        start(row_kernel, rows, Launch(1, width, min(16, max(1, width // 1024)), 1), s, p, CAUSAL=causal and not apart, BN=width, **more)
    else:
        start(long_row_kernel, rows, Launch(1, 8192, 8, 1), s, p, CAUSAL=causal and not apart, BN=8192, **more)
    start(output_kernel, n * tiles_q, GEMM, p, v, o, BM=GEMM.br, BK=INNER, **more)
    return o
