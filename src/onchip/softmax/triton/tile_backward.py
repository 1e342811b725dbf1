"""Backward kernels: dx = scale · y ∘ (dy − Σ y ∘ dy), or scale · (dy − exp(y) · Σ dy) for the logarithm."""
import triton
import triton.language as tl

from onchip.softmax.triton.cluster import INTERPRETED, enter, exchange
from onchip.softmax.triton.rows import begin, columns, ends, lead, locate

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(dy, y, step_dy, step_y, w, keep, LOG: tl.constexpr, HIDING: tl.constexpr):
    """dy, p = softmax (y is p or log p) and where the result was selected, or is as good as: there softmax ignores dy."""
    p = tl.load(y + w * step_y, mask=keep, other=float("-inf") if LOG else 0.0).to(tl.float32)
    d = tl.load(dy + w * step_dy, mask=keep, other=0.0).to(tl.float32)
    gone = p == (float("-inf") if LOG else 0.0)
    if LOG:
        p = tl.exp2(p * LOG2E)
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
def _load_ends(dy, y, lead, n, exists, VECTOR: tl.constexpr, LOG: tl.constexpr, HIDING: tl.constexpr):
    """The same of a row's first vector and its last one, element by element."""
    w, keep = ends(lead, n, VECTOR)
    return _load(dy, y, 1, 1, w, keep & exists[:, None], LOG, HIDING)


@triton.jit
def _total(dy, y, step_dy, step_y, lead, exists, n, blocks, step, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CUT: tl.constexpr, LOG: tl.constexpr, HIDING: tl.constexpr):
    """Σ p ∘ dy of whole rows, or Σ dy, block by block."""
    total = tl.zeros([BLOCK_M], tl.float32)
    if EDGES:
        d_ends, p_ends, _ = _load_ends(dy, y, lead, n, exists, VECTOR, LOG, HIDING)
        total += tl.sum(d_ends if LOG else p_ends * d_ends, axis=1)
    for block in range(blocks):
        w, keep = columns(block, step, lead, n, BLOCK_N, WIDE, VECTOR, EDGES, CUT)
        d, p, _gone = _load(dy, y, step_dy, step_y, w, keep & exists[:, None], LOG, HIDING)
        total += tl.sum(d if LOG else p * d, axis=1)
    return total


@triton.jit
def _resident(dy, y, dx, strides_dy, strides_y, strides_dx, scale, n, n0, n1, groups, tiles_a_group, span, FLAT: tl.constexpr,
              PACKED: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, PARTS: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr, HIDING: tl.constexpr):
    """A tile of whole rows, or one of PARTS parts of a row: two reads, one write."""
    part, tile, mail = enter(tl.program_id(0), PARTS)
    i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M)
    before = lead(strides_y, i2, i1, i0, VECTOR, EDGES)
    row_dy, row_y = begin(dy, strides_dy, i2, i1, i0, VECTOR), begin(y, strides_y, i2, i1, i0, VECTOR)
    w, keep = columns(part, span, before, n, BLOCK_N, WIDE, VECTOR, EDGES, PARTS > 1)
    keep &= exists[:, None]
    d, p, gone = _load(row_dy, row_y, strides_dy[3], strides_y[3], w, keep, LOG, HIDING)
    if EDGES and PARTS == 1:  # asked for with the others; in a cluster most parts need none
        d_ends, p_ends, gone_ends = _load_ends(row_dy, row_y, before, n, exists, VECTOR, LOG, HIDING)
    total = tl.sum(d if LOG else p * d, axis=1)
    if EDGES:  # noqa: SIM102  known when it is compiled
        if part == 0:
            if PARTS > 1:
                d_ends, p_ends, gone_ends = _load_ends(row_dy, row_y, before, n, exists, VECTOR, LOG, HIDING)
            total += tl.sum(d_ends if LOG else p_ends * d_ends, axis=1)
    if PARTS > 1:
        if INTERPRETED:  # programs run one after another: each works out the whole row's
            total = _total(row_dy, row_y, strides_dy[3], strides_y[3], before, exists, n, PARTS, span, WIDE, VECTOR, EDGES, BLOCK_M,
                           BLOCK_N, True, LOG, HIDING)
        else:
            _, totals = exchange(total, total, mail, PARTS)
            total = tl.sum(totals, axis=1)
    row_dx = begin(dx, strides_dx, i2, i1, i0, VECTOR)
    tl.store(row_dx + w * strides_dx[3], _gradient(d, p, gone, total, scale, LOG, SCALED, HIDING), mask=keep)
    if EDGES:  # noqa: SIM102  as above
        if part == 0:
            if PARTS > 1:
                d_ends, p_ends, gone_ends = _load_ends(row_dy, row_y, before, n, exists, VECTOR, LOG, HIDING)
            w_ends, keep_ends = ends(before, n, VECTOR)
            tl.store(row_dx + w_ends, _gradient(d_ends, p_ends, gone_ends, total, scale, LOG, SCALED, HIDING),
                     mask=keep_ends & exists[:, None])


@triton.jit
def _streamed(dy, y, dx, strides_dy, strides_y, strides_dx, scale, n, n0, n1, groups, tiles_a_group, tiles, blocks, FLAT: tl.constexpr,
              PACKED: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr, HIDING: tl.constexpr):
    """Tiles of any width: the total block by block, then dx from a second read."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M)
        before = lead(strides_y, i2, i1, i0, VECTOR, EDGES)
        row_dy, row_y = begin(dy, strides_dy, i2, i1, i0, VECTOR), begin(y, strides_y, i2, i1, i0, VECTOR)
        row_dx = begin(dx, strides_dx, i2, i1, i0, VECTOR)
        total = _total(row_dy, row_y, strides_dy[3], strides_y[3], before, exists, n, blocks, BLOCK_N, WIDE, VECTOR, EDGES, BLOCK_M,
                       BLOCK_N, False, LOG, HIDING)
        for back in range(blocks):  # backwards: what was read last is nearest
            w, keep = columns(blocks - 1 - back, BLOCK_N, before, n, BLOCK_N, WIDE, VECTOR, EDGES)
            keep &= exists[:, None]
            d, p, gone = _load(row_dy, row_y, strides_dy[3], strides_y[3], w, keep, LOG, HIDING)
            tl.store(row_dx + w * strides_dx[3], _gradient(d, p, gone, total, scale, LOG, SCALED, HIDING), mask=keep)
        if EDGES:
            w_ends, keep_ends = ends(before, n, VECTOR)
            d_ends, p_ends, gone_ends = _load_ends(row_dy, row_y, before, n, exists, VECTOR, LOG, HIDING)
            tl.store(row_dx + w_ends, _gradient(d_ends, p_ends, gone_ends, total, scale, LOG, SCALED, HIDING),
                     mask=keep_ends & exists[:, None])
