"""Shared memory to the byte, registers, occupancy and launch verdicts against figures worked out by hand."""
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.roofline.hardware import GPU, GPUS, KIB
from onchip.roofline.tiles import (
    BUDGETS,
    OVERHEAD,
    TileConfig,
    footprint,
    launchable,
    needs_opt_in,
    occupancy,
    register_cap,
    row_fits,
    spilled,
)

A100, H100, H200 = GPUS["a100-80gb"], GPUS["h100"], GPUS["h200"]

# (head dim, configuration): tiles measured as good on Hopper. At head dims 64 and 96 the large ones pass P through shared memory.
GOOD_FORWARD = [
    (64, TileConfig(192, 128, 2, consumers=3)), (64, TileConfig(192, 192, 2, consumers=3, p_in_smem=True)),
    (96, TileConfig(192, 144, 2, consumers=3, p_in_smem=True)), (128, TileConfig(128, 128, 2, consumers=2)),
    (128, TileConfig(128, 176, 2, consumers=2)), (192, TileConfig(128, 112, 2, consumers=2)), (256, TileConfig(128, 80, 2, consumers=2)),
]
GOOD_BACKWARD = [
    (d, TileConfig(br, bc, stages, consumers=2, backward=True))
    for d, br, bc, stages in [(64, 128, 128, 2), (96, 64, 128, 2), (128, 64, 128, 2), (128, 80, 128, 2), (192, 64, 96, 1), (256, 64, 64, 1),
                              (256, 64, 80, 1)]
]


@pytest.mark.parametrize(
    ("config", "smem", "opt_in"),
    [(TileConfig(64, 64), 49152, False), (TileConfig(64, 64, stages=2), 80 * KIB, True), (TileConfig(64, 64, pad=8), 52224, True),
     (TileConfig(256, 256, warps=8), 192 * KIB, True)],
    ids=str,
)
def test_shared_memory_of_the_usual_tiles(config: TileConfig, smem: int, opt_in: bool) -> None:
    taken = footprint(config, "fp16", 128)
    assert taken.smem == smem
    assert needs_opt_in(taken, A100) is opt_in


@pytest.mark.parametrize(("warps", "fraction"), [(4, 0.1875), (8, 0.375)])
def test_three_blocks_an_sm_on_an_a100(warps: int, fraction: float) -> None:
    resident = occupancy(footprint(TileConfig(64, 64, warps=warps), "fp16", 128), A100)
    assert (resident.blocks, resident.fraction) == (3, fraction)
    assert resident.limited_by == "shared memory"
    assert dict(resident.limits)["shared memory"] == 164 // (48 + 1)


def test_the_reserved_kib_counts_on_the_sm_not_on_the_block() -> None:
    taken = footprint(TileConfig(64, 64, pad=16), "fp16", 128)
    assert taken.smem == 54 * KIB
    assert occupancy(taken, A100).blocks == 164 // 55 == 164 // 54 - 1
    assert launchable(taken, replace(A100, smem_per_block=54 * KIB)) is None
    assert dict(occupancy(footprint(TileConfig(64, 64), "fp16", 128), GPUS["v100"]).limits)["shared memory"] == 96 // 48  # nothing reserved


def test_256x256_fails_on_an_a100_and_runs_once_an_sm_on_an_h100() -> None:
    taken = footprint(TileConfig(256, 256, warps=8), "fp16", 128)
    assert launchable(taken, A100) == "needs 196608 B of shared memory a block, A100-SXM4-80GB allows 166912 B"
    assert launchable(taken, H100) is None
    assert occupancy(taken, H100).blocks == 1
    assert occupancy(taken, A100).blocks == 0
    assert spilled(taken, H100) > 0  # S alone would take 256 registers a thread


@pytest.mark.parametrize(("d", "config"), GOOD_FORWARD + GOOD_BACKWARD, ids=str)
def test_known_good_hopper_tiles_launch_without_spilling(d: int, config: TileConfig) -> None:
    taken = footprint(config, "bf16", d)
    assert launchable(taken, H200) is None
    assert spilled(taken, H200) == 0
    assert occupancy(taken, H200).blocks == 1


