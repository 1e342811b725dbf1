"""The Hopper kernels as the compiler makes them, without a GPU: no spills, wgmma that overlaps, the shared memory the planner counts."""
import inspect
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.hopper import launch, offline, tiles
from onchip.roofline.hardware import GPUS
from onchip.roofline.tiles import BUDGETS, TileConfig, footprint

GROUPS = 12  # processes, so that workers share the compilations; each also pays for its imports

# Bytes a thread that may go to local memory, by head dims: what no loop over blocks needs, written once and read at most once a tile.
MAY_SPILL = {(192, 128): 28, (192, 192): 32, (256, 256): 44}


def more(tile: tiles.Tile) -> int:
    """Bytes of q and o beyond the planner's one slot for both."""
    return 2 * tile.rows * (tile.dim * (tile.queries - 1) + tile.dim_v // tile.pieces)


@pytest.mark.parametrize("group", range(GROUPS))
def test_compiled_kernels(group):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "onchip.attention.hopper.offline", "--start", str(group), "--of", str(GROUPS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(offline.configurations()[group::GROUPS])
    for made in map(json.loads, lines):
        tile, features, counts = tiles.Tile(**made["tile"]), made["features"], made["instructions"]
        what = f"{tile.dim}/{tile.dim_v} {made['dtype']} {sorted(features)}"
        assert made["local_accesses_in_loops"] == 0, what
        allowed = MAY_SPILL.get((tile.dim, tile.dim_v), 0)
        assert max(made["spill_stores"], made["spill_loads"]) <= allowed, what
        assert 4 * max(counts["STL"], counts["LDL"]) <= allowed, what
        # q kᵀ is written out before the first tile, in each loop (2; 3 with a window's left end) and after them, p v but for the first
        loops = 3 if features.get("left") else 2
        qk, pv = tile.dim // 16, tile.keys // 16 * (2 if tile.v1 else 1)
        assert made["wgmma"] == tile.consumers * ((2 + loops) * qk + (1 + loops) * pv), what
        # as many waits as the source has: ptxas, when it cannot prove a wgmma safe, adds one after each
        assert counts["DEPBAR"] == tile.consumers * (1 + 2 * (loops + 1)), what
        assert not [note for note in made["ptxas_notes"] if "wgmma" in note.lower()], what
        assert made["mma"] == 0, what
        assert made["threads"] == 128 * (tile.consumers + 1), what
        assert made["registers"] == tile.max_registers, what
        # the planner's q, k, v and barriers, a second q, o, and what Triton adds for words, captures and reductions
        config = TileConfig(tile.rows, tile.keys, stages=tile.stages, consumers=tile.consumers)
        planned = footprint(config, made["dtype"], tile.dim, tile.dim_v).smem + more(tile)
        assert made["planned_bytes"] == planned, what
        assert planned <= made["shared_bytes"] <= planned + 1024, what
        assert made["shared_bytes"] <= GPUS["h200"].smem_per_block, what


def test_every_tile_is_compiled_with_every_feature_and_dtype():
    flags = {name for name, parameter in inspect.signature(launch.constants).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    for tile in tiles.FORWARD:
        seen = [(dtype, features) for one, dtype, features in offline.configurations() if one == tile]
        assert set().union(*(features for _, features in seen)) == flags, tile
        assert {dtype for dtype, _ in seen} == set(launch.DTYPES), tile
        assert any(not features for _, features in seen), tile


@pytest.mark.parametrize("tile", tiles.FORWARD, ids=lambda tile: f"{tile.dim}-{tile.dim_v}-{tile.rows}")
def test_registers_and_buffers_of_the_table_are_the_planners(tile):
    consumer, producer = tile.registers
    assert (consumer, producer) == BUDGETS[tile.consumers]
    assert tile.consumers * consumer + producer <= tile.max_registers * (tile.consumers + 1) <= 512
    planned = footprint(TileConfig(tile.rows, tile.keys, stages=tile.stages, consumers=tile.consumers), "bf16", tile.dim, tile.dim_v)
    assert tile.buffers == planned.smem - planned.barriers + more(tile)


def test_every_head_dim_up_to_256_has_a_tile():
    for dim in range(8, 257, 8):
        for dim_v in range(8, 257, 8):
            tile = tiles.forward(dim, dim_v)
            assert tile.dim >= dim
            assert tile.dim_v >= dim_v
    assert tiles.forward(192, 128).v1 == 0
