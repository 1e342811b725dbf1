"""Forward kernels: s = scale · x + bias, hidden positions selected to −∞; y = exp(s − m) / l, (s − m) − log l, or a row's m + log l alone.

exp(s − m) is 2^((s − m) · log₂e): the subtraction first, where it is exact or nearly so, and two instructions after it; Triton's own `exp`
takes five, to keep results below 2⁻¹²⁶.
"""
import triton
import triton.language as tl

from onchip.softmax.triton.addresses import (
    INTERPRETED,
    ahead,
    begin,
    columns,
    ends,
    lead,
    locate,
    multiples,
    only,
    place,
    start,
    under_way,
)
from onchip.softmax.triton.cluster import begun, enter, exchange, leave
from onchip.softmax.triton.scores import ask, ask_ends, below, end_scores, larger, scores, waits, whole

LOG2E = tl.constexpr(1.4426950408889634)
Y, LOG_Y, SUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is wanted: y, log y or log Σ exp s


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
def _normalise(d, l, WANTED: tl.constexpr, HIDING: tl.constexpr, ANEW: tl.constexpr = False):
    """y of d = s − m; l: [rows, 1]. l = 0 is a row of −∞ only: 0/0 and −∞ − log 0 give torch's NaN, l = 1 the empty row's 0, −∞.

    As a product, whose exponential the compiler has from l's terms. ANEW, where it has not, and for y of 16 bits: 1/l goes into the
    exponent, an instruction less, off by 2⁻²⁴ of an exponent below 160, 1e-5.
    """
    if HIDING:
        l = tl.where(l == 0.0, 1.0, l)
    if WANTED == LOG_Y:
        result = d - tl.log(l)
    elif ANEW:
        result = tl.exp2(tl.fma(d, LOG2E, -tl.log2(l)))
    else:
        result = _exp(d) * (1.0 / l)
    return result


@triton.jit
def _store_ends(y, s, shift, l, strides_y, i2, i1, i0, lead, n, VECTOR: tl.constexpr, WANTED: tl.constexpr, HIDING: tl.constexpr):
    """y of them; shift and l: [1]."""
    w, keep = ends(only(lead), n, VECTOR)
    tl.store(y + start(strides_y, i2, i1, i0, VECTOR) + w, _normalise(s - only(shift), only(l), WANTED, HIDING), mask=keep)


@triton.jit
def _join(m, l, s, WANTED: tl.constexpr):
    """m and l with a block more: l is rescaled by exp(m_old − m)."""
    m_old = m
    m = tl.maximum(m, tl.max(s, axis=1))
    return m, l * _exp(m_old - _shift(m, WANTED)) + tl.sum(_exp(s - _shift(m, WANTED)[:, None]), axis=1)


@triton.jit
def _join_ends(m, l, s, WANTED: tl.constexpr):
    """The same with the ends."""
    m_old = m
    m = tl.maximum(m, tl.max(s, axis=0))
    return m, l * _exp(m_old - _shift(m, WANTED)) + tl.sum(_exp(s - only(_shift(m, WANTED))), axis=0)


