"""``onchip inspect``: kernels compiled without a GPU, the report on them, and one clear line for bad input."""
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("triton")
from onchip.attention.hopper import tiles
from onchip.bench import inspect as compiling
from onchip.cli import inspect
from onchip.errors import InputError, MissingExtra
from tests import fresh

app = typer.Typer()
inspect.register(app)

COMMANDS = {
    "hopper": "attention --head-dim 128 --arch sm_90 --causal --json",
    "split": "attention --head-dim 128 --seq 100 --seq-k 8192 --heads 16 --json",
    "backward": "attention --head-dim 64 --window 64,0 --direction backward --backend hopper --dtype fp16 --json",
    "ampere": "attention --head-dim 64 --arch sm_80 --seq 512 --json",
    "softmax": "softmax --columns 4096 --dtype fp32 --json",
    "cluster": "softmax --columns 16384",
    "log_softmax": "softmax --columns 300 --across --direction backward --log --arch sm_80",
    "blind": "attention --head-dim 40 --arch sm_89 --varlen",
}


def printed(name: str) -> str:
    """What that command prints, where kernels compile; 'blind' takes the disassembler away."""
    if name == "blind":
        compiling._disassemble = lambda cubin: ""
    return run(*COMMANDS[name].split())


class Answers(dict[str, str]):
    """Each command's, when it is first asked for."""

    def __missing__(self, name: str) -> str:
        self[name] = fresh.call(printed, name)
        return self[name]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


def test_the_hopper_forward(answers):
    report = json.loads(answers["hopper"])
    tile = tiles.forward(128, 128)
    assert (report["operator"], report["backend"], report["direction"], report["arch"]) == ("attention", "hopper", "forward", "sm_90")
    assert report["problem"]["causal"] == "bottom-right"
    (kernel,) = report["kernels"]
    # s = q kᵀ and o += p v, k = 16 a wgmma, at least in the edge loop and in the whole one, for each consumer
    step = tile.consumers * (128 // 16 + tile.keys // 16)
    assert report["wgmma"] == kernel["wgmma"] == kernel["instructions"]["HGMMA"] >= 2 * step
    assert report["spill_stores"] == report["spill_loads"] == kernel["spill_stores"] == 0
    assert report["registers"] == kernel["registers"] == tile.max_registers
    assert 0 <= report["shared_bytes"] - kernel["planned_shared_bytes"] <= 1024
    assert kernel["planned_shared_bytes"] >= tile.buffers
    assert (kernel["tile_rows"], kernel["tile_columns"]) == (tile.rows, tile.keys)
    assert (kernel["blocks_per_sm"], kernel["warps_per_sm"]) == (1, 4 * (tile.consumers + 1))
    assert kernel["instructions"]["UTMALDG"] > 0 < kernel["instructions"]["MUFU"]
    assert kernel["counted_in"] == "SASS"


def test_split_keys_take_a_second_kernel(answers):
    forward, merge = json.loads(answers["split"])["kernels"]
    assert (forward["kernel"], merge["kernel"]) == ("forward_kernel", "merge_kernel")
    assert 0 <= forward["shared_bytes"] - forward["planned_shared_bytes"] <= 1024
    assert forward["planned_shared_bytes"] < json.loads(answers["hopper"])["kernels"][0]["planned_shared_bytes"]  # no room for o
    assert (merge["threads"], merge["tile_rows"], merge["planned_shared_bytes"]) == (32, 1, None)
    assert not any(kernel["unwritten"] or kernel["spill_stores"] for kernel in (forward, merge))


def test_the_backward_of_hopper_is_triton_s(answers):
    report = json.loads(answers["backward"])
    kernels = {kernel["kernel"]: kernel for kernel in report["kernels"]}
    assert report["backend"] == "hopper"
    assert set(kernels) == {"rows_kernel", "keys_kernel", "queries_kernel"}
    assert all(kernels[name]["wgmma"] > 0 for name in ("keys_kernel", "queries_kernel"))
    assert report["wgmma"] == sum(kernel["wgmma"] for kernel in kernels.values())
    assert report["registers"] == max(kernel["registers"] for kernel in kernels.values())
    assert kernels["rows_kernel"]["tile_columns"] is kernels["rows_kernel"]["planned_shared_bytes"] is None
    assert kernels["keys_kernel"]["planned_shared_bytes"] > 0


def test_another_card_gets_its_own_kernel(answers):
    report = json.loads(answers["ampere"])
    assert (report["backend"], report["wgmma"]) == ("triton", 0)
    assert report["mma"] > 0 < report["kernels"][0]["instructions"]["LDGSTS"]


def test_softmax(answers):
    report = json.loads(answers["softmax"])
    (kernel,) = report["kernels"]
    assert kernel["tile_rows"] * 4096 == kernel["tile_rows"] * kernel["tile_columns"]
    assert kernel["instructions"]["EX2"] == kernel["tile_rows"] * 4096 // kernel["threads"]  # one an element, in registers
    assert kernel["blocks_a_row"] == 1
    assert " 3 of 1×6144 " in answers["cluster"]
    out = answers["log_softmax"]
    assert "4096 rows of 300 (dim 0), bfloat16, log_softmax backward on sm_80" in out
    assert "PTX" not in out


def test_a_missing_disassembler_is_said(answers):
    out = " ".join(answers["blind"].split())
    assert "instructions in the PTX" in out
    assert "No disassembler" in out
    assert "mma.sync" in out


def run(*args: str) -> str:
    done = CliRunner().invoke(app, ["inspect", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(("args", "words"), [
    (("attention", "--arch", "sm_70"), ("--arch", "sm_70", "sm_90")), (("attention", "--arch", "hopper"), ("--arch", "hopper")),
    (("attention", "--head-dim", "600"), ("600", "1 … 512", "8 … 256")), (("attention", "--head-dim", "0"), ("--head-dim",)),
    (("attention", "--head-dim", "300", "--backend", "hopper"), ("hopper", "300", "8 … 256")),
    (("attention", "--arch", "sm_80", "--backend", "hopper"), ("hopper", "compute capability 9.0")),
    (("attention", "--bias", "--backend", "hopper"), ("hopper", "no bias")), (("attention", "--backend", "cudnn"), ("--backend", "triton")),
    (("attention", "--direction", "up"), ("--direction", "up", "backward")), (("attention", "--dtype", "e4m3"), ("--dtype", "bf16")),
    (("softmax", "--columns", "0"), ("--columns", "0")), (("softmax", "--dtype", "fp64"), ("--dtype", "fp64")),
    (("softmax", "--causal", "--across"), ("--causal", "--across")), (("softmax", "--arch", "sm_1"), ("--arch", "sm_1"))])
def test_bad_input_is_one_clear_message(args, words):
    with pytest.raises(InputError) as error:
        run(*args)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_without_triton_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(inspect, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"onchip\[torch\]"):
        run("attention")


def test_under_the_interpreter_nothing_compiles_and_that_is_said(monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    with pytest.raises(InputError, match="TRITON_INTERPRET"):
        run("softmax")


def test_the_program_exits_with_2_and_one_line():
    command = [sys.executable, "-m", "onchip", "inspect", "attention", "--arch", "sm_1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("onchip: --arch: got 'sm_1', accepted: sm_80")
    assert len(done.stderr.splitlines()) == 1
