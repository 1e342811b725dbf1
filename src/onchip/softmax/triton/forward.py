"""Forward kernels: s = scale · x, hidden positions selected to −∞; y = exp(s − m) / l, or (s − m) − log l."""
import triton
import triton.language as tl
from torch import Tensor, empty, uint8

from onchip.softmax.contract import Spec
from onchip.softmax.triton.rows import begin, columns, fold, locate, on


def forward(x: Tensor, mask: Tensor | None, spec: Spec) -> Tensor:
    """`onchip.softmax.reference.forward` for float16, bfloat16 and float32."""
    y = empty(x.shape, dtype=spec.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows, tensors = fold((x, y, x if mask is None else mask.view(uint8)), spec.dim, spec.causal)
    kernel = _resident if rows.plan.resident else _streamed
    with on(x.device):
        kernel[(rows.programs(x.device),)](*tensors, *rows.strides, spec.scale, LOG=spec.log, SCALED=spec.scale != 1.0,
                                           MASKED=mask is not None, CAUSAL=spec.causal, **rows.arguments)
    return y


@triton.jit
def _scores(x, mask, column_x, column_mask, columns, i0, exists, scale, n, n0, SCALED: tl.constexpr, MASKED: tl.constexpr,
            CAUSAL: tl.constexpr):
    """s of a block in float32; −∞ is selected, after scaling, where a position is hidden or does not exist."""
    keep = exists[:, None] & (columns < n)
    if CAUSAL:
        keep &= columns <= (i0 + (n - n0))[:, None]  # what lies above the triangle is not read
    s = tl.load(x + columns * column_x, mask=keep, other=0.0).to(tl.float32)
    if SCALED:
        s *= scale
    if MASKED:
        keep &= tl.load(mask + columns * column_mask, mask=keep, other=0) != 0
    return tl.where(keep, s, float("-inf"))


@triton.jit
def _shift(m):
    """What to subtract: m, or 0 in a row of −∞ so far, where −∞ − −∞ would be NaN. A NaN need not reach m: it reaches l."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _normalise(s, shift, l, LOG: tl.constexpr, HIDING: tl.constexpr):
    """y of a block. l = 0 is a row of −∞ only: 0/0 and −∞ − log 0 give torch's NaN, l = 1 the empty row's 0 and −∞."""
    if HIDING:
        l = tl.where(l == 0.0, 1.0, l)
    s -= shift[:, None]
    return s - tl.log(l)[:, None] if LOG else tl.exp(s) * (1.0 / l)[:, None]


@triton.jit
def _resident(x, y, mask, strides_x, strides_y, strides_mask, scale, n, n0, n1, groups, tiles_a_group, PACKED: tl.constexpr,
              WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr,
              MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """A tile of whole rows, read once and written once."""
    i2, i1, i0, exists = locate(tl.program_id(0), n0, n1, groups, tiles_a_group, PACKED, BLOCK_M)
    j = columns(0, BLOCK_N, WIDE)
    s = _scores(begin(x, strides_x, i2, i1, i0), begin(mask, strides_mask, i2, i1, i0), strides_x[3], strides_mask[3], j, i0, exists,
                scale, n, n0, SCALED, MASKED, CAUSAL)
    shift = _shift(tl.max(s, axis=1))
    l = tl.sum(tl.exp(s - shift[:, None]), axis=1)
    result = _normalise(s, shift, l, LOG, MASKED or CAUSAL)
    tl.store(begin(y, strides_y, i2, i1, i0) + j * strides_y[3], result, mask=exists[:, None] & (j < n))


@triton.jit
def _streamed(x, y, mask, strides_x, strides_y, strides_mask, scale, n, n0, n1, groups, tiles_a_group, tiles, blocks,
              PACKED: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr,
              SCALED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """Tiles of any width: m and l block by block, l rescaled by exp(m_old − m) whenever m grows; then the result from a second read."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, PACKED, BLOCK_M)
        row_x, row_mask, row_y = begin(x, strides_x, i2, i1, i0), begin(mask, strides_mask, i2, i1, i0), begin(y, strides_y, i2, i1, i0)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        for block in range(blocks):
            s = _scores(row_x, row_mask, strides_x[3], strides_mask[3], columns(block, BLOCK_N, WIDE), i0, exists, scale, n, n0, SCALED,
                        MASKED, CAUSAL)
            m_old = m
            m = tl.maximum(m, tl.max(s, axis=1))
            l = l * tl.exp(m_old - _shift(m)) + tl.sum(tl.exp(s - _shift(m)[:, None]), axis=1)
        for back in range(blocks):  # backwards: what was read last is nearest
            j = columns(blocks - 1 - back, BLOCK_N, WIDE)
            s = _scores(row_x, row_mask, strides_x[3], strides_mask[3], j, i0, exists, scale, n, n0, SCALED, MASKED, CAUSAL)
            tl.store(row_y + j * strides_y[3], _normalise(s, _shift(m), l, LOG, MASKED or CAUSAL), mask=exists[:, None] & (j < n))
