"""Backward kernels: dx = scale · y ∘ (dy − Σ y ∘ dy), or scale · (dy − exp(y) · Σ dy) for the logarithm."""
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
    start,
    under_way,
    widen,
)
from onchip.softmax.triton.cluster import begun, enter, exchange, leave
from onchip.softmax.triton.held import await_held, hold, take

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _read(dy, y, step_dy, step_y, w, keep, LOG: tl.constexpr):
    """dy and y as they come; softmax, or the logarithm of it, is 0 where there is none."""
    return (tl.load(dy + w * step_dy, mask=keep, other=0.0),
            tl.load(y + w * step_y, mask=keep, other=float("-inf") if LOG else 0.0))


@triton.jit
def _values(d, y, LOG: tl.constexpr, HIDING: tl.constexpr, AGAIN: tl.constexpr = False):
    """dy, p = softmax (y is p or log p) and where the result was selected, or is as good as: there softmax ignores dy."""
    d, p = widen(d, AGAIN), widen(y, AGAIN)
    gone = p == (float("-inf") if LOG else 0.0)
    if LOG:
        p = tl.exp2(p * LOG2E)
    elif HIDING:
        d = tl.where(gone, 0.0, d)
    return d, p, gone


@triton.jit
def _load(dy, y, step_dy, step_y, w, keep, LOG: tl.constexpr, HIDING: tl.constexpr):
    d, y = _read(dy, y, step_dy, step_y, w, keep, LOG)
    return _values(d, y, LOG, HIDING)


@triton.jit
def _gradient(d, p, gone, total, scale, LOG: tl.constexpr, SCALED: tl.constexpr, HIDING: tl.constexpr):
    """dx of a block from the rows' `total`, [rows, 1]: Σ p ∘ dy, or Σ dy for the logarithm."""
    dx = d - p * total if LOG else p * (d - total)
    if SCALED:
        dx *= scale
    return tl.where(gone, 0.0, dx) if HIDING else dx


