"""The GPU's rungs without a GPU: their ledgers, tiles and memory, what a counter is held against, and eager attention itself."""
import pytest
import torch

from onchip.bench.counters import Counters
from onchip.bench.machine import Ceilings
from onchip.ladder import gpu
from onchip.ladder.counted import held_against
from onchip.ladder.kernels import unfused
from onchip.roofline.hardware import find_gpu
from onchip.roofline.shape import AttentionShape

H200 = find_gpu("h200")
SHAPE = AttentionShape.square(4096, 128, heads=16)
PROBLEM = gpu.problem_of(SHAPE, "bfloat16")


@pytest.mark.parametrize("rung", gpu.GPU_RUNGS, ids=lambda rung: rung.key)
def test_every_rung_has_a_prediction_with_the_tile_it_runs(rung: gpu.GpuRung) -> None:
    tile = rung.tile(PROBLEM, H200)
    prediction = rung.predict(PROBLEM, H200)
    assert prediction.time > 4 * 4096**2 * 128 * 16 / H200.matmul_rate("bf16") * 0.99  # no faster than the tensor cores
    if rung.backend == "hopper":
        assert tile == (128, 128)


def test_a_higher_rung_is_predicted_faster() -> None:
    times = {rung.key: rung.predict(PROBLEM, H200).time for rung in gpu.GPU_RUNGS}
    assert times["naive_scaled"] > times["naive"] > times["tiled"] > times["online"] > times["fa2"] >= times["hopper"]


def test_long_rows_are_read_twice_by_the_softmax() -> None:
    naive = next(rung for rung in gpu.GPU_RUNGS if rung.key == "naive")
    for seq, reads in ((unfused.ROW, 1), (2 * unfused.ROW, 2)):
        pipeline = naive.pipeline(gpu.problem_of(AttentionShape.square(seq, 64), "bfloat16"), H200)
        assert pipeline.kernels[1].read("S") == reads * 2 * seq**2


def test_memory_is_known_before_it_is_asked_for() -> None:
    """The famous incident: 32 heads of 32 K keep S and P, 64 GiB each."""
    problem = gpu.problem_of(AttentionShape.square(32768, 128, heads=32), "bfloat16")
    out = 32 * 32768 * 128 * 2
    needed = {rung.key: gpu.needed_bytes(rung, problem) for rung in gpu.GPU_RUNGS}
    assert (needed["naive"], needed["fa2"]) == (2 * 64 * 2**30 + out, out)


def test_the_measured_card_replaces_the_datasheet() -> None:
    card = gpu.card(Ceilings("NVIDIA H200", "bfloat16", copy=4.2e12, matmul=700e12))
    assert (card.dram_gbps, card.matmul_rate("bf16")) == (4200, 700e12)


@pytest.mark.parametrize("causal", [False, True])
def test_eager_is_attention(causal: bool) -> None:
    q, (k, v) = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 2, 12, 16).unbind(0)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, enable_gqa=True, attn_mask=torch.ones(9, 12, dtype=torch.bool).tril_(3) if causal else None)
    torch.testing.assert_close(gpu.eager(q, k, v, causal), want)


def test_counters_are_summed_over_a_rung_and_held_against_its_ledger() -> None:
    naive = next(rung for rung in gpu.GPU_RUNGS if rung.key == "naive")
    pipeline = naive.pipeline(PROBLEM, H200)
    launches = [Counters(f"kernel {n}", "naive", seconds, 1e9, 0.5e9, None, None, 2e9, 1e9, 10.0, busy, 50.0, 100.0 + n)
                for n, (seconds, busy) in enumerate([(1e-3, 80.0), (3e-3, 0.0)])]
    counted = held_against("naive", "naive", pipeline, launches, H200)
    assert (counted.dram_bytes, counted.sm_bytes, counted.conflicts, counted.registers) == (3e9, 6e9, 20.0, 101)
    assert counted.tensor_pipe == 20.0  # 80 % of a quarter of the time
    assert counted.issued == pipeline.issued
    assert counted.dram_ratio == 3e9 / counted.dram_predicted
    assert abs(counted.dram_predicted / 2.2e9 - 1) < 0.05  # S and P written and read once: 4 · 0.537 GB, and the operands
