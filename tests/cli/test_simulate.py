"""``onchip simulate``: the published figures through the command line, its files, and what it says to bad input."""
import json
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from onchip.cli import simulate, simulate_attention
from onchip.errors import InputError
from onchip.ladder.climb import sample_size
from onchip.ladder.rungs import RUNGS

app = typer.Typer()
simulate.register(app)
app.callback()(lambda: None)


def run(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *args], catch_exceptions=False)
    assert result.exit_code == status
    return result.stdout


def softmax(*args: str) -> dict:
    return json.loads(run("softmax", *args, "--json"))


def attention(*args: str) -> dict:
    return json.loads(run("attention", *args, "--json"))


# --- softmax


def test_worked_example():
    text = run("softmax", "--values", "1,3,2,4", "--block", "2")
    assert [cell for line in text.splitlines() if line.split()[:1] == ["1"] for cell in line.split()][-2:] == ["0.41767", "1.553"]
    steps = softmax("--values", "1,3,2,4", "--block", "2", "--format", "fp64")["modes"]["online"]["steps"]
    assert [round(s["l"], 4) for s in steps] == [1.1353, 1.5530]
    assert round(steps[1]["carried"], 4) == 0.4177


def test_a_spike_breaks_naive_and_anchored_in_half_precision():
    report = softmax("--distribution", "spike", "--format", "fp16")
    assert report["exp_overflows_above"] == pytest.approx(11.09, abs=1e-3)
    for mode, m in report["modes"].items():
        broken = mode in ("naive", "anchored")
        assert (m["breakdown"] is not None) is broken
        assert m["passes_for_m_and_l"] == (2 if mode == "safe" else 1)
        if broken:
            assert (m["breakdown"]["block"], m["breakdown"]["element"]) == (6, 3072)
            assert m["l"] == "inf"
        else:
            assert 0 < m["relative_error"] < 2**-10
    assert report["modes"]["anchored"]["redo"]
    text = run("softmax", "--distribution", "spike", "--format", "fp16")
    assert "naive breaks at block 6, element 3072: exp(20 − 0) is inf" in text
    assert "anchored breaks at block 6, element 3072: exp(20 − 3.06641) is inf: float16 ends at 65504; online must redo the row." in text
    assert "y = exp(x − m) / l took one more" in text


def test_one_mode_in_detail_with_a_masked_block():
    text = run("softmax", "--values=-inf,-inf,2,4", "--block", "2", "--mode", "online")
    assert "nan" not in text.lower()
    assert "1.1353" in text
    assert list(softmax("--values=-inf,2", "--mode", "safe")["modes"]) == ["safe"]


def test_an_empty_row_is_nan_and_says_so():
    assert "every probability is NaN, as in torch" in run("softmax", "--values=-inf,-inf")
    assert softmax("--values=-inf,-inf")["modes"]["online"]["max_abs_error"] == "nan"


def test_anchored_out_of_range_says_why():
    text = run("softmax", "--values", "0,70,1", "--block", "1")
    assert "anchored: l = 2.515e+30 is outside 2^-60 … 2^100; online must redo the row." in text


def test_order_and_long_rows():
    report = softmax("--n", "1000", "--block", "10", "--order", "reverse", "--format", "bf16", "--state-format", "fp64")
    assert report["order"] == list(range(100))[::-1]
    assert report["state_format"] == "float64"
    text = run("softmax", "--n", "1000", "--block", "10")
    assert "84 blocks are left out" in text
    assert softmax("--values", "1,2,3", "--block", "1", "--order", "1,2,0")["order"] == [1, 2, 0]


@pytest.mark.parametrize(("distribution", "low", "high"), [("uniform", -1, 1), ("ramp", 0, 20), ("normal", -6, 6), ("spike", -6, 20)])
def test_distributions_scale_and_repeat(distribution, low, high):
    args = "--distribution", distribution, "--n", "64", "--format", "fp64", "--block", "1"
    once, twice = ([s["block_max"] for s in softmax(*args, "--scale", scale)["modes"]["safe"]["steps"]] for scale in ("1", "2"))
    assert low <= min(once) < max(once) <= high
    assert max(once) == high or distribution in ("uniform", "normal")
    assert twice == pytest.approx([2 * x for x in once])
    assert softmax(*args, "--seed", "1") == softmax(*args, "--seed", "1")


