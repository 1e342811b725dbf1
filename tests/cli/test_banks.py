"""``onchip banks``: what it prints, writes and refuses; every example of its help page runs."""
import inspect
import json
import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import banks
from onchip.errors import InputError

app = typer.Typer(rich_markup_mode="markdown")
app.callback()(lambda: None)  # keeps `banks` a subcommand
banks.register(app)

EXAMPLES = re.findall(r"^ +onchip (banks.*)$", inspect.getdoc(banks.banks), re.MULTILINE)


def run(line):
    """Standard output of ``onchip banks LINE``, which must succeed."""
    result = CliRunner().invoke(app, ["banks", *shlex.split(line)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def prose(line):
    """The same with line breaks taken out of sentences."""
    return " ".join(run(line).split())


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_help_page_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(example.removeprefix("banks")).strip()


def test_help_shows_options_patterns_and_whole_example_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = CliRunner().invoke(app, ["banks", "--help"]).output
    assert len(EXAMPLES) >= 8
    for text in (*EXAMPLES, "--swizzle", "none|xor|32B|64B|128B", "--map", "--table", "--json", "--plot", "• column, row:", "ldmatrix.x4"):
        assert text in page
    assert "**" not in page


def test_padded_tile_is_clean_for_ldmatrix_and_four_way_down_a_column():
    for line in ("--rows 64 --cols 64 --dtype fp16 --pad 8 --pattern ldmatrix", "--pad 8"):
        assert "[64][64+8]: ldmatrix is clean, while the scalar column stays 4-way." in prose(line)
    words = prose("--pad 8 --pattern column")
    assert "one bank holds 4 of the words asked for and delivers them one after another: 4 wavefronts where 1 would do." in words
    assert "To free it: --pad 2 (256 B more); no swizzle does." in words
    assert "is clean, while" not in prose("--pad 2")


def test_the_tension_between_patterns_is_told():
    assert "To free all of them at once: no padding does; no swizzle does." in prose("--pattern column --pattern ldmatrix")
    assert "To free all of them at once: --pad 8 (1,024 B more); --swizzle xor (0 B more)." in prose("--pattern row --pattern ldmatrix")


def test_without_a_pattern_all_that_differ_and_fit_are_listed():
    def listed(line):
        return re.findall(r"^ ([\w.-]+) +\d+ × \d+ B", run(line), re.MULTILINE)

    vectors = ["column", "row", "column-4B", "row-4B", "column-8B", "row-8B", "column-16B", "row-16B"]
    assert listed("") == [*vectors, "ldmatrix.x1", "ldmatrix.x2", "ldmatrix.x4"]
    assert max(len(line.rstrip()) for line in run("").splitlines() if "conflict-free" in line) <= 80
    assert listed("--dtype fp32 --rows 8") == [*vectors[:2], *vectors[4:], "ldmatrix.x1"]
    assert "Left out (pattern: got ldmatrix.x2 on a 8×64 tile" in prose("--rows 8")


def test_table_holds_every_verdict():
    verdict = r"(\d+-way|conflict-free|misaligned)"
    rows = re.findall(rf"^ (\d+ ?\S*) +{verdict} +{verdict} +([\d,]+) *$", run("--table"), re.MULTILINE)
    assert [tuple(map(str.strip, row)) for row in rows] == [
        ("64", "32-way", "8-way", "0"), ("65 (+1)", "2-way", "misaligned", "128"), ("66 (+2)", "conflict-free", "misaligned", "256"),
        ("68 (+4)", "2-way", "misaligned", "512"), ("72 (+8)", "4-way", "conflict-free", "1,024"), ("80 (+16)", "8-way", "2-way", "2,048"),
        ("128", "32-way", "8-way", "0"), ("136 (+8)", "4-way", "conflict-free", "1,024"), ("64 xor", "4-way", "conflict-free", "0")]
    assert json.loads(run("--table --json"))[4] == {
        "cols": 64, "pad": 8, "swizzle": "none", "extra_bytes": 1024, "column": "4-way", "ldmatrix": "conflict-free"}


def test_map_marks_each_lane_in_its_bank_with_its_turn():
    lines = run("--pad 8 --pattern column --map").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("bank"))
    grid = [line.split() for line in lines[start + 1 : start + 34]]
    for lane in range(32):  # rows of 36 words: lane i meets bank 36 i mod 32, eighth after eighth
        assert grid[lane] == [str(lane), *(str(lane // 8 + 1) if bank == 36 * lane % 32 else "·" for bank in range(32))]
    assert grid[32] == ["words", *("4" if bank % 4 == 0 else "·" for bank in range(32))]
    assert max(map(len, lines[start:])) <= 80
    last = [line for line in run("--pattern column --map").splitlines() if line.startswith("  31")]
    assert last[0].split()[1] == "w"  # the 32nd wavefront


def test_misaligned_is_said_not_counted():
    words = prose("--pad 1 --pattern ldmatrix --map")
    assert "misaligned, as rows start 130 B apart and an access needs a multiple of its 16 B: the hardware raises an error." in words
    assert "ldmatrix.x4: misaligned, so there is no map" in words
    assert "lane 1 is at byte 12" in prose("--addresses 0,12 --width 8")
    assert json.loads(run("--pad 1 --pattern ldmatrix --json"))["patterns"][0]["degree"] is None


def test_json_gives_layout_figures_and_map():
    report = json.loads(run("--pad 8 --pattern column --pattern ldmatrix --json --map"))
    assert report["layout"] == {"rows": 64, "cols": 64, "element_bytes": 2, "pad": 8, "swizzle": "none",
                                "pitch": 144, "nbytes": 9216, "extra_bytes": 1024}
    column, matrix = report["patterns"]
    assert (column["pattern"], column["degree"], column["bandwidth_left"], column["freeing_pad"], column["freeing_swizzle"]) == \
        ("column", 4, 0.25, 2, None)
    assert (matrix["wavefronts"], matrix["ideal"], matrix["freeing_pad_bytes"], matrix["freeing_swizzle_bytes"]) == (4, 4, 1024, 0)
    assert column["phases"][0]["lane_banks"] == [[36 * lane % 32] for lane in range(32)]
    assert [len(words) for words in column["phases"][0]["bank_words"]] == [4, 0, 0, 0] * 8
    assert "phases" not in json.loads(run("--json"))["patterns"][0]


def test_addresses_are_numbers_and_ranges():
    report = json.loads(run("--addresses 0x80,4,0:512:128 --json"))
    assert "layout" not in report
    assert report["patterns"][0]["addresses"] == [128, 4, 0, 128, 256, 384]
    assert report["patterns"][0]["verdict"] == "4-way"


@pytest.mark.parametrize("line", ["--dtype fp64 --rows 8", "--pattern ldmatrix --pad 1", "--addresses 0,128"])
def test_plot_draws_the_marks(line, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "map.png"
    run(f"{line} --plot {picture}")
    pixels = image.imread(picture)
    assert pixels.shape[2] == 4
    coloured = (pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2) > 0.2).mean()
    assert coloured == 0 if "ldmatrix" in line else coloured > 0.005  # misaligned: an empty panel
    assert [entry.name for entry in tmp_path.iterdir()] == ["map.png"]


@pytest.mark.parametrize(("line", "message"), [
    ("--rows 0", "--rows: got 0"),
    ("--cols -1", "--cols: got -1"),
    ("--pad -1", "--pad: got -1"),
    ("--dtype int9", "--dtype: got 'int9'"),
    ("--swizzle 16B", "--swizzle: got '16B'"),
    ("--swizzle 64B --pad 8", "--pad: got 8, accepted: 0 with swizzle 64B"),
    ("--pattern diagonal", "--pattern: got 'diagonal'"),
    ("--rows 8 --pattern ldmatrix", "--pattern: got ldmatrix.x4 on a 8×64 tile"),
    ("--width 8", "--width: got 8 without --addresses"),
    ("--addresses 0:1:x", "--addresses: got '0:1:x'"),
    ("--addresses 0:99999999999", "--addresses: got 33 of them"),
    ("--addresses 0,4 --width 5", "--width: got 5"),
    ("--addresses 0,4 --pad 8", "--pad: got it beside --addresses, accepted there: --width, --map, --plot, --json"),
    ("--table --pattern column", "--pattern: got it beside --table, accepted there: --json"),
    ("--pattern column --plot map.gif", "--plot: got map.gif"),
])
def test_bad_input_names_the_option(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["banks", *shlex.split(line)])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(message)
    assert not list(tmp_path.iterdir())
