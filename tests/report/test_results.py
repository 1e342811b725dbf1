"""Files are told apart by what they hold; what is broken or unknown is refused by name."""
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import ladder as ladder_command
from onchip.errors import InputError
from onchip.report.results import read_results
from onchip.roofline.shape import AttentionShape
from tests.report import made_up

ROOT = Path(__file__).parents[2]


def test_the_ladder_of_a_gpu(tmp_path):
    data = made_up.ladder()
    found = read_results([made_up.write(tmp_path, "any-name.json", data)])
    assert [climb.backward for climb in found.ladders] == [False] * 4 + [True]
    (incident,) = found.incidents
    assert [c.shape.seq_q for c in incident] == [2048, 4096, 8192, 32768]
    assert set(incident[-1].skipped) == {"naive"}
    climb, raw = found.ladders[1], data["ladder"][1]
    assert climb.shape == AttentionShape.square(4096, 128, heads=16, causal="bottom-right")
    assert climb.name == "N = 4096, 16 heads, d = 128, bf16, causal"
    for step, m, c in zip(climb.steps, raw["measured"], raw["counted"], strict=True):
        assert (step.key, step.measured, step.predicted, step.roof) == (m["key"], m["seconds"], m["predicted"], m["roof"])
        assert (step.issued, step.sm_bytes, step.dram_predicted) == (c["issued"], c["sm_bytes"], c["dram_predicted"])
        assert step.dram_counted == c["dram_bytes"] == pytest.approx(sum(x.dram_read + x.dram_written for x in step.launches))
    assert (climb.roof.bandwidth, climb.roof.matmul, climb.roof.sms) == (4.25e12, 7.1e14, 132)
    assert [len(step.pairs) for step in climb.steps] == [3, 1, 1, 1]
    assert [step.merged for step in climb.steps] == [pytest.approx(2.0), None, pytest.approx(2.0), pytest.approx(2.0)]  # FA1 shares nothing


def test_the_backward_has_its_own_flops_bytes_and_name(tmp_path):
    *_, forward, backward = read_results([made_up.write(tmp_path, "ladder.json", made_up.ladder())]).ladders
    assert backward.name.endswith("causal, backward")
    assert backward.flops == 2.5 * (4096 * 4097 // 2) * 4 * 128 * 16
    one = 4096 * 128 * 16 * 2  # bytes of q, and of each other tensor
    assert backward.compulsory == 8 * one + 4096 * 16 * 4  # q, k, v, out, dout and three gradients, and lse
    assert forward.compulsory == 4 * one * 2  # twice as long
    assert [step.key for step in backward.steps] == ["naive_backward", "apart_backward"]


def test_counters_may_be_missing_for_a_rung_or_for_all(tmp_path):
    data = made_up.ladder()
    data["ladder"][0]["counted"].pop(0)
    data["ladder"][1]["counted"] = []
    first, second, *_ = read_results([made_up.write(tmp_path, "a.json", data)]).ladders
    assert [s.dram_counted is None for s in first.steps] == [True, False, False, False]
    assert all(s.issued is None and s.measured for s in second.steps)


def test_the_ladder_of_the_command_line(tmp_path):
    app = typer.Typer()
    ladder_command.register(app)
    text = CliRunner().invoke(app, ["--seq", "96", "--head-dim", "16", "--heads", "2", "--json"], catch_exceptions=False).stdout
    file = tmp_path / "ladder.json"
    file.write_text(text)
    data, (predicted, here) = json.loads(text), read_results([file]).ladders
    assert [(s.key, s.predicted, s.issued, s.dram_predicted) for s in predicted.steps] == [
        (r["rung"], r["predicted_s"], r["counted_bytes"], r["dram_bytes"]) for r in data["rungs"]]
    assert predicted.device == "H200-SXM-141GB"
    assert [s.measured for s in here.steps] == [m["seconds"] for m in data["this_machine"]["measurements"]]
    assert here.device == data["this_machine"]["ceilings"]["device"]


def test_a_folder_gives_what_it_has_and_says_what_it_left_out(tmp_path):
    (tmp_path / "deep").mkdir()
    made_up.write(tmp_path / "deep", "lab.json", made_up.lab())
    odd = made_up.write(tmp_path, "odd.json", {"rows": []})
    (tmp_path / "notes.txt").write_text("no JSON")
    found = read_results([tmp_path])
    assert [file for file, _ in found.sources] == [str(tmp_path / "deep" / "lab.json")]
    assert found.left_out == [str(odd)]


def test_the_committed_results_are_of_known_kinds():
    found = read_results([ROOT / "benchmarks" / "results"])
    assert found.forward
    assert found.triton
    assert found.softmax
    assert found.costs


def refused(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_results(paths)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_refused(tmp_path):
    missing = tmp_path / "missing.json"
    assert str(missing) in refused(missing)
    text = tmp_path / "text.json"
    text.write_text("{not JSON")
    assert "text.json" in refused(text)
    text.write_bytes(b"\xff\xfe\x00")
    assert "text.json" in refused(text)
    for other in ([1, 2], {"rows": []}, 3, None):
        assert "onchip ladder --json" in refused(made_up.write(tmp_path, "other.json", other))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no file of a known kind" in refused(empty)


@pytest.mark.parametrize(("part", "says"), [("measured", "it lacks 'measured'"), ("shape", "it lacks 'shape'")])
def test_a_broken_ladder_is_named(tmp_path, part, says):
    data = made_up.ladder()
    del data["ladder"][2][part]
    assert says in refused(made_up.write(tmp_path, "broken.json", data))


def test_sizes_that_make_no_sense_are_named(tmp_path):
    data = made_up.ladder()
    data["ladder"][0]["shape"]["heads"] = -16
    message = refused(made_up.write(tmp_path, "broken.json", data))
    assert "broken.json" in message
    assert "heads" in message
