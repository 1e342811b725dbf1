"""Verdicts: a pure function of predictions and measurements, here with made-up ones."""
import json
import math

import pytest

from onchip.lab.experiment import Experiment, Interval, Prediction, Sizes, about, at_least, at_most, between, exactly, verdict
from onchip.lab.experiments import EXPERIMENTS, attention, banks, pick, sources
from onchip.lab.run import conduct, judge, report
from onchip.roofline.hardware import GPUS, find_gpu

H200 = find_gpu("h200")


@pytest.mark.parametrize(("interval", "inside", "outside"), [
    (exactly(7), [7], [6, 8, 7.001]), (about(100, 0.25), [75, 100, 125], [74, 126]), (at_least(2), [2, 1e30, math.inf], [1.99]),
    (at_most(2), [0, 2], [2.01]), (between(5, 3), [3, 4, 5], [2.9, 5.1]),
])
def test_intervals(interval, inside, outside):
    assert all(x in interval for x in inside)
    assert not any(x in interval for x in [*outside, math.nan])


def judged(*measured):
    predictions = [Prediction(f"x.{i}", f"the {i}th", Interval(10, 20)) for i in range(len(measured))]
    found = {f"x.{i}": value for i, value in enumerate(measured) if value is not None}
    return tuple(p.judge(found) for p in predictions)


@pytest.mark.parametrize(("measured", "words"), [
    ((12, 20), "confirmed"), ((12, 9.9), "refuted: the 1th"), ((9, 21), "refuted: the 0th; the 1th"),
    ((None, None), "not measured yet"), ((15, None, None), "confirmed as far as measured (1 of 3)"),
    ((None, 25), "refuted: the 1th"), ((math.nan, 15), "refuted: the 0th"),
])
def test_verdict(measured, words):
    assert verdict(judged(*measured)) == words


def test_a_problem_is_told_whatever_was_measured():
    assert verdict(judged(15, 15), "the kernel is off by 0.3") == "failed: the kernel is off by 0.3"


@pytest.mark.parametrize("gpu", [name for name, gpu in GPUS.items() if gpu.capability and gpu.capability >= (8, 0)])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_commits_itself_on_every_card(name, gpu):
    experiment, card = EXPERIMENTS[name], GPUS[gpu]
    predictions = experiment.predict(card, Sizes())
    assert predictions
    assert len({p.quantity for p in predictions}) == len(predictions)
    for p in predictions:
        assert p.interval.low <= p.interval.high
        assert p.interval != Interval(0, math.inf)
        assert p.what
        assert p.source
    assert judge(experiment, card, Sizes(), {}).verdict == "not measured yet"


def test_every_pitfall_has_its_experiment():
    assert {one.pitfall for one in EXPERIMENTS.values()} - {None} == {
        "unpadded shared-memory tile", "exp without the maximum", "oversized tile", "writing P to device memory", "FA1's loop order",
        "dividing by l inside the loop", "separate scale and mask kernels", "a timing loop whose data fits in L2"}


