import math

import pytest

from onchip.bench.machine import Ceilings
from onchip.errors import InputError
from onchip.ladder import eager, measure
from onchip.ladder.inputs import random_inputs
from onchip.ladder.measure import Budget, measure_rungs
from onchip.roofline.shape import AttentionShape

ROOFS = Ceilings("Abacus", "float32", copy=10e9, matmul=50e9)


@pytest.fixture
def half_a_second(monkeypatch):
    monkeypatch.setattr(measure, "median_time", lambda call, device: 0.5)


def test_figures_follow_from_the_time(half_a_second):
    shape = AttentionShape(48, 64, 16, 8, 2, 4, 2)
    report = measure_rungs(random_inputs(shape), ceilings=ROOFS)
    assert [m.key for m in report.measurements] == ["naive", "tiled", "online", "sdpa"]
    assert (report.shape, report.dtype, report.skipped, report.checked_rows) == (shape, "float32", {}, 1.0)
    flops = 2 * 4 * 48 * 64 * 2 * (16 + 8)  # batch · heads · pairs · 2(d + dv)
    nbytes = 4 * (2 * 4 * 48 * (16 + 8) + 2 * 2 * 64 * (16 + 8))  # q and out, k and v, once each
    for m in report.measurements:
        assert m.seconds == 0.5
        assert m.flops == flops / 0.5
        assert math.isclose(m.matmul_share, flops / 0.5 / 50e9)
        assert math.isclose(m.copy_share, nbytes / 0.5 / 10e9)
        assert 0 < m.error.rms < 1e-6
    peaks = {m.key: m.peak_bytes for m in report.measurements}
    out = 2 * 4 * 48 * 8 * 4
    assert peaks["naive"] == 2 * (2 * 4 * 48 * 64 * 4) + out
    assert all(peak >= out for peak in peaks.values())


def test_causal_counts_visible_pairs_only(half_a_second):
    report = measure_rungs(random_inputs(AttentionShape.square(32, 8)), causal=True, ceilings=ROOFS)
    assert report.shape.causal == "bottom-right"
    assert {m.flops for m in report.measurements} == {32 * 33 // 2 * 32 / 0.5}
    assert max(m.error.rms for m in report.measurements) < 1e-6


def test_a_wrong_rung_shows_in_its_error(half_a_second, monkeypatch):
    right = eager.tiled
    monkeypatch.setattr(eager, "tiled", lambda q, k, v, causal: right(q, k, v, causal).zero_())
    errors = {m.key: m.error.rms for m in measure_rungs(random_inputs(AttentionShape.square(32, 8)), ceilings=ROOFS).measurements}
    assert errors["tiled"] == 1.0
    assert errors["online"] < 1e-6


def test_naive_is_skipped_beyond_the_memory_budget(half_a_second):
    inputs = random_inputs(AttentionShape.square(64, 8, heads=2))
    scores = 2 * 2 * 64 * 64 * 4
    report = measure_rungs(inputs, ceilings=ROOFS, budget=Budget(memory=scores - 1))
    assert [m.key for m in report.measurements] == ["tiled", "online", "sdpa"]
    assert report.skipped == {"naive": "S before and after the scale would take 6.55e-05 GB, more than the 6.55e-05 GB allowed"}
    assert not measure_rungs(inputs, ceilings=ROOFS, budget=Budget(memory=scores)).skipped


def test_all_are_skipped_beyond_the_time_budget(half_a_second):
    slow = Ceilings("Abacus", "float32", copy=1e3, matmul=1e3)
    report = measure_rungs(random_inputs(AttentionShape.square(64, 8)), ceilings=slow)
    assert report.measurements == ()
    assert set(report.skipped) == {"naive", "tiled", "online", "sdpa"}
    assert report.skipped["online"] == "a call would take 131 s at least, more than the 1 s allowed"  # 4 · 64² · 8 FLOPs at 1000 a second


def test_large_problems_are_checked_on_sampled_rows(half_a_second, monkeypatch):
    monkeypatch.setattr(measure, "CHECKED", 64 * 64)
    report = measure_rungs(random_inputs(AttentionShape.square(64, 8, heads=4)), causal=True, ceilings=ROOFS)
    assert report.checked_rows == 0.25
    assert all(0 < m.error.rms < 1e-6 for m in report.measurements)


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_dtype_on_request(half_a_second, dtype):
    report = measure_rungs(random_inputs(AttentionShape.square(32, 8)), dtype=dtype, ceilings=ROOFS)
    bounds = {"bf16": (1e-4, 1e-2), "fp64": (0, 1e-15)}[dtype]
    assert report.dtype == {"bf16": "bfloat16", "fp64": "float64"}[dtype]
    assert all(bounds[0] <= m.error.rms <= bounds[1] for m in report.measurements)


def test_says_what_it_runs_and_times_for_real():
    heard = []
    report = measure_rungs(random_inputs(AttentionShape.square(16, 8)), ceilings=ROOFS, on_rung=heard.append)
    assert heard == ["copy and matmul", *measure.RUNGS.values()]
    assert all(0 < m.seconds < 10 for m in report.measurements)


def test_bad_requests():
    inputs = random_inputs(AttentionShape.square(8, 8))
    for arguments in ({"device": "abacus"}, {"dtype": "int8"}, {"dtype": "e4m3"}, {"causal": "sideways"}):
        with pytest.raises(InputError):
            measure_rungs(inputs, ceilings=ROOFS, **arguments)
