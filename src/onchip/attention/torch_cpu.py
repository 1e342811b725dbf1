"""torch's own CPU kernel behind the contract: served only what it computes rightly (`dispatch` says what), repaired where it is not exact.

Under a causal mask it multiplies hidden values by zero, so a NaN or Inf in v would reach rows that do not see it. A finite result proves
that none did; otherwise the reference computes the call anew. It knows no gradient of lse: the reference's backward takes those.
"""
from typing import Any

import torch
from torch import Tensor

from onchip.attention import reference
from onchip.attention.contract import Spec, empty_like_q

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(q: Tensor, k: Tensor, v: Tensor, bias: None, mask: None, alibi_slopes: None, sinks: None, cu_seqlens_q: None,
            cu_seqlens_k: None, dropout_seed: None, spec: Spec, memo: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense call without bias, mask, slopes, sinks, window, softcap or dropout."""
    out, lse = _forward(q, k, v, 0.0, spec.causal != 0, scale=spec.scale)
    if spec.causal and not _finite(out):
        return reference.forward(q, k, v, None, None, None, None, None, None, None, spec)
    return _as(q, out), lse.contiguous()


def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: None, mask: None,
             alibi_slopes: None, sinks: None, cu_seqlens_q: None, cu_seqlens_k: None, dropout_seed: None, spec: Spec,
             needs: tuple[bool, bool, bool, bool, bool], memo: dict[str, Any] | None = None) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, None, None), None where not needed."""
    if dlse is None:
        grads = _backward(dout, q, k, v, out, lse, 0.0, spec.causal != 0, scale=spec.scale)
        if not spec.causal or all(map(_finite, grads)):
            return *(_as(x, grad) if need else None for x, grad, need in zip((q, k, v), grads, needs, strict=False)), None, None
    return reference.backward(dout, dlse, q, k, v, out, lse, None, None, None, None, None, None, None, spec, needs)


def _finite(x: Tensor) -> bool:
    """A finite sum proves finite terms; the reverse may fail by overflow, which costs time, not truth."""
    return bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())


def _as(like: Tensor, x: Tensor) -> Tensor:
    """`x` in the memory order promised for `like`."""
    promised = empty_like_q(like, x.shape[-1])
    return x if x.stride() == promised.stride() else promised.copy_(x)
