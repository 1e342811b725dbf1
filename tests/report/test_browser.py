"""The page in a real browser: no errors, nothing loaded, no sideways scroll on a phone, and figures that equal the JSON's.

Runs headless Chromium (Debian's package `chromium`). `probe.html` holds the page in a frame and writes down what the browser shows.
"""
import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from onchip.report.page import render
from onchip.report.results import read_results
from tests.report import made_up

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH: apt-get install chromium")
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "x": 1.0, "%": 1.0, "": 1.0,
         "clocks": 1.0, "a clock": 1.0}


def visit(file: Path, folder: Path, *options: str) -> str:
    """The document after Chromium opened `file`. Its console must be silent."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr",
               "--virtual-time-budget=5000", *options, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout


def seen(page: str, folder: Path, width: int, dark: bool) -> dict:
    """What the browser shows of `page` in a window of `width`."""
    file = folder / "probe.html"
    template = Path(__file__).with_name("probe.html").read_text()
    file.write_text(template.replace("WIDTH", str(width)).replace("PAGE", escape(page, quote=True)))
    document = visit(file, folder, "--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    return json.loads(unescape(re.search(r"<title>(.*?)</title>", document, re.S)[1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    made_up.write(folder, "ladder.json", made_up.ladder())
    made_up.write(folder, "lab.json", made_up.lab())
    kept = shutil.copytree(RESULTS, folder / "kept")
    (kept / "h200" / "ladder.json").unlink()  # the made-up one stands for it
    (folder / "page.html").write_text(render(read_results([folder])), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def phone(folder) -> dict:
    return seen((folder / "page.html").read_text(encoding="utf-8"), folder, 360, dark=False)


@pytest.fixture(scope="module")
def desk(folder) -> dict:
    return seen((folder / "page.html").read_text(encoding="utf-8"), folder, 1200, dark=True)


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def shown(text: str) -> tuple[float, float]:
    """(a cell's number, half of its last digit): '559 µs' → (559e-6, 0.5e-6); 'yes' is 1."""
    if text in ("no", "yes"):
        return float(text == "yes"), 0.0
    figure, power, unit = re.fullmatch(r"([\d.,]+)(?:e([-+]\d+))? ?(.*)", text).groups()
    scale = UNITS[unit.removesuffix("/s")] * 10.0 ** int(power or 0)
    return float(figure.replace(",", "")) * scale, 0.5 * 10.0 ** -len(figure.partition(".")[2]) * scale


def test_opens_from_disk_in_silence(folder):
    assert "<h1>Predicted, measured, counted</h1>" in visit(folder / "page.html", folder)


def test_a_script_error_would_be_noticed(folder):
    bad = folder / "bad.html"
    bad.write_text("<script>nonsense()</script>")
    with pytest.raises(AssertionError):
        visit(bad, folder)


def test_both_widths_fit_without_sideways_scroll_and_load_nothing(phone, desk):
    for view, width in ((phone, 360), (desk, 1200)):
        assert view["width"] <= width
        assert view["content"] <= view["width"]
        assert view["loaded"] == []
        assert len(view["headings"]) == 7
        assert [p["outside"] for p in view["pictures"]] == [[]] * len(view["pictures"])
        assert min(p["type"] for p in view["pictures"]) >= 9.5  # pixels of type in the smallest picture


def test_light_and_dark(phone, desk):
    assert brightness(phone["paper"]) > 220 > 60 > brightness(phone["ink"])
    assert brightness(desk["paper"]) < 40 < 180 < brightness(desk["ink"])


def test_every_number_shown_is_the_number_kept(desk):
    count = 0
    for table in desk["tables"]:
        for heading, cells in table["rows"]:
            for column, (text, value) in cells.items():
                if value is not None:
                    number, half = shown(text)
                    assert abs(number - float(value)) <= max(half, 5e-3 * number) * 1.0001, (table["caption"], heading, column, text, value)
                    count += 1
    assert count > 500


def table_of(view: dict, caption: str) -> list:
    (found,) = (t["rows"] for t in view["tables"] if t["caption"] == caption)
    return found


def test_the_ladders_figures_equal_the_json(desk):
    data = made_up.ladder()
    for raw in data["ladder"]:
        s = raw["shape"]
        name = f"N = {s['seq_q']}, 16 heads, d = 128, bf16, {'causal' if s['causal'] else 'full'}"
        rows, first = table_of(desk, f"Rungs on the NVIDIA H200: {name}"), raw["measured"][0]["seconds"]
        assert len(rows) == len(raw["measured"]) == 4
        for (heading, cells), m, c in zip(rows, raw["measured"], raw["counted"], strict=True):
            assert heading.split(" ", 1)[1] == m["title"]
            assert cells["roof"][0] == m["roof"]
            expected = {
                "predicted": m["predicted"], "measured": m["seconds"], "time ratio": m["seconds"] / m["predicted"],
                "speed-up": first / m["seconds"], "DRAM predicted": c["dram_predicted"], "DRAM counted": c["dram_bytes"],
                "DRAM ratio": c["dram_bytes"] / c["dram_predicted"], "issued": c["issued"], "L2 ↔ SMs counted": c["sm_bytes"],
                "issued ratio": c["sm_bytes"] / c["issued"], "tensor pipe": c["tensor_pipe"], "occupancy": c["occupancy"],
                "registers": c["registers"], "peak memory": m["peak_bytes"], "error": m["error"]["rms"]}
            assert {key: float(cells[key][1]) for key in expected} == expected
        (roofline,) = (p for p in desk["pictures"] if p["title"] == f"Roofline, {name}")
        points, wanted = {(title.partition(":")[0], float(x), float(y)) for title, x, y in roofline["points"]}, set()
        for m, c in zip(raw["measured"], raw["counted"], strict=True):
            flops = round(m["flops"] * m["seconds"])
            wanted.add((f"{m['title']}, predicted", flops / c["dram_predicted"], flops / m["predicted"]))
            wanted.add((f"{m['title']}, measured", flops / c["dram_bytes"], flops / m["seconds"]))
        assert points == wanted
        (traffic,) = (p for p in desk["pictures"] if p["title"] == f"Traffic, {name}")
        assert [float(b) for _, b in traffic["bars"]] == [
            x for c in raw["counted"] for x in (4 * 16 * s["seq_q"] * 128 * 2, c["issued"], c["dram_predicted"], c["dram_bytes"])]


def test_the_results_that_are_kept_make_a_page(folder):
    page = render(read_results([RESULTS]))
    (folder / "kept.html").write_text(page, encoding="utf-8")
    assert "Rungs on the NVIDIA H200: N = 16384, 16 heads, d = 128, bf16, causal" in visit(folder / "kept.html", folder)


def test_the_incident(desk):
    rows = dict(table_of(desk, "As N grows"))
    for raw in made_up.ladder()["incident"]:
        for m in raw["measured"]:
            cells = rows[f"N = {raw['shape']['seq_q']}, {m['title']}"]
            assert float(cells["time"][1]) == m["seconds"]
            assert float(cells["peak memory"][1]) == m["peak_bytes"]
    assert rows["N = 32768, naive"][""][0] == "not run: S and P would take 17.2 GB, more than the 9.1 GB free: out of memory"


def test_speed_equals_the_committed_results(desk):
    names = {"onchip": "onchip", "fa4": "FlashAttention-4", "cudnn": "cuDNN", "fa2": "FlashAttention-2 (SDPA)"}
    cells = json.loads((RESULTS / "h200" / "attention_forward.json").read_text())["cells"]
    rows = table_of(desk, "Attention forward, TFLOP/s (attention_forward.json)")
    for (heading, shown_), cell in zip(rows, cells, strict=True):
        assert heading == cell["case"]
        assert {k: float(shown_[names[k]][1]) for k in cell["tflops"]} == cell["tflops"]
        peers = [v for k, v in cell["tflops"].items() if k != "onchip"]
        if peers:
            assert float(shown_["over the best peer"][1]) == cell["tflops"]["onchip"] / max(peers)
    softmax = json.loads((RESULTS / "h200" / "softmax.json").read_text())["results"]
    for row in softmax:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(row["dtype"], row["dtype"])
        found = dict(table_of(desk, f"Softmax {row['pass']}, {short}, TB/s (softmax.json)"))
        assert float(found[f"N = {row['n']}"][row["name"]][1]) == row["tb_per_s"]


def test_the_labs_verdicts(desk):
    for experiment in made_up.lab()["experiments"]:
        (cells,) = (c for heading, c in table_of(desk, "Claims and verdicts, made-up H200") if heading == experiment["name"])
        assert cells["verdict"][0] == experiment["verdict"]
        for p in experiment["predictions"]:
            rows = table_of(desk, "Predictions and measurements, made-up H200")
            (numbers,) = (c for h, c in rows if h == f"{experiment['name']}: {p['what']}")
            assert (numbers["measured"][1] and float(numbers["measured"][1])) == p["measured"]
