"""Where the rows of a tensor lie: any shape and strides, folded to three row dimensions and the reduced one.

Row r has coordinates (i₂, i₁, i₀) in dimensions of sizes (·, n₁, n₀); element j of it lies at i₂·s₂ + i₁·s₁ + i₀·s₀ + j·s of each tensor.
A tile takes its rows from the innermost dimension, or from the rows in one line when that dimension is shorter than the tile ("packed").

**Vectors.** A thread's access is 16 bytes wide where the compiler can see that nothing forbids it. Elements that follow each other are not
enough: rows of 1001 elements start anywhere, and a bound that is no multiple of a vector cuts vectors in two. So offsets are rounded to
vectors here, in a way the compiler understands, and a row that starts or ends inside a vector ("edges") is read in two pieces: its whole
vectors, and the elements of its first and last one one by one. An index w then counts from the vector in which the row starts, `lead`
elements before it.
"""
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.launcher import divisor
from onchip.softmax.triton import plan as plans
from onchip.softmax.triton.plan import Plan

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
INT32_MAX = 2**31 - 1
NARROW_VECTOR = 8  # elements of 16 bits in a vector
# Where groups share a mask: bytes of x, y and mask that a group moves at a turn, at most (2.4 to 4 µs of the card: when the next group asks
# for its rows of the mask, they have come from memory and are still in L2), fewest rows of a turn, and bytes of a whole group from which on
# it is worth it: an L2 of 50 MB still had the mask after 20 MB.
SHARED_BYTES, SHARED_ROWS, SHARED_FROM = 2**24, 8, 2**25


