"""``onchip explain``: the backend, the reasons, the bound, and one clear line for bad input."""
import json

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import explain
from onchip.errors import InputError

app = typer.Typer()
explain.register(app)


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_plain_call_on_a_gpu():
    r = json.loads(run("--seq", "8192", "--causal", "--json"))
    assert r["backend"] in ("hopper", "triton")
    assert set(r["reasons"]) | {r["backend"]} == {"hopper", "triton", "torch-cpu", "reference"}
    assert "runs on cpu" in r["reasons"]["torch-cpu"]
    flops = 16 * 4 * 128 * (8192 * 8193 // 2)
    assert flops / 989.4e12 < r["predicted_s"] < 1.2 * flops / 989.4e12
    assert r["binding"] == "tensor cores"


def test_a_call_on_a_cpu_and_what_each_lacks():
    out = run("--device", "cpu", "--dtype", "fp32", "--seq", "2048", "--window", "256,0", "--bias", "--alibi")
    assert "runs on:  reference" in out
    assert "not torch-cpu: it has no window, no bias, no ALiBi slopes" in " ".join(out.split())
    assert json.loads(run("--device", "cpu", "--dtype", "fp32", "--json"))["backend"] == "torch-cpu"


@pytest.mark.parametrize(("args", "words"), [
    (("--device", "tpu"), ("--device", "tpu")), (("--backend", "flash"), ("--backend", "flash", "triton")),
    (("--dropout", "1"), ("--dropout", "1")), (("--softcap", "-2"), ("--softcap", "-2")),
    (("--gpu", "h9"), ("h9",)), (("--seq", "0"), ("--seq", "0"))])
def test_bad_input_is_one_clear_message(args, words):
    with pytest.raises(InputError) as error:
        run(*args)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
