"""Attention in one kernel, S on the chip: tiled (three passes over K), online softmax (two), FlashAttention-2 (one), FlashAttention-1.

Ledgers and schedules: the functions of these names in `onchip.roofline.attention` and `onchip.simulate.attention`. All walk only key tiles
that some row of the query tile sees.

Sources: Milakov & Gimelshein (arXiv 1805.02867); FlashAttention (arXiv 2205.14135, Alg. 1); FlashAttention-2 (arXiv 2307.08691, Alg. 1).
"""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.attention.triton.common import LN2
from onchip.ladder.kernels.common import Launch, cast, dot, finite, load_rows, reciprocal, scores, sizes, start, store_rows, zeros


@triton.jit
def query_tile(q, seq_q, seq_k, offset, CAUSAL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """(head, first row, keys to walk, q tile) of this program. Grid: query tiles · heads; the longest walks first."""
    tiles = tl.cdiv(seq_q, BM)
    head, i0 = tl.program_id(0) // tiles, (tiles - 1 - tl.program_id(0) % tiles) * BM
    hi = seq_k
    if CAUSAL:
        hi = tl.minimum(seq_k, tl.minimum(i0 + BM, seq_q) + offset)
    return head, i0, hi, load_rows(q, head, i0, seq_q, D, BD, BM)


@triton.jit
def write_output(q_tile, k, v, o, head, i0, hi, m, l, seq_q, seq_k, offset, group, factor, CAUSAL: tl.constexpr, D: tl.constexpr,
                 DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The last pass, once m and l are known: O = Σ (exp(s − m) / l) V."""
    m, r = finite(m), reciprocal(l)
    acc = zeros(BM, BDV, v.dtype.element_ty, WGMMA)
    for j0 in tl.range(0, hi, BN):
        s = scores(q_tile, load_rows(k, head // group, j0, seq_k, D, BD, BN), i0, j0, seq_k, offset, factor, CAUSAL, BM, BN)
        p = tl.exp2(s - m[:, None]) * r[:, None]  # (BM, BN)
        acc = dot(cast(p, v.dtype.element_ty), load_rows(v, head // group, j0, seq_k, DV, BDV, BN), acc, "ieee")
    store_rows(o, head, i0, seq_q, acc, DV, BDV, BM)


@triton.jit
def tiled_kernel(q, k, v, o, seq_q, seq_k, offset, group, factor, CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                 BD: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Safe softmax as it is written: the maximum; the sum; the result. S is computed three times, K read three times."""
    head, i0, hi, q_tile = query_tile(q, seq_q, seq_k, offset, CAUSAL, D, BD, BM)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    for j0 in tl.range(0, hi, BN):
        s = scores(q_tile, load_rows(k, head // group, j0, seq_k, D, BD, BN), i0, j0, seq_k, offset, factor, CAUSAL, BM, BN)
        m = tl.maximum(m, tl.max(s, 1))
    m = finite(m)
    for j0 in tl.range(0, hi, BN):
        s = scores(q_tile, load_rows(k, head // group, j0, seq_k, D, BD, BN), i0, j0, seq_k, offset, factor, CAUSAL, BM, BN)
        l += tl.sum(tl.exp2(s - m[:, None]), 1)
    write_output(q_tile, k, v, o, head, i0, hi, m, l, seq_q, seq_k, offset, group, factor, CAUSAL, D, DV, BD, BDV, WGMMA, BM, BN)


@triton.jit
def online_kernel(q, k, v, o, seq_q, seq_k, offset, group, factor, CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                  BD: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """m and l together, l rescaled whenever m rises; then the result. S is computed twice, K read twice."""
    head, i0, hi, q_tile = query_tile(q, seq_q, seq_k, offset, CAUSAL, D, BD, BM)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    for j0 in tl.range(0, hi, BN):
        s = scores(q_tile, load_rows(k, head // group, j0, seq_k, D, BD, BN), i0, j0, seq_k, offset, factor, CAUSAL, BM, BN)
        m_new = tl.maximum(m, tl.max(s, 1))
        l = l * tl.exp2(m - finite(m_new)) + tl.sum(tl.exp2(s - finite(m_new)[:, None]), 1)
        m = m_new
    write_output(q_tile, k, v, o, head, i0, hi, m, l, seq_q, seq_k, offset, group, factor, CAUSAL, D, DV, BD, BDV, WGMMA, BM, BN)


@triton.jit
def fa2_kernel(q, k, v, o, lse, seq_q, seq_k, offset, group, factor, CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
               BD: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One pass: O is rescaled like l, stays unnormalised on the chip, and is divided once."""
    head, i0, hi, q_tile = query_tile(q, seq_q, seq_k, offset, CAUSAL, D, BD, BM)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = zeros(BM, BDV, v.dtype.element_ty, WGMMA)
    for j0 in tl.range(0, hi, BN):
        s = scores(q_tile, load_rows(k, head // group, j0, seq_k, D, BD, BN), i0, j0, seq_k, offset, factor, CAUSAL, BM, BN)
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - finite(m_new))
        p = tl.exp2(s - finite(m_new)[:, None])  # (BM, BN)
        l = l * alpha + tl.sum(p, 1)
        acc = dot(cast(p, v.dtype.element_ty), load_rows(v, head // group, j0, seq_k, DV, BDV, BN), acc * alpha[:, None], "ieee")
        m = m_new
    store_rows(o, head, i0, seq_q, acc * reciprocal(l)[:, None], DV, BDV, BM)
    i = i0 + tl.arange(0, BM)
    lse_i = tl.where(l == 0.0, float("-inf"), (m + tl.log2(tl.where(l == 0.0, 1.0, l))) * LN2)
    tl.store(lse + head.to(tl.int64) * seq_q + i, lse_i, mask=i < seq_q)


@triton.jit
def fa1_kernel(q, k, v, o, m, l, seq_q, seq_k, offset, group, factor, CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
               BD: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """K and V outside, Q inside: O, m and l go through memory at every step, normalised each time. Grid: heads.

    What one iteration stores another loads, with other threads: a barrier lies between, and loads are not pipelined past it.
    """
    head = tl.program_id(0)
    for i0 in tl.range(0, seq_q, BM):
        i = i0 + tl.arange(0, BM)
        at = head.to(tl.int64) * seq_q + i
        store_rows(o, head, i0, seq_q, tl.zeros([BM, BDV], tl.float32), DV, BDV, BM)
        tl.store(m + at, tl.full([BM], float("-inf"), tl.float32), mask=i < seq_q)
        tl.store(l + at, tl.zeros([BM], tl.float32), mask=i < seq_q)
    tl.debug_barrier()
    for j0 in tl.range(0, seq_k, BN):
        k_tile = load_rows(k, head // group, j0, seq_k, D, BD, BN)
        v_tile = load_rows(v, head // group, j0, seq_k, DV, BDV, BN)
        first = 0
        if CAUSAL:
            first = tl.maximum(j0 - offset, 0) // BM * BM  # tiles above see none of these keys
        for i0 in tl.range(first, seq_q, BM):
            i = i0 + tl.arange(0, BM)
            at = head.to(tl.int64) * seq_q + i
            q_tile, o_tile = load_rows(q, head, i0, seq_q, D, BD, BM), load_rows(o, head, i0, seq_q, DV, BDV, BM)
            m_old, l_old = tl.load(m + at, mask=i < seq_q, other=0.0), tl.load(l + at, mask=i < seq_q, other=0.0)
            s = scores(q_tile, k_tile, i0, j0, seq_k, offset, factor, CAUSAL, BM, BN)
            m_new = tl.maximum(m_old, tl.max(s, 1))
            alpha = tl.exp2(m_old - finite(m_new))
            p = tl.exp2(s - finite(m_new)[:, None])  # (BM, BN)
            l_new = l_old * alpha + tl.sum(p, 1)
            o_tile = dot(cast(p, v.dtype.element_ty), v_tile, o_tile.to(tl.float32) * (l_old * alpha)[:, None], "ieee")
            store_rows(o, head, i0, seq_q, o_tile * reciprocal(l_new)[:, None], DV, BDV, BM)
            tl.store(m + at, m_new, mask=i < seq_q)
            tl.store(l + at, l_new, mask=i < seq_q)
            tl.debug_barrier()


# Tiles and warps as on an A100 and later at d ≤ 128 in 16 bits; `launch_for` shrinks them for wider ones.
LAUNCH = {"tiled": Launch(128, 64, 8, 2), "online": Launch(128, 64, 8, 2), "fa2": Launch(128, 64, 8, 3), "fa1": Launch(64, 64, 4, 1)}


def launch_for(name: str, q: Tensor, v: Tensor) -> Launch:
    """The tile a rung runs: the table's, with half the rows and keys for every doubling of the head's bytes beyond 256."""
    launch, width = LAUNCH[name], max(q.shape[-1], v.shape[-1]) * q.element_size()
    while width > 256 and launch.br > 16:
        launch, width = Launch(launch.br // 2, max(16, launch.bc // 2), launch.warps, launch.stages), width // 2
    return launch


def _run(kernel: Any, name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, *more: Tensor) -> Tensor:
    """One program a query tile."""
    launch = launch_for(name, q, v)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    grid = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], launch.br)
    start(kernel, grid, launch, q, k, v, o, *more, CAUSAL=causal, BM=launch.br, BN=launch.bc, **sizes(q, k, v))
    return o


def tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Three passes over K; arguments as in `unfused.naive`, no memory but o."""
    return _run(tiled_kernel, "tiled", q, k, v, causal)


def online(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Two passes over K."""
    return _run(online_kernel, "online", q, k, v, causal)


def fa2(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """One pass; lse is stored as for a backward."""
    return _run(fa2_kernel, "fa2", q, k, v, causal, q.new_empty(q.shape[:3], dtype=torch.float32))


def fa1(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """K and V outside; one program a head."""
    launch = launch_for("fa1", q, v)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    m, l = q.new_empty((2, *q.shape[:3]), dtype=torch.float32)
    start(fa1_kernel, q.shape[0] * q.shape[1], launch, q, k, v, o, m, l, CAUSAL=causal, BM=launch.br, BN=launch.bc, **sizes(q, k, v))
    return o
