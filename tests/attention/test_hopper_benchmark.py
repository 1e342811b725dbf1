"""The forward's benchmark: which cells are chosen, and what its clocks and counters say, without a card."""
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.bench.clocks import Sustained
from onchip.bench.counters import Counters

EMPTY = Counters("", (), *(None,) * 13)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        return importlib.import_module("attention_forward")


def test_cells_are_chosen_by_words_either_word_or_their_whole_name(benchmark):
    def names(*words: str) -> list[str]:
        return [case.name for case in benchmark.chosen(benchmark.grid([16384, 32768]), list(words))]

    assert names("d128", "s32768,s131072") == [
        f"b1 {size} d128 {mask}" for size in ("s32768 h16", "s131072 h8") for mask in ("full", "causal")]
    assert names("d256", "s16384") == [f"b{b} s16384 h8 d256 {mask}" for b in (1, 2) for mask in ("full", "causal")]
    assert names("b8", "s4096", "h16", "d128", "causal") == ["b8 s4096 h16 d128 causal"]  # not the worst case of the same size
    assert len(names()) == len(benchmark.grid([16384, 32768]))
    assert names("s4096", "d127") == []


def test_a_sustained_rate_is_held_against_the_peak_at_its_clock(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark.torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132, major=9, minor=0))
    monkeypatch.setattr(benchmark, "sustain", lambda *_: Sustained(2e-3, 1500.0, 698.0, 700.0, {"power cap": 0.98}, 200))
    found = benchmark.at_clocks({"onchip": None}, 1_460_000_000_000, {"onchip": 2e-3}, None)["onchip"]
    assert found["tflops"] == pytest.approx(730)
    assert found["of_peak"] == pytest.approx(730e12 / (132 * 4096 * 1.5e9))  # 4096 FLOP a clock: 989 TFLOP/s at 1830 MHz
    assert "730.0 TFLOP/s at 1500 MHz  698 W of 700 = 90.0 %" in benchmark.clocks_line("onchip", found).replace("%", " %")
    silent = found | {"watts": None, "limit_watts": None, "reasons": {}}
    assert "nothing held the clock" in benchmark.clocks_line("onchip", silent)


def test_counters_are_those_of_the_longest_kernel_of_a_contender_in_its_cell(benchmark, monkeypatch, tmp_path):
    cases = benchmark.chosen(benchmark.grid([16384]), ["s131072"])
    full, causal = cases

    def launch(case, name: str, seconds: float, read: float) -> Counters:
        return replace(EMPTY, within=(benchmark.label(case, name), "a library's own"), seconds=seconds, dram_read=read)

    seen = []

    def count(command: list[str], ncu: Path) -> list[Counters]:
        seen.append(command[2:])
        return [launch(full, "onchip", 0.1, 5e9), launch(causal, "onchip", 0.05, 2e9), launch(causal, "cudnn", 1e-6, 1.0),
                launch(causal, "cudnn", 0.06, 3e9), replace(EMPTY, seconds=9.0)]

    monkeypatch.setattr(benchmark, "count", count)
    found = benchmark.counters(cases, ["s131072"], [16384], tmp_path / "ncu")
    assert seen == [["--alone", "--tokens", "16384", "--only", "s131072"]]
    assert {name: (c["launches"], c["dram_read"]) for name, c in found[causal.name].items()} == {"onchip": (1, 2e9), "cudnn": (2, 3e9)}
    assert list(found[full.name]) == ["onchip"]
    line = benchmark.counters_line("cudnn", found[causal.name]["cudnn"])
    assert "DRAM read 3.00, written –" in line
    assert line.endswith("kernels a call: 2")
