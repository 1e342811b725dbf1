"""The GPU's rungs without a GPU: their ledgers, tiles and memory, what a counter is held against, and eager attention itself."""
import json
import sys
from pathlib import Path

import pytest
import torch

from onchip.bench.counters import Counters
from onchip.bench.machine import Ceilings
from onchip.ladder import counted, gpu
from onchip.ladder.counted import Job, Ledger, count_jobs, held_against
from onchip.ladder.kernels import unfused
from onchip.roofline.hardware import find_gpu
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

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
    launches = [Counters(f"kernel {n}", ("naive",), seconds, 1e9, 0.5e9, None, None, None, 2e9, 1e9, 0.0, 10.0, busy, 50.0, 100.0 + n)
                for n, (seconds, busy) in enumerate([(1e-3, 80.0), (3e-3, 0.0)])]
    found = held_against(Ledger("naive", "naive", pipeline), launches, H200, "bfloat16")
    assert (found.dram_bytes, found.sm_bytes, found.conflicts, found.registers) == (3e9, 6e9, 20.0, 101)
    assert found.tensor_pipe == 20.0  # 80 % of a quarter of the time
    assert found.issued == pipeline.issued == sum(x.issued for x in found.expected)
    assert found.dram_ratio == 3e9 / found.dram_predicted
    # S and P written and read once: 4 · 0.537 GB, and the operands, less the lines that each kernel leaves in L2
    assert abs(found.dram_predicted / 2.15e9 - 1) < 0.01
    assert [x.kernel for x in found.expected] == [k.name for k in pipeline.kernels]
    assert sum(x.seconds for x in found.expected) == pytest.approx(naive.predict(PROBLEM, H200).time)


@pytest.mark.parametrize(("key", "percent"), [("tiled", 12.5), ("fa1", 6.25), ("fa2", 12.5), ("triton", 12.5), ("hopper", 18.75)])
def test_occupancy_is_what_was_counted_on_an_h200(key: str, percent: float) -> None:
    """Counted: 12.5, 6.2, 12.5, 12.0 and 18.7 %."""
    rung = next(rung for rung in gpu.GPU_RUNGS if rung.key == key)
    found = held_against(Ledger(key, key, rung.pipeline(PROBLEM, H200), planned=rung.planned(PROBLEM, H200)), [], H200, "bfloat16")
    assert found.occupancy_predicted == percent
    assert found.registers_predicted is not None
    assert found.tensor_pipe_predicted == pytest.approx(7.8 if key == "fa1" else 100, rel=0.01)  # 16 blocks of FA1 on 132 SMs, bound by L2


def test_launches_are_filed_under_the_rung_and_the_problem_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of the profiler for all problems; libraries' own ranges and other problems' rungs are no concern of a rung."""
    jobs = [Job(SHAPE, "bfloat16", ("fa2", "apart_backward")), Job(Rows(64, 4096), "bfloat16", ("online", "chip"))]
    asked: list[dict] = []

    def profiler(command: list[str], ncu: Path, seconds: float | None) -> list[Counters]:
        assert command[:3] == [sys.executable, "-m", "onchip.ladder.counted"]
        asked.extend(json.loads(command[3]))
        names = [(0, "fa2"), (0, "apart_backward"), (0, "apart_backward"), (0, "apart_backward"), (1, "online"), (1, "chip")]
        return [Counters("k", (f"{number} {key}", "cublas"), *[float(i)] * 13) for i, (number, key) in enumerate(names)]

    monkeypatch.setattr("onchip.bench.counters.count", profiler)
    attention, softmax = count_jobs(jobs, H200, Path("ncu"))
    assert [(c.key, [x.seconds for x in c.kernels]) for c in (*attention, *softmax)] == [
        ("fa2", [0.0]), ("apart_backward", [1.0, 2.0, 3.0]), ("online", [4.0]), ("chip", [5.0])]
    assert [(job["dtype"], job["keys"]) for job in asked] == [("bfloat16", ["fa2", "apart_backward"]), ("bfloat16", ["online", "chip"])]
    assert (asked[0]["seq_q"], asked[0]["head_dim"], asked[1]["rows"], asked[1]["n"]) == (4096, 128, 64, 4096)


def test_the_program_that_is_profiled_launches_every_rung_once_in_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the interpreter: what happens between start and stop, and that it was warm by then."""
    heard: list[str] = []
    fakes = {"synchronize": lambda: None, "empty_cache": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: heard.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: heard.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", heard.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: heard.append("pop"))
    monkeypatch.setattr("onchip.bench.counters.mark", lambda: heard.append("mark"))
    calls = [("fa2", lambda: heard.append("fa2")), ("naive", lambda: heard.append("naive"))]
    monkeypatch.setattr(counted, "_calls", lambda job: iter(calls))
    counted.profiled([{}])
    assert heard == [step for key in ("fa2", "naive") for step in (key, key, "start", f"0 {key}", "mark", key, "pop", "stop")]
