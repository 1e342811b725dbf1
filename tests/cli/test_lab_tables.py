"""The lab's tables: from made-up results, and from predictions alone."""
import json

import pytest

from onchip.cli import lab_tables as tables
from onchip.lab.experiment import Interval
from onchip.lab.experiments import EXPERIMENTS


def made_up():
    def prediction(what, low, high, measured, holds, unit=""):
        return {"quantity": "q", "what": what, "low": low, "high": high, "unit": unit, "source": "a model", "measured": measured,
                "holds": holds}

    return {"experiments": [
        {"name": "one", "claim": "It is so.", "pitfall": "a trap", "verdict": "refuted: speed", "predictions": [
            prediction("count", 3, 3, 3.0, True), prediction("speed", 2, "inf", 1.5, False), prediction("bytes", 0, 4e6, None, None, "B")]},
        {"name": "two", "claim": "So is this.", "pitfall": None, "verdict": "not measured yet", "predictions": [
            prediction("time", 2e-4, 3e-4, None, None, "s")]},
    ]}


def test_verdicts():
    assert tables.verdicts(made_up()).splitlines() == [
        "| experiment | claim | pitfall | hold | verdict |", "| --- | --- | --- | --- | --- |",
        "| one | It is so. | a trap | 1 of 3 | refuted: speed |", "| two | So is this. |  | – of 1 | not measured yet |"]


def test_predictions():
    assert tables.predictions(made_up()).splitlines()[2:] == [
        "| one | count | = 3 | 3 | yes | a model |", "| one | speed | ≥ 2 | 1.5 | no | a model |",
        "| one | bytes | ≤ 4 MB | – | – | a model |", "| two | time | 200 µs … 300 µs | – | – | a model |"]


def test_results_are_the_file_or_the_predictions_alone(tmp_path):
    file = tmp_path / "lab.json"
    alone = tables.results(file)
    assert [one["name"] for one in alone["experiments"]] == list(EXPERIMENTS)
    assert {one["verdict"] for one in alone["experiments"]} == {"not measured yet"}
    assert len(tables.verdicts(alone).splitlines()) == 2 + len(EXPERIMENTS)
    file.write_text(json.dumps(made_up()))
    assert tables.results(file) == made_up()


@pytest.mark.parametrize(("interval", "unit", "text"), [
    (Interval(1, 1), "yes/no", "yes"), (Interval(0, 0), "yes/no", "no"), (Interval(63488, 63488), "", "= 63,488"),
    (Interval(20, 25), "clocks", "20 … 25 clocks"), (Interval(2e-4, float("inf")), "s", "≥ 200 µs"), (Interval(0, 4e6), "B", "≤ 4 MB"),
    (Interval(4.8e12, float("inf")), "B/s", "≥ 4.8 TB/s"), (Interval(0.98, 1.056), "", "0.98 … 1.056"),
])
def test_numbers_as_they_are_printed(interval, unit, text):
    assert tables.show_interval(interval, unit) == text
