
"""The float64 truth of softmax and what counts as agreement with it."""
from typing import Any

import torch
from torch import Tensor

from onchip.softmax.api import log_softmax, softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = {False: softmax, True: log_softmax}
EAGER = {False: torch.softmax, True: torch.log_softmax}


def hidden_positions(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """True where a position is hidden, by the definitions; None when nothing hides."""
    if mask is None and not causal:
        return None
    hidden = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None:
        hidden |= ~mask
    if causal:
        rows, n = x.shape[-2:]
        for i in range(rows):
            hidden[..., i, max(0, i + n - rows + 1):] = True
    return hidden


def truth(x: Tensor, dy: Tensor, dim: int, log: bool, scale: float, mask: Tensor | None, causal: bool,
          bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and the terms dx is a difference of, whose rounding it inherits, in float64 and from the formulas.

    One of the terms is a sum; on its way to n terms it has the size of their norm, however small it ends.
    """
    s, dy = x.double() * scale, dy.double()
    s = s if bias is None else s + bias.double()
    hidden = hidden_positions(x, mask, causal)
    s = s if hidden is None else torch.where(hidden, -float("inf"), s)
    m = s.amax(dim, keepdim=True)
    e = torch.exp(s - m)
    l = e.sum(dim, keepdim=True)
    p, y = e / l, (s - m) - l.log() if log else e / l
    each = dy if log else p * dy
    terms = [scale * each, scale * p * each.sum(dim, keepdim=True)]
    dx = terms[0] - terms[1]
    terms.append(scale * p * each.norm(dim=dim, keepdim=True))
    if hidden is not None:
        empty = (m == -float("inf")).expand_as(s)
        y = torch.where(empty, -float("inf") if log else 0.0, y)
        dx = torch.where(empty | hidden, 0.0, dx)
    return y, dx, torch.stack(terms)


def eager(x: Tensor, dy: Tensor, dim: int, log: bool, scale: float, mask: Tensor | None, causal: bool,
          bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and dx of torch's own kernels in x's dtype: the yardstick."""
    x = x.detach().requires_grad_()
    hidden = hidden_positions(x, mask, causal)
    s = x * scale if scale != 1 else x
    s = s if bias is None else s + bias
    s = s if hidden is None else s.masked_fill(hidden, -float("inf"))
    y = EAGER[log](s, dim, dtype=dy.dtype)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def error(got: Tensor, right: Tensor) -> float:
    """max |got − right| over finite values."""
    both = got.isfinite() & right.isfinite()
    return (got.double() - right)[both].abs().max().item() if both.any() else 0.0


def same_places(got: Tensor, right: Tensor) -> bool:
    """Finite, −∞ and NaN in the same places."""
    return all(torch.equal(f(got), f(right)) for f in (torch.isfinite, torch.isneginf, torch.isnan))


def agree(x: Tensor, dim: int = -1, *, backend: str = "triton", log: bool = False, scale: Any = None, mask: Tensor | None = None,
          bias: Tensor | None = None, causal: bool = False, dtype: torch.dtype | None = None,
          dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run the operator forward and backward; assert twice torch's own error plus two roundings of the largest term. Returns (y, dx)."""
    leaf = x.detach().requires_grad_()
    y = NAMES[log](leaf, dim, dtype=dtype, scale=scale, mask=mask, bias=bias, causal=causal, backend=backend)
    assert y.shape == x.shape
    assert y.dtype == (dtype or x.dtype)
    assert y.is_contiguous()
    if dy is None:
        dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(x.device, y.dtype)
    dx, = torch.autograd.grad(y, leaf, dy)
    assert dx.dtype == x.dtype
    if x.numel():
        judge(y.detach(), dx, x, dy, dim, log=log, scale=scale, mask=mask, bias=bias, causal=causal)
    return y.detach(), dx


def judge(y: Tensor, dx: Tensor, x: Tensor, dy: Tensor, dim: int = -1, *, log: bool = False, scale: Any = None, mask: Tensor | None = None,
          bias: Tensor | None = None, causal: bool = False) -> None:
    """Assert what `agree` does of a y and dx that are there already."""
    case = (dim, log, 1.0 if scale is None else float(scale), mask, causal, bias)
    right_y, right_dx, terms = truth(x, dy, *case)
    same_y, same_dx = eager(x, dy, *case)
    _close("y", y, right_y, same_y, right_y)
    _close("dx", dx, right_dx, same_dx, terms)


def _close(name: str, got: Tensor, right: Tensor, same: Tensor, terms: Tensor) -> None:
    assert same_places(got, right), f"{name}: NaN or infinities elsewhere than in the truth"
    finite = terms[terms.isfinite()].abs()
    allowed = 2 * error(same, right) + 2 * torch.finfo(got.dtype).eps * (finite.max().item() if finite.numel() else 0.0)
    assert error(got, right) <= allowed, f"{name}: error {error(got, right):.3g} > {allowed:.3g}"
