"""The planner against hand-made times, brute-force schedules and tiles known to be good."""
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.roofline.hardware import GPUS, custom_gpu
from onchip.roofline.planner import CHAIN, HOPPER_MMA_SYNC, LATENCY, ON_SM, Plan, busiest_sm, candidates, plan_tile, rank
from onchip.roofline.reasons import explain, parts, why_slower
from onchip.roofline.shape import AttentionShape
from onchip.roofline.tiles import TileConfig
from tests.roofline.test_tiles import GOOD_BACKWARD, GOOD_FORWARD

A100, H200 = GPUS["a100-80gb"], GPUS["h200"]
HOPPER = TileConfig(128, 128, 2, consumers=2)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_no_schedule_beats_the_busiest_sm(steps: list[int], sms: int) -> None:
    best = min(max(sum(s for s, at in zip(steps, places, strict=True) if at == sm) for sm in range(sms))
               for places in product(range(sms), repeat=len(steps)))
    bound = busiest_sm(Counter(steps), sms)
    assert bound <= best
    loads = [0] * sms
    for step in sorted(steps, reverse=True):  # heaviest first comes within 4/3 of it
        loads[loads.index(min(loads))] += step
    assert 3 * max(loads) <= 4 * max(bound, best)


@pytest.mark.parametrize(("blocks", "sms", "busiest"), [(132, 132, 7), (133, 132, 14), (1, 132, 7), (264, 132, 14), (265, 132, 21)])
def test_equal_blocks_come_in_whole_waves(blocks: int, sms: int, busiest: int) -> None:
    assert busiest_sm(Counter({7: blocks}), sms) == busiest


def full(heads: int, seq_q: int = 128, seq_k: int = 4096) -> AttentionShape:
    """One query tile a head; all heads share K and V, which keeps DRAM and L2 out of the way."""
    return AttentionShape(seq_q, seq_k, 128, 128, heads=heads, kv_heads=1)


def test_registers_of_a_compiled_kernel_go_before_the_models() -> None:
    config, shape = TileConfig(64, 64, pad=8), AttentionShape.square(1024, 64, heads=128)
    model, told, same = (plan_tile(config, shape, H200, "fp16", registers) for registers in (None, 144, 104))
    assert (model.footprint.registers, model.occupancy.blocks, model.occupancy.limited_by) == (104, 4, "registers")
    assert (told.footprint.registers, told.occupancy.blocks, told.streams) == (144, 3, 3)
    assert same == model
    assert told.time > model.time


def test_one_wave_by_hand() -> None:
    """132 tiles on 132 SMs: each does 4 · 128 · 4096 · 128 FLOPs at 4096 a clock, 32 steps, and one exponential a score at 16 a clock."""
    plan = plan_tile(HOPPER, full(132), H200, "bf16")
    clock = 1.83e9
    matmul = 4 * 128 * 4096 * 128 / 4096 / clock
    assert plan.roofs["tensor cores"] == pytest.approx(matmul, rel=1e-3)
    assert plan.balance == pytest.approx(1.0)
    exps = (128 * 4096 + 128 * 32) / 16 / clock  # a score each, and a rescale factor for each row and step
    assert plan.roofs["exp unit"] == pytest.approx(exps, rel=1e-3)
    # fp32: 4 instructions a score, O rescaled at every step
    assert plan.roofs["fp32 pipe"] == pytest.approx((4 * 128 * 4096 + 32 * 128 * 128) / 128 / clock, rel=1e-3)
    assert plan.streams == 4
    assert plan.turns == pytest.approx((exps + 32 * CHAIN / clock) / 4, rel=1e-3)
    assert plan.latency == pytest.approx(LATENCY / clock)
    assert plan.time == pytest.approx(plan.sm_time) == pytest.approx(sum(parts(plan).values()))


def test_one_tile_too_many_costs_a_wave() -> None:
    even, over = (plan_tile(HOPPER, full(heads), H200, "bf16") for heads in (132, 133))
    assert over.balance == pytest.approx(133 / 264)
    for roof in ON_SM:
        assert over.roofs[roof] == pytest.approx(2 * even.roofs[roof])
    assert over.roofs["DRAM"] < 1.01 * even.roofs["DRAM"]  # no SM's own


def test_few_tiles_leave_sms_idle() -> None:
    few, all_busy = (plan_tile(HOPPER, full(heads), H200, "bf16") for heads in (33, 132))
    assert few.roofs["tensor cores"] == pytest.approx(all_busy.roofs["tensor cores"])
    assert few.balance == pytest.approx(0.25)


def test_a_ragged_tile_takes_as_long_as_a_whole_one() -> None:
    whole, ragged = (plan_tile(HOPPER, full(132, seq_q, seq_k), H200, "bf16") for seq_q, seq_k in ((128, 4096), (65, 4000)))
    assert ragged.roofs["tensor cores"] == pytest.approx(whole.roofs["tensor cores"])
    assert ragged.balance == pytest.approx(65 * 4000 / (128 * 4096))


