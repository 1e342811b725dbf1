"""Attention as one dense differentiable expression, for derivatives of derivatives and for forward mode: O(N²) memory, any order, any mode.

A packed batch is one dense problem whose sequences hide each other. Rows that see nothing are selected out before every division and
logarithm, so no derivative of any order meets 0/0. Inputs are taken to be finite.
"""
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onchip.attention.problem import Spec
from onchip.attention.reference.philox import keep_mask

Primals = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, bias, sinks: what has a derivative
Constants = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # mask, slopes, cu_q, cu_k, seed: the rest


def forward(primals: Primals, constants: Constants, spec: Spec) -> tuple[Tensor, Tensor]:
    """(out, lse) as every implementation returns them, in differentiable torch."""
    q, k, v, bias, sinks = primals
    mask, slopes, cu_q, cu_k, seed = constants
    if cu_q is not None and cu_k is not None:
        at = _Positions.packed(cu_q, q.shape[0], cu_k, k.shape[0], spec)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = _dense(q, k, v, None, sinks, None, slopes, seed, spec, at)
        return out[0].transpose(0, 1), lse[0]
    return _dense(q, k, v, bias, sinks, mask, slopes, seed, spec, _Positions.dense(q, k, spec))


def backward(dout: Tensor, dlse: Tensor | None, primals: Primals, constants: Constants, spec: Spec, needs: Sequence[bool]) -> list[Tensor]:
    """The gradients `needs` asks for, in order, themselves differentiable."""
    wanted = [n for n, need in enumerate(needs) if need]

    def function(*chosen: Tensor) -> tuple[Tensor, Tensor]:
        whole = list(primals)
        for n, x in zip(wanted, chosen, strict=True):
            whole[n] = x
        return forward(tuple(whole), constants, spec)  # type: ignore[arg-type]

    (_, lse), pull = torch.func.vjp(function, *(primals[n] for n in wanted))[:2]
    return list(pull((dout, torch.zeros_like(lse) if dlse is None else dlse)))


class _Positions:
    """Where queries and keys stand: `i` (rows, 1) and `j` (keys,) inside their sequence, offset, each row's sequence, who is foreign."""

    def __init__(self, i: Tensor, j: Tensor, offset: Tensor | int, sequence: Tensor, foreign: Tensor | None) -> None:
        self.i, self.j, self.offset, self.sequence, self.foreign = i, j, offset, sequence, foreign

    @classmethod
    def dense(cls, q: Tensor, k: Tensor, spec: Spec) -> "_Positions":
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
        return cls(i, j, 0 if spec.causal == 2 else k.shape[2] - q.shape[2], torch.arange(q.shape[0], device=q.device)[:, None], None)

    @classmethod
    def packed(cls, cu_q: Tensor, total_q: int, cu_k: Tensor, total_k: int, spec: Spec) -> "_Positions":
        """`sequence` is (1, rows). Rows past the last sequence count to it, and are foreign to every key."""
        (of_q, i), (of_k, j) = _locate(cu_q, total_q), _locate(cu_k, total_k)
        sequences = cu_q.shape[0] - 1
        foreign = (of_q[:, None] != of_k) | (of_q[:, None] >= sequences)
        if sequences == 0:
            return cls(i[:, None], j, 0, of_q[None], foreign)
        of_q = of_q.clamp(max=sequences - 1)
        offset = 0 if spec.causal == 2 else (torch.diff(cu_k) - torch.diff(cu_q))[of_q, None]
        return cls(i[:, None], j, offset, of_q[None], foreign)

    @property
    def distance(self) -> Tensor:
        """j − (i + offset), (rows, keys)."""
        return self.j - (self.i + self.offset)

    def hidden(self, spec: Spec) -> Tensor:
        """True where the sequence, the causal mask or the window hides the key, (rows, keys)."""
        distance = self.distance
        hidden = torch.zeros_like(distance, dtype=torch.bool) if self.foreign is None else self.foreign
        if spec.window_left >= 0:
            hidden = hidden | (distance < -spec.window_left)
        if spec.window_right >= 0:
            hidden = hidden | (distance > spec.window_right)
        return hidden

    def per_row(self, slopes: Tensor) -> Tensor:
        """(Hq,) or (sequences, Hq) slopes, to multiply (batch, Hq, rows, keys)."""
        return slopes[:, None, None] if slopes.dim() == 1 else slopes[self.sequence].transpose(1, 2)[..., None]


def _locate(cu: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence of each packed row, and its index inside it; rows past the last sequence get a number of their own."""
    row = torch.arange(total, device=cu.device)
    sequence = torch.bucketize(row, cu[1:].long(), right=True)
    return sequence, row - cu[sequence]


def _dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, mask: Tensor | None, slopes: Tensor | None,
           seed: Tensor | None, spec: Spec, at: _Positions) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    q, k, v = q.to(acc), k.to(acc).repeat_interleave(group, 1), v.to(acc).repeat_interleave(group, 1)
    s = (q @ k.mT) * spec.scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if bias is not None:
        s = s + bias
    if slopes is not None:
        s = s - at.per_row(slopes) * at.distance.abs()
    hidden = at.hidden(spec)
    s = s.masked_fill(hidden if mask is None else hidden | ~mask, -math.inf)
    m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    if sinks is not None:
        sink = sinks.to(acc)[:, None, None]
        m = torch.maximum(m, sink.detach())
    m = m.masked_fill(m == -math.inf, 0)
    e = (s - m).exp()
    norm = e.sum(-1, keepdim=True)
    if sinks is not None:
        norm = norm + (sink - m).exp()
    empty = norm == 0
    norm = norm.masked_fill(empty, 1)
    p = e / norm
    if seed is not None:
        heads = at.sequence[:, None, :, None] * q.shape[1] + torch.arange(q.shape[1], device=q.device)[:, None, None]
        p = p * keep_mask(seed, spec.dropout_p, at.j, at.i, heads) / (1 - spec.dropout_p)
    return (p @ v).to(q.dtype), (m + norm.log()).masked_fill(empty, -math.inf).squeeze(-1)
