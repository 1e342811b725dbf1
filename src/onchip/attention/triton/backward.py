"""Backward: gradients from (Q, K, V, O, dO, lse) with P recomputed tile by tile (FlashAttention-2, arXiv 2307.08691, Alg. 2).

With p = exp(s − lse) and Δ = rowsum(dO∘O) − dlse:   dV = Pᵀ dO,   dS = P∘(dO Vᵀ − Δ),   dQ = scale · dS K,   dK = scale · dSᵀ Q,
dbias = dS,   dsink = −Σ exp(sink − lse) Δ. With dropout P becomes P∘keep/(1 − p) in dV, and dO Vᵀ is masked likewise; Δ stays as it is.
With softcap dS is multiplied by its derivative before dQ and dK.

No atomics, so every gradient repeats bit for bit: one program per key tile sums dK and dV over the rows and heads that see it, one per
query tile sums dQ, one per bias tile (bias.py) sums dbias over the dimensions it was broadcast along.
"""
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.attention.contract import Spec
from onchip.attention.triton import launch, tiles
from onchip.attention.triton.bias import bias_gradient
from onchip.attention.triton.common import (
    LOG2E,
    cast,
    dot,
    kept,
    load_rows,
    load_tile,
    lse_index,
    scores,
    segment,
    span,
    statistics,
    store_tile,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=launch.RUNTIME)
def rows_kernel(
    o, do, lse, dlse, lse2, delta, cu_q,
    o_b: tl.int64, o_h: tl.int64, o_s: tl.int64, do_b: tl.int64, do_h: tl.int64, do_s: tl.int64,
    len_q, pitch, heads, tile_count, UNIT: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
):
    """Row statistics, fp32, laid out as `statistics` says: Δ = rowsum(dO∘O) − dlse, and lse2 = log₂e · lse.

    lse2 is ready for p = 2^(x − lse2): +∞ for an empty row, so that p is 0 there and never −∞ − (−∞).
    """
    i0, bh = (tl.program_id(0) % tile_count) * BM, tl.program_id(0) // tile_count
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    begin, rows = segment(cu_q, b, len_q)
    if i0 >= rows:
        return
    i = i0 + tl.arange(0, BM)
    o_tile = load_tile(o, (o_b, o_h, o_s), None, b, h, begin + i0, i < rows, BM, BDV, DV, UNIT, True)
    do_tile = load_tile(do, (do_b, do_h, do_s), None, b, h, begin + i0, i < rows, BM, BDV, DV, UNIT, True)
    delta_i = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    at = lse_index(cu_q, b, h, heads, len_q, begin) + i
    if dlse is not None:
        delta_i -= tl.load(dlse + at, mask=i < rows, other=0.0)
    lse_i = tl.load(lse + at, mask=i < rows, other=0.0)
    at = statistics(cu_q, b, h, heads, pitch, begin, i)
    tl.store(delta + at, delta_i, mask=i < rows)
    tl.store(lse2 + at, tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E), mask=i < rows)