def test_a_row_from_a_file(tmp_path):
    x = np.array([[9, 9, 9, 9], [1, 3, 2, 4]], np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", scores=x[1])
    save_file({"scores": x.astype(ml_dtypes.bfloat16)}, tmp_path / "x.safetensors")
    for name, row in (("x.npy", "1"), ("x.npz", "0"), ("x.safetensors", "1")):
        report = softmax("--inputs", str(tmp_path / name), "--row", row, "--block", "2", "--mode", "online")
        assert report["modes"]["online"]["l"] == pytest.approx(1.5530, abs=1e-4)


def test_files_that_are_refused(tmp_path):
    def message(name: str, *args: str) -> str:
        with pytest.raises(InputError) as caught:
            run("softmax", "--inputs", str(tmp_path / name), *args)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for name in ("bad.npy", "bad.npz", "bad.safetensors", "missing.npy", "missing.safetensors"):
        if name.startswith("bad"):
            (tmp_path / name).write_bytes(b"1234567890")
        assert f"{name}: the file cannot be read" in message(name)
    assert "a name ending in .npy" in message("x.csv")
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    assert "2 arrays in two.npz" in message("two.npz")
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    assert "shape (2, 2, 2)" in message("cube.npy")
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    assert "accepted: real numbers" in message("text.npy")
    np.save(tmp_path / "nan.npy", np.array([[0.0, math.nan]]))
    assert message("nan.npy").startswith("x: got nan at element 1")
    assert message("nan.npy", "--row", "1") == "--row: got 1, accepted: 0 … 0"


@pytest.mark.parametrize(("args", "message"), [
    (("--values", "1,two"), "--values: got '1,two', accepted: numbers with commas between"),
    (("--values", "1,nan"), "x: got nan at element 1"),
    (("--values", "70000", "--format", "fp16"), "x: got 70000 at element 0"),
    (("--values", "1", "--inputs", "x.npy"), "--values: got 1 and --inputs x.npy, accepted: one of the two"),
    (("--n", "0"), "--n: got 0"),
    (("--block", "-4"), "--block: got -4"),
    (("--scale", "inf"), "--scale: got inf"),
    (("--seed", "-1"), "--seed: got -1"),
    (("--distribution", "cauchy"), "--distribution: got 'cauchy', accepted: normal, uniform, spike, ramp"),
    (("--order", "0,0"), "order: got 0,0"),
    (("--format", "fp6"), "--format: got 'fp6'"),
    (("--state-format", "e4m3"), "state: got float8_e4m3"),
    (("--mode", "fast"), "--mode: got 'fast', accepted: naive, safe, online, anchored"),
    (("--values", "1,2", "--plot", "x.pdf"), "--plot: got x.pdf")])
def test_softmax_refuses(args, message):
    with pytest.raises(InputError, match=f"^{message}"):
        run("softmax", *args)


# --- attention


@pytest.mark.parametrize("schedule", list(RUNGS))
@pytest.mark.parametrize("extra", [
    (), ("--causal", "--heads", "4", "--kv-heads", "2", "--seq-k", "70"), ("--window", "8,3", "--head-dim-v", "24"),
    ("--inputs-format", "fp64", "--p-format", "fp64"), ("--sram", "20000"), ("--sample", "0", "--batch", "3")])
def test_counted_is_closed_form_for_every_schedule(schedule, extra):
    report = attention("--schedule", schedule, "--seq", "50", "--head-dim", "16", "--tile", "16x32", "--inputs-format", "fp16",
                       "--p-format", "fp32", *extra)
    assert report["equal"]
    assert all(line["counted"] == line["closed_form"] > 0 for line in report["traffic"])
    assert sum(line["counted"] for line in report["traffic"]) == report["issued_bytes"]
    assert 0 < report["on_chip_peak_bytes"] == sum(report["on_chip_peak_buffers"].values()) <= (report["sram"] or math.inf)
    limit = 1e-12 if "fp64" in extra else 2e-3
    assert all(error["rms"] < limit for error in report["errors"].values())
    assert set(report["errors"]) == (set() if "0" in extra else {"dq", "dk", "dv"} if "backward" in schedule else {"out", "lse"})


def test_causal_tiles():
    report = attention("--seq", "1024", "--head-dim", "16", "--causal", "--sample", "0")
    assert report["tiles"] == {"full": 120, "masked": 16, "skipped": 120}  # 136 of 256: 53.1 %
    assert "visited 53.1 %: 120 whole, 16 masked" in run("attention", "--seq", "1024", "--head-dim", "16", "--causal", "--sample", "0")


def test_large_shapes_execute_a_sample_and_count_everything(monkeypatch):
    monkeypatch.setattr(simulate_attention, "sample_size", lambda shape, br: sample_size(shape, br, budget=1 << 20))
    args = "--seq", "2048", "--head-dim", "8", "--tile", "128x512"
    report = attention(*args)
    assert report["executed"] == 0.25  # 2²⁰ of 2²² scores
    assert report["issued_bytes"] == 2 * 2048 * 8 * 2 + 2 * 2048 * 8 * 2 * 16 + 4 * 2048
    assert 0 < report["errors"]["out"]["rms"] < 5e-3
    assert "Executed 6.25 % of the query rows" in run("attention", *args, "--sample", "1")


def test_a_row_that_does_not_fit_makes_the_softmax_read_twice():
    def reads(sram: str) -> int:
        args = "--schedule", "naive", "--seq", "2048", "--head-dim", "16", "--tile", "16x16", "--sample", "0", "--sram", sram
        return next(line["counted"] for line in attention(*args)["traffic"] if line["kernel"].startswith("P") and line["tensor"] == "S")

    assert reads(str(2 * 2048 + 8)) == 2 * 2048**2  # a row of S in bf16, m and l in fp32
    assert reads(str(2 * 2048 + 7)) == 2 * 2 * 2048**2


def test_the_page_for_a_person():
    text = run("attention", "--schedule", "fa2", "--seq", "512", "--head-dim", "64", "--causal")
    assert "equal" in text
    assert "differs" not in text
    assert "On-chip peak of a thread block: 57,856 B" in text
    assert "Error of out against float64" in text


def test_a_count_that_differs_is_shown_and_fails(monkeypatch):
    monkeypatch.setitem(RUNGS, "fa2", replace(RUNGS["fa2"], ledger=RUNGS["online"].ledger))
    assert "differs" in run("attention", "--seq", "64", "--head-dim", "16", status=1)


def test_too_little_sram_is_refused_with_what_is_alive():
    with pytest.raises(InputError, match=r"^sram: got 40,000 B.*66,560 B"):
        run("attention", "--sram", "40000", "--tile", "128x64")


@pytest.mark.parametrize(("args", "message"), [
    (("--schedule", "fa9"), "--schedule: got 'fa9', accepted: naive_scaled, naive, tiled"),
    (("--seq", "0"), "--seq: got 0"),
    (("--heads", "3", "--kv-heads", "2"), "kv_heads: got 2"),
    (("--tile", "64"), "--tile: got '64'"),
    (("--window", "a"), "--window: got 'a'"),
    (("--splits", "0"), "--splits: got 0"),
    (("--sram", "0"), "--sram: got 0"),
    (("--sample", "-1"), "--sample: got -1"),
    (("--seed", "-1"), "--seed: got -1"),
    (("--inputs-format", "fp6"), "--inputs-format: got 'fp6'"),
    (("--p-format", "fp6"), "scores: got 'fp6'"),
    (("--state-format", "e4m3"), "state: got float8_e4m3"),
    (("--seq", "64", "--plot", "x.pdf"), "--plot: got x.pdf")])
def test_attention_refuses(args, message):
    with pytest.raises(InputError, match=f"^{message}"):
        run("attention", *args)


# --- both


@pytest.mark.parametrize(("name", "args"), [
    ("m_and_l.svg", ("softmax", "--distribution", "spike", "--format", "fp16", "--n", "64")),
    ("masked.png", ("softmax", "--values=-inf,-inf")),
    ("traffic.png", ("attention", "--seq", "64"))])
def test_pictures(name, args, tmp_path):
    run(*args, "--plot", str(tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(("command", "words"), [
    ("softmax", ("anchored", "--values 1,3,2,4 --block 2", "single pass")), ("attention", ("split_kv", "--causal", "closed form"))])
def test_help_has_examples(command, words):
    text = " ".join(run(command, "--help").split())
    for word in words:
        assert word in text
