"""``onchip verify``: it passes here, counts what it skips, and fails, with exit status 1, when a backend is wrong."""
import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from onchip.attention import ops
from onchip.attention.dispatch import implementation
from onchip.cli import verify
from onchip.errors import InputError
from onchip.testing import verify as checks
from onchip.testing.verify import ATTENTION, planned

app = typer.Typer()
verify.register(app)


def run(*args: str):
    return CliRunner().invoke(app, ["--device", "cpu", "--quick", *args], catch_exceptions=False)


def test_this_machine_is_right():
    result = run("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)["checks"]
    assert len(found) == planned(quick=True)
    outcomes = {(c["operator"], c["backend"], c["outcome"]) for c in found}
    assert ("attention", "reference", "passed") in outcomes
    assert ("softmax", "reference", "passed") in outcomes
    assert not any(outcome == "failed" for _, _, outcome in outcomes)
    assert sum(c["backend"] == "reference" and c["operator"] == "attention" for c in found) == len(ATTENTION)
    assert all(c["detail"] for c in found if c["outcome"] == "skipped")


def test_a_wrong_backend_is_named_and_fails_the_command(monkeypatch):
    def zeros(backend, direction):
        if (backend, direction) != ("reference", "forward"):
            return implementation(backend, direction)
        return lambda *args: tuple(torch.zeros_like(x) for x in implementation(backend, direction)(*args))

    monkeypatch.setattr(ops, "implementation", zeros)
    monkeypatch.setattr(checks, "CAPABILITIES", ["reference"])  # the others are right: above
    result = run()
    assert result.exit_code == 1
    assert "FAILED attention on reference, plain, bfloat16" in result.stdout
    assert result.stdout.count("FAILED attention on reference") == len(ATTENTION)
    assert "FAILED softmax" not in result.stdout


def test_an_unknown_device_is_one_clear_message():
    with pytest.raises(InputError, match="device: got 'tpu9'"):
        CliRunner().invoke(app, ["--device", "tpu9"], catch_exceptions=False)