def test_one_block_of_384_threads_and_208_kib() -> None:
    taken = footprint(TileConfig(128, 176, 2, consumers=2), "bf16", 128)
    assert taken.threads == 384
    assert taken.smem == 208 * KIB + taken.barriers
    assert taken.barriers == 8 * 10  # full and empty: K and V twice each, Q
    assert occupancy(taken, H200).fraction == 0.1875


def test_fa2_runs_at_an_eighth() -> None:
    resident = occupancy(footprint(TileConfig(128, 64), "fp16", 128), A100)
    assert (resident.blocks, resident.fraction) == (2, 0.125)


def test_backward_of_a_hopper_kernel_to_the_byte() -> None:
    """K, V, two stages of Q, dO and dS, dQ in fp32: 192 KiB; lse and D from the next multiples of 1024, then the barriers."""
    taken = footprint(TileConfig(64, 128, 2, consumers=2, backward=True), "bf16", 128)
    tile = 128 * 128 * 2
    assert dict(taken.buffers) == dict.fromkeys(("K", "V", "Q", "dO", "dS", "dQ"), tile) | {"lse": 512, "D": 512, "mbarriers": 96}
    assert taken.smem == 6 * tile + 1024 + 512 + 96 == 198240
    assert dict(taken.accumulators) == {"dK": 64, "dV": 64, "S": 32, "dP": 32}


def test_an_ampere_backward_passes_p_and_ds_through_shared_memory() -> None:
    taken = footprint(TileConfig(64, 128, 2, warps=8, backward=True), "fp16", 128)
    assert taken.smem == 160 * KIB + 4 * 64 * 4  # K V 64, Q dO twice 64, dS P 32 KiB; lse and D twice
    assert launchable(taken, A100) is None


def test_registers() -> None:
    accumulators = dict(footprint(TileConfig(128, 128, 2, consumers=2), "bf16", 128).accumulators)
    assert accumulators == {"S": 64, "P": 32, "O": 64}  # a warpgroup's 64 × 128 in fp32 is 64 a thread
    assert footprint(TileConfig(128, 128, 2, consumers=2), "bf16", 128).registers == 64 + 32 + 64 + OVERHEAD
    assert dict(footprint(TileConfig(128, 128, 2, consumers=2), "fp8", 128).accumulators)["P"] == 16
    assert dict(footprint(TileConfig(64, 64), "tf32", 64).accumulators)["P"] == 32
    # a key tile of 256 at head dim 64 spills, with 3 consumers and with 2
    for config in (TileConfig(192, 256, 2, consumers=3), TileConfig(128, 256, 2, consumers=2)):
        assert spilled(footprint(config, "bf16", 64), H200) > 0


def test_budgets_fill_the_register_file() -> None:
    for consumers, (consumer, producer) in BUDGETS.items():
        groups = consumers + 1
        at_launch = 65536 // (128 * groups) // 8 * 8
        assert consumers * consumer + producer <= groups * at_launch
        assert register_cap(footprint(TileConfig(64 * consumers, 64, consumers=consumers), "bf16", 64), H200) == consumer
    assert BUDGETS == {2: (240, 24), 3: (160, 32)}


@pytest.mark.parametrize(
    ("config", "gpu", "reason"),
    [(TileConfig(128, 128, consumers=2), A100, "needs wgmma, which compute capability 9.0 alone has, A100-SXM4-80GB is 8.0"),
     (TileConfig(128, 128, consumers=2), GPUS["b200"], "B200-SXM-180GB is 10.0"),
     (TileConfig(64, 32, 2), GPUS["t4"], "needs cp.async for 2 stages, which starts with compute capability 8.0, T4 is 7.5"),
     (TileConfig(64, 64), GPUS["mi300x"], "Instinct MI300X has neither"),
     (TileConfig(256, 64, warps=64), H100, "needs 2048 threads a block, H100-SXM5-80GB allows 1024")],
    ids=str,
)
def test_why_a_tile_cannot_launch(config: TileConfig, gpu: GPU, reason: str) -> None:
    said = launchable(footprint(config, "fp16", 64), gpu)
    assert said is not None
    assert reason in said


