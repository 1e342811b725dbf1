"""Forward kernels: s = scale · x + bias, hidden positions selected to −∞; y = exp(s − m) / l, (s − m) − log l, or a row's m + log l alone.

exp(s − m) is 2^((s − m) · log₂e): the subtraction first, where it is exact or nearly so, and two instructions after it; Triton's own `exp`
takes five, to keep results below 2⁻¹²⁶.
"""
import triton
import triton.language as tl

from onchip.softmax.triton.cluster import INTERPRETED, enter, exchange
from onchip.softmax.triton.rows import begin, columns, ends, lead, locate

LOG2E = tl.constexpr(1.4426950408889634)
Y, LOG_Y, SUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is wanted: y, log y or log Σ exp s


@triton.jit
def _seen(w, keep, lead, i0, exists, n, n0, CAUSAL: tl.constexpr):
    """Which positions of a block exist and are not above the triangle; the others are not read."""
    keep &= exists[:, None]
    if CAUSAL:
        keep &= w - lead <= (i0 + (n - n0))[:, None]
    return keep


@triton.jit
def _scores(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED: tl.constexpr,
            MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """s of a block in float32; −∞ is selected, after scaling, where a position is hidden or does not exist."""
    keep = _seen(w, keep, lead, i0, exists, n, n0, CAUSAL)
    if not (SCALED or BIASED or MASKED):
        return tl.load(x + w * step_x, mask=keep, other=float("-inf")).to(tl.float32)
    s = tl.load(x + w * step_x, mask=keep, other=0.0).to(tl.float32)
    if SCALED:
        s *= scale
    if BIASED:
        s += tl.load(bias + (w - lead) * step_bias, mask=keep, other=0.0).to(tl.float32)
    if MASKED:
        keep &= tl.load(mask + (w - lead) * step_mask, mask=keep, other=0) != 0
    return tl.where(keep, s, float("-inf"))


@triton.jit
def _widen(x, keep, scale, SCALED: tl.constexpr):
    """s of 16-bit elements that stay as they were loaded. The move hides that they have been widened before: else the compiler would keep
    what it got then, in twice the registers."""
    if not INTERPRETED:
        bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x.to(tl.int16, bitcast=True)], dtype=tl.int16, is_pure=False, pack=2)
        x = bits.to(x.dtype, bitcast=True)
    s = x.to(tl.float32)
    return tl.where(keep, s * scale, float("-inf")) if SCALED else s


@triton.jit
def _shift(m, WANTED: tl.constexpr):
    """What to subtract: m, or 0 in a row of −∞ so far, where −∞ − −∞ would be NaN. A NaN need not reach m: it reaches l.

    A sum may be +∞, where y is NaN: then 0 as well.
    """
    m = tl.where(m == float("-inf"), 0.0, m)
    return tl.where(m == float("inf"), 0.0, m) if WANTED == SUM else m


@triton.jit
def _exp(s):
    return tl.exp2(s * LOG2E)


@triton.jit
def _normalise(s, shift, l, WANTED: tl.constexpr, HIDING: tl.constexpr):
    """y of a block. l = 0 is a row of −∞ only: 0/0 and −∞ − log 0 give torch's NaN, l = 1 the empty row's 0 and −∞."""
    if HIDING:
        l = tl.where(l == 0.0, 1.0, l)
    s -= shift[:, None]
    return s - tl.log(l)[:, None] if WANTED == LOG_Y else _exp(s) * (1.0 / l)[:, None]


