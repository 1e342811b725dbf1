"""The page without a browser: what it holds, what it must not load, and that it reads aloud."""
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from onchip.errors import InputError
from onchip.report.charts import Axis, Series, bars, lines
from onchip.report.page import SECTIONS, render
from onchip.report.results import read_results
from tests.report import made_up

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "br", "img", "input"}


class Outline(HTMLParser):
    """Every element with its attributes and its parents' names; complains where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.stack)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.stack)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes, _ in self.elements if tag == name]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("results")
    made_up.write(folder, "ladder.json", made_up.ladder())
    made_up.write(folder, "lab.json", made_up.lab())
    return render(read_results([folder, ROOT / "benchmarks" / "results"]))


def test_nothing_is_loaded_and_nothing_runs(page):
    outline = Outline(page)
    assert not outline.all("script")
    assert not outline.all("link")
    assert not outline.all("img")
    assert all((a["href"] or "").startswith("#") for a in outline.all("a"))
    assert not re.search(r"url\(|@import|https?:|\son\w+=", page)
    (policy,) = (m["content"] for m in outline.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_id_is_there_once_and_every_reference_leads_somewhere(page):
    outline = Outline(page)
    ids = [a["id"] for _, a, _ in outline.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in outline.elements:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)
    assert {a["href"] for a in outline.all("a")} == {f"#{ident}" for ident, _, _ in SECTIONS.values()}
    assert {a["href"][1:] for a in outline.all("a")} <= set(ids)


def test_tables_and_pictures_have_words(page):
    outline = Outline(page)
    assert len(outline.all("table")) == len(outline.all("caption")) > 10
    assert all(a.get("scope") in ("row", "col") for a in outline.all("th"))
    assert all(parents[-2:-1] == ("div",) for tag, _, parents in outline.elements if tag == "caption")
    assert len(outline.all("svg")) == len(outline.all("desc")) == len(outline.all("figcaption")) > 10
    assert all(a.get("role") == "img" and a.get("aria-labelledby") for a in outline.all("svg"))
    assert all(re.search(r"\d", words) for words in re.findall(r"<desc[^>]*>(.*?)</desc>", page))


def test_names_from_a_file_are_text(page):
    assert "Hopper, anchored &lt;softmax&gt;" in page
    assert "<softmax>" not in page


def test_a_section_is_there_only_with_its_data(tmp_path):
    only = render(read_results([made_up.write(tmp_path, "lab.json", made_up.lab())]))
    assert re.findall(r'<h2 id="(\w+)">', only) == ["lab"]
    assert "<svg" not in only
    uncounted = render(read_results([made_up.write(tmp_path, "ladder.json", made_up.ladder(counters=False))]))
    assert re.findall(r'<h2 id="(\w+)">', uncounted) == ["ladder", "incident"]
    assert "DRAM counted" not in uncounted
    assert "Roofline" not in uncounted
    assert "Traffic" not in uncounted
    assert "time: " in uncounted  # gaps in time are told without counters, too


def test_the_lab_says_what_it_knows(page):
    assert [v in page for v in ("confirmed", "refuted: conflicts of a &amp; b", "not measured yet")] == [True] * 3
    assert '≥ 2 µs' in page


@pytest.mark.parametrize(("name", "part"), [("attention_forward", "cells"), ("attention_triton", "rows"), ("softmax", "results")])
def test_a_row_that_lacks_something_is_told_with_its_file(tmp_path, name, part):
    data = json.loads((ROOT / "benchmarks" / "results" / "h200" / f"{name}.json").read_text())
    lost = {"cells": "tflops", "rows": "tflops", "results": "tb_per_s"}[part]
    del data[part][1][lost]
    with pytest.raises(InputError, match=rf"{name}\.json.* it lacks '{lost}'"):
        render(read_results([made_up.write(tmp_path, f"{name}.json", data)]))


def test_softmax_of_odd_lengths_selections_and_small_calls(tmp_path):
    row = {"dtype": "bfloat16", "rows": 8}
    results = [row | {"pass": "forward", "n": n, "name": name, "us": 1.0, "tb_per_s": rate}
               for n, rate in ((1000, 3.0), (1024, 4.0), (2048, 4.5)) for name in ("onchip", "copy")]
    others = [row | {"pass": "topk", "n": 50257, "k": 8, "name": "onchip", "us": 5.0, "tb_per_s": 3.9},
              row | {"pass": "topk", "n": 50257, "k": 8, "name": "torch", "us": 10.0, "tb_per_s": 1.3},
              {"dtype": "bfloat16", "pass": "small", "shape": [8, 128], "name": "onchip", "us": 7.5, "tb_per_s": 0.1},
              {"dtype": "bfloat16", "pass": "small", "shape": [8, 128], "name": "torch", "us": 6.0, "tb_per_s": 0.125}]
    data = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "results": results, "others": others}
    page = render(read_results([made_up.write(tmp_path, "softmax.json", data)]))
    assert re.findall(r'data-x="([\d.]+)"', page) == ["1024.0", "2048.0"]  # the copy is a line, 1000 stands in the table alone
    assert "N = 1000" in page
    assert re.search(r"8 × 50257, k = 8</th>.*?3\.90.*?1\.30.*?3\.00x", page)
    assert re.search(r"8 × 128</th>.*?7\.5.*?6\.0.*?0\.80x", page)


def test_a_time_of_zero_is_told(tmp_path):
    data = made_up.ladder()
    data["ladder"][0]["measured"][0]["seconds"] = 0.0
    data["incident"][0]["measured"][0]["seconds"] = 0.0
    assert "<svg" in render(read_results([made_up.write(tmp_path, "ladder.json", data)]))  # not drawn, and nothing divides by it


def test_a_position_is_where_its_number_belongs():
    axis = Axis("x", 1.0, 100.0, 0.0, 200.0, log=True)
    assert [axis.at(v) for v in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])
    assert axis.ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Axis("x", 1.0, 1e5, 0.0, 1.0, log=True).ticks() == [1, 10, 100, 1000, 10000, 100000]
    assert Axis("y", 0.0, 86.0, 240.0, 0.0).ticks() == [0, 20, 40, 60, 80]
    assert Axis("y", 0.0, 80.0, 240.0, 0.0).at(20.0) == 180.0


def test_bars_share_one_scale_from_zero():
    svg = bars("b", "t", [("a", [("x", "issued", 4e9), ("y", "counted", 1e9)]), ("b", [("x", "issued", 2e9)])])
    drawn = re.findall(r'width="([\d.]+)" height="10" data-bytes="([\d.]+)"', svg)
    assert [float(width) / float(nbytes) for width, nbytes in drawn] == pytest.approx([float(drawn[0][0]) / 4e9] * 3, rel=1e-3)


def test_points_stand_where_the_scale_says():
    svg = lines("l", "t", [Series("a", "s0", ((512.0, 10.0), (1024.0, 20.0), (2048.0, 40.0)))], "N", "TFLOP/s")
    at = [(float(cx), float(cy)) for cx, cy in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = at
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # lengths that double are equally far apart
    assert y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.2)  # values are linear
