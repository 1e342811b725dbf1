"""Long rows, cut in parts that wait on chip: what the forward and the backward of such rows share (Gluon; NVIDIA, from Ampere on).

A row of 64 KB and more is more than a thread block's registers hold without spills, and a second read from memory costs a third of the
time. So a *group* of thread blocks takes a row, each a part of it in shared memory:

    fetch        16 bytes a thread at a time straight into shared memory (cp.async), slot by slot
    statistics   of each slot as it arrives, in each thread by itself; joined once, across the thread block
    exchange     through memory, if the group is more than one block (PUBLISH, AWAIT)
    result       from shared memory, slot by slot; a slot is refilled from the next row as soon as it is read, so reading never stops

Thread blocks are persistent, and a grid with groups is launched cooperatively: all blocks of a group run, so no wait is forever.

**Rows that start anywhere.** A row is read through the aligned window around it, from `lead` elements before its start: every access is
one of 16 bytes, whatever the row's length, but for the vector that would reach past the tensor's last element, which is read one by one.
What a window holds beyond its row, and what a mask hides, is overwritten in shared memory.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

WARPS = gl.constexpr(8)
THREADS = gl.constexpr(256)
LOG2E = gl.constexpr(1.4426950408889634)
# Two words of 64 bits, each a value and the tag above it: a word is whole, so there is neither a fence nor a flag. A thread asks for one
# block's pair and no other thread of its block does: a poll ends in no reduction (a row of 2²⁰ elements 8.9 → 8.2 µs), and L2 has one
# request for each pair and block (four rows of 2¹⁸ 8.5 → 7.9 µs; eight warps used to ask for the same 32).
PUBLISH = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    .reg .b64 a, b;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    mov.b64 a, {$2, $4};
    mov.b64 b, {$3, $4};
    @first st.relaxed.gpu.global.v2.b64 [$1], {a, b};
    mov.b32 $0, 0;
}""")
AWAIT = gl.constexpr("""{
    .reg .pred out;
    .reg .b32 tag_a, tag_b;
    .reg .b64 a, b;
    mov.b32 $0, 0xFF800000;
    mov.b32 $1, 0;
    setp.eq.s32 out, $4, 0;
    @out bra DONE;
AGAIN:
    ld.relaxed.gpu.global.v2.b64 {a, b}, [$2];
    mov.b64 {$0, tag_a}, a;
    mov.b64 {$1, tag_b}, b;
    setp.ne.b32 out, tag_a, $3;
    setp.ne.or.b32 out, tag_b, $3, out;
    @out bra AGAIN;
DONE:
}""")


@gluon.constexpr_function
def thread_layout(vectors, vector):
    """[vectors, threads, elements of a vector]: a thread reads what it copied itself."""
    return gl.BlockedLayout([vectors, 1, vector], [1, 32, 1], [1, 8, 1], [2, 1, 0])


@gluon.constexpr_function
def slot_layout(vector):
    """Neighbours in memory stay neighbours."""
    return gl.SwizzledSharedLayout(vector, 1, 1, [2, 1, 0])


@gluon.jit
def places(VECTORS: gl.constexpr, VECTOR: gl.constexpr):
    """Places in a slot, [VECTORS, THREADS, VECTOR]."""
    layout: gl.constexpr = thread_layout(VECTORS, VECTOR)
    a = gl.arange(0, VECTORS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    t = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    v = gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return (a * THREADS + t) * VECTOR + v


@gluon.jit
def fetch(slot, window, first, end, VECTORS: gl.constexpr, VECTOR: gl.constexpr):
    """Start to copy a slot from `first` elements after `window`, a pointer to 16 aligned bytes; nothing from `end` on is needed."""
    w = first + places(VECTORS, VECTOR)
    async_copy.async_copy_global_to_shared(slot, window + w, mask=w // VECTOR * VECTOR < end)


@gluon.jit
def last_whole(end, start, extent, VECTOR: gl.constexpr, EDGES: gl.constexpr):
    """Where to stop copying vectors of the row that begins at `start`: at its `end`, or when one reaches past the tensor's `extent`."""
    if EDGES:
        end = gl.minimum(end, gl.minimum(extent - start // VECTOR * VECTOR, 1 << 30).to(gl.int32) - (VECTOR - 1))
    return end


@gluon.jit
def complete(slots, window, begin, stop, end, SLOTS: gl.constexpr, VECTORS: gl.constexpr, VECTOR: gl.constexpr, EDGES: gl.constexpr):
    """Bring to a part what no whole vector brought, from `stop` to `end`: of a tensor's last row, some of its last elements."""
    SLOT: gl.constexpr = VECTORS * THREADS * VECTOR
    if EDGES:  # noqa: SIM102  known when it is compiled
        if (stop < end) & (begin < end) & (stop < begin + SLOTS * SLOT):
            async_copy.wait_group(0)
            at = (end - 1 - begin) // SLOT
            slot, w = slots.index(at), begin + at * SLOT + places(VECTORS, VECTOR)
            cut = (w // VECTOR * VECTOR >= stop) & (w < end)
            slot.store(gl.where(cut, gl.load(window + w, mask=cut, other=0), slot.load(thread_layout(VECTORS, VECTOR))))


@gluon.jit
def row_start(row, n0, n1, s2, s1, s0):
    """Offset of a row's first element, in 64 bits."""
    i0, above = row % n0, row // n0
    return (above // n1).to(gl.int64) * s2 + (above % n1).to(gl.int64) * s1 + i0.to(gl.int64) * s0


@gluon.jit
def exp(s):
    """In two instructions; `gl.exp` takes five, to keep results below 2⁻¹²⁶."""
    return gl.exp2(s * LOG2E)


@gluon.constexpr_function
def places_of(group):
    """A power of two that holds the group; a place is one thread's, unless there are more."""
    return max(1 << (group - 1).bit_length(), 256)


@gluon.jit
def publish(words, part, a, b, tag):
    """Make a block's two scalars known to its group, in its place among the words."""
    place = (words + 2 * part).to(gl.int64)
    gl.inline_asm_elementwise(PUBLISH, "=r,l,f,f,r", [place, a, b, tag], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def collect(words, tag, GROUP: gl.constexpr):
    """All the group's a and b, [a power of two], as soon as they carry the tag; −∞ and 0 beyond GROUP."""
    p = gl.arange(0, places_of(GROUP), gl.BlockedLayout([1], [32], [WARPS], [0]))
    asked = [(words + 2 * p).to(gl.int64), tag, (p < GROUP).to(gl.int32)]
    return gl.inline_asm_elementwise(AWAIT, "=&f,=&f,l,r,r", asked, dtype=(gl.float32, gl.float32), is_pure=False, pack=1)


@gluon.jit
def store(row, result, first, lead, end, VECTORS: gl.constexpr, VECTOR: gl.constexpr, EDGES: gl.constexpr):
    """Store a slot of a row whose window begins at `row`: whole vectors at once, those at its ends element by element."""
    w = first + places(VECTORS, VECTOR)
    if EDGES:
        v = w // VECTOR * VECTOR
        gl.store(row + w, result, mask=(v >= lead) & (v + VECTOR <= end))
        if (first < lead) | (first + VECTORS * THREADS * VECTOR > end):
            gl.store(row + w, result, mask=(w >= lead) & (w < end) & ((v < lead) | (v + VECTOR > end)))
    else:
        gl.store(row + w, result, mask=w // VECTOR * VECTOR < end)