def test_backward_blocks_own_keys() -> None:
    """Causal: key tile j is seen by the query tiles from j on, 16 + 15 + … + 1 of a head's 16; each of 2 K/V heads serves 2 query heads."""
    shape = AttentionShape.square(1024, 128, heads=4, kv_heads=2, causal="bottom-right")
    config = TileConfig(64, 64, backward=True)
    one_sm = replace(A100, sms=1, matmul_tflops={"float16": 312 / 108})
    plan = plan_tile(config, shape, one_sm, "fp16")
    assert plan.blocks == 2 * 16
    assert plan.balance == pytest.approx(1.0)
    five_matmuls = 5 * 2 * 64 * 64 * 128 / (312e12 / 108)
    assert plan.roofs["tensor cores"] == pytest.approx(4 * 136 * five_matmuls)
    assert plan.other > 0
    assert plan_tile(config, shape, replace(one_sm, sms=2), "fp16").balance == pytest.approx(1.0)  # heaviest first, 272 steps each


def test_mma_sync_on_hopper_loses_a_third() -> None:
    uniform = TileConfig(128, 128, warps=8)
    on_hopper, wgmma = (plan_tile(config, full(132), H200, "bf16").roofs["tensor cores"] for config in (uniform, HOPPER))
    assert on_hopper == pytest.approx(wgmma / HOPPER_MMA_SYNC)
    on_ampere = plan_tile(uniform, full(108), A100, "bf16").roofs["tensor cores"]
    assert on_ampere == pytest.approx(4 * 128 * 4096 * 128 / 2048 / 1.41e9, rel=2e-3)


def test_latency_shows_where_nothing_covers_it() -> None:
    one, two = (plan_tile(replace(HOPPER, stages=stages), full(132), H200, "bf16") for stages in (1, 2))
    assert two.latency == pytest.approx(LATENCY / 1.83e9)
    assert one.latency == pytest.approx(33 * LATENCY / 1.83e9)  # at the start, and at each of 32 steps
    assert "more load latency shows, with 1 stage against 2" in why_slower(one, two)
    assert f"{one.time / two.time - 1:.1%} slower" in why_slower(one, two)


def test_more_warps_cover_more_of_the_turns() -> None:
    turns = [plan_tile(TileConfig(64, 64, warps=warps), full(108 * 4), A100, "fp16").turns for warps in (1, 2, 4)]
    assert turns == sorted(turns, reverse=True)
    assert turns[2] > 0


def test_p_through_shared_memory_costs_its_bytes() -> None:
    inside, through = (plan_tile(replace(HOPPER, p_in_smem=p), full(132), H200, "bf16") for p in (False, True))
    extra = 2 * 128 * 4096 * 2 / 128 / 1.83e9  # written once, read once, 2 bytes a score, 128 B a clock
    assert through.roofs["shared memory"] - inside.roofs["shared memory"] == pytest.approx(extra, rel=1e-3)


@pytest.mark.parametrize("config", [HOPPER, TileConfig(64, 64), TileConfig(64, 128, 2, consumers=2, backward=True)], ids=str)
@pytest.mark.parametrize("causal", [None, "bottom-right"])
def test_time_is_monotone(config: TileConfig, causal: str | None) -> None:
    def time(seq: int = 2048, heads: int = 8, **card: float) -> float:
        shape = AttentionShape.square(seq, 128, heads=heads, causal=causal)
        return plan_tile(config, shape, replace(H200, **card), "bf16").time  # type: ignore[arg-type]

    for longer in ([time(seq=seq) for seq in (256, 500, 512, 1000, 4096)], [time(heads=heads) for heads in (1, 2, 16, 17, 40)],
                   [time(dram_gbps=gbps) for gbps in (48000, 4800, 480, 48)], [time(clock_ghz=clock) for clock in (2.0, 1.8, 1.0)],
                   [time(l2_bytes_per_clock=rate) for rate in (10000, 5000, 500)]):
        assert longer == sorted(longer)
        assert longer[-1] > longer[0]


def test_more_sms_are_never_slower() -> None:
    times = []
    for sms in (16, 33, 64, 66, 132, 264):
        gpu = custom_gpu(sms=sms, dram_gbps=4800, matmul_tflops={"bf16": 7.5 * sms})
        times.append(plan_tile(HOPPER, AttentionShape.square(4096, 128, heads=4), gpu, "bf16").time)
    assert times == sorted(times, reverse=True)


@lru_cache
def ranked(d: int, backward: bool) -> tuple[AttentionShape, tuple[Plan, ...]]:
    shape = AttentionShape.square(8192, d, batch=2, heads=16)
    return shape, rank(shape, H200, "bf16", backward=backward).plans


@pytest.mark.parametrize(("d", "config"), GOOD_FORWARD + GOOD_BACKWARD, ids=str)
def test_known_good_hopper_tiles_rank_high(d: int, config: TileConfig) -> None:
    """Each within 10 % of the winner; 64 × 64 at head dim 256 is the small end of a range whose large end wins."""
    shape, plans = ranked(d, config.backward)
    mine = plan_tile(config, shape, H200, "bf16").time
    assert plans[0].time <= mine
    assert mine < (1.3 if config == TileConfig(64, 64, 1, consumers=2, backward=True) else 1.1) * plans[0].time
    assert plans[0].config.specialised


