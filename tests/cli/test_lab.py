"""``onchip lab``: the list, a run without a GPU and one on an emulated card, compiling, and one clear line for every bad input."""
import inspect
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import lab
from onchip.errors import InputError, MissingExtra
from onchip.lab.experiment import Sizes
from onchip.lab.experiments import EXPERIMENTS
from tests.lab import emulator

app = typer.Typer(rich_markup_mode="markdown")
app.callback()(lambda: None)  # keeps `lab` a group within
lab.register(app)

PAGES = "\n".join(map(inspect.getdoc, (lab.lab, lab.run, lab.compile_)))
EXAMPLES = re.findall(r"^- `onchip (lab.*?)`", PAGES, re.MULTILINE)


def run(line, status=0):
    result = CliRunner().invoke(app, ["lab", *shlex.split(line)], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


def prose(line):
    """The same with line breaks taken out of sentences."""
    return " ".join(run(line).split())


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(lab, "find_card", lambda: "no driver is installed")


@pytest.fixture
def emulated(monkeypatch):
    class Card(emulator.EmulatedCard):
        name, driver_version = "NVIDIA H200", 13000

    monkeypatch.setattr(lab, "find_card", Card)
    monkeypatch.setattr(lab, "Card", Card)
    monkeypatch.setattr(lab, "conduct", lambda *args, **options: CONDUCT(*args, sizes=Sizes.small(), **options))


CONDUCT = lab.conduct


def test_the_list_names_every_experiment_and_its_claim():
    page = prose("")
    for experiment in EXPERIMENTS.values():
        assert experiment.name in page
        assert experiment.claim in page
        assert experiment.pitfall is None or f"(pitfall: {experiment.pitfall})" in page


def test_examples_name_what_exists():
    assert len(EXAMPLES) >= 8
    for example in EXAMPLES:
        words = [word for word in shlex.split(example)[2:] if not word.startswith("-")]
        assert all(word in EXPERIMENTS or re.match(r"(sm_\d+|a100-80gb|lab\.json)$", word) for word in words), example


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_compiles_and_says_what_it_would_measure(tmp_path):
    pytest.importorskip("cuda.core")
    file = tmp_path / "lab.json"
    page = prose(f"run shuffle oversized --json {file}")
    assert "No GPU to measure on: no driver is installed Compiled for sm_90: 3 kernels from 3 sources, none with spilled registers." in page
    assert "What would be measured on one H200-SXM-141GB:" in page
    assert "20 … 25 clocks" in page
    assert page.count("not measured yet") == 2
    written = json.loads(file.read_text())
    assert written["gpu"] is None
    assert [one["name"] for one in written["experiments"]] == ["shuffle", "oversized"]
    assert all(p["measured"] is None and p["holds"] is None for one in written["experiments"] for p in one["predictions"])


@pytest.mark.usefixtures("no_gpu")
def test_predictions_follow_the_card(monkeypatch):
    monkeypatch.setattr(lab, "_compiled", lambda chosen, target: "")
    rows = run("run oversized --gpu a100-80gb")
    assert re.search(r"256x256, 192 KiB: launches after the opt-in +no ", rows)
    assert re.search(r"256x256, 192 KiB: launches after the opt-in +yes ", run("run oversized"))


@pytest.mark.usefixtures("no_gpu")
def test_without_the_compiler_the_extra_is_named_and_the_predictions_are_shown(monkeypatch):
    def missing(source, arch):
        raise MissingExtra("compiling the lab's kernels", "NVRTC (nvidia-cuda-nvrtc)", "lab")

    monkeypatch.setattr(lab, "build", missing)
    page = prose("run shuffle")
    assert "needs NVRTC (nvidia-cuda-nvrtc), which is not installed: pip install 'onchip[lab]'" in page
    assert "shuffle: not measured yet" in page


def test_a_card_too_old_is_told(monkeypatch, no_gpu):
    page = prose("run shuffle --gpu t4")
    assert "Nothing was compiled: the kernels need compute capability 8.0, which the T4 has not." in page


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for this CPU")
def test_on_a_card_it_measures_and_judges(tmp_path):
    file = tmp_path / "lab.json"
    page = prose(f"run oversized division --json {file}")
    assert "oversized: confirmed" in page
    assert "division: confirmed" in page  # the emulated card takes a second for everything: the ratio is 1
    written = json.loads(file.read_text())
    assert (written["gpu"], written["predicted_for"], written["cuda_driver"]) == ("NVIDIA H200", "h200", 13000)
    oversized, division = written["experiments"]
    assert all(p["holds"] for p in oversized["predictions"])
    assert division["found"]["division.cost"] == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for this CPU")
def test_a_run_cut_short_leaves_what_it_measured_beside_the_last_whole_results(tmp_path, monkeypatch):
    file, partial = tmp_path / "lab.json", tmp_path / "lab.json.partial"
    file.write_text("the last whole results")

    def cut(bench):
        raise KeyboardInterrupt

    pick = lab.pick
    monkeypatch.setattr(lab, "pick", lambda names: [pick(names)[0], replace(pick(names)[1], measure=cut)])
    run(f"run oversized division --json {file}", status=130)
    assert [one["name"] for one in json.loads(partial.read_text())["experiments"]] == ["oversized"]
    assert file.read_text() == "the last whole results"


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for this CPU")
def test_a_whole_run_leaves_no_part_behind(tmp_path):
    run(f"run oversized --json {tmp_path / 'lab.json'}")
    assert [file.name for file in tmp_path.iterdir()] == ["lab.json"]


@pytest.mark.usefixtures("emulated")
def test_an_experiment_that_fails_ends_in_status_1(monkeypatch):
    def wrong(bench):
        raise AssertionError("off by 0.3")

    monkeypatch.setattr(lab, "pick", lambda names: [replace(EXPERIMENTS[name], measure=wrong) for name in names])
    assert "shuffle: failed: off by 0.3" in run("run shuffle", status=1)


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for this CPU")
def test_where_counting_fails_the_measurements_are_kept(tmp_path, monkeypatch):
    """As when Nsight's reader crashes: the file is whole, and says why there are no counters."""
    def count(command, ncu):
        raise InputError("ncu: its reader died of SIGSEGV")

    (tmp_path / "extras" / "python").mkdir(parents=True)
    (tmp_path / "extras" / "python" / "ncu_report.py").write_text("")
    (tmp_path / "ncu").write_text("")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr("onchip.bench.counters.count", count)
    result = CliRunner().invoke(app, ["lab", "run", "tiles", "oversized", "--counters", "--ncu", str(tmp_path / "ncu"), "--json",
                                      str(tmp_path / "lab.json")])
    assert result.exit_code == 1
    assert "not counted: ncu: its reader died of SIGSEGV" in result.stderr
    assert "oversized: confirmed" in result.stdout
    assert not (tmp_path / "lab.json.partial").exists()
    written = json.loads((tmp_path / "lab.json").read_text())
    assert written["uncounted"] == "ncu: its reader died of SIGSEGV"
    tiles, oversized = written["experiments"]
    assert {p["holds"] for p in tiles["predictions"] if p["quantity"].endswith(".conflicts")} == {None}
    assert oversized["verdict"] == "confirmed"


@pytest.mark.usefixtures("emulated")
def test_counters_without_the_tool_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match=r"ncu: got .*missing, accepted"):
        run(f"run tiles --counters --ncu {tmp_path / 'missing'}")


