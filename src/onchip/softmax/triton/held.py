"""Pieces of a row that wait in shared memory, beside those in registers (NVIDIA, from Ampere on; elements of 32 bits).

A thread's registers hold a row only up to some 160 elements, and a thread block's share of an SM's shared memory is not used otherwise. A
piece is a vector a thread. It is copied without a register (cp.async) by the thread that reads it, so it takes no barrier, and by a few
lines of PTX, for Triton's own copies are of its pipelined loops alone. Triton knows nothing of that memory, which PTX limits to 48 KB.
"""
import triton
import triton.language as tl

BYTES = tl.constexpr(16)  # a thread and piece
AWAIT = tl.constexpr("cp.async.wait_all; mov.u32 $0, $1;")
# $8 to $11 say which elements the thread has: those it has of another piece.
TAKE = tl.constexpr("""{
    .reg .b32 place;
    mov.u32 place, %tid.x;
    mad.lo.u32 place, place, 16, $4;
    ld.shared.v4.f32 {$0, $1, $2, $3}, [place];
}""")


@triton.constexpr_function
def copies(pieces, piece):
    """PTX that starts to copy `pieces` of `piece` bytes each from $1 into new memory, $0: $2 bytes of them, zeros beyond."""
    one = ("setp.gt.s32 there, left, {0}; selp.b32 size, 16, 0, there;"
           "cp.async.cg.shared.global [place + {0}], [from + {0}], 16, size;")
    return f"""{{
    .reg .pred there;
    .reg .b32 place, left, size;
    .reg .b64 from;
    .shared .align 16 .b8 held[{pieces * piece}];
    mov.u32 $0, held;
    mov.u32 size, %tid.x;
    shl.b32 size, size, 4;
    add.u32 place, $0, size;
    sub.s32 left, $2, size;
    cvt.u64.u32 from, size;
    add.u64 from, from, $1;
    {" ".join(one.format(at * piece) for at in range(pieces))}
}}"""


@triton.jit
def hold(tensor, elements, HELD: tl.constexpr, BLOCK_N: tl.constexpr):
    """Start to copy HELD pieces from a pointer on, of which so many elements exist; the place of the first one."""
    HOW: tl.constexpr = copies(HELD, BLOCK_N * 4)
    return tl.inline_asm_elementwise(HOW, "=r,l,r", [tensor.to(tl.int64), elements * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_held(place):
    """`place`, when all is there that the thread has copied."""
    return tl.inline_asm_elementwise(AWAIT, "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take(place, piece, like):
    """The piece-th one, each thread the elements that it has of `like`. Read anew each time: so no register has it in between."""
    own = [place + piece * (BYTES // 4 * like.shape[1]), like.to(tl.float32)]
    return tl.inline_asm_elementwise(TAKE, "=f,=f,=f,=f,r,r,r,r,f,f,f,f", own, dtype=tl.float32, is_pure=False, pack=4)