@dataclass(frozen=True)
class Rows:
    """Tensors of one shape seen as rows of `n` elements, and the tiles that cover them."""

    strides: dict[str, tuple[int, int, int, int]]  # of each tensor: s₂, s₁, s₀, s
    n: int
    n0: int
    n1: int
    groups: int  # n₂·n₁
    plan: Plan
    vector: int  # elements that are accessed at once
    edges: bool  # rows start and end inside vectors, in all tensors at the same elements
    mask_vector: int  # as `vector`, of the mask

    @property
    def count(self) -> int:
        """All rows."""
        return self.groups * self.n0

    @property
    def narrow(self) -> bool:
        """Elements may wait in the 16 bits they came in."""
        return narrow(self.vector, self.mask_vector, self.strides)

    @property
    def packed(self) -> bool:
        """Tiles take rows across the ends of the innermost dimension."""
        return self.groups > 1 and self.n0 < self.plan.block_m

    @property
    def tiles_a_group(self) -> int:
        """Tiles of one innermost dimension, unpacked."""
        return triton.cdiv(self.n0, self.plan.block_m)

    @property
    def shared(self) -> int:
        """Tiles that a group has at a turn, where groups have the rows of a mask or a bias in common and the L2 would not keep all of them
        from one group to the next; 0 where each group has all of its tiles at once."""
        sizes = self.groups // self.n1, self.n1
        beside = [steps for name, steps in self.strides.items() if name in ("mask", "bias") and steps[2]]
        common = any(size > 1 and step == 0 for steps in beside for size, step in zip(sizes, steps, strict=False))
        moved = self.plan.block_m * self.n * (2 * 16 // self.vector + 1)  # bytes of a tile
        at_once = math.gcd(self.tiles_a_group, 1 << max(1, SHARED_BYTES // moved).bit_length() - 1)
        enough = not self.packed and self.tiles_a_group * moved >= SHARED_FROM and at_once * self.plan.block_m >= SHARED_ROWS
        return at_once if common and enough else 0

    @cached_property
    def tiles(self) -> int:
        """All tiles. Below 2³¹: every tile but the last of a dimension is full, and no memory holds 2³¹ full ones."""
        return triton.cdiv(self.count, self.plan.block_m) if self.packed else self.groups * self.tiles_a_group

    def extent(self, name: str) -> int:
        """Elements from a tensor's first to its last one, both included."""
        s2, s1, s0, s = self.strides[name]
        return 1 + (self.groups // self.n1 - 1) * s2 + (self.n1 - 1) * s1 + (self.n0 - 1) * s0 + (self.n - 1) * s

    def programs(self, device: torch.device) -> int:
        """One for each tile, or as many as a streamed plan keeps in flight."""
        if self.plan.resident:
            return self.tiles * self.plan.parts
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        return min(self.tiles, self.plan.programs_per_sm * processors)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What every tile kernel is told of its rows and tiles."""
        plan = self.plan
        reach = (self.n + plan.block_n * plan.pieces + 2 * self.vector * self.edges) * max(1, *(s[3] for s in self.strides.values()))
        shape = {"n": self.n, "n0": self.n0, "n1": self.n1, "groups": self.groups, "tiles_a_group": divisor(self.tiles_a_group),
                 "tiles": self.tiles, "blocks": triton.cdiv(self.n, plan.block_n), "span": plan.span(self.n)}
        constants = {"FLAT": self.groups == 1, "PACKED": self.packed, "WIDE": reach > INT32_MAX, "VECTOR": self.vector, "EDGES": self.edges,
                     "MASK_VECTOR": self.mask_vector, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "PARTS": plan.parts,
                     "PIECES": plan.pieces}
        return shape | constants | {f"strides_{name}": steps for name, steps in self.strides.items()}


def narrow(vector: int, mask_vector: int, names: Collection[str]) -> bool:
    """Rows whose 16-bit elements may wait as they came: nothing but x and a mask of whole vectors makes y, or dy and y, of one type, dx."""
    return vector == NARROW_VECTOR and not set(names) - {"x", "y", "dy", "dx"} - ({"mask"} if mask_vector == vector else set())


def fold(tensors: dict[str, Tensor], dim: int, queries: bool = False, wide: tuple[str, ...] = ("x", "y")) -> Rows | None:
    """`tensors`, of one shape and not empty, as rows along `dim` < 0; with `queries` the second last dimension is n₀ by itself.

    Those in `wide` are accessed by vectors of 16 bytes of the first tensor where that can be. None when their strides need more than
    three row dimensions.
    """
    first = next(iter(tensors.values()))
    aligned = all(t.data_ptr() % 16 == 0 for t in tensors.values())
    return layout(first.shape, tuple((name, t.stride()) for name, t in tensors.items()), dim, queries, wide,
                  16 // first.element_size() if aligned else 1)


@lru_cache(maxsize=4096)
def layout(shape: torch.Size, strides: tuple[tuple[str, tuple[int, ...]], ...], dim: int, queries: bool, wide: tuple[str, ...],
           vector: int) -> Rows | None:
    """`fold` by strides; `vector`: elements that may be accessed at once where they follow each other and start at a multiple of it."""
    runs: list[tuple[int, tuple[int, ...]]] = []  # (size, stride of each tensor), outermost first
    for d in range(-len(shape), 0):
        alone = queries and d == -2
        if d == dim or (shape[d] == 1 and not alone):
            continue
        steps = tuple(s[d] for _, s in strides)
        # neighbours merge where they are one run of memory in every tensor
        if runs and not alone and all(outer == inner * shape[d] for outer, inner in zip(runs[-1][1], steps, strict=True)):
            runs[-1] = (runs[-1][0] * shape[d], steps)
        else:
            runs.append((shape[d], steps))
    if len(runs) > 3:
        return None
    n, none = shape[dim], (0,) * len(strides)
    (n2, s2), (n1, s1), (n0, s0) = runs[:-1] + [(1, none)] * (3 - len(runs)) + runs[-1:]  # where n₁ = 1 the kernel divides once less
    if n0 == 1:
        s0 = none
    columns = tuple(s[dim] for _, s in strides)
    across = n > 1 and any(0 < row < column for row, column in zip(s0, columns, strict=True))
    of = {name: steps for (name, _), *steps in zip(strides, s2, s1, s0, columns, strict=True)}
    whole, edges = n % vector == 0, n >= plans.EDGES_FROM  # what vectors need: rows made of them, or worth two ends beside them
    for s in zip(*(of[name][:3] for name in wide), strict=True):
        whole &= all(step % vector == 0 for step in s)
        edges &= all((step - s[0]) % vector == 0 for step in s)
    if across or any(of[name][3] != 1 for name in wide) or not (whole or edges):
        whole, vector = True, 1
    mask_vector = vector if whole and "mask" in of and of["mask"][3] == 1 and all(s % vector == 0 for s in of["mask"][:3]) else 1
    places = {name: (a, b, c, d) for name, (a, b, c, d) in of.items()}
    plan = plans.choose(n, across, not whole, "x" in of, narrow(vector, mask_vector, of), queries, "mask" in of, wide == ("x",))
    return Rows(places, n, n0, n1, n2 * n1, plan, vector, not whole, mask_vector)


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
