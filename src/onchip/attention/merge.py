"""Partial attention over disjoint keys, put together."""
from collections.abc import Sequence

import torch
from torch import Tensor

from onchip.errors import InputError


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over all keys from attentions over disjoint sets of them: softmax weighs the parts by their lse.

        lse = log Σₙ exp(lseₙ)        out = Σₙ exp(lseₙ − lse) outₙ

    A part that saw nothing (lse −∞) weighs nothing, whatever its out holds; when every part is empty, out is 0 and lse −∞. Keep `outs` in
    fp32 between repeated merges: rounding each step to 16 bits lets the error grow with the number of steps. Differentiable.

    Args:
        outs: parts (…, D), all of one shape; computed in fp32 (fp64 in fp64).
        lses: natural logarithms (…), the shape of a part without its last dimension.

    Returns:
        out (…, D) in the dtype of the parts, and lse (…) in fp32 (fp64 in fp64).

    Raises:
        InputError: no parts, as many outs as lses not given, or shapes that differ.

    Source: Flash-Decoding (2023); FlashAttention (arXiv 2205.14135), §3.1.
    """
    if not outs or len(outs) != len(lses):
        raise InputError(f"outs, lses: got {len(outs)} and {len(lses)}, accepted: equally many, at least one")
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise InputError(f"outs[{n}], lses[{n}]: got {tuple(out.shape)} and {tuple(lse.shape)}, "
                             f"accepted: {tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}")
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    logs = torch.stack([lse.to(dtype) for lse in lses])
    m = logs.detach().amax(0)
    m = m.masked_fill(m == -torch.inf, 0)
    weights = (logs - m).exp()
    norm = weights.sum(0)
    empty = norm == 0
    norm = norm.masked_fill(empty, 1)
    total = torch.zeros_like(outs[0], dtype=dtype)
    for out, lse, weight in zip(outs, lses, weights, strict=True):
        total = total + weight[..., None] * torch.where((lse == -torch.inf)[..., None], 0, out.to(dtype))
    return (total / norm[..., None]).to(outs[0].dtype), (m + norm.log()).masked_fill(empty, -torch.inf)
