"""`torch.nn.functional.scaled_dot_product_attention`, signature and meaning, on this library's backends."""
import math

import torch
from torch import Tensor

from onchip.attention.api import attention
from onchip.errors import InputError


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Drop-in for torch's function of this name: softmax(scale · query keyᵀ + attn_mask) value.

    `is_causal` is aligned to the top left, as in torch (query i sees keys ≤ i), and acts together with `attn_mask`:

        is_causal, L = 2, S = 5        is_causal, L = 5, S = 2
            1 0 0 0 0                      1 0
            1 1 0 0 0                      1 1
                                           1 1
                                           1 1
                                           1 1

    Args:
        query: (…, L, E), any number of leading dimensions; fp16, bf16, fp32 or fp64.
        key: (…, S, E) and value: (…, S, Ev); leading dimensions broadcast with query's.
        attn_mask: broadcasts to (…, L, S). Boolean: True = attend. Floating point: added to the scores, and learnable.
        dropout_p: probability of dropping an attention weight; drawn from torch's generator. Applied whenever > 0, as in torch.
        is_causal: see above.
        scale: factor of the scores; None is 1/√E.
        enable_gqa: key and value have fewer heads (dimension −3), each a divisor of query's.

    Returns:
        (…, L, Ev) in query's dtype. A row that may attend to nothing is 0, with gradient 0.

    Raises:
        InputError: shapes, dtypes or devices that do not fit; the message names the argument.
        TypeError: an argument that is no tensor or number.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, accepted: a torch.Tensor")
        if x.dim() < 2 + enable_gqa:
            wanted = "3 (…, heads, seq, dim) with enable_gqa" if enable_gqa else "2 (…, seq, dim)"
            raise InputError(f"{name}: got {x.dim()} dimensions {tuple(x.shape)}, accepted: at least {wanted}")
    if dropout_p == 1:  # torch allows it; everything is dropped
        out = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
        return out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0)
    query, key, value = _broadcast(query, key, value, enable_gqa)
    lead = query.shape[:-2]
    bias = mask = None
    if attn_mask is not None:
        attn_mask = _fold_mask(attn_mask, (*query.shape[:-1], key.shape[-2]))
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    out = attention(_fold(query), _fold(key), _fold(value), causal="top-left" if is_causal else False, scale=scale, bias=bias, mask=mask,
                    dropout_p=dropout_p)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Equal leading dimensions, except the heads with `enable_gqa`."""
    heads = 3 if enable_gqa else 2
    if enable_gqa and key.shape[-3] != value.shape[-3]:  # a kv head serves one group: key and value must agree
        for name, x in (("key", key), ("value", value)):
            if x.shape[-3] == 0 or query.shape[-3] % x.shape[-3] != 0:
                raise InputError(f"{name}: got {x.shape[-3]} heads, accepted: a divisor of query's {query.shape[-3]} heads")
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if query.shape[:-heads] == key.shape[:-heads] == value.shape[:-heads]:
        return query, key, value
    try:
        lead = torch.broadcast_shapes(query.shape[:-heads], key.shape[:-heads], value.shape[:-heads])
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise InputError(f"query, key, value: got {shapes}, accepted: leading dimensions that broadcast together") from None
    expanded = (x.expand(*lead, *x.shape[-heads:]) for x in (query, key, value))
    return tuple(expanded)  # type: ignore[return-value]


def _fold(x: Tensor) -> Tensor:
    """(…, heads, seq, dim) as 4-D."""
    if x.dim() <= 4:
        return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _fold_mask(mask: Tensor, full: tuple[int, ...]) -> Tensor:
    """`mask`, which broadcasts to `full` (…, L, S), as 4-D; leading dimensions it does not have stay 1."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: got {type(mask).__name__}, accepted: a torch.Tensor or None")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"attn_mask: got {mask.dtype}, accepted: torch.bool or a floating point dtype")
    fits = 2 <= mask.dim() <= len(full) and all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(full), strict=False))
    if not fits:
        raise InputError(f"attn_mask: got shape {tuple(mask.shape)}, accepted: at least 2 dimensions that broadcast to {full}")
    if mask.dim() <= 4 and len(full) <= 4:
        return mask
    mask = mask[(None,) * (len(full) - mask.dim())]
    batch = mask.shape[:-3]
    if any(size != 1 for size in batch):
        mask = mask.expand(*full[:-3], *mask.shape[-3:])
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