@triton.jit(do_not_specialize=launch.RUNTIME)
def queries_kernel(
    q, k, v, k_tma, v_tma, do, lse2, delta, dq, bias, mask, slopes, cu_q, cu_k, seed,
    q_b: tl.int64, q_h: tl.int64, q_s: tl.int64, k_b: tl.int64, k_h: tl.int64, k_s: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_s: tl.int64, do_b: tl.int64, do_h: tl.int64, do_s: tl.int64,
    dq_b: tl.int64, dq_h: tl.int64, dq_s: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_i: tl.int64, bias_j,
    mask_b: tl.int64, mask_h: tl.int64, mask_i: tl.int64, mask_j, slopes_b,
    len_q, len_k, pitch, heads, group, tile_count, left, right, scale, softcap, threshold: tl.uint32, keep_scale,
    TOP_LEFT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WGMMA: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """dQ of one query tile. Grid and walk as in the forward kernel."""
    tile, bh = tl.program_id(0) % tile_count, tl.program_id(0) // tile_count
    if right is not None:
        tile = tile_count - 1 - tile
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    q_begin, rows = segment(cu_q, b, len_q)
    k_begin, keys = segment(cu_k, b, len_k)
    i0 = tile * BM
    if i0 >= rows:
        return
    offset = 0 if TOP_LEFT else keys - rows
    i = i0 + tl.arange(0, BM)
    q_tile = load_tile(q, (q_b, q_h, q_s), None, b, h, q_begin + i0, i < rows, BM, BD, D, UNIT, True)
    do_tile = load_tile(do, (do_b, do_h, do_s), None, b, h, q_begin + i0, i < rows, BM, BDV, DV, UNIT, True)
    at = statistics(cu_q, b, h, heads, pitch, q_begin, i0)
    lse_i, delta_i = load_rows(lse2, None, at, BM), load_rows(delta, None, at, BM)
    key = None if seed is None else tl.load(seed)
    factor = scale * LOG2E if FOLD else 1.0

    dq_tile = zeros(BM, BD, q.dtype.element_ty, WGMMA)
    WHOLE: tl.constexpr = 1 if mask is None else -1
    lo, edges = span(i0 + offset, tl.minimum(i0 + BM, rows) - 1 + offset, left, right, keys, BN)
    for phase in tl.static_range(0, 3):
        if phase != 0 or left is not None:
            for j0 in tl.range(edges[phase], edges[phase + 1], BN):
                j = j0 + tl.arange(0, BN)
                near = (j >= lo) & (j < edges[3])
                ok = (i < rows)[:, None] if phase == 1 else (i < rows)[:, None] & (j < keys)[None, :]
                if phase != WHOLE:
                    seen = visible(i[:, None], j[None, :], ok, offset, left, right, mask, (mask_b, mask_h, mask_i, mask_j), b, h)
                    if mask is not None:
                        near = near & (tl.max(seen.to(tl.int32), 0) > 0)
                k_tile = load_tile(k, (k_b, k_h, k_s), k_tma, b, h // group, k_begin + j0, near, BN, BD, D, UNIT, phase != WHOLE)
                v_tile = load_tile(v, (v_b, v_h, v_s), v_tma, b, h // group, k_begin + j0, near, BN, BDV, DV, UNIT, phase != WHOLE)
                qk = dot(q_tile, tl.trans(k_tile), tl.zeros([BM, BN], tl.float32), PRECISION)
                dp = dot(do_tile, tl.trans(v_tile), tl.zeros([BM, BN], tl.float32), PRECISION)
                x, gain = scores(qk, i[:, None], j[None, :], ok, offset, scale, softcap, slopes, slopes_b,
                                 bias, (bias_b, bias_h, bias_i, bias_j), b, h, FOLD)
                p = tl.exp2(x * factor - lse_i[:, None])
                if seed is not None:
                    dp = tl.where(kept(key, i[:, None], j[None, :], bh, threshold), dp * keep_scale, 0.0)
                ds = p * (dp - delta_i[:, None])
                if softcap is not None:
                    ds *= gain
                if phase != WHOLE:
                    ds = tl.where(seen, ds, 0.0)
                dq_tile = dot(cast(ds, k_tile.dtype), k_tile, dq_tile, PRECISION)
    store_tile(dq, (dq_b, dq_h, dq_s), b, h, q_begin + i0, dq_tile * scale, i < rows, BM, BD, D, UNIT)


@triton.jit(do_not_specialize=launch.RUNTIME)
def keys_kernel(
    q, k, v, do, q_tma, do_tma, lse2, delta, lse2_tma, delta_tma, dk, dv, bias, mask, slopes, cu_q, cu_k, seed,
    q_b: tl.int64, q_h: tl.int64, q_s: tl.int64, k_b: tl.int64, k_h: tl.int64, k_s: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_s: tl.int64, do_b: tl.int64, do_h: tl.int64, do_s: tl.int64,
    dk_b: tl.int64, dk_h: tl.int64, dk_s: tl.int64, dv_b: tl.int64, dv_h: tl.int64, dv_s: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_i: tl.int64, bias_j,
    mask_b: tl.int64, mask_h: tl.int64, mask_i: tl.int64, mask_j, slopes_b,
    len_q, len_k, pitch, heads, group, tile_count, left, right, scale, softcap, threshold: tl.uint32, keep_scale,
    TOP_LEFT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WGMMA: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """dK and dV of one key tile, summed over the query heads of its group (either may be None). Grid: tile_count · kv heads · sequences.

    Works on Sᵀ, so that Pᵀ and dSᵀ come out of the first products as the register operand of the second ones.
    """
    tile, bh = tl.program_id(0) % tile_count, tl.program_id(0) // tile_count
    kv_heads = heads // group
    b, h_kv = (bh // kv_heads).to(tl.int64), (bh % kv_heads).to(tl.int64)
    q_begin, rows = segment(cu_q, b, len_q)
    k_begin, keys = segment(cu_k, b, len_k)
    j0 = tile * BN
    if j0 >= keys:
        return
    offset = 0 if TOP_LEFT else keys - rows
    j = j0 + tl.arange(0, BN)
    k_tile = load_tile(k, (k_b, k_h, k_s), None, b, h_kv, k_begin + j0, j < keys, BN, BD, D, UNIT, True)
    v_tile = load_tile(v, (v_b, v_h, v_s), None, b, h_kv, k_begin + j0, j < keys, BN, BDV, DV, UNIT, True)
    key = None if seed is None else tl.load(seed)
    factor = scale * LOG2E if FOLD else 1.0

    dk_tile, dv_tile = zeros(BN, BD, k.dtype.element_ty, WGMMA), zeros(BN, BDV, v.dtype.element_ty, WGMMA)
    WHOLE: tl.constexpr = 1 if mask is None else -1
    lo, edges = span(j0 - offset, tl.minimum(j0 + BN, keys) - 1 - offset, right, left, rows, BM)
    for g in tl.range(0, group):
        h = h_kv * group + g
        for phase in tl.static_range(0, 3):
            if phase != 0 or right is not None:  # without a right bound no masked rows precede the unmasked ones
                for i0 in tl.range(edges[phase], edges[phase + 1], BM):
                    i = i0 + tl.arange(0, BM)
                    near = (i >= lo) & (i < edges[3])  # rows that see some key of this tile
                    ok = (i < rows)[None, :] & (j < keys)[:, None]
                    if phase != WHOLE:
                        seen = visible(i[None, :], j[:, None], ok, offset, left, right, mask, (mask_b, mask_h, mask_i, mask_j), b, h)
                        if mask is not None:
                            near = near & (tl.max(seen.to(tl.int32), 0) > 0)
                    row, at = q_begin + i0, statistics(cu_q, b, h, heads, pitch, q_begin, i0)
                    q_tile = load_tile(q, (q_b, q_h, q_s), q_tma, b, h, row, near, BM, BD, D, UNIT, phase != WHOLE)
                    do_tile = load_tile(do, (do_b, do_h, do_s), do_tma, b, h, row, near, BM, BDV, DV, UNIT, phase != WHOLE)
                    lse_i = load_rows(lse2, lse2_tma, at, BM)
                    st = dot(k_tile, tl.trans(q_tile), tl.zeros([BN, BM], tl.float32), PRECISION)
                    x, gain = scores(st, i[None, :], j[:, None], ok, offset, scale, softcap, slopes, slopes_b,
                                     bias, (bias_b, bias_h, bias_i, bias_j), b, h, FOLD)
                    p = tl.exp2(x * factor - lse_i[None, :])
                    if phase != WHOLE:
                        p = tl.where(seen, p, 0.0)
                    if seed is not None:
                        keep = kept(key, i[None, :], j[:, None], (b * heads + h).to(tl.int32), threshold)
                    if dv is not None:
                        dropped = p if seed is None else tl.where(keep, p * keep_scale, 0.0)
                        dv_tile = dot(cast(dropped, do_tile.dtype), do_tile, dv_tile, PRECISION)
                    if dk is not None:
                        dp = dot(v_tile, tl.trans(do_tile), tl.zeros([BN, BM], tl.float32), PRECISION)
                        if seed is not None:
                            dp = tl.where(keep, dp * keep_scale, 0.0)
                        ds = p * (dp - load_rows(delta, delta_tma, at, BM)[None, :])
                        if softcap is not None:
                            ds *= gain
                        if phase != WHOLE:
                            ds = tl.where(seen, ds, 0.0)
                        dk_tile = dot(cast(ds, q_tile.dtype), q_tile, dk_tile, PRECISION)
    if dk is not None:
        store_tile(dk, (dk_b, dk_h, dk_s), b, h_kv, k_begin + j0, dk_tile * scale, j < keys, BN, BD, D, UNIT)
    if dv is not None:
        store_tile(dv, (dv_b, dv_h, dv_s), b, h_kv, k_begin + j0, dv_tile, j < keys, BN, BDV, DV, UNIT)


def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
             mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None, cu_seqlens_q: Tensor | None,
             cu_seqlens_k: Tensor | None, dropout_seed: Tensor | None, spec: Spec,
             needs: tuple[bool, bool, bool, bool, bool], memo: dict[str, Any] | None = None) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias, dsinks), None where `needs` is False; dbias fp32 in the bias' own (unexpanded) shape.

    K, V, Q and dO are read by the rule of the forward pass: a row that nothing in a tile sees is never read into a gradient.
    """
    need_q, need_k, need_v, need_bias, need_sinks = needs
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    dq, dk, dv = (launch.gradient(t, cu_seqlens_q is not None) if need else None for t, need in ((q, need_q), (k, need_k), (v, need_v)))
    call = launch.Call(memo, q, k, v, bias, mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k, dropout_seed, spec,
                       o=out, do=dout, dq=dq, dk=dk, dv=dv)
    shape = (*lse.shape[:-1], call.numbers["pitch"])
    lse2, delta = torch.empty((2, math.prod(shape) + tiles.MOST_ROWS), dtype=torch.float32, device=q.device)
    if need_sinks:
        lse2.fill_(torch.inf)  # between the rows, too
    tile = tiles.rows(call.numbers["BDV"])
    tile_count = -(-spec.max_seqlen_q // tile.bm)
    call(rows_kernel, tile, tile_count * call.heads * call.sequences, tile_count=tile_count, lse=lse, dlse=dlse, lse2=lse2, delta=delta)
    if need_k or need_v:
        tile = call.tile("keys", call.describable("q", "do"))
        tile_count = -(-spec.max_seqlen_k // tile.bn)
        call(keys_kernel, tile, tile_count * call.kv_heads * call.sequences, tile_count=tile_count, lse2=lse2, delta=delta,
             q_tma=call.tma("q", tile.bm), do_tma=call.tma("do", tile.bm),
             lse2_tma=call.tma_rows(lse2, tile.bm), delta_tma=call.tma_rows(delta, tile.bm))
    if need_q:
        tile = call.tile("queries", call.describable("k", "v"))
        tile_count = -(-spec.max_seqlen_q // tile.bm)
        call(queries_kernel, tile, tile_count * call.heads * call.sequences, tile_count=tile_count, lse2=lse2, delta=delta,
             k_tma=call.tma("k", tile.bn), v_tma=call.tma("v", tile.bn))
    dbias = bias_gradient(call, lse2, delta) if need_bias else None
    dsinks = sink_gradient(sinks, *(t[:math.prod(shape)].view(shape) for t in (lse2, delta))) if need_sinks else None
    return dq, dk, dv, dbias, dsinks


def sink_gradient(sinks: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
    """−Σ exp(sink − lse) Δ over each head's rows: a sink is a key of value 0, so its dS = p · (0 − Δ). Rows with lse2 = ∞ weigh nothing."""
    lse2, delta = (t if t.dim() == 3 else t[None] for t in (lse2, delta))
    weight = torch.exp2(sinks.float()[None, :, None] * math.log2(math.e) - lse2)
    return torch.where(lse2 == torch.inf, 0.0, weight * delta).sum((0, 2)).neg().to(sinks.dtype)
