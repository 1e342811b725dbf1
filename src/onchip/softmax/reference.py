"""Softmax in plain torch, on any device and for every feature: what the contract means, executed.

Memory is O(x): a few tensors of x's size. torch's autograd differentiates it, to any order.
"""
import torch
from torch import Tensor

from onchip.softmax.contract import NARROW, Spec

INF = float("inf")


def forward(x: Tensor, mask: Tensor | None, spec: Spec, bias: Tensor | None = None) -> Tensor:
    """Softmax, its logarithm or log Σ exp of `x` as the public functions define them; `mask` and `bias` have x's shape."""
    normalise = _sum if spec.summed else torch.log_softmax if spec.log else torch.softmax
    if spec.plain and bias is None:
        return normalise(x, spec.dim, dtype=spec.dtype)
    s = wide(x) * spec.scale
    if bias is not None:
        s = s + bias.to(s.dtype)
    if not spec.hiding:
        return normalise(s, spec.dim).to(spec.dtype)
    hidden = s == -INF  # a visible −∞ weighs as little as a hidden position
    if mask is not None:
        hidden = hidden | ~mask
    if spec.causal:
        hidden = hidden | ~visible(s)
    empty = hidden.all(spec.dim, keepdim=True)
    # Selected, never added: what x holds there is gone, in the backward too. An empty row is uniform until its result is selected.
    y = normalise(s.masked_fill(hidden, -INF).masked_fill(empty, 0.0), spec.dim)
    y = y.masked_fill(empty, -INF) if spec.log or spec.summed else y.masked_fill(hidden, 0.0)
    return y.to(spec.dtype)


def _sum(s: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.logsumexp(wide(s), dim, keepdim=True).to(dtype or s.dtype)


def visible(s: Tensor) -> Tensor:
    """(rows, n) of bool: j ≤ i + n − rows, the bottom-right triangle over the last two dimensions of `s`."""
    rows, n = s.shape[-2:]
    return torch.arange(n, device=s.device) <= torch.arange(rows, device=s.device)[:, None] + (n - rows)


def backward(dy: Tensor, y: Tensor, spec: Spec) -> Tensor:
    """dx = scale · y ∘ (dy − Σ y ∘ dy), or scale · (dy − exp(y) · Σ dy) for the logarithm; differentiable in dy and y.

    With a mask or causal, dx is 0 wherever the result is exactly 0 (−∞ for the logarithm). float32, or float64 where y is.
    """
    dy, y = wide(dy), wide(y)
    if spec.log:
        dx = spec.scale * (dy - y.exp() * dy.sum(spec.dim, keepdim=True))
        return dx.masked_fill(y == -INF, 0.0) if spec.hiding else dx
    gone = y == 0 if spec.hiding else None
    dy = dy if gone is None else dy.masked_fill(gone, 0.0)
    dx = spec.scale * y * (dy - (y * dy).sum(spec.dim, keepdim=True))
    return dx if gone is None else dx.masked_fill(gone, 0.0)


def tangent(tx: Tensor, y: Tensor, spec: Spec) -> Tensor:
    """dy/dx · tx. Softmax's Jacobian is symmetric: `backward`; for the logarithm scale · (tx − Σ exp(y) ∘ tx)."""
    if not spec.log:
        return backward(tx, y, spec)
    tx, y = wide(tx), wide(y)
    if spec.hiding:
        tx = tx.masked_fill(y == -INF, 0.0)
    return spec.scale * (tx - (y.exp() * tx).sum(spec.dim, keepdim=True))


def spread(g: Tensor, sums: Tensor, x: Tensor, mask: Tensor | None, bias: Tensor | None, spec: Spec, factor: float) -> Tensor:
    """factor · g · exp(s − log Σ exp s), the gradient of log Σ exp s for factor 1, and for factor = scale in x; 0 where hidden."""
    s = wide(x) * spec.scale
    if bias is not None:
        s = s + bias.to(s.dtype)
    if not spec.hiding:
        return factor * g * (s - sums).exp()
    hidden = s == -INF
    if mask is not None:
        hidden = hidden | ~mask
    if spec.causal:
        hidden = hidden | ~visible(s)
    return factor * g * (s.masked_fill(hidden, -INF) - sums.masked_fill(sums == -INF, 0.0)).exp()


def wide(t: Tensor) -> Tensor:
    """In the format of the arithmetic: float32 for narrower types."""
    return t.float() if t.dtype in NARROW else t
