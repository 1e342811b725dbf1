"""Backward over parts of long rows, see `parts`."""
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


@gluon.jit(do_not_specialize=["tag"])
def parts_backward(dy, y, dx, words, tag, scale, rows, n, n0, n1, dy_extent: gl.int64, y_extent: gl.int64, dy2, dy1, dy0, y2, y1, y0,
                   dx2, dx1, dx0, VECTOR: gl.constexpr, EDGES: gl.constexpr, GROUP: gl.constexpr, VECTORS: gl.constexpr,
                   BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                   LOG: gl.constexpr, SCALED: gl.constexpr, HIDING: gl.constexpr):
    """dx of `rows` rows: groups of GROUP thread blocks, BLOCK_N elements of BLOCK_M = 1 row in each; words and tag as in the forward."""
    layout: gl.constexpr = thread_layout(VECTORS, VECTOR)
    SLOT: gl.constexpr = VECTORS * THREADS * VECTOR
    SLOTS: gl.constexpr = BLOCK_N // SLOT
    part, group, groups = gl.program_id(0) % GROUP, gl.program_id(0) // GROUP, gl.num_programs(0) // GROUP
    begin = part * BLOCK_N
    ds = gl.allocate_shared_memory(dy.dtype.element_ty, [SLOTS, VECTORS, THREADS, VECTOR], slot_layout(VECTOR))
    ps = gl.allocate_shared_memory(y.dtype.element_ty, [SLOTS, VECTORS, THREADS, VECTOR], slot_layout(VECTOR))
    words += group * (4 * GROUP)
    start_d, start_p = row_start(group, n0, n1, dy2, dy1, dy0), row_start(group, n0, n1, y2, y1, y0)
    for s in gl.static_range(SLOTS):
        end = (start_p % VECTOR).to(gl.int32) + n
        stop_d, stop_p = last_whole(end, start_d, dy_extent, VECTOR, EDGES), last_whole(end, start_p, y_extent, VECTOR, EDGES)
        fetch(ds.index(s), dy + start_d // VECTOR * VECTOR, begin + s * SLOT, stop_d, VECTORS, VECTOR)
        fetch(ps.index(s), y + start_p // VECTOR * VECTOR, begin + s * SLOT, stop_p, VECTORS, VECTOR)
        async_copy.commit_group()
    for row in range(group, rows, groups):
        start_d, start_p = row_start(row, n0, n1, dy2, dy1, dy0), row_start(row, n0, n1, y2, y1, y0)
        lead = (start_p % VECTOR).to(gl.int32)
        end = lead + n
        stop_d, stop_p = last_whole(end, start_d, dy_extent, VECTOR, EDGES), last_whole(end, start_p, y_extent, VECTOR, EDGES)
        complete(ds, dy + start_d // VECTOR * VECTOR, begin, stop_d, end, SLOTS, VECTORS, VECTOR, EDGES)
        complete(ps, y + start_p // VECTOR * VECTOR, begin, stop_p, end, SLOTS, VECTORS, VECTOR, EDGES)
        totals = gl.zeros([THREADS], gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        for s in gl.static_range(SLOTS):
            async_copy.wait_group(SLOTS - 1 - s)
            first = begin + s * SLOT
            if (first < lead) | (first + SLOT > end):
                w = first + places(VECTORS, VECTOR)
                inside = (w >= lead) & (w < end)
                ds.index(s).store(gl.where(inside, ds.index(s).load(layout), 0.0).to(dy.dtype.element_ty))
                ps.index(s).store(gl.where(inside, ps.index(s).load(layout), float("-inf") if LOG else 0.0).to(y.dtype.element_ty))
            d = ds.index(s).load(layout).to(gl.float32)
            if not LOG:
                p = ps.index(s).load(layout).to(gl.float32)
                d = gl.where(p == 0.0, 0.0, p * d) if HIDING else p * d
            totals += gl.sum(gl.sum(d, 2), 0)
        total = gl.sum(totals, 0)
        if GROUP > 1:
            buffer = words + (tag & 1) * (2 * GROUP)
            publish(buffer, part, 0.0, total, tag)
            total = gl.sum(collect(buffer, tag, GROUP)[1], 0)
            tag += 1
        following = row + groups
        start_d, start_p = row_start(following, n0, n1, dy2, dy1, dy0), row_start(following, n0, n1, y2, y1, y0)
        next_end = gl.where(following < rows, (start_p % VECTOR).to(gl.int32) + n, 0)
        next_d, next_p = last_whole(next_end, start_d, dy_extent, VECTOR, EDGES), last_whole(next_end, start_p, y_extent, VECTOR, EDGES)
        row_dx = dx + row_start(row, n0, n1, dx2, dx1, dx0) // VECTOR * VECTOR
        for s in gl.static_range(SLOTS):
            first = begin + s * SLOT
            d, p = ds.index(s).load(layout).to(gl.float32), ps.index(s).load(layout).to(gl.float32)
            fetch(ds.index(s), dy + start_d // VECTOR * VECTOR, first, next_d, VECTORS, VECTOR)
            fetch(ps.index(s), y + start_p // VECTOR * VECTOR, first, next_p, VECTORS, VECTOR)
            async_copy.commit_group()
            gone = p == (float("-inf") if LOG else 0.0)
            result = d - exp(p) * total if LOG else p * (d - total)
            if SCALED:
                result *= scale
            if HIDING:
                result = gl.where(gone, 0.0, result)
            store(row_dx, result.to(dx.dtype.element_ty), first, lead, end, VECTORS, VECTOR, EDGES)
