"""What tests of the Hopper forward share: problems, the float64 truth, and the error of the same arithmetic done eagerly in one dtype."""
import math

import pytest
import torch
from torch import Tensor

from onchip.attention.contract import Spec, empty_like_q

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from onchip.attention.hopper import launch, tiles

DEVICE = "cuda"
CAUSAL = {None: 0, "bottom-right": 1, "top-left": 2}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32, generator=generator).to(dtype)


def inputs(b: int, hq: int, hkv: int, sq: int, sk: int, d: int, dv: int | None = None,
           dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return randn(b, hq, sq, d, dtype=dtype), randn(b, hkv, sk, d, dtype=dtype, seed=1), randn(b, hkv, sk, dv or d, dtype=dtype, seed=2)


def make_spec(q: Tensor, k: Tensor, causal: str | None = None, window: tuple[int, int] = (-1, -1), scale: float | None = None,
              softcap: float = 0.0) -> Spec:
    return Spec(CAUSAL[causal], window[0], 0 if causal else window[1], scale or q.shape[-1] ** -0.5, softcap, 0.0, q.shape[-2], k.shape[-2],
                False, False)


def visible(sq: int, sk: int, spec: Spec) -> Tensor:
    offset = 0 if spec.causal == 2 else sk - sq
    distance = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] - offset
    seen = torch.ones(sq, sk, dtype=torch.bool, device=DEVICE)
    if spec.window_left >= 0:
        seen &= distance >= -spec.window_left
    if spec.window_right >= 0:
        seen &= distance <= spec.window_right
    return seen


def truth(q: Tensor, k: Tensor, v: Tensor, spec: Spec, sinks: Tensor | None = None,
          dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition; with a 16-bit `dtype` the yardstick: products rounded to it, softmax in fp32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    s = (q @ k.mT).to(wide) * spec.scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    s = s.masked_fill(~visible(q.shape[2], k.shape[2], spec), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])[..., : k.shape[2]]
    return p.to(dtype) @ v, lse


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check(q: Tensor, k: Tensor, v: Tensor, spec: Spec, sinks: Tensor | None = None, **options: object) -> Tensor:
    """Run, compare, return the flags of repeated tiles. Outputs are poisoned by what the allocator last held there."""
    torch.full((q.numel() * 2,), math.nan, device=DEVICE)
    out, lse, plan = launch.run(q, k, v, sinks, None, None, spec, **options)
    exact, exact_lse = truth(q, k, v, spec, sinks)
    yardstick, _ = truth(q, k, v, spec, sinks, q.dtype)
    assert out.shape == exact.shape
    assert out.dtype == q.dtype
    assert out.stride() == empty_like_q(q, v.shape[-1]).stride()
    assert torch.isfinite(out).all()
    step = torch.finfo(q.dtype).eps / 2
    assert error(out, exact) <= 1.5 * error(yardstick, exact) + step
    blind = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert (out[~visible(q.shape[2], k.shape[2], spec).any(-1).expand(q.shape[:3])] == 0).all()
    torch.testing.assert_close(lse[~blind].double(), exact_lse[~blind], atol=2e-4, rtol=2e-5)
    return plan.repeated()


TILES = pytest.mark.parametrize("tile", tiles.FORWARD, ids=lambda tile: f"{tile.dim}-{tile.dim_v}-{tile.rows}")