@triton.jit
def _statistics(x, mask, bias, step_x, step_mask, step_bias, lead, i0, exists, scale, n, n0, blocks, WIDE: tl.constexpr,
                VECTOR: tl.constexpr, EDGES: tl.constexpr, MASK_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                WANTED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """m and l of whole rows but for their ends, block by block."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for block in range(blocks):
        w, keep = columns(block, BLOCK_N, lead, n, BLOCK_N, WIDE, VECTOR, EDGES)
        s = scores(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED, MASKED, BIASED, CAUSAL,
                   VECTOR, MASK_VECTOR)
        m, l = _join(m, l, s, WANTED)
    return m, l


@triton.jit
def _tile(x, y, mask, bias, strides_x, strides_y, strides_mask, strides_bias, scale, n, n0, span, part, mail, i2, i1, i0, exists,
          WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, MASK_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, WANTED: tl.constexpr,
          SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr, NARROW: tl.constexpr):
    """y of rows, or of one part of them, of which nothing is seen beyond the first of BLOCKS blocks."""
    before = lead(strides_x, i2, i1, i0, VECTOR, EDGES)
    row_x, row_mask = begin(x, strides_x, i2, i1, i0, VECTOR), begin(mask, strides_mask, i2, i1, i0, MASK_VECTOR)
    row_bias = begin(bias, strides_bias, i2, i1, i0, 1)
    if EDGES:  # asked for with the others
        of_ends = ask_ends(x, mask, bias, strides_x, strides_mask, strides_bias, i2, i1, i0, before, part, n, n0, VECTOR, MASKED,
                           BIASED, CAUSAL)
    asked, row, there = (), (), ()  # its pieces
    for piece in tl.static_range(PIECES):
        w, keep = columns(part, span, before, n, BLOCK_N, WIDE, VECTOR, EDGES, PARTS > 1, piece)
        there += (keep & exists[:, None],)
        asked += (ask(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], w, keep, before, i0, exists, n, n0, SCALED,
                      MASKED, BIASED, CAUSAL, VECTOR, MASK_VECTOR, NARROW, piece, BLOCK_N),)
    if MASKED or (CAUSAL and NARROW):
        under_way(n)
    mail = begun(mail, PARTS)
    if EDGES:
        s_ends = end_scores(of_ends, scale, SCALED, MASKED, BIASED)
    for piece in tl.static_range(PIECES):
        row += (waits(asked[piece], w, there[piece], before, i0, exists, scale, n, n0, SCALED, MASKED, BIASED, CAUSAL, VECTOR, NARROW,
                      piece, BLOCK_N),)
    best = row[0]
    for piece in tl.static_range(1, PIECES):
        best = larger(best, row[piece], SCALED, NARROW)
    m = tl.max(whole(best, scale, SCALED, NARROW), axis=1)
    if EDGES:
        m = tl.maximum(m, tl.max(s_ends, axis=0))
    shift = _shift(m, WANTED)[:, None]
    terms = _exp(below(row[0], shift, scale, SCALED, NARROW, False))
    for piece in tl.static_range(1, PIECES):
        terms += _exp(below(row[piece], shift, scale, SCALED, NARROW, False))
    l = tl.sum(terms, axis=1)
    if EDGES:
        l += tl.sum(_exp(s_ends - only(_shift(m, WANTED))), axis=0)
    if PARTS > 1:
        if INTERPRETED:  # programs run one after another: each works out the whole row's
            m, l = _statistics(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], before, i0, exists, scale, n, n0,
                               tl.cdiv(n, BLOCK_N), WIDE, VECTOR, EDGES, MASK_VECTOR, BLOCK_M, BLOCK_N, WANTED, SCALED, MASKED, BIASED,
                               CAUSAL)
            if EDGES:
                of_ends = ask_ends(x, mask, bias, strides_x, strides_mask, strides_bias, i2, i1, i0, before, 0, n, n0, VECTOR, MASKED,
                                   BIASED, CAUSAL)
                s_ends = end_scores(of_ends, scale, SCALED, MASKED, BIASED)
                m, l = _join_ends(m, l, s_ends, WANTED)
        else:
            ms, ls = exchange(m, l, mail, PARTS)
            m = tl.max(ms, axis=1)
            l = tl.sum(ls * _exp(ms - _shift(m, WANTED)[:, None]), axis=1)
    shift = _shift(m, WANTED)
    if NARROW and SCALED and (MASKED or CAUSAL) and WANTED != SUM:  # scale · x beyond float32: no term is left, as in an empty row
        l = tl.where(m == float("inf"), float("nan"), l)
    if WANTED == SUM:
        tl.store(y + i2 * strides_y[0] + i1 * strides_y[1] + i0 * strides_y[2], shift + tl.log(l), mask=exists & (part == 0))
    else:
        row_y = begin(y, strides_y, i2, i1, i0, VECTOR)
        ANEW: tl.constexpr = NARROW and y.dtype.element_ty != tl.float32
        for piece in tl.static_range(PIECES):
            d = below(row[piece], shift[:, None], scale, SCALED, NARROW, True)
            tl.store(ahead(row_y, piece, strides_y[3], BLOCK_N) + w * strides_y[3],
                     _normalise(d, l[:, None], WANTED, MASKED or CAUSAL, ANEW), mask=there[piece])
        if BLOCKS > 1:  # 0 or −∞, and NaN in rows that have one
            rest = _normalise(tl.full([BLOCK_M, 1], float("-inf"), tl.float32) - shift[:, None], l[:, None], WANTED, True, ANEW)
            for block in tl.static_range(1, BLOCKS):
                w, keep = columns(block, BLOCK_N, before, n, BLOCK_N, WIDE, VECTOR, EDGES)
                tl.store(row_y + w * strides_y[3], rest, mask=exists[:, None] & keep)
        if EDGES:  # noqa: SIM102  known when it is compiled
            if part == 0:
                if PARTS > 1:  # read again, rather than kept
                    of_ends = ask_ends(x, mask, bias, strides_x, strides_mask, strides_bias, i2, i1, i0, before, part, n, n0, VECTOR,
                                       MASKED, BIASED, CAUSAL)
                    s_ends = end_scores(of_ends, scale, SCALED, MASKED, BIASED)
                _store_ends(y, s_ends, shift, l, strides_y, i2, i1, i0, before, n, VECTOR, WANTED, MASKED or CAUSAL)


@triton.jit
def _resident(x, y, mask, bias, strides_x, strides_y, strides_mask, strides_bias, scale, n, n0, n1, groups, tiles_a_group, tiles, span,
              FLAT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
              MASK_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr,
              WANTED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr,
              NARROW: tl.constexpr, HALVES: tl.constexpr, SHARED: tl.constexpr, SIDE_BY_SIDE: tl.constexpr):
    """A tile of whole rows, or one of PARTS parts of a row, `span` elements each in PIECES of BLOCK_N; read once and written once.

    NARROW: elements of 16 bits wait as such, and are widened for each use. HALVES: rows of a triangle that see no more than half of their
    tile work on that half; so they issue as many instructions less as they move fewer bytes. They are begun by turns with those that see
    more, from both ends of the grid: in order, an SM would all but write for a while. SHARED: so many tiles of a group follow each other,
    then as many of the next.
    """
    part, tile, mail = enter(tl.program_id(0), PARTS, BLOCK_M)
    strides_x, strides_y = multiples(strides_x, SIDE_BY_SIDE), multiples(strides_y, SIDE_BY_SIDE)
    n0 = n0 // SIDE_BY_SIDE * SIDE_BY_SIDE
    if HALVES:
        tile = tl.where(tile % 2 == 0, tile // 2, tiles - 1 - tile // 2)
    i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M, SHARED)
    at = tile
    if not FLAT:
        _, at = place(tile, groups, tiles_a_group, SHARED)
    if HALVES and at * BLOCK_M + (BLOCK_M - 1) + (n - n0) < BLOCK_N // 2:
        _tile(x, y, mask, bias, strides_x, strides_y, strides_mask, strides_bias, scale, n, n0, span, part, mail, i2, i1, i0, exists, WIDE,
              VECTOR, EDGES, MASK_VECTOR, BLOCK_M, BLOCK_N // 2, 2, PARTS, PIECES, WANTED, SCALED, MASKED, BIASED, CAUSAL, NARROW)
    else:
        _tile(x, y, mask, bias, strides_x, strides_y, strides_mask, strides_bias, scale, n, n0, span, part, mail, i2, i1, i0, exists, WIDE,
              VECTOR, EDGES, MASK_VECTOR, BLOCK_M, BLOCK_N, 1, PARTS, PIECES, WANTED, SCALED, MASKED, BIASED, CAUSAL, NARROW)
    leave(mail, PARTS, BLOCK_M)


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
                           blocks, WIDE, VECTOR, EDGES, MASK_VECTOR, BLOCK_M, BLOCK_N, WANTED, SCALED, MASKED, BIASED, CAUSAL)
        if EDGES:
            of_ends = ask_ends(x, mask, bias, strides_x, strides_mask, strides_bias, i2, i1, i0, before, 0, n, n0, VECTOR, MASKED,
                               BIASED, CAUSAL)
            s_ends = end_scores(of_ends, scale, SCALED, MASKED, BIASED)
            m, l = _join_ends(m, l, s_ends, WANTED)
        if WANTED == SUM:
            tl.store(y + i2 * strides_y[0] + i1 * strides_y[1] + i0 * strides_y[2], _shift(m, WANTED) + tl.log(l), mask=exists)
        else:
            row_y = begin(y, strides_y, i2, i1, i0, VECTOR)
            for back in range(blocks):  # backwards: what was read last is nearest
                w, keep = columns(blocks - 1 - back, BLOCK_N, before, n, BLOCK_N, WIDE, VECTOR, EDGES)
                s = scores(row_x, row_mask, row_bias, strides_x[3], strides_mask[3], strides_bias[3], w, keep, before, i0, exists, scale,
                           n, n0, SCALED, MASKED, BIASED, CAUSAL, VECTOR, MASK_VECTOR)
                tl.store(row_y + w * strides_y[3], _normalise(s - _shift(m, WANTED)[:, None], l[:, None], WANTED, MASKED or CAUSAL),
                         mask=exists[:, None] & keep)
            if EDGES:
                _store_ends(y, s_ends, _shift(m, WANTED), l, strides_y, i2, i1, i0, before, n, VECTOR, WANTED, MASKED or CAUSAL)
