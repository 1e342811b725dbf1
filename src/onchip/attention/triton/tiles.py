"""Which tile each kernel runs: a table, and the choice by head dim, dtype and the card's shared memory.

The table is data: for each kernel, element size and head-dim block one tile a class of card. A class is named by the shared memory a block
may have; a card takes the largest class it holds. The largest class's tiles up to head dim 128, and those of `DESCRIBED`, are the fastest
of sweeps on an H200 (`benchmarks/attention_tiles.py`; figures in docs/notes/triton-attention.md), the others were chosen from the
compiler's report: shared memory, no spills in the unmasked loop. `tests/attention/test_triton_compile.py` compiles rows for their class.
"""
from functools import lru_cache
from typing import NamedTuple

import torch

KIB = 1024
BUDGETS = (227 * KIB, 163 * KIB, 99 * KIB, 64 * KIB)  # Hopper and later · A100 · RTX 30/40, L4, L40 · AMD CDNA
MOST_ROWS = 256  # no tile is taller or wider: what row statistics are padded to


class Tile(NamedTuple):
    """bm query rows × bn keys, run by `warps` warps; loads run `stages` − 1 blocks ahead."""

    bm: int
    bn: int
    warps: int
    stages: int


# kernel → (element bytes, head-dim block) → tiles for BUDGETS. Blocks below 64 run the tile of 64.
TABLE: dict[str, dict[tuple[int, int], tuple[Tile, Tile, Tile, Tile]]] = {
    "forward": {
        (2, 64): (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        (2, 128): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
        (2, 256): (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
        (2, 512): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 4, 1)),
        (4, 64): (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 4, 2)),
        (4, 128): (Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)),
        (4, 256): (Tile(16, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
        (4, 512): (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "queries": {
        (2, 64): (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        (2, 128): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)),
        (2, 256): (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1)),
        (2, 512): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        (4, 64): (Tile(128, 64, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
        (4, 128): (Tile(128, 32, 8, 1), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
        (4, 256): (Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        (4, 512): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(8, 16, 4, 1), Tile(8, 16, 4, 1)),
    },
    "keys": {
        (2, 64): (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
        (2, 128): (Tile(64, 128, 8, 3), Tile(32, 128, 8, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)),
        (2, 256): (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4, 1)),
        (2, 512): (Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        (4, 64): (Tile(32, 128, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
        (4, 128): (Tile(32, 128, 8, 1), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
        (4, 256): (Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        (4, 512): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 8, 4, 1), Tile(16, 8, 4, 1)),
    },
    "bias": {
        (2, 64): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
        (2, 128): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
        (2, 256): (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
        (2, 512): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        (4, 64): (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        (4, 128): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
        (4, 256): (Tile(32, 32, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        (4, 512): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(8, 8, 4, 1), Tile(8, 8, 4, 1)),
    },
}

# The same for calls of the largest class whose whole blocks come through tensor descriptors, where another tile is faster. Without the
# addresses of 16-byte pieces (32 to 64 registers a thread) these keep their loop in registers; by pointers they spill there.
DESCRIBED: dict[str, dict[tuple[int, int], Tile]] = {
    "forward": {(2, 128): Tile(128, 64, 4, 2)},
    "keys": {(2, 64): Tile(128, 64, 4, 2), (2, 128): Tile(64, 64, 4, 2), (2, 256): Tile(64, 64, 8, 2)},
}


def pick(kernel: str, shared: int, size: int, dim: int, extra: bool, described: bool) -> Tile:
    """The tile of a kernel for head-dim block `dim` and elements of `size` bytes where a block may have `shared` bytes of shared memory.

    `extra`: what a call does pair by pair (bias, mask, dropout, softcap, ALiBi) takes registers and room of its own, so it runs the tile of
    the next smaller class of card. `described`: its operands have tensor descriptors.
    """
    level = min(sum(budget > shared for budget in BUDGETS) + extra, len(BUDGETS) - 1)
    key = size, max(dim, 64)
    tile = TABLE[kernel][key][level]
    return DESCRIBED.get(kernel, {}).get(key, tile) if described and level == 0 else tile


def choose(kernel: str, device: torch.device, dtype: torch.dtype, dim: int, extra: bool, described: bool = False) -> Tile:
    """`pick` for a call on `device`."""
    return pick(kernel, shared_memory(device), dtype.itemsize, dim, extra, described)


def rows(dim: int) -> Tile:
    """The tile of the row-statistics kernel, which has no matmul: 8192 elements of O and of dO."""
    return Tile(max(8192 // dim, 16), 0, 4, 1)


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA card; (0, 0) of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else (0, 0)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may have on `device`. A CPU (the interpreter) counts as the largest card."""
    if device.type != "cuda":
        return BUDGETS[0]
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
