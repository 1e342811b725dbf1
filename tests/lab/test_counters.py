"""Hardware counters filed under what was launched; the program that is profiled, on an emulated card."""
import json
from dataclasses import fields
from pathlib import Path

import pytest

from onchip.bench.counters import Counters
from onchip.errors import InputError
from onchip.lab import counters
from onchip.lab.experiment import COUNTERS
from tests.lab import emulator

NAMES = [field.name for field in fields(Counters) if field.name not in ("kernel", "within")]


def launch(number, **without):
    """Counter m of launch k is 100 k + m."""
    return Counters(f"kernel {number}", "", **{**{name: 100.0 * number + m for m, name in enumerate(NAMES)}, **without})


def value(name, *launches):
    return sum(100 * number + NAMES.index(name) for number in launches)


def test_launches_are_added_up_under_their_keys():
    found = counters.merge([("a", 2), ("b", 1)], [launch(1), launch(2), launch(3)])
    for name in COUNTERS:
        if name != "dram_bytes":
            assert found[f"a.{name}"] == value(name, 1, 2)
            assert found[f"b.{name}"] == value(name, 3)
    assert found["a.dram_bytes"] == value("dram_read", 1, 2) + value("dram_written", 1, 2)


def test_a_counter_the_card_has_not_is_left_out():
    found = counters.merge([("a", 2)], [launch(1), launch(2, dram_written=None)])
    assert {"a.dram_written", "a.dram_bytes"} & set(found) == set()
    assert found["a.dram_read"] == value("dram_read", 1, 2)


def test_other_launches_than_were_made_are_refused():
    with pytest.raises(InputError, match="ncu: counted 1 launches, 2 were made"):
        counters.merge([("a", 2)], [launch(1)])


def test_the_lab_runs_itself_under_the_profiler(monkeypatch):
    def profiled(command, ncu):
        program, keys, names = command[1:3], command[3], command[4:]
        assert program == ["-m", "onchip.lab.counters"]
        assert (names, ncu) == (["tiles", "steps"], Path("ncu"))
        Path(keys).write_text(json.dumps([["a", 1]]))
        return [launch(7)]

    monkeypatch.setattr("onchip.bench.counters.count", profiled)
    assert counters.count(["tiles", "steps"], Path("ncu"))["a.conflicts"] == value("conflicts", 7)


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for this CPU")
def test_the_child_says_what_it_launched(tmp_path, monkeypatch, capsys):
    class Named(emulator.EmulatedCard):
        name = "NVIDIA H200"

    monkeypatch.setattr("onchip.lab.card.Card", Named)
    monkeypatch.setattr("onchip.lab.experiments.attention.Fused", None)  # `division` fails, and the other goes on
    keys = tmp_path / "keys.json"
    counters.main([str(keys), "division", "tiles"])
    assert capsys.readouterr().err == "division: 'NoneType' object is not callable\n"
    launched = json.loads(keys.read_text())
    orders = ["column", "ldmatrix", "ldmatrix across", "ldmatrix.trans", "ldmatrix.trans across", "ldmatrix.x2", "ldmatrix.x1"]
    assert [key for key, _ in launched] == [
        *(f"{order}.64" for order in orders), "column.65", "column.66", "column.72", "ldmatrix.72",
        *(f"{order}.80" for order in orders[:4]), "column.xor", "ldmatrix.xor"]
    assert all(launches == 1 for _, launches in launched)