@triton.jit
def _hold(dy, strides_dy, i2, i1, i0, lead, part, span, n, VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK_N: tl.constexpr,
          KEPT: tl.constexpr, PIECES: tl.constexpr):
    """Pieces KEPT to PIECES of a part, see `columns`, on their way to shared memory."""
    first = part * (span // VECTOR * VECTOR) + VECTOR * EDGES
    stop = tl.minimum(n if not EDGES else only(lead) + n - (VECTOR - 1), first + span)
    first += KEPT * BLOCK_N
    return hold(dy + start(strides_dy, i2, i1, i0, VECTOR) + first, stop - first, PIECES - KEPT, BLOCK_N)


@triton.jit
def _load_ends(dy, y, strides_dy, strides_y, i2, i1, i0, lead, part, n, VECTOR: tl.constexpr, LOG: tl.constexpr, HIDING: tl.constexpr):
    """The same of a row's first vector and its last one, element by element; the row's first part has them."""
    w, keep = ends(only(lead), n, VECTOR)
    dy, y = dy + start(strides_dy, i2, i1, i0, VECTOR), y + start(strides_y, i2, i1, i0, VECTOR)
    return _load(dy, y, 1, 1, w, keep & (part == 0), LOG, HIDING)


@triton.jit
def _store_ends(dx, d, p, gone, total, scale, strides_dx, i2, i1, i0, lead, n, VECTOR: tl.constexpr, LOG: tl.constexpr,
                SCALED: tl.constexpr, HIDING: tl.constexpr):
    """dx of them; `total`: [1]."""
    w, keep = ends(only(lead), n, VECTOR)
    dx += start(strides_dx, i2, i1, i0, VECTOR)
    tl.store(dx + w, _gradient(d, p, gone, only(total), scale, LOG, SCALED, HIDING), mask=keep)


@triton.jit
def _total(dy, y, step_dy, step_y, lead, exists, n, blocks, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr, HIDING: tl.constexpr):
    """Σ p ∘ dy of whole rows but for their ends, or Σ dy, block by block."""
    total = tl.zeros([BLOCK_M], tl.float32)
    for block in range(blocks):
        w, keep = columns(block, BLOCK_N, lead, n, BLOCK_N, WIDE, VECTOR, EDGES)
        d, p, _gone = _load(dy, y, step_dy, step_y, w, keep & exists[:, None], LOG, HIDING)
        total += tl.sum(d if LOG else p * d, axis=1)
    return total


@triton.jit
def _resident(dy, y, dx, strides_dy, strides_y, strides_dx, scale, n, n0, n1, groups, tiles_a_group, span, FLAT: tl.constexpr,
              PACKED: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr,
              HIDING: tl.constexpr, NARROW: tl.constexpr, HELD: tl.constexpr, SIDE_BY_SIDE: tl.constexpr):
    """A tile of whole rows, or one of PARTS parts of a row in PIECES of BLOCK_N: two reads, one write. NARROW: 16 bits wait as such.
    HELD: of a part's dy, in float32, so many pieces wait in shared memory."""
    KEPT: tl.constexpr = PIECES if INTERPRETED else PIECES - HELD
    part, tile, mail = enter(tl.program_id(0), PARTS, BLOCK_M)
    strides_dy, strides_y = multiples(strides_dy, SIDE_BY_SIDE), multiples(strides_y, SIDE_BY_SIDE)
    strides_dx, n0 = multiples(strides_dx, SIDE_BY_SIDE), n0 // SIDE_BY_SIDE * SIDE_BY_SIDE
    i2, i1, i0, exists = locate(tile, n0, n1, groups, tiles_a_group, FLAT, PACKED, BLOCK_M)
    before = lead(strides_y, i2, i1, i0, VECTOR, EDGES)
    row_dy, row_y = begin(dy, strides_dy, i2, i1, i0, VECTOR), begin(y, strides_y, i2, i1, i0, VECTOR)
    place = 0
    if KEPT < PIECES:  # the first to be asked for: they need no register
        place = _hold(dy, strides_dy, i2, i1, i0, before, part, span, n, VECTOR, EDGES, BLOCK_N, KEPT, PIECES)
    if EDGES:  # asked for with the others
        d_ends, p_ends, gone_ends = _load_ends(dy, y, strides_dy, strides_y, i2, i1, i0, before, part, n, VECTOR, LOG, HIDING)
    ds, ys, there = (), (), ()  # the row's pieces
    for piece in tl.static_range(PIECES):
        w, keep = columns(part, span, before, n, BLOCK_N, WIDE, VECTOR, EDGES, PARTS > 1, piece)
        there += (keep & exists[:, None],)
        d, p = _read(ahead(row_dy, piece, strides_dy[3], BLOCK_N), ahead(row_y, piece, strides_y[3], BLOCK_N), strides_dy[3], strides_y[3],
                     w, there[piece], LOG)
        ds += (d,)
        ys += (p,)
    under_way(n)
    mail = begun(mail, PARTS)
    d, p, gone = _values(ds[0], ys[0], LOG, HIDING)
    terms = d if LOG else p * d
    if KEPT < PIECES:
        place = await_held(place)
    for piece in tl.static_range(1, PIECES):
        d, p, gone = _values(take(place, piece - KEPT, ys[piece]) if piece >= KEPT else ds[piece], ys[piece], LOG, HIDING)
        terms += d if LOG else p * d
    total = tl.sum(terms, axis=1)
    if EDGES:
        total += tl.sum(d_ends if LOG else p_ends * d_ends, axis=0)
    if PARTS > 1:
        if INTERPRETED:  # programs run one after another: each works out the whole row's
            total = _total(row_dy, row_y, strides_dy[3], strides_y[3], before, exists, n, tl.cdiv(n, BLOCK_N), WIDE, VECTOR, EDGES,
                           BLOCK_M, BLOCK_N, LOG, HIDING)
            if EDGES:
                d_ends, p_ends, gone_ends = _load_ends(dy, y, strides_dy, strides_y, i2, i1, i0, before, 0, n, VECTOR, LOG, HIDING)
                total += tl.sum(d_ends if LOG else p_ends * d_ends, axis=0)
        else:
            _, totals = exchange(total, total, mail, PARTS)
            total = tl.sum(totals, axis=1)
    row_dx = begin(dx, strides_dx, i2, i1, i0, VECTOR)
    for piece in tl.static_range(PIECES):
        d, p, gone = _values(take(place, piece - KEPT, ys[piece]) if piece >= KEPT else ds[piece], ys[piece], LOG, HIDING, NARROW)
        tl.store(ahead(row_dx, piece, strides_dx[3], BLOCK_N) + w * strides_dx[3],
                 _gradient(d, p, gone, total[:, None], scale, LOG, SCALED, HIDING), mask=there[piece])
    if EDGES:  # noqa: SIM102  known when it is compiled
        if part == 0:
            _store_ends(dx, d_ends, p_ends, gone_ends, total, scale, strides_dx, i2, i1, i0, before, n, VECTOR, LOG, SCALED, HIDING)
    leave(mail, PARTS, BLOCK_M)


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
        total = _total(row_dy, row_y, strides_dy[3], strides_y[3], before, exists, n, blocks, WIDE, VECTOR, EDGES, BLOCK_M,
                       BLOCK_N, LOG, HIDING)
        if EDGES:
            d_ends, p_ends, gone_ends = _load_ends(dy, y, strides_dy, strides_y, i2, i1, i0, before, 0, n, VECTOR, LOG, HIDING)
            total += tl.sum(d_ends if LOG else p_ends * d_ends, axis=0)
        for back in range(blocks):  # backwards: what was read last is nearest
            w, keep = columns(blocks - 1 - back, BLOCK_N, before, n, BLOCK_N, WIDE, VECTOR, EDGES)
            keep &= exists[:, None]
            d, p, gone = _load(row_dy, row_y, strides_dy[3], strides_y[3], w, keep, LOG, HIDING)
            tl.store(row_dx + w * strides_dx[3], _gradient(d, p, gone, total[:, None], scale, LOG, SCALED, HIDING), mask=keep)
        if EDGES:
            _store_ends(dx, d_ends, p_ends, gone_ends, total, scale, strides_dx, i2, i1, i0, before, n, VECTOR, LOG, SCALED, HIDING)
