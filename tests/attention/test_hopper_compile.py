"""The Hopper kernels as the compiler makes them, without a GPU: no spills, wgmma that overlaps, the shared memory the planner counts."""
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.hopper import tiles
from onchip.roofline.hardware import GPUS
from onchip.roofline.tiles import BUDGETS, TileConfig, footprint

GROUPS = 10  # processes, so that workers share the compilations; each also pays for its imports

# Accumulator registers leave 3 consumers at head dim 64 none to spare: a few addresses, used once a tile, are kept in local memory.
TIGHT = {(64, "left")}


@pytest.mark.parametrize("group", range(GROUPS))
def test_compiled_kernels(group):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    del environment["TRITON_INTERPRET"]  # the tests' own process interprets kernels; this one compiles them
    command = [sys.executable, "-m", "onchip.attention.hopper.offline", "--start", str(group), "--of", str(GROUPS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines
    for line in lines:
        made = json.loads(line)
        tile, features, counts = tiles.Tile(**made["tile"]), made["features"], made["counts"]
        what = f"{tile.dim}/{tile.dim_v} {made['dtype']} {sorted(features)}"
        assert made["spills_in_loops"] == 0, what
        assert made["spills"] == 0 or any((tile.dim, feature) in TIGHT for feature in features), what
        # q kᵀ is written out for the first block and in each loop (2; 3 with a window's left end), p v in each loop and after them
        loops = 3 if features.get("left") else 2
        qk, pv = tile.dim // 16, tile.keys // 16 * (2 if tile.v1 else 1)
        assert counts["HGMMA"] == tile.consumers * (1 + loops) * (qk + pv), what
        # as many waits as the source has: ptxas, when it cannot prove a wgmma safe, adds one after each
        assert counts["DEPBAR"] == tile.consumers * (loops + 3), what
        assert not [note for note in made["notes"] if "wgmma" in note.lower()], what
        assert counts["HMMA"] == 0, what
        # the planner's q, k, v and barriers, o where it has memory of its own, and what Triton adds for words, captures and reductions
        config = TileConfig(tile.rows, tile.keys, stages=tile.stages, consumers=tile.consumers)
        planned = footprint(config, made["dtype"], tile.dim, tile.dim_v).smem + 2 * tile.rows * tile.dim_v * tile.own_o
        assert planned <= made["shared"] <= planned + 1024, what
        assert made["shared"] <= GPUS["h200"].smem_per_block, what


@pytest.mark.parametrize("tile", tiles.FORWARD, ids=lambda tile: f"{tile.dim}-{tile.dim_v}")
def test_registers_and_buffers_of_the_table_are_the_planners(tile):
    consumer, producer = tile.registers
    assert (consumer, producer) == BUDGETS[tile.consumers]
    assert tile.consumers * consumer + producer <= tile.max_registers * (tile.consumers + 1) <= 512
    planned = footprint(TileConfig(tile.rows, tile.keys, stages=tile.stages, consumers=tile.consumers), "bf16", tile.dim, tile.dim_v)
    assert tile.buffers == planned.smem - planned.barriers + 2 * tile.rows * tile.dim_v * tile.own_o


def test_every_head_dim_up_to_256_has_a_tile():
    for dim in range(8, 257, 8):
        for dim_v in range(8, 257, 8):
            tile = tiles.forward(dim, dim_v)
            assert tile.dim >= dim
            assert tile.dim_v >= dim_v
    assert tiles.forward(192, 128).v1 == 0