# What the published ledgers and the programming guide give, worked out by hand
def test_predictions_are_the_known_figures():
    def predicted(name, gpu=H200):
        return {p.quantity: p.interval for p in EXPERIMENTS[name].predict(gpu, Sizes())}

    tiles = predicted("tiles")
    assert tiles["column.64.conflicts"] == exactly(31 * 128 * 16)  # 32-way: 31 extra of each of the 128 requests, 16 times over
    for access in ("ldmatrix", "ldmatrix across", "ldmatrix.trans", "ldmatrix.trans across", "ldmatrix.x2", "ldmatrix.x1"):
        assert tiles[f"{access}.64.conflicts"] == exactly(7 * 64 * 16)  # 8-way: 7 extra for each of the 64 matrices, 16 times over
        if access in banks.ORDERS["80"]:
            assert tiles[f"{access}.80.conflicts"] == exactly(64 * 16)  # 2-way
    assert tiles["column.66.conflicts"] == tiles["ldmatrix.72.conflicts"] == tiles["ldmatrix.xor.conflicts"] == exactly(0)
    assert tiles["column.72.conflicts"] == tiles["column.xor.conflicts"] == exactly(3 * 128 * 16)  # 4-way
    assert {key for key in tiles if "misaligned" in key} == {"ldmatrix.65.misaligned", "ldmatrix.66.misaligned"}

    order = predicted("loop-order")
    heads, n, d = 128, 1024, 64
    fa2_read = heads * (2 * n * d + 2 * 2 * n * n * d // 64)  # Q once, K and V once for each of the 16 query tiles, at two bytes
    assert order["order.fa2.sm_read"] == about(fa2_read, 0.1)
    assert order["order.slower"].low > 1

    assert predicted("oversized", find_gpu("a100"))["oversized.256x256.launches"] == exactly(0)  # 192 KiB, where a block may have 163
    assert predicted("oversized")["oversized.256x256.launches"] == exactly(1)
    assert predicted("oversized", find_gpu("a100"))["oversized.64x64.blocks"] == exactly(3)
    assert predicted("shuffle")["shuffle.rate"] == about(1, 0.1)
    separate = predicted("separate")
    assert separate["separate.scale.seconds"] == about(2 * 8 * 4096**2 * 2 / 4.8e12, 0.25)
    assert separate["separate.cost"] == about(3, 0.25)


# What Nsight Compute counted on an H200, in two runs
LAYOUT = [{"plain": 119_306_566, "padded": 122_963, "swizzled": 99_346}, {"plain": 119_307_963, "padded": 126_457, "swizzled": 80_297}]
# Of `tiles` conflicts, and reads of the tile that the machine code made: ptxas had merged those by ldmatrix, 16 in the source
TILES = {
    "column.64": (63_488, 16), "column.65": (2_048, 16), "column.66": (0, 16), "column.72": (6_144, 16), "column.80": (14_336, 16),
    "column.xor": (6_144, 16), "ldmatrix.64": (3_584, 8), "ldmatrix across.64": (3_584, 8), "ldmatrix.trans.64": (3_584, 8),
    "ldmatrix.trans across.64": (3_584, 8), "ldmatrix.x2.64": (1_792, 4), "ldmatrix.x1.64": (1_792, 4), "ldmatrix.72": (0, 8),
    "ldmatrix.80": (512, 8), "ldmatrix across.80": (512, 8), "ldmatrix.trans.80": (512, 8), "ldmatrix.xor": (0, 8),
}


def test_conflicts_of_a_tile_are_those_that_were_counted():
    predicted = {p.quantity: p.interval for p in EXPERIMENTS["tiles"].predict(H200, Sizes()) if p.counted}
    assert predicted == {f"{key}.conflicts": exactly(counted * banks.READS / reads) for key, (counted, reads) in TILES.items()}


@pytest.mark.parametrize("counted", LAYOUT)
def test_conflicts_of_the_loop_are_those_that_were_counted(counted):
    predicted = {p.quantity: p.interval for p in EXPERIMENTS["layout"].predict(H200, Sizes())}
    for key, conflicts in counted.items():
        assert conflicts in predicted[f"layout.{key}.conflicts"], key
    # and on plain tiles it took 486.6 µs longer than on padded ones
    waits = attention.loads(attention.square(Sizes().loops), attention.LAYOUTS["plain"][1]).conflicts
    assert waits * 128 / H200.smem_rate == pytest.approx(486.6e-6, rel=0.02)


def test_no_cache_keeps_more_of_a_walk_than_it_holds():
    timing = {p.quantity: p.interval for p in EXPERIMENTS["timing"].predict(H200, Sizes())}
    assert timing["loop.large.rate"].high == pytest.approx(4.8e12 / (1 - 60 / 512))
    assert timing["loop.large.dram_read"].low == pytest.approx(64 * (512 - 60) * 2**20)


def test_picking():
    assert [one.name for one in pick(["tiles", "tiles", "steps"])] == ["tiles", "steps"]
    assert len(pick(None)) == len(pick([])) == len(EXPERIMENTS)
    with pytest.raises(ValueError, match=r"NAME: got 'tile', accepted: shuffle, "):
        pick(["tile"])
    made = sources(pick(["steps", "layout"]))
    assert len(made) == len(set(made))


def fake(name, measure, quantity="x.seconds"):
    return Experiment(name, "a claim", (), lambda gpu, sizes: (Prediction(quantity, "it", at_least(1)),), measure)


def test_one_failure_does_not_end_the_others():
    def wrong(bench):
        raise AssertionError("off by 0.3")

    def right(bench):
        bench.found["x.seconds"] = 2.0

    heard = []
    kept = []
    outcomes = conduct([fake("one", wrong), fake("two", right)], None, H200, on_experiment=heard.append,
                       keep=lambda outcomes: kept.append([one.verdict for one in outcomes]))
    assert [one.verdict for one in outcomes] == ["failed: off by 0.3", "confirmed"]
    assert heard == ["one", "two"]
    assert kept == [["failed: off by 0.3"], ["failed: off by 0.3", "confirmed"]]


def test_counters_are_asked_for_once_and_only_where_predicted():
    asked = []

    def count(names):
        asked.append(names)
        return {"x.conflicts": 0.0, "y.conflicts": 5.0}

    def measure(bench):
        bench.found["x.seconds"] = 3.0

    def wrong(bench):
        raise AssertionError("off")

    outcomes = conduct([fake("timed", measure), fake("zero", measure, "x.conflicts"), fake("five", measure, "y.conflicts"),
                        fake("failed", wrong, "y.conflicts")], None, H200, count=count)
    assert asked == [["zero", "five"]]
    assert [one.verdict for one in outcomes] == ["confirmed", "refuted: it", "confirmed", "failed: off"]
    assert outcomes[1].found == {"x.seconds": 3.0, "x.conflicts": 0.0}


def test_report_is_strict_json():
    outcomes = conduct([fake("two", lambda bench: bench.found.update({"x.seconds": math.inf}))], None, H200)
    text = json.dumps(report(outcomes, H200, Sizes(), {"gpu": "NVIDIA H200"}), allow_nan=False)
    (one,) = json.loads(text)["experiments"]
    assert one["verdict"] == "confirmed"
    assert one["predictions"][0] == {"quantity": "x.seconds", "what": "it", "low": 1, "high": "inf", "unit": "", "source": "",
                                     "measured": "inf", "holds": True}
