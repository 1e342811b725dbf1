"""Where the rows of a tensor lie: any shape and strides, folded to three row dimensions and the reduced one.

Row r has coordinates (i₂, i₁, i₀) in dimensions of sizes (·, n₁, n₀); element j of it lies at i₂·s₂ + i₁·s₁ + i₀·s₀ + j·s of each tensor.
A tile takes its rows from the innermost dimension, or from the rows in one line when that dimension is shorter than the tile ("packed").
"""
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from onchip.launcher import divisor
from onchip.softmax.triton import plan as plans
from onchip.softmax.triton.plan import Plan

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
    mask_vector: int  # as `vector`, of a mask whose rows start inside vectors where those of the first tensor do
    side_by_side: int  # rows of which the elements of one column are accessed at once, as a vector; 1 where they do not lie so

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
                     "PIECES": plan.pieces, "SIDE_BY_SIDE": self.side_by_side}
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
           at_once: int) -> Rows | None:
    """`fold` by strides; `at_once`: elements that may be accessed so where they follow each other and start at a multiple of it."""
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
    n, none, vector = shape[dim], (0,) * len(strides), at_once
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
    beside = of["mask"] if "mask" in of and of["mask"][3] == 1 else None
    mask_vector = vector if beside and all((a - b) % vector == 0 for a, b in zip(beside[:3], of[wide[0]][:3], strict=True)) else 1
    side_by_side = across and n0 % at_once == 0 and all(
        s0 == 1 and not any(step % at_once for step in (s2, s1, s)) for name, (s2, s1, s0, s) in of.items() if name not in ("mask", "bias"))
    places = {name: (a, b, c, d) for name, (a, b, c, d) in of.items()}
    plan = plans.choose(n, across, not whole, "x" in of, narrow(vector, mask_vector, of), queries, "mask" in of, wide == ("x",))
    return Rows(places, n, n0, n1, n2 * n1, plan, vector, not whole, mask_vector, at_once if side_by_side else 1)
