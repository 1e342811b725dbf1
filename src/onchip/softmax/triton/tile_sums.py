"""The gradient of log Σ exp s: factor · g · exp(s − log Σ exp s), elementwise."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.softmax.contract import Spec
from onchip.softmax.triton.addresses import columns, locate
from onchip.softmax.triton.launch import Launch, kind, remembered
from onchip.softmax.triton.rows import fold
from onchip.softmax.triton.scores import scores
from onchip.softmax.triton.tile_forward import LOG2E


@triton.jit
def _spread(x, dx, g, sums, mask, bias, strides_x, strides_dx, strides_g, strides_sums, strides_mask, strides_bias, scale, factor, n, n0,
            n1, groups, tiles_a_group, tiles, blocks, FLAT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """A program takes tiles of rows, and these block by block."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M)
        row_x = x + (i2 * strides_x[0] + i1 * strides_x[1] + i0 * strides_x[2])[:, None]
        row_dx = dx + (i2 * strides_dx[0] + i1 * strides_dx[1] + i0 * strides_dx[2])[:, None]
        row_mask = mask + (i2 * strides_mask[0] + i1 * strides_mask[1] + i0 * strides_mask[2])[:, None]
        row_bias = bias + (i2 * strides_bias[0] + i1 * strides_bias[1] + i0 * strides_bias[2])[:, None]
        weight = factor * tl.load(g + i2 * strides_g[0] + i1 * strides_g[1] + i0 * strides_g[2], mask=exists).to(tl.float32)
        total = tl.load(sums + i2 * strides_sums[0] + i1 * strides_sums[1] + i0 * strides_sums[2], mask=exists)
        if MASKED or CAUSAL:
            total = tl.where(total == float("-inf"), 0.0, total)
        for block in range(blocks):
            w, keep = columns(block, BLOCK_N, 0, n, BLOCK_N, WIDE, 1, False)
            s = scores(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], w, keep, 0, i0, exists, scale, n, n0,
                       SCALED, MASKED, BIASED, CAUSAL)
            tl.store(row_dx + w * strides_dx[3], weight[:, None] * tl.exp2((s - total[:, None]) * LOG2E), mask=exists[:, None] & keep)


def backward(g: Tensor, sums: Tensor, x: Tensor, mask: Tensor | None, bias: Tensor | None, spec: Spec, factor: float,
             into: torch.dtype) -> Tensor:
    """`onchip.softmax.reference.spread` for float16, bfloat16 and float32, in `into`."""
    dx = torch.empty(x.shape, dtype=into, device=x.device)
    if dx.numel() == 0:
        return dx
    mask = None if mask is None else mask.view(torch.uint8)
    key = ("sums", x.shape, spec, factor, *kind(x, dx, g, sums, mask, bias))
    launch = remembered(x.device, key, lambda: _launch(g, sums, x, dx, mask, bias, spec, factor))
    if launch is None:
        mask, bias = (None if t is None else t.contiguous() for t in (mask, bias))
        return backward(g.contiguous(), sums.contiguous(), x.contiguous(), mask, bias, spec, factor, into)
    launch(x, dx, g, sums, x if mask is None else mask, x if bias is None else bias)
    return dx


def _launch(g: Tensor, sums: Tensor, x: Tensor, dx: Tensor, mask: Tensor | None, bias: Tensor | None, spec: Spec,
            factor: float) -> Launch | None:
    tensors = {"x": x, "dx": dx, "g": g.expand(x.shape), "sums": sums.expand(x.shape)}
    tensors |= {name: t for name, t in (("mask", mask), ("bias", bias)) if t is not None}
    rows = fold(tensors, spec.dim, spec.causal, ("x", "dx"))
    if rows is None:
        return None
    absent = dict.fromkeys({"strides_mask", "strides_bias"} - rows.arguments.keys(), (0, 0, 0, 0))
    named = {**rows.arguments, **absent, "scale": spec.scale, "factor": factor, "SCALED": spec.scale != 1.0, "MASKED": mask is not None,
             "BIASED": bias is not None, "CAUSAL": spec.causal}
    return Launch(_spread, rows.programs(x.device), 6, named, {"num_warps": rows.plan.warps})
