"""Which rows and columns a tile has, where they lie (`onchip.softmax.triton.rows` folds tensors so), and how its elements are read.

**Vectors.** A thread's access is 16 bytes wide where the compiler can see that nothing forbids it. Elements that follow each other are not
enough: rows of 1001 elements start anywhere, and a bound that is no multiple of a vector cuts vectors in two. So offsets are rounded to
vectors here, in a way the compiler understands, and a row that starts or ends inside a vector ("edges") is read in two pieces: its whole
vectors, and the elements of its first and last one one by one. An index w then counts from the vector in which the row starts, `lead`
elements before it.
"""
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Two elements of 16 bits in float32, by instructions that the compiler cannot tell to do the same.
BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
BF16_AGAIN = tl.constexpr("prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;")
FP16 = tl.constexpr("{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}")
FP16_AGAIN = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 turned;
    prmt.b32 turned, $2, 0, 0x1032;
    mov.b32 {high, low}, turned;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}""")


@triton.jit
def over(x, d):
    """x // d for 0 ≤ x < 2³¹ and d from `onchip.launcher.divisor`: a program's first load waits for it."""
    high = tl.umulhi(2 * tl.cast(x, tl.uint32), tl.cast(d[1], tl.uint32))
    return tl.cast(high >> tl.cast(d[2], tl.uint32), tl.int32)


@triton.jit
def place(tile, groups, tiles_a_group, SHARED: tl.constexpr):
    """A tile's group, and which of it the tile is. SHARED: the groups take turns, of so many tiles each."""
    if SHARED:
        turn = tile // SHARED
        group, at = turn % groups, turn // groups * SHARED + tile % SHARED
    else:
        group = over(tile, tiles_a_group)
        at = tile - group * tiles_a_group[0]
    return group, at


@triton.jit
def locate(tile, n0, n1, groups, tiles_a_group, FLAT: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr,
           SHARED: tl.constexpr = 0):
    """i₂, i₁, i₀ of a tile's rows, in 64 bits, and which of them exist. FLAT: there is one group; SHARED: see `place`."""
    lanes = tl.arange(0, BLOCK_M)
    if FLAT:  # no division: it would take as many instructions as two elements of a row
        group = tl.cast(0, tl.int64)
        i0 = tl.cast(tile, tl.int64) * BLOCK_M + lanes
        exists = i0 < n0
    elif PACKED:
        row = tl.cast(tile, tl.int64) * BLOCK_M + lanes
        group = row // n0
        i0 = row % n0
        exists = group < groups
    else:
        group, at = place(tile, groups, tiles_a_group, SHARED)
        group = tl.cast(group, tl.int64)
        i0 = tl.cast(at, tl.int64) * BLOCK_M + lanes
        exists = i0 < n0
    return group // n1, group % n1, i0, exists


@triton.jit
def multiples(strides, VECTOR: tl.constexpr):
    """`strides` of neighbouring rows, in a way that shows the compiler what they are: all but the third multiples of VECTOR."""
    if VECTOR > 1:
        strides = (strides[0] // VECTOR * VECTOR, strides[1] // VECTOR * VECTOR, strides[2], strides[3] // VECTOR * VECTOR)
    return strides


@triton.jit
def begin(tensor, strides, i2, i1, i0, VECTOR: tl.constexpr):
    """Pointers to the vector in which each row begins."""
    return tensor + ((i2 * strides[0] + i1 * strides[1] + i0 * strides[2]) // VECTOR * VECTOR)[:, None]


@triton.jit
def lead(strides, i2, i1, i0, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    """Elements from there to the row's first one."""
    return ((i2 * strides[0] + i1 * strides[1] + i0 * strides[2]) % VECTOR).to(tl.int32)[:, None] if EDGES else 0


@triton.jit
def columns(block, step, lead, n, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
            CUT: tl.constexpr = False, PIECE: tl.constexpr = 0):
    """Indices w of a block of whole vectors, in 64 bits where they or their distances need it, and which of them are the row's.

    Blocks begin `step` elements after each other; CUT: a block ends where the next one begins. A block is one piece of BLOCK_N elements or
    more, and `keep` is of the PIECE-th, w of the first: `ahead` has the way from there.
    """
    if WIDE:
        block = tl.cast(block, tl.int64)
    first = block * (step // VECTOR * VECTOR)
    w, stop = first + tl.arange(0, BLOCK_N)[None, :], n
    if EDGES:
        w += VECTOR
        first += VECTOR
        stop = lead + n - (VECTOR - 1)
    if CUT:
        stop = tl.minimum(stop, first + step)
    keep = w // VECTOR * VECTOR < stop - PIECE * BLOCK_N
    return w, keep


@triton.jit
def ahead(row, piece, step, BLOCK_N: tl.constexpr):
    """`row` + so many pieces: a constant in 64 bits, which instructions hold. Added to w, in 32, it would take sums for each access."""
    return row + tl.cast(piece * BLOCK_N, tl.int64) * step


@triton.jit
def ends(lead, n, VECTOR: tl.constexpr):
    """The same for the first vector of a tile's only row and the last one, element by element: [2 · VECTOR], `lead` a scalar.

    Of one dimension, so that a thread has one of them. Shaped like a tile, whose threads have a vector each, it would have eight of them,
    and need shared memory and two barriers to store them: 18 instructions an element at 4095 columns of bf16 in place of 14.
    """
    q = tl.arange(0, 2 * VECTOR)
    last = tl.maximum((lead + n) // VECTOR * VECTOR, VECTOR)
    w = tl.where(q < VECTOR, q, last + q - VECTOR)
    return w, (w >= lead) & (w < lead + n)


@triton.jit
def only(a):
    """The one element of `a`, a scalar."""
    return tl.sum(tl.reshape(a, [1]), axis=0)


@triton.jit
def start(strides, i2, i1, i0, VECTOR: tl.constexpr):
    """Elements from a tensor's first one to the vector in which the tile's only row begins, a scalar."""
    return only((i2 * strides[0] + i1 * strides[1] + i0 * strides[2]) // VECTOR * VECTOR)


@triton.jit
def widen(x, AGAIN: tl.constexpr):
    """x in float32. AGAIN: elements of 16 bits that have been widened before are so anew: else the compiler would keep what it got then, in
    twice the registers. Two of bf16 take two instructions; the compiler's own way takes three."""
    if INTERPRETED or x.dtype == tl.float32:
        wide = x.to(tl.float32)
    else:
        HOW: tl.constexpr = (FP16_AGAIN if AGAIN else FP16) if x.dtype == tl.float16 else (BF16_AGAIN if AGAIN else BF16)
        wide = tl.inline_asm_elementwise(HOW, "=&f,=&f,r", [x.to(tl.int16, bitcast=True)], dtype=tl.float32, is_pure=True, pack=2)
    return wide


@triton.jit
def under_way(n):
    """All loads before it are, when one of them is waited for. In straight-line code ptxas, to save registers, puts off some until the
    first have arrived and been used: two turns of memory for one. No row is empty, but as a branch it keeps both sides apart."""
    if not INTERPRETED and n <= 0:
        tl.inline_asm_elementwise("trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
