"""The documentation's tables: what they show is what the results say, and what is not measured says so."""
import importlib.util
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onchip.report.ladders import picture
from onchip.report.results import read_results
from tests.report import made_up

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("tables", None)


def cells(markdown: str) -> list[list[str]]:
    """Rows of the first table, its heading first, without the ruler."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for i, line in enumerate(lines) if i != 1]


def test_a_ladder_that_was_not_measured_says_so(tables, tmp_path):
    words = tables.measured(tmp_path / "ladder.json")
    assert words.startswith("Not measured yet.")
    assert "benchmarks/ladder_gpu.py" in words
    assert not re.search(r"\d", words.replace("h200", ""))


def test_the_measured_ladder(tables, tmp_path):
    data = made_up.ladder()
    shown = tables.measured(made_up.write(tmp_path, "ladder.json", data))
    assert shown.count("**NVIDIA H200, N = ") == len(data["ladder"]) + len(data["backward"])
    heading, *rows = cells(shown.split("**NVIDIA H200")[1])
    assert heading[:5] == ["rung", "roof", "predicted", "measured", "ratio"]
    for row, m, c in zip(rows, data["ladder"][0]["measured"], data["ladder"][0]["counted"], strict=True):
        assert row[0] == m["title"]
        assert row[4] == f"{m['seconds'] / m['predicted']:.2f}x"
        assert row[8] == f"{c['dram_bytes'] / c['dram_predicted']:.2f}x"
        assert bool(row[10]) == (m["seconds"] / m["predicted"] > 1.1 or c["dram_bytes"] / c["dram_predicted"] > 1.1)


def test_what_crosses_and_what_is_looked_up(tables, tmp_path):
    data = made_up.ladder()
    heading, *rows = cells(tables.crossing(made_up.write(tmp_path, "ladder.json", data)))
    counted = [*data["ladder"][0]["counted"], *data["backward"][0]["counted"]]
    assert [row[0] for row in rows] == [c["title"] for c in counted]
    for row, c in zip(rows, counted, strict=True):
        assert row[heading.index("ratio")] == f"{c['sm_bytes'] / c['issued']:.2f}x"
        assert row[heading.index("merged into one")] == ("–" if c["key"] == "fa1" else "2.0")
    assert "Not" in tables.crossing(tmp_path / "none.json")


def test_as_n_grows_memory_ends_for_naive(tables, tmp_path):
    data = made_up.ladder()
    shown = tables.incident(made_up.write(tmp_path, "ladder.json", data))
    heading, *rows = cells(shown)
    assert [row[0] for row in rows] == ["2048", "4096", "8192", "32768"]
    naive, hopper = (m["seconds"] for m in data["incident"][2]["measured"])
    assert rows[2][heading.index("faster")] == f"{naive / hopper:.1f}x"
    assert rows[2][3].endswith("20 %")
    assert rows[3][1:4] == ["–"] * 3
    assert "N = 32768: naive was not run: S and P would take 17.2 GB" in shown
    assert tables.incident(tmp_path / "none.json") == "Not measured yet."


def forward_cell(seq: int, causal: bool, **rates: float) -> dict:
    return {"case": f"s{seq}", "b": 8192 // seq, "s": seq, "hq": 16, "hkv": 16, "d": 128, "dv": 128, "causal": causal, "window": None,
            "dtype": "bfloat16", "lengths": [], "error": {"onchip": 2e-3}, "refused": {}, "tflops": rates,
            "seconds": {name: seq * (0.6 if causal else 1.0) / rate for name, rate in rates.items()}}


@pytest.fixture
def forward(tmp_path) -> Path:
    grid = [forward_cell(seq, causal, onchip=400.0 + seq, cudnn=500.0, fa4=450.0) for seq in (1024, 2048, 4096) for causal in (False, True)]
    grid.append(forward_cell(8192, False, onchip=1.0) | {"b": 8})  # another B·S: too few lengths to be a column
    machine = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6"}
    return made_up.write(tmp_path, "forward.json", {"machine": machine, "cells": grid})


def test_forward_is_held_against_the_best_peer_also_where_it_loses(tables, forward):
    shown = tables.forward(forward)
    heading, *rows = cells(shown)
    assert heading == ["S", "d 128 full", "d 128 causal"]
    assert [row[0] for row in rows] == ["1024", "2048", "4096"]
    assert rows[0][1] == f"1424 ({1424 / 500:.2f}x)"
    losing = json.loads(forward.read_text())
    losing["cells"][0]["tflops"]["onchip"] = 250.0
    forward.write_text(json.dumps(losing))
    assert cells(tables.forward(forward))[1][1] == "250 (0.50x)"
    assert "FlashAttention-4, cuDNN" in shown


def test_what_a_causal_mask_saves(tables, forward):
    heading, *rows = cells(tables.causal(forward))
    assert heading == ["N", "scores computed", "onchip: time", "FlashAttention-4: time", "cuDNN: time"]
    assert rows == [["1024", "56.2%", *["60.0%"] * 3], ["2048", "53.1%", *["60.0%"] * 3], ["4096", "51.6%", *["60.0%"] * 3]]


def test_the_committed_results_fill_every_table(tables):
    for make in (tables.forward, tables.triton, tables.softmax, tables.across, tables.causal, tables.backward):
        rows = cells(make())
        assert len(rows) > 2
        assert all(len(row) == len(rows[0]) for row in rows)
        assert all(re.match(r"\d|–", cell) for row in rows[1:] for cell in row[1:])


def test_the_picture_stands_alone(tmp_path):
    climb = read_results([made_up.write(tmp_path, "ladder.json", made_up.ladder())]).ladders[1]
    svg = picture(climb)
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {step.title for step in climb.steps} <= set(words)
    assert not re.search(r"url\(|href|<script", svg)