@triton.jit
def _end_scores(x, mask, bias, step_mask, step_bias, lead, i0, exists, scale, n, n0, VECTOR: tl.constexpr, SCALED: tl.constexpr,
                MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """s of a row's first vector and its last one, element by element."""
    w, keep = ends(lead, n, VECTOR)
    return _scores(x, mask, bias, 1, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED, MASKED, BIASED, CAUSAL)


@triton.jit
def _join(m, l, s, WANTED: tl.constexpr):
    """m and l with a block more: l is rescaled by exp(m_old − m)."""
    m_old = m
    m = tl.maximum(m, tl.max(s, axis=1))
    return m, l * _exp(m_old - _shift(m, WANTED)) + tl.sum(_exp(s - _shift(m, WANTED)[:, None]), axis=1)


@triton.jit
def _statistics(x, mask, bias, step_x, step_mask, step_bias, lead, i0, exists, scale, n, n0, blocks, step, WIDE: tl.constexpr,
                VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CUT: tl.constexpr,
                WANTED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """m and l of whole rows, block by block."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if EDGES:
        s_ends = _end_scores(x, mask, bias, step_mask, step_bias, lead, i0, exists, scale, n, n0, VECTOR, SCALED, MASKED, BIASED, CAUSAL)
        m, l = _join(m, l, s_ends, WANTED)
    for block in range(blocks):
        w, keep = columns(block, step, lead, n, BLOCK_N, WIDE, VECTOR, EDGES, CUT)
        s = _scores(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED, MASKED, BIASED, CAUSAL)
        m, l = _join(m, l, s, WANTED)
    return m, l


@triton.jit
def _resident(x, y, mask, bias, strides_x, strides_y, strides_mask, strides_bias, scale, n, n0, n1, groups, tiles_a_group, span,
              FLAT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
              MASK_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WANTED: tl.constexpr,
              SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr, NARROW: tl.constexpr):
    """A tile of whole rows, or one of PARTS parts of a row, `span` elements each; read once and written once.

    NARROW: elements of 16 bits wait as such, and are widened for each use.
    """
    part, tile, mail = enter(tl.program_id(0), PARTS)
    i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M)
    before = lead(strides_x, i2, i1, i0, VECTOR, EDGES)
    row_x, row_mask = begin(x, strides_x, i2, i1, i0, VECTOR), begin(mask, strides_mask, i2, i1, i0, MASK_VECTOR)
    row_bias = begin(bias, strides_bias, i2, i1, i0, 1)
    w, keep = columns(part, span, before, n, BLOCK_N, WIDE, VECTOR, EDGES, PARTS > 1)
    if NARROW:
        seen = _seen(w, keep, before, i0, exists, n, n0, CAUSAL)
        narrow = tl.load(row_x + w * strides_x[3], mask=seen, other=0.0 if SCALED else float("-inf"))
        s = _widen(narrow, seen, scale, SCALED)
    else:
        s = _scores(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], w, keep, before, i0, exists, scale, n, n0,
                    SCALED, MASKED, BIASED, CAUSAL)
    if EDGES and PARTS == 1:  # asked for with the others; in a cluster most parts need none
        s_ends = _end_scores(row_x, row_mask, row_bias, strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0, VECTOR, SCALED,
                             MASKED, BIASED, CAUSAL)
    m = tl.max(s, axis=1)
    if EDGES and PARTS == 1:
        m = tl.maximum(m, tl.max(s_ends, axis=1))
    if NARROW:
        s = _widen(narrow, seen, scale, SCALED)
    l = tl.sum(_exp(s - _shift(m, WANTED)[:, None]), axis=1)
    if EDGES and PARTS == 1:
        l += tl.sum(_exp(s_ends - _shift(m, WANTED)[:, None]), axis=1)
    if EDGES and PARTS > 1:  # noqa: SIM102  known when it is compiled
        if part == 0:
            s_ends = _end_scores(row_x, row_mask, row_bias, strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0, VECTOR,
                                 SCALED, MASKED, BIASED, CAUSAL)
            m, l = _join(m, l, s_ends, WANTED)
    if PARTS > 1:
        if INTERPRETED:  # programs run one after another: each works out the whole row's
            m, l = _statistics(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0,
                               PARTS, span, WIDE, VECTOR, EDGES, BLOCK_M, BLOCK_N, True, WANTED, SCALED, MASKED, BIASED, CAUSAL)
        else:
            ms, ls = exchange(m, l, mail, PARTS)
            m = tl.max(ms, axis=1)
            l = tl.sum(ls * _exp(ms - _shift(m, WANTED)[:, None]), axis=1)
    shift = _shift(m, WANTED)
    if WANTED == SUM:
        tl.store(y + i2 * strides_y[0] + i1 * strides_y[1] + i0 * strides_y[2], shift + tl.log(l), mask=exists & (part == 0))
    else:
        row_y = begin(y, strides_y, i2, i1, i0, VECTOR)
        if NARROW:
            s = _widen(narrow, seen, scale, SCALED)
        tl.store(row_y + w * strides_y[3], _normalise(s, shift, l, WANTED, MASKED or CAUSAL), mask=exists[:, None] & keep)
        if EDGES:  # noqa: SIM102  as above
            if part == 0:
                if PARTS > 1:
                    s_ends = _end_scores(row_x, row_mask, row_bias, strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0,
                                         VECTOR, SCALED, MASKED, BIASED, CAUSAL)
                w_ends, keep_ends = ends(before, n, VECTOR)
                tl.store(row_y + w_ends, _normalise(s_ends, shift, l, WANTED, MASKED or CAUSAL), mask=exists[:, None] & keep_ends)


@triton.jit
def _streamed(x, y, mask, bias, strides_x, strides_y, strides_mask, strides_bias, scale, n, n0, n1, groups, tiles_a_group, tiles, blocks,
              FLAT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
              MASK_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WANTED: tl.constexpr, SCALED: tl.constexpr,
              MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """Tiles of any width: m and l block by block, l rescaled by exp(m_old − m) whenever m grows; then the result from a second read."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M)
        before = lead(strides_x, i2, i1, i0, VECTOR, EDGES)
        row_x, row_mask = begin(x, strides_x, i2, i1, i0, VECTOR), begin(mask, strides_mask, i2, i1, i0, MASK_VECTOR)
        row_bias = begin(bias, strides_bias, i2, i1, i0, 1)
        m, l = _statistics(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0,
                           blocks, BLOCK_N, WIDE, VECTOR, EDGES, BLOCK_M, BLOCK_N, False, WANTED, SCALED, MASKED, BIASED, CAUSAL)
        if WANTED == SUM:
            tl.store(y + i2 * strides_y[0] + i1 * strides_y[1] + i0 * strides_y[2], _shift(m, WANTED) + tl.log(l), mask=exists)
        else:
            row_y = begin(y, strides_y, i2, i1, i0, VECTOR)
            for back in range(blocks):  # backwards: what was read last is nearest
                w, keep = columns(blocks - 1 - back, BLOCK_N, before, n, BLOCK_N, WIDE, VECTOR, EDGES)
                s = _scores(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], w, keep, before, i0, exists, scale,
                            n, n0, SCALED, MASKED, BIASED, CAUSAL)
                tl.store(row_y + w * strides_y[3], _normalise(s, _shift(m, WANTED), l, WANTED, MASKED or CAUSAL),
                         mask=exists[:, None] & keep)
            if EDGES:
                s_ends = _end_scores(row_x, row_mask, row_bias, strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0, VECTOR,
                                     SCALED, MASKED, BIASED, CAUSAL)
                w_ends, keep_ends = ends(before, n, VECTOR)
                tl.store(row_y + w_ends, _normalise(s_ends, _shift(m, WANTED), l, WANTED, MASKED or CAUSAL),
                         mask=exists[:, None] & keep_ends)
