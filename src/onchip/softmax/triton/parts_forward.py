"""Forward over parts of long rows, see `parts`."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from onchip.softmax.triton.parts import (
    THREADS,
    collect,
    complete,
    exp,
    fetch,
    last_whole,
    places,
    publish,
    row_start,
    slot_layout,
    store,
    thread_layout,
)

LOG_Y, SUM = gl.constexpr(1), gl.constexpr(2)  # as in `tile_forward`


@gluon.jit
def shifted(m, WANTED: gl.constexpr):
    """What to subtract: m, or 0 where nothing has been seen but −∞; and for sums, which may be +∞, where m is."""
    m = gl.where(m == float("-inf"), 0.0, m)
    return gl.where(m == float("inf"), 0.0, m) if WANTED == SUM else m


@gluon.jit
def seen(row, n, n0, CAUSAL: gl.constexpr):
    """How many of a row's elements are below the triangle's edge."""
    return gl.minimum(n, gl.maximum(0, row % n0 + 1 + n - n0)) if CAUSAL else n


@gluon.jit(do_not_specialize=["tag"])
def parts_forward(x, y, mask, words, tag, scale, rows, n, n0, n1, x_extent: gl.int64, x2, x1, x0, y2, y1, y0, mask2, mask1, mask0,
                  mask_step, VECTOR: gl.constexpr, EDGES: gl.constexpr, GROUP: gl.constexpr, VECTORS: gl.constexpr,
                  BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WANTED: gl.constexpr, SCALED: gl.constexpr, MASKED: gl.constexpr,
                  CAUSAL: gl.constexpr, ONE: gl.constexpr):
    """y, log y or log Σ exp s of `rows` rows: groups of GROUP thread blocks, BLOCK_N elements of BLOCK_M = 1 row in each.

    words: 4 · GROUP for each group. tag: from it on, as many as a group has rows were never used before with these words. x_extent:
    elements from x's first to its last. ONE: a group has one row, whose terms of l wait in registers, each relative to its thread's m at
    the time: y is a product, and takes no second exponential.
    """
    layout: gl.constexpr = thread_layout(VECTORS, VECTOR)
    SLOT: gl.constexpr = VECTORS * THREADS * VECTOR
    SLOTS: gl.constexpr = BLOCK_N // SLOT
    part, group, groups = gl.program_id(0) % GROUP, gl.program_id(0) // GROUP, gl.num_programs(0) // GROUP
    begin = part * BLOCK_N  # of this part in the window
    slots = gl.allocate_shared_memory(x.dtype.element_ty, [SLOTS, VECTORS, THREADS, VECTOR], slot_layout(VECTOR))
    words += group * (4 * GROUP)
    start = row_start(group, n0, n1, x2, x1, x0)
    stop = last_whole((start % VECTOR).to(gl.int32) + seen(group, n, n0, CAUSAL), start, x_extent, VECTOR, EDGES)
    for s in gl.static_range(SLOTS):
        fetch(slots.index(s), x + start // VECTOR * VECTOR, begin + s * SLOT, stop, VECTORS, VECTOR)
        async_copy.commit_group()
    for row in range(group, rows, groups):
        start = row_start(row, n0, n1, x2, x1, x0)
        lead = (start % VECTOR).to(gl.int32)
        end = lead + seen(row, n, n0, CAUSAL)
        complete(slots, x + start // VECTOR * VECTOR, begin, last_whole(end, start, x_extent, VECTOR, EDGES), end, SLOTS, VECTORS, VECTOR,
                 EDGES)
        m = gl.full([THREADS], float("-inf"), gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        l = gl.zeros([THREADS], gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        kept = ()
        for s in gl.static_range(SLOTS):
            async_copy.wait_group(SLOTS - 1 - s)
            slot, first = slots.index(s), begin + s * SLOT
            if MASKED or (first < lead) | (first + SLOT > end):
                w = first + places(VECTORS, VECTOR)
                keep = (w >= lead) & (w < end)
                if MASKED:
                    keep &= gl.load(mask + row_start(row, n0, n1, mask2, mask1, mask0) + (w - lead) * mask_step, mask=keep, other=0) != 0
                hidden = float("-inf")
                if SCALED:
                    hidden = gl.where(scale < 0, float("inf"), float("-inf"))
                slot.store(gl.where(keep, slot.load(layout).to(gl.float32), hidden).to(x.dtype.element_ty))
            s_slot = slot.load(layout).to(gl.float32)
            if SCALED:
                s_slot *= scale
            m_old = m
            m = gl.maximum(m, gl.max(gl.max(s_slot, 2), 0))
            shift = shifted(m, WANTED)
            terms = exp(s_slot - shift[None, :, None])
            l = l * exp(m_old - shift) + gl.sum(gl.sum(terms, 2), 0)
            if ONE:
                kept += ((terms, m),)
        row_m = gl.max(m, 0)
        row_l = gl.sum(l * exp(m - shifted(row_m, WANTED)), 0)
        if GROUP > 1:
            buffer = words + (tag & 1) * (2 * GROUP)  # two take turns: no block is two rows ahead of another
            publish(buffer, part, row_m, row_l, tag)
            ms, ls = collect(buffer, tag, GROUP)
            row_m = gl.max(ms, 0)
            row_l = gl.sum(ls * exp(ms - shifted(row_m, WANTED)), 0)
            tag += 1
        shift = shifted(row_m, WANTED)
        row_y = row_start(row, n0, n1, y2, y1, y0)
        if WANTED == SUM:  # noqa: SIM102  known when it is compiled, which `part` is not
            if part == 0:
                gl.store(y + row_y, (shift + gl.log(row_l)).to(y.dtype.element_ty))
        if MASKED or CAUSAL:
            row_l = gl.where(row_l == 0.0, 1.0, row_l)
        norm = gl.log(row_l) if WANTED == LOG_Y else 1.0 / row_l
        following = row + groups
        start = row_start(following, n0, n1, x2, x1, x0)
        next_end = gl.where(following < rows, (start % VECTOR).to(gl.int32) + seen(following, n, n0, CAUSAL), 0)
        next_stop = last_whole(next_end, start, x_extent, VECTOR, EDGES)
        for s in gl.static_range(SLOTS):
            slot, first = slots.index(s), begin + s * SLOT
            if not ONE:
                if WANTED != SUM:
                    s_slot = slot.load(layout).to(gl.float32)
                fetch(slot, x + start // VECTOR * VECTOR, first, next_stop, VECTORS, VECTOR)
                async_copy.commit_group()
            if WANTED != SUM:
                if ONE:
                    terms, above = kept[s]
                    result = terms * (exp(above - shift) * norm)[None, :, None]
                else:
                    if SCALED:
                        s_slot *= scale
                    s_slot -= shift
                    result = s_slot - norm if WANTED == LOG_Y else exp(s_slot) * norm
                store(y + row_y // VECTOR * VECTOR, result.to(y.dtype.element_ty), first, lead, lead + n, VECTORS, VECTOR, EDGES)
