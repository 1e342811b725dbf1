"""``onchip plan``: the ranking, the verdict on one tile, and what it says to bad input."""
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import plan
from onchip.errors import InputError

app = typer.Typer()
plan.register(app)


def run(*args: str):
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def report(*args: str) -> dict:
    return json.loads(run(*args, "--json").stdout)


SMALL = ("--seq", "1024", "--head-dim", "128", "--heads", "8")


def test_the_ranking() -> None:
    r = report(*SMALL, "--gpu", "h200", "--dtype", "bf16", "--top", "3")
    assert len(r["plans"]) == 3 < r["ranked"]
    times = [p["predicted_s"] for p in r["plans"]]
    assert times == sorted(times)
    for p in r["plans"]:
        assert p["smem_bytes"] <= 227 * 1024
        assert p["spilled_registers"] == 0
        assert p["blocks_per_sm"] == min(p["block_limits"].values()) >= 1
    assert r["explanation"][0].startswith(f"{r['plans'][0]['br']}×{r['plans'][0]['bc']}")
    assert r["gpu"]["name"] == "h200"
    assert r["shape"]["seq_q"] == 1024


def test_the_table_says_why() -> None:
    said = run(*SMALL, "--top", "4").stdout
    assert "TFLOP/s" in said
    words = " ".join(said.split())
    for part in ("wins with", "which is not the goal", "The runner-up", "that cannot launch", "NVIDIA H200 data sheet"):
        assert part in words


def test_backward_plans_the_backward() -> None:
    forward, backward = report(*SMALL), report(*SMALL, "--backward")
    assert backward["plans"][0]["backward"]
    assert {"dO", "dS"} <= set(backward["plans"][0]["buffers"])
    assert backward["plans"][0]["predicted_s"] > 1.5 * forward["plans"][0]["predicted_s"]


@pytest.mark.parametrize(
    ("pad", "smem", "opt_in"), [(0, 49152, False), (8, 52224, True)],
)
def test_padding_takes_64x64_over_the_static_limit(pad: int, smem: int, opt_in: bool) -> None:
    args = (*SMALL, "--gpu", "a100", "--dtype", "fp16", "--tile", "64x64", "--stages", "1", "--warps", "4", "--pad", str(pad))
    tile = report(*args)["tile"]
    assert (tile["smem_bytes"], tile["needs_opt_in"], tile["blocks_per_sm"], tile["occupancy"]) == (smem, opt_in, 3, 0.1875)
    assert ("cudaFuncSetAttribute" in run(*args).stdout) is opt_in


def test_a_hopper_tile() -> None:
    tile = report(*SMALL, "--gpu", "h100", "--tile", "128x176", "--consumers", "2", "--stages", "2")["tile"]
    assert (tile["threads"], tile["smem_bytes"], tile["occupancy"], tile["register_cap"]) == (384, 208 * 1024 + 80, 0.1875, 240)
    words = " ".join(run(*SMALL, "--gpu", "h100", "--tile", "128x176", "--consumers", "2", "--stages", "2").stdout.split())
    assert "Launches with 1 of these blocks an SM" in words
    assert "Predicted" in words


def test_a_tile_that_cannot_launch_shows_its_table_and_the_reason() -> None:
    args = [*SMALL, "--gpu", "a100", "--dtype", "fp16", "--tile", "256x256", "--warps", "8"]
    shown = CliRunner().invoke(app, args)
    assert "196608 B" in shown.stdout
    assert isinstance(shown.exception, InputError)  # the application turns it into one line and exit status 2
    assert str(shown.exception) == ("--tile: 256×256, 8 warps, 1 stage cannot launch: needs 196608 B of shared memory a block, "
                                    "A100-SXM4-80GB allows 166912 B")
    machine = CliRunner().invoke(app, [*args, "--json"])
    assert json.loads(machine.stdout)["launchable"] is False
    assert json.loads(machine.stdout)["reason"].startswith("needs 196608 B")
    # the same tile on an H100: one block an SM, and far more registers than it has
    h100 = report(*SMALL, "--gpu", "h100", "--dtype", "fp16", "--tile", "256x256", "--warps", "8")
    assert h100["launchable"]
    assert h100["tile"]["blocks_per_sm"] == 1
    assert h100["tile"]["spilled_registers"] > 0


def test_measured_ceilings_replace_the_data_sheet() -> None:
    sheet, measured = (report(*SMALL, "--gpu", gpu, "--tile", "128x128", "--consumers", "2", "--stages", "2") for gpu in
                       ("h200", "h200,bf16_tflops=494.7"))
    ratio = measured["tile"]["roofs_s"]["tensor cores"] / sheet["tile"]["roofs_s"]["tensor cores"]
    assert ratio == pytest.approx(2.0)
    assert measured["gpu"]["measured"] == ["bfloat16_tflops"]


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--gpu", "h300"], "gpu: got 'h300'"), (["--top", "0"], "--top: got 0"), (["--seq", "-1"], "--seq: got -1"),
     (["--tile", "64"], "--tile: got '64'"), (["--stages", "2"], "--stages: got 2 without --tile"),
     (["--p-in-smem"], "--p-in-smem"), (["--tile", "100x64"], "--tile br: got 100"),
     (["--tile", "64x64", "--stages", "0"], "--stages: got 0"), (["--tile", "64x64", "--consumers", "4"], "--consumers: got 4"),
     (["--tile", "64x64", "--warps", "0"], "--warps: got 0"), (["--tile", "64x64", "--dtype", "fp64"], "--dtype: got fp64"),
     (["--gpu", "mi300x"], "gpu: got mi300x"), (["--gpu", "v100"], "dtype: got bf16"), (["--head-dim", "9999"], "head_dim: got 9999"),
     (["--plot", "plan.pdf"], "--plot: got plan.pdf")],
)
def test_bad_input_is_one_line(args: list[str], message: str) -> None:
    error = CliRunner().invoke(app, [*SMALL, *args]).exception
    assert isinstance(error, InputError)
    assert message in str(error)
    assert "accepted" in str(error)
    assert "\n" not in str(error)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, magic, args in (("plan.png", b"\x89PNG", ()), ("one.svg", b"<?xml", ("--tile", "64x64"))):
        assert run(*SMALL, *args, "--plot", str(tmp_path / name)).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(magic)


def test_help_is_a_manual_page() -> None:
    said = run("--help").stdout
    for part in ("--consumers", "--pad", "--gpu", "onchip plan --gpu a100", "mma.sync", "exit status is 2"):
        assert part in " ".join(said.split())