def test_causal_prefers_128x128_at_head_dim_128() -> None:
    shape = AttentionShape.square(2048, 128, batch=8, heads=16, causal="bottom-right")
    winner = rank(shape, H200, "bf16").plans[0]
    assert (winner.config.br, winner.config.bc, winner.config.stages) == (128, 128, 2)
    assert winner.occupancy.fraction == 0.1875


def test_an_eighth_of_the_threads_is_enough_on_an_a100() -> None:
    shape = AttentionShape.square(4096, 128, batch=8, heads=16)
    plans = rank(shape, A100, "fp16").plans
    fa2 = next(p for p in plans if p.config == TileConfig(128, 64))
    assert fa2.occupancy.fraction == 0.125
    assert fa2.time < 1.02 * plans[0].time
    fuller = [p for p in plans if p.occupancy.fraction > 0.125]
    assert fuller
    assert all(p.time > fa2.time for p in fuller)


@pytest.mark.parametrize("gpu", [name for name, card in GPUS.items() if card.capability])
def test_every_card_gets_a_ranking(gpu: str) -> None:
    ranking = rank(AttentionShape.square(1024, 128, heads=8), GPUS[gpu], "fp16")
    times = [plan.time for plan in ranking.plans]
    assert times == sorted(times)
    assert times[0] > 0
    assert len({(p.config.br, p.config.bc, p.config.warps, p.config.consumers) for p in ranking.plans}) == len(times)
    assert all(p.footprint.smem <= GPUS[gpu].smem_per_block for p in ranking.plans)
    assert all(p.occupancy.blocks >= 1 for p in ranking.plans)


def test_wide_heads_and_fp8_find_a_tile() -> None:
    assert rank(AttentionShape.square(1024, 512, heads=8), H200, "bf16").plans
    fp8 = rank(AttentionShape.square(8192, 128, heads=16), H200, "fp8").plans
    assert all(p.config.bc % 32 == 0 for p in fp8)
    assert fp8[0].roofs["exp unit"] > 0.9 * fp8[0].roofs["tensor cores"]  # at twice the matmul rate, exp is as high a roof


def test_candidates_are_valid_and_distinct() -> None:
    for backward in (False, True):
        found = candidates(backward)
        assert len(found) == len(set(found)) > 200


@pytest.mark.parametrize(("gpu", "dtype", "message"), [("mi300x", "bf16", "gpu: got mi300x"), ("v100", "bf16", "dtype: got bf16"),
                                                       ("h200", "int7", "dtype: got 'int7'")])
def test_bad_input(gpu: str, dtype: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        rank(AttentionShape.square(512, 64), GPUS[gpu], dtype)
    assert message in str(caught.value)


def test_no_tile_for_a_head_dim() -> None:
    with pytest.raises(InputError, match="head_dim: got 4096, accepted: one some tile can hold"):
        rank(AttentionShape.square(512, 4096), H200, "bf16")
    with pytest.raises(InputError, match="accepted: one that can launch: this one needs wgmma"):
        plan_tile(HOPPER, full(1), A100, "bf16")


def test_the_explanation_names_winner_runner_up_and_what_hides_latency() -> None:
    shape = AttentionShape.square(4096, 128, heads=16)
    ranking = rank(shape, H200, "bf16")
    text = " ".join(explain(ranking, H200, "bf16"))
    first, second = ranking.plans[:2]
    assert f"{first.config} wins" in text
    assert f"bound by {first.binding}" in text
    assert f"The runner-up {second.config} is {second.time / first.time - 1:.1%} slower" in text
    assert "which is not the goal" in text
    assert "TMA copies 1 tile ahead" in text
    assert f"{len(ranking.refused)} that cannot launch" in text
    assert f"{len(ranking.spilling)} that would spill" in text


def test_reasons_follow_the_term_that_differs() -> None:
    plan = plan_tile(HOPPER, full(132), H200, "bf16")
    slower_roof = replace(plan, roofs=plan.roofs | {"tensor cores": 1.5 * plan.roofs["tensor cores"]})
    assert why_slower(slower_roof, plan).endswith("50.0% more work for the roof that binds both, tensor cores")
    uneven = replace(slower_roof, balance=plan.balance / 1.5)
    assert "loads the SMs less evenly, the average one 66.7% of the busiest against 100.0%" in why_slower(uneven, plan)
    other = replace(plan, roofs=plan.roofs | {"L2": 3 * plan.roofs["tensor cores"]})
    assert "L2 takes" in why_slower(other, plan)
    turning = replace(plan, turns=3 * plan.turns, streams=1.0)
    assert "take turns" in why_slower(turning, plan)
    assert "1 warp a scheduler against 4" in why_slower(turning, plan)
    assert "as fast but takes" in why_slower(plan, plan)