def resident_by_hand(smem: int, registers: int, warps: int, gpu: GPU) -> int:
    """Add blocks until something runs out; warps go to the four schedulers in turn, 16 K registers each."""
    free_smem, schedulers, blocks = gpu.smem_per_sm, [gpu.registers_per_sm // 4] * 4, 0
    while True:
        free_smem -= -(-smem // 128) * 128 + gpu.smem_reserved
        for warp in range(warps):
            schedulers[(blocks * warps + warp) % 4] -= -(-registers * 32 // 256) * 256
        if free_smem < 0 or min(schedulers) < 0 or 32 * warps * (blocks + 1) > gpu.max_threads_per_sm or blocks == gpu.max_blocks_per_sm:
            return blocks
        blocks += 1


@settings(max_examples=50)
@given(
    br=st.sampled_from([16, 32, 64, 128]), bc=st.sampled_from([32, 64, 96, 128]), stages=st.integers(1, 3), warps=st.sampled_from([4, 8]),
    d=st.sampled_from([32, 64, 80, 128, 256]), gpu=st.sampled_from(["v100", "t4", "a100-80gb", "rtx-4090", "h200"]),
)
def test_occupancy_against_counting_blocks(br: int, bc: int, stages: int, warps: int, d: int, gpu: str) -> None:
    if br * bc < 128 * warps:
        return
    card = GPUS[gpu]
    taken = footprint(TileConfig(br, bc, stages, warps), "fp16", d)
    registers = min(taken.registers, register_cap(taken, card))
    assert occupancy(taken, card).blocks == resident_by_hand(taken.smem, registers, warps, card)


@settings(max_examples=50)
@given(st.sampled_from([16, 64, 128]), st.sampled_from([32, 64, 128]), st.integers(1, 4), st.integers(0, 4), st.integers(1, 300),
       st.integers(1, 300))
def test_buffers_lie_apart_and_in_order(br: int, bc: int, stages: int, pads: int, d: int, dv: int) -> None:
    taken = footprint(TileConfig(br, bc, stages, pad=8 * pads), "bf16", d, dv)
    sizes = dict(taken.buffers)
    assert sizes["K"] == stages * bc * (-(-d // 16) * 16 + 8 * pads) * 2
    assert sizes["Q"] == br * (-(-max(d, dv) // 16) * 16 + 8 * pads) * 2  # O leaves through it
    assert sum(sizes.values()) <= taken.smem <= sum(sizes.values()) + 127 * len(sizes)
    assert footprint(TileConfig(br, bc, stages + 1, pad=8 * pads), "bf16", d, dv).smem > taken.smem


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TileConfig(100, 64), "tile br: got 100"), (lambda: TileConfig(64, 0), "tile bc: got 0"),
        (lambda: TileConfig(64, 64, 0), "stages: got 0"), (lambda: TileConfig(64, 64, pad=-8), "pad: got -8"),
        (lambda: TileConfig(64, 64, consumers=1), "consumers: got 1"), (lambda: TileConfig(128, 64, consumers=2, pad=8), "pad: got 8"),
        (lambda: TileConfig(64, 64, consumers=2), "2 warpgroups, 64 rows each"),
        (lambda: TileConfig(64, 128, consumers=3, backward=True), "3 warpgroups"),
        (lambda: TileConfig(128, 64, consumers=2, warps=4), "warps: got 4, accepted: 12"),
        (lambda: TileConfig(16, 32, warps=8), "warps: got 8, accepted: 1 … 4"),
        (lambda: footprint(TileConfig(64, 64), "fp64", 64), "dtype: got fp64"),
        (lambda: footprint(TileConfig(64, 80), "fp8", 64), "tile: got 64×80, accepted: multiples of 32"),
        (lambda: footprint(TileConfig(64, 64, pad=4), "fp16", 64), "pad: got 4"),
        (lambda: footprint(TileConfig(64, 64), "fp16", 0), "head_dim: got (0, None)"), (lambda: row_fits(0, "fp16", A100), "n: got 0"),
    ],
)
def test_bad_input_is_one_clear_line(make, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
    assert "accepted" in str(caught.value)


def test_one_row_fits_and_a_tile_of_rows_does_not() -> None:
    assert row_fits(32768, "fp16", A100)  # 64 KiB
    assert not row_fits(32768, "fp16", A100, rows=64)
    assert row_fits(166912 // 2, "bf16", A100)
    assert not row_fits(166912 // 2 + 1, "bf16", A100)
    assert not row_fits(32768, "fp32", GPUS["rtx-4090"])  # 128 KiB, 99 allowed
