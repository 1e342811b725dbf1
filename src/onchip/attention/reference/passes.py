"""The two passes of the reference, block by block (the package says what they compute)."""
import math
from typing import Any

import torch
from torch import Tensor

from onchip.attention.contract import Spec, empty_like_q
from onchip.attention.reference.blocks import Call, visible_product
from onchip.attention.reference.packed import Members, equal_lengths, gather, scatter


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
            cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, dropout_seed: Tensor | None, spec: Spec,
            memo: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse): dense (B, Hq, Sq, Dv) and (B, Hq, Sq), packed (total_q, Hq, Dv) and (Hq, total_q)."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        sequence = torch.arange(q.shape[0], device=q.device)
        return _forward(Call(q, k, v, bias, mask, alibi_slopes, sinks, sequence, dropout_seed, spec))
    out = empty_like_q(q, v.shape[-1]).zero_()
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for members in equal_lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        dense_out, dense_lse = _forward(_dense(members, q, k, v, alibi_slopes, sinks, dropout_seed, spec))
        scatter(out, members.queries, dense_out)
        scatter(lse.mT, members.queries, dense_lse)
    return out, lse


def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
             mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None, cu_seqlens_q: Tensor | None,
             cu_seqlens_k: Tensor | None, dropout_seed: Tensor | None, spec: Spec,
             needs: tuple[bool, bool, bool, bool, bool], memo: dict[str, Any] | None = None) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias, dsinks), None where `needs` is False; dbias in fp32 with size 1 where bias has stride 0."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        sequence = torch.arange(q.shape[0], device=q.device)
        return _backward(Call(q, k, v, bias, mask, alibi_slopes, sinks, sequence, dropout_seed, spec), dout, dlse, out, lse, needs)
    packed = [_zeros(x) if need else None for x, need in zip((q, k, v), needs, strict=False)]
    dsinks = torch.zeros_like(sinks, dtype=lse.dtype) if sinks is not None and needs[4] else None
    for members in equal_lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        queries = members.queries
        call = _dense(members, q, k, v, alibi_slopes, sinks, dropout_seed, spec)
        *grads, _, dsinks_part = _backward(call, gather(dout, queries), None if dlse is None else gather(dlse.mT, queries),
                                           gather(out, queries), gather(lse.mT, queries), needs)
        for into, rows, grad in zip(packed, (queries, members.keys, members.keys), grads, strict=True):
            if into is not None and grad is not None:
                scatter(into, rows, grad)
        if dsinks is not None and dsinks_part is not None:
            dsinks += dsinks_part
    return *packed, None, dsinks


def _zeros(x: Tensor) -> Tensor:
    return empty_like_q(x, x.shape[-1]).zero_()


def _dense(members: Members, q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None,
           dropout_seed: Tensor | None, spec: Spec) -> Call:
    """The members of a packed batch as one dense problem."""
    slopes = alibi_slopes[members.sequences] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
    return Call(gather(q, members.queries), gather(k, members.keys), gather(v, members.keys), None, None, slopes, sinks, members.sequences,
                dropout_seed, spec)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    out = empty_like_q(call.q, call.v.shape[-1])
    lse = call.q.new_empty(call.q.shape[:3], dtype=call.accumulate)
    if call.empty:
        lse[:] = -math.inf if call.sinks is None else call.sinks[:, None]
        return out.zero_(), lse
    for chunk in call.chunks():
        careful = chunk.hides_what_is_not_finite(chunk.v)
        for block in chunk.blocks():
            s, _ = chunk.scores(block)
            m = s.amax(-1, keepdim=True) if block.lo < block.hi else s.new_full((*s.shape[:2], 1), -math.inf)
            if call.sinks is not None:
                sink = chunk.per_head(call.sinks).expand(*chunk.grid, block.stop - block.start, 1).reshape(m.shape)
                m = torch.maximum(m, sink)
            m = m.masked_fill(m == -math.inf, 0)  # a row that sees nothing: exp(−∞ − 0) = 0 and log 0 = −∞
            p = s.sub_(m).exp_()
            norm = p.sum(-1, keepdim=True)
            if call.sinks is not None:
                norm += (sink - m).exp_()
            keep = chunk.keep(block)
            if keep is not None:
                p *= keep
            o = visible_product(p, chunk.v[:, block.lo : block.hi], chunk.hidden(block) if careful else None)
            chunk.put(out, block, o.div_(norm.masked_fill(norm == 0, 1)))
            chunk.put(lse, block, m + norm.log())
    return out, lse


