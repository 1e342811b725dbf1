"""``onchip ladder``: the climb on real and random numbers, and one clear line for every bad input."""
import builtins
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import ladder
from onchip.errors import InputError

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "data" / "minilm_qkv.npz"
app = typer.Typer()
ladder.register(app)


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def report(*args: str) -> dict:
    return json.loads(run(*args, "--json", "--no-measure"))


@pytest.mark.parametrize("mask", [(), ("--causal",)])
def test_real_inputs(mask):
    r = report("--inputs", str(DATA), *mask)
    with np.load(DATA) as file:
        heads, seq, dim = file["q"].shape[-3:]
    assert (r["shape"]["heads"], r["shape"]["seq_q"], r["shape"]["head_dim"]) == (heads, seq, dim)
    rungs = {x["rung"]: x for x in r["rungs"]}
    assert list(rungs)[:6] == ["naive_scaled", "naive", "tiled", "online", "fa1", "fa2"]
    for rung in rungs.values():
        assert rung["counted_bytes"] == rung["issued_bytes"]
        assert rung["executed_share"] == 1
        assert 1e-5 < rung["error"]["out"]["rms"] < 2e-3  # fp16 carries 2⁻¹¹ = 4.9e-4 a rounding
    assert rungs["naive_scaled"]["counted_bytes"] > rungs["naive"]["counted_bytes"] > rungs["tiled"]["counted_bytes"]
    assert rungs["tiled"]["counted_bytes"] > rungs["online"]["counted_bytes"] > rungs["fa2"]["counted_bytes"]
    # S and P rounded on their way through memory cost accuracy that keeping them on the chip does not
    assert rungs["naive"]["error"]["out"]["rms"] > 2 * rungs["fa2"]["error"]["out"]["rms"]
    skipped = rungs["fa2"]["tiles"].get("skipped", 0)
    assert (skipped > 0) == bool(mask)


def test_float64_is_exact_and_large_problems_are_sampled():
    exact = report("--seq", "200", "--head-dim", "24", "--heads", "2", "--dtype", "fp64", "--gpu", "a100", "--causal")
    assert max(x["error"]["out"]["rms"] for x in exact["rungs"]) < 1e-6  # inputs and scores float64, state float32
    large = report("--seq", "16384", "--head-dim", "16", "--heads", "1")
    assert all(0 < x["executed_share"] < 0.2 for x in large["rungs"])
    fa2 = large["rungs"][5]
    assert fa2["counted_bytes"] == 2 * 16384 * 16 * 2 + 2 * 16384**2 * 16 * 2 // 128 + 4 * 16384


def test_backward_rungs():
    r = report("--seq", "192", "--heads", "2", "--kv-heads", "1", "--backward")
    assert [x["rung"] for x in r["rungs"]] == [
        "naive_scaled_backward", "naive_backward", "apart_backward", "fa2_backward"]
    for rung in r["rungs"]:
        assert set(rung["error"]) == {"dq", "dk", "dv"}
        assert all(1e-4 < e["rms"] < 2e-2 for e in rung["error"].values())


def test_tables_and_this_machine(tmp_path):
    out = run("--seq", "128", "--head-dim", "16", "--heads", "2", "--plot", str(tmp_path / "x.png"))
    for word in ("counted here", "FA1, K/V outer", "speed-up", "equals the closed form", "timed on this machine", "torch SDPA"):
        assert word in out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_torch_the_rest_still_runs(monkeypatch):
    real = builtins.__import__

    def no_torch(name, *args, **rest):
        if name.split(".")[0] == "torch":
            raise ImportError(name)
        return real(name, *args, **rest)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    out = run("--seq", "64", "--heads", "1")
    assert "pip install 'onchip[torch]'" in out
    assert "FA2, Q outer" in out


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_where_counting_fails_the_rest_is_printed_and_then_the_reason(monkeypatch, form):
    def refused(*_):
        raise InputError("ncu: the driver does not permit counters")

    monkeypatch.setattr(ladder, "find_profiler", lambda named: Path("ncu"))
    monkeypatch.setattr(ladder, "count_here", refused)
    result = CliRunner().invoke(app, ["--seq", "64", "--head-dim", "16", "--heads", "1", "--no-measure", "--counters", *form])
    assert isinstance(result.exception, InputError)  # what `onchip` prints as one line and exits with status 2 for
    assert str(result.exception) == "ncu: the driver does not permit counters"
    if form:
        report = json.loads(result.stdout)
        assert report["counted"] is None
        assert report["rungs"][0]["counted_bytes"] > 0
    else:
        assert "executed and counted here" in result.stdout
        assert "counted by Nsight Compute" not in result.stdout


@pytest.mark.parametrize(("gpu", "options", "words"), [
    (False, (), "--counters: got a machine without an NVIDIA GPU"), (True, ("--ncu", "/no/such/ncu"), "ncu: got /no/such/ncu"),
])
def test_a_machine_that_cannot_count_says_so_before_anything_runs(monkeypatch, gpu, options, words):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(ladder, "climb", lambda *_, **__: pytest.fail("climbed"))
    result = CliRunner().invoke(app, ["--seq", "64", "--counters", *options])
    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)
    assert result.stdout == ""


def bad_file(folder: Path, **arrays: np.ndarray) -> str:
    path = folder / "bad.npz"
    np.savez(path, **arrays)
    return str(path)


def test_bad_arrays_are_named(tmp_path):
    ok = np.ones((4, 8), np.float32)
    nan = ok.copy()
    nan[1, 2] = np.nan
    for arrays, words in (({"q": ok, "k": ok}, ("v",)), ({"q": ok, "k": nan, "v": ok}, ("k", "nan")),
                          ({"q": ok, "k": ok[:, :4], "v": ok}, ("k",)), ({"q": ok[0], "k": ok, "v": ok}, ("q",)),
                          ({"q": ok.astype(int), "k": ok, "v": ok}, ("q", "int"))):
        with pytest.raises(InputError) as error:
            run("--inputs", bad_file(tmp_path, **arrays))
        assert all(word in str(error.value) for word in words)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("args", "words"), [
    (("--seq", "0"), ("--seq", "0")), (("--heads", "-1"), ("--heads", "-1")), (("--gpu", "z9"), ("z9", "h200")),
    (("--tile", "512x512", "--head-dim", "128"), ("--tile", "512x512", "393,216", "232,448")),
    (("--inputs", "nowhere.npz"), ("nowhere.npz", "no such file")), (("--inputs", str(ROOT)), ("is not a file",)),
    (("--inputs", str(ROOT / "README.md")), (".md", ".npz")), (("--inputs", str(DATA), "--seq", "9"), ("--seq", "--inputs"))])
def test_bad_input_is_one_clear_message(args, words):
    with pytest.raises(InputError) as error:
        run(*args)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_the_real_command_exits_2_with_one_line_and_no_traceback(tmp_path):
    done = subprocess.run([sys.executable, "-m", "onchip", "ladder", "--seq", "-3", "--plot", str(tmp_path / "x.png")],
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("onchip: --seq: got -3")
    assert not list(tmp_path.iterdir())
