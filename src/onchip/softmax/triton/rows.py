"""Where the rows of a tensor lie: any shape and strides, folded to three row dimensions and the reduced one.

Row r has coordinates (i₂, i₁, i₀) in dimensions of sizes (·, n₁, n₀); element j of it lies at i₂·s₂ + i₁·s₁ + i₀·s₀ + j·s of each tensor.
A tile takes its rows from the innermost dimension, or from the rows in one line when that dimension is shorter than the tile ("packed").
"""
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.softmax.triton import plan as plans
from onchip.softmax.triton.plan import Plan

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """Tensors of one shape seen as rows of `n` elements, and the tiles that cover them."""

    strides: tuple[tuple[int, int, int, int], ...]  # of each tensor: s₂, s₁, s₀, s
    n: int
    n0: int
    n1: int
    groups: int  # n₂·n₁
    plan: Plan

    @property
    def packed(self) -> bool:
        """Tiles take rows across the ends of the innermost dimension."""
        return self.groups > 1 and self.n0 < self.plan.block_m

    @property
    def tiles_a_group(self) -> int:
        """Tiles of one innermost dimension, unpacked."""
        return triton.cdiv(self.n0, self.plan.block_m)

    @cached_property
    def tiles(self) -> int:
        """All tiles. Below 2³¹: every tile but the last of a dimension is full, and no memory holds 2³¹ full ones."""
        return triton.cdiv(self.groups * self.n0, self.plan.block_m) if self.packed else self.groups * self.tiles_a_group

    def programs(self, device: torch.device) -> int:
        """One for each tile, or as many as a streamed plan keeps in flight."""
        if self.plan.resident:
            return self.tiles
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        return min(self.tiles, self.plan.programs_per_sm * processors)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What every kernel is told about its tiles, and Triton about its warps."""
        plan = self.plan
        reach = (self.n + plan.block_n) * max(1, *(s[3] for s in self.strides))
        shape = {"n": self.n, "n0": self.n0, "n1": self.n1, "groups": self.groups, "tiles_a_group": self.tiles_a_group,
                 "PACKED": self.packed, "WIDE": reach > INT32_MAX}
        if not plan.resident:
            shape |= {"tiles": self.tiles, "blocks": triton.cdiv(self.n, plan.block_n)}
        return shape | {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "num_warps": plan.warps}


def fold(tensors: tuple[Tensor, ...], dim: int, queries: bool = False) -> tuple[Rows, tuple[Tensor, ...]]:
    """`tensors`, of one shape and not empty, as rows along `dim` < 0; with `queries` the second last dimension is n₀ by itself.

    Strides that need more than three row dimensions are rare enough for a copy; results, being contiguous, are never what is copied.
    """
    rows = layout(tensors[0].shape, tuple(t.stride() for t in tensors), dim, queries)
    return (rows, tensors) if rows else fold(tuple(t.contiguous() for t in tensors), dim, queries)


@lru_cache(maxsize=4096)
def layout(shape: torch.Size, strides: tuple[tuple[int, ...], ...], dim: int, queries: bool) -> Rows | None:
    """Row dimensions: neighbours merge where they are one run of memory in every tensor. None when more than three remain."""
    runs: list[tuple[int, tuple[int, ...]]] = []  # (size, stride of each tensor), outermost first
    for d in range(-len(shape), 0):
        alone = queries and d == -2
        if d == dim or (shape[d] == 1 and not alone):
            continue
        steps = tuple(s[d] for s in strides)
        if runs and not alone and all(outer == inner * shape[d] for outer, inner in zip(runs[-1][1], steps, strict=True)):
            runs[-1] = (runs[-1][0] * shape[d], steps)
        else:
            runs.append((shape[d], steps))
    if len(runs) > 3:
        return None
    (n2, s2), (n1, s1), (n0, s0) = [(1, (0,) * len(strides))] * (3 - len(runs)) + runs
    n, s = shape[dim], tuple(s[dim] for s in strides)
    across = n > 1 and any(0 < row < column for row, column in zip(s0, s, strict=True))
    return Rows(tuple(zip(s2, s1, s0, s, strict=True)), n, n0, n1, n2 * n1, plans.choose(n, across))


def on(device: torch.device) -> Any:
    """Launch there: a kernel goes to the current device, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def locate(tile, n0, n1, groups, tiles_a_group, PACKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """i₂, i₁, i₀ of a tile's rows, in 64 bits, and which of them exist."""
    lanes = tl.arange(0, BLOCK_M)
    if PACKED:
        row = tl.cast(tile, tl.int64) * BLOCK_M + lanes
        group = row // n0
        i0 = row % n0
        exists = group < groups
    else:
        group = tl.cast(tile // tiles_a_group, tl.int64)
        i0 = tl.cast(tile % tiles_a_group, tl.int64) * BLOCK_M + lanes
        exists = i0 < n0
    return group // n1, group % n1, i0, exists


@triton.jit
def begin(tensor, strides, i2, i1, i0):
    """Pointers to the first element of each row."""
    return tensor + (i2 * strides[0] + i1 * strides[1] + i0 * strides[2])[:, None]


@triton.jit
def columns(block, BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """Indices of a block's columns, in 64 bits where they or their distances need it."""
    if WIDE:
        block = tl.cast(block, tl.int64)
    return block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
