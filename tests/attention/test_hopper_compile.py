"""The Hopper kernels as the compiler makes them, without a GPU: no spills, wgmma that overlaps, the shared memory the planner counts."""
import inspect
import io
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.hopper import launch, offline, tiles
from onchip.roofline.hardware import GPUS
from onchip.roofline.tiles import BUDGETS, TileConfig, footprint
from tests import fresh

CONFIGURATIONS = offline.configurations()


def apart(tile: tiles.Tile, dtype: torch.dtype, features: Mapping[str, object]) -> bool:
    """What other configurations show as well: 7 s of CI each. `benchmarks/triton_versions.py` compiles all of them.

    * Plain, with split keys and nothing else, and float16 under a mask: the tile of 128 stands for the others.
    * The right end of a mask alone, with the online softmax or not: the code is part of a window's, which every tile is compiled with. The
      tile of 128 and those that have the fewest registers (3 consumers; 256 dims) stand for the others.
    """
    if "right" in features and not features.keys() - {"right", "online"} and dtype is torch.bfloat16:
        return (tile.dim, tile.rows) not in ((64, 192), (128, 128), (256, 128))
    return tile.dim != 128 and (set(features) in (set(), {"split"}) or (dtype is torch.float16 and set(features) == {"right"}))


def more(tile: tiles.Tile, split: bool = False) -> int:
    """Bytes of q and o beyond the planner's one slot for both; parts of o go from the registers to global memory."""
    return 2 * tile.rows * (tile.dim * (tile.queries - 1) + (0 if split else tile.dim_v // tile.pieces))


def printed(*options: str) -> str:
    """What `offline` prints."""
    sys.argv = ["offline", *options]
    with redirect_stdout(io.StringIO()) as out:
        offline.main()
    return out.getvalue()


def merges() -> str:
    """What it prints of the merge for v in one part: 96 and 192, in two, are 128 and 256 columns under a mask, as 120 and 248 are."""
    tiles.FORWARD = tuple(tile for tile in tiles.FORWARD if not tile.v1)
    return printed("--merge")


@pytest.mark.parametrize("index", [
    pytest.param(i, id="-".join([str(tile.dim), str(tile.dim_v), str(tile.rows), str(dtype).removeprefix("torch."), *features]))
    for i, (tile, dtype, features) in enumerate(CONFIGURATIONS) if not apart(tile, dtype, features)])
def test_compiled_kernels(index):
    made = json.loads(fresh.call(printed, "--start", str(index), "--of", str(len(CONFIGURATIONS))))
    tile, features, counts = tiles.Tile(**made["tile"]), made["features"], made["instructions"]
    what = f"{tile.dim}/{tile.dim_v} {made['dtype']} {sorted(features)}"
    assert made["local_accesses_in_loops"] == 0, what
    assert made["spill_stores"] == made["spill_loads"] == counts["STL"] == counts["LDL"] == 0, what
    assert not made["unwritten"], what
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
    planned = footprint(config, made["dtype"], tile.dim, tile.dim_v).smem + more(tile, features.get("split", False))
    assert made["planned_bytes"] == planned, what
    assert planned <= made["shared_bytes"] <= planned + 1024, what
    assert made["shared_bytes"] <= GPUS["h200"].smem_per_block, what


def test_the_merge_reads_16_bytes_a_lane_and_keeps_eight_parts_under_way():
    lines = [json.loads(line) for line in fresh.call(merges).splitlines()]
    assert [made["dim_v"] for made in lines] == [dim - less for dim in (64, 128, 256) for _ in launch.DTYPES for less in (0, 8)]
    for made in lines:
        assert made["spill_stores"] == made["spill_loads"] == made["shared_bytes"] == 0, made["dim_v"]
        assert made["threads"] == 32
        assert made["registers"] <= 72  # 28 warps an SM
        # a weight and 1 or 2 loads of o for each of eight parts, once or twice for what is left over; 4-byte loads would be 4 times as many
        loads = 8 * (3 if made["dim_v"] > 128 else 2)
        assert loads <= made["instructions"]["LDG"] <= 2 * loads + 4, made["dim_v"]
        assert made["instructions"]["BAR"] == 0


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