def test_compile_reports_each_kernel():
    pytest.importorskip("cuda.core")
    table = run("compile overflow --arch sm_89")
    assert re.search(r"overflow FORMAT=0 MAX=1 +softmax +sm_89 +\d+ +0\+0 +0 ", table)
    kernels = json.loads(run("compile overflow --arch 89 --json"))["kernels"]
    assert len(kernels) == 12  # three formats, with and without the maximum, two kernels
    assert {one["arch"] for one in kernels} == {"sm_89"}
    assert all(one["registers"] > 0 and one["spill_stores"] == 0 for one in kernels)


@pytest.mark.parametrize(("line", "message"), [
    ("run tile", "NAME: got 'tile', accepted: shuffle, butterfly"), ("compile nothing", "NAME: got 'nothing'"),
    ("compile tiles --arch sm_75", "--arch: got 'sm_75', accepted: sm_80"), ("run tiles --gpu h2o", "gpu: got 'h2o', accepted: v100"),
])
def test_bad_input_is_one_line(line, message, no_gpu):
    with pytest.raises(InputError) as caught:
        run(line)
    assert str(caught.value).startswith(message)


def test_the_program_exits_with_2_and_no_traceback():
    done = subprocess.run([sys.executable, "-m", "onchip", "lab", "run", "tile"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("onchip: NAME: got 'tile'")
    assert "Traceback" not in done.stderr


def self_check():
    page = (Path(__file__).parents[2] / "docs" / "checklist.md").read_text()
    return re.findall(r"\| `onchip (.*?)` \|$", page, re.MULTILINE)


@pytest.mark.parametrize("line", self_check())
def test_every_question_of_the_checklist_has_a_command_that_runs(line):
    done = subprocess.run([sys.executable, "-m", "onchip", *shlex.split(line)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_item_of_the_checklist_has_a_command():
    page = (Path(__file__).parents[2] / "docs" / "checklist.md").read_text()
    items = re.split(r"^- \[ \] ", page.partition("## Check yourself")[0], flags=re.MULTILINE)[1:]
    assert len(items) > 12
    assert [item.splitlines()[0] for item in items if "```sh\n" not in item] == []
    assert len(self_check()) >= 8
