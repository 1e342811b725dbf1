"""Backward kernels: dx = scale · y ∘ (dy − Σ y ∘ dy), or scale · (dy − exp(y) · Σ dy) for the logarithm."""
import triton
import triton.language as tl
from torch import Tensor, dtype, empty

from onchip.softmax.contract import Spec
from onchip.softmax.triton.rows import begin, columns, fold, locate, on


def backward(dy: Tensor, y: Tensor, spec: Spec, into: dtype) -> Tensor:
    """`onchip.softmax.reference.backward` for float16, bfloat16 and float32; the gradient's type is `into`."""
    dx = empty(y.shape, dtype=into, device=y.device)
    if dx.numel() == 0:
        return dx
    rows, tensors = fold((dy, y, dx), spec.dim)
    kernel = _resident if rows.plan.resident else _streamed
    with on(y.device):
        kernel[(rows.programs(y.device),)](*tensors, *rows.strides, spec.scale, LOG=spec.log, SCALED=spec.scale != 1.0, HIDING=spec.hiding,
                                           **rows.arguments)
    return dx


@triton.jit
def _load(dy, y, column_dy, column_y, columns, exists, n, LOG: tl.constexpr, HIDING: tl.constexpr):
    """dy, p = softmax (y is p or log p) and where the result was selected, or is as good as: there softmax ignores dy."""
    keep = exists[:, None] & (columns < n)
    p = tl.load(y + columns * column_y, mask=keep, other=float("-inf") if LOG else 0.0).to(tl.float32)
    d = tl.load(dy + columns * column_dy, mask=keep, other=0.0).to(tl.float32)
    gone = p == (float("-inf") if LOG else 0.0)
    if LOG:
        p = tl.exp(p)
    elif HIDING:
        d = tl.where(gone, 0.0, d)
    return d, p, gone


@triton.jit
def _gradient(d, p, gone, total, scale, LOG: tl.constexpr, SCALED: tl.constexpr, HIDING: tl.constexpr):
    """dx of a block from the row's `total`: Σ p ∘ dy, or Σ dy for the logarithm."""
    dx = d - p * total[:, None] if LOG else p * (d - total[:, None])
    if SCALED:
        dx *= scale
    return tl.where(gone, 0.0, dx) if HIDING else dx


@triton.jit
def _resident(dy, y, dx, strides_dy, strides_y, strides_dx, scale, n, n0, n1, groups, tiles_a_group, PACKED: tl.constexpr,
              WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr,
              HIDING: tl.constexpr):
    """A tile of whole rows: two reads, one write."""
    i2, i1, i0, exists = locate(tl.program_id(0), n0, n1, groups, tiles_a_group, PACKED, BLOCK_M)
    j = columns(0, BLOCK_N, WIDE)
    d, p, gone = _load(begin(dy, strides_dy, i2, i1, i0), begin(y, strides_y, i2, i1, i0), strides_dy[3], strides_y[3], j, exists, n, LOG,
                       HIDING)
    total = tl.sum(d if LOG else p * d, axis=1)
    result = _gradient(d, p, gone, total, scale, LOG, SCALED, HIDING)
    tl.store(begin(dx, strides_dx, i2, i1, i0) + j * strides_dx[3], result, mask=exists[:, None] & (j < n))


@triton.jit
def _streamed(dy, y, dx, strides_dy, strides_y, strides_dx, scale, n, n0, n1, groups, tiles_a_group, tiles, blocks, PACKED: tl.constexpr,
              WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr,
              HIDING: tl.constexpr):
    """Tiles of any width: the total block by block, then dx from a second read."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, PACKED, BLOCK_M)
        row_dy, row_y, row_dx = begin(dy, strides_dy, i2, i1, i0), begin(y, strides_y, i2, i1, i0), begin(dx, strides_dx, i2, i1, i0)
        total = tl.zeros([BLOCK_M], tl.float32)
        for block in range(blocks):
            d, p, _ = _load(row_dy, row_y, strides_dy[3], strides_y[3], columns(block, BLOCK_N, WIDE), exists, n, LOG, HIDING)
            total += tl.sum(d if LOG else p * d, axis=1)
        for back in range(blocks):  # backwards: what was read last is nearest
            j = columns(blocks - 1 - back, BLOCK_N, WIDE)
            d, p, gone = _load(row_dy, row_y, strides_dy[3], strides_y[3], j, exists, n, LOG, HIDING)
            tl.store(row_dx + j * strides_dx[3], _gradient(d, p, gone, total, scale, LOG, SCALED, HIDING), mask=exists[:, None] & (j < n))