def _backward(call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
              needs: tuple[bool, bool, bool, bool, bool]) -> tuple[Tensor | None, ...]:
    need_q, need_k, need_v, need_bias, need_sinks = needs
    scale, empty_rows = call.spec.scale, lse == -math.inf
    delta = (dout.to(call.accumulate) * out).sum(-1)
    if dlse is not None:
        delta -= dlse
    delta.masked_fill_(empty_rows, 0)  # they give no gradient, whatever came in
    dq, dk, dv = (_zeros(x) if need else None for x, need in zip((call.q, call.k, call.v), needs, strict=False))
    dbias = dsinks = None
    if need_bias and call.bias is not None:
        sizes = [1 if stride == 0 else size for size, stride in zip(call.bias.shape, call.bias.stride(), strict=True)]
        dbias = call.bias.new_zeros(sizes, dtype=call.accumulate)
    if need_sinks and call.sinks is not None:
        p_sink = (call.sinks.to(call.accumulate)[:, None] - lse).exp().masked_fill(empty_rows, 0)
        dsinks = -(p_sink * delta).sum((0, 2))
    if call.empty or not any(needs[:4]):
        return dq, dk, dv, dbias, dsinks

    for chunk in call.chunks():
        careful = chunk.hides_what_is_not_finite(chunk.k, chunk.v, call.q, dout, delta)
        dk_chunk, dv_chunk = torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
        for block in chunk.blocks():
            seen = slice(block.lo, block.hi)
            hidden = chunk.hidden(block) if careful else None
            hidden_t = None if hidden is None else hidden.mT
            row_lse, row_delta = chunk.rows(lse, block)[..., None], chunk.rows(delta, block)[..., None]
            empty = row_lse == -math.inf
            s, slope = chunk.scores(block)
            p = s.sub_(row_lse.masked_fill(empty, 0)).exp_()
            do = chunk.rows(dout, block).masked_fill(empty, 0)
            keep = chunk.keep(block)
            if need_v:
                dv_chunk[:, seen] += visible_product((p if keep is None else p * keep).mT, do, hidden_t)
            if not (need_q or need_k or need_bias):
                continue
            dp = torch.bmm(do, chunk.v[:, seen].mT)
            if keep is not None:
                dp *= keep
            ds = dp.sub_(row_delta).mul_(p)
            if hidden is not None:
                ds.masked_fill_(hidden, 0)
            if dbias is not None:
                here = (chunk.batch, chunk.head, slice(block.start, block.stop), seen)
                into = dbias[tuple(slice(0, 1) if size == 1 else part for size, part in zip(dbias.shape, here, strict=True))]
                into += chunk.by_head(ds, block).sum_to_size(into.shape)
            if slope is not None:
                ds *= slope if hidden is None else slope.masked_fill(hidden, 0)
            if dq is not None:
                chunk.put(dq, block, visible_product(ds, chunk.k[:, seen], hidden) * scale)
            if dk is not None:
                dk_chunk[:, seen] += visible_product(ds.mT, chunk.rows(call.q, block) * scale, hidden_t)
        for total, part in ((dk, dk_chunk), (dv, dv_chunk)):
            if total is not None:
                there = total[chunk.batch, chunk.kv_head]
                there.copy_(part.view(there.shape))
    return dq, dk, dv, dbias, dsinks
