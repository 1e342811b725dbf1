"""benchmarks/softmax_plans.py without a GPU: a plan that is asked for is the plan that runs, and its neighbours hold the row."""
import sys
from pathlib import Path

import pytest
import torch

from onchip.softmax.triton import plan
from onchip.softmax.triton.plan import Plan


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("softmax", "softmax_plans"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import softmax_plans
    return softmax_plans


@pytest.mark.parametrize("wanted", [Plan(True, 2, 64, 1), Plan(True, 1, 64, 1, narrow=True), Plan(False, 1, 32, 1, 2)])
def test_a_forced_plan_runs(plans, wanted):
    x, dy = torch.randn(2, 6, 64).bfloat16()
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    forward, backward = plans.made(wanted, (x, y)), plans.made(wanted, (dy, x, dx))
    for launch in (forward, backward):
        assert launch.kernel.fn.__name__ == ("_resident" if wanted.resident else "_streamed")
        assert launch.options["num_warps"] == wanted.warps
    forward(x, y, x, x)
    assert torch.allclose(y.float(), torch.softmax(x.float(), -1), atol=4e-3)
    backward(dy, y, dx)
    p = y.float()
    assert torch.allclose(dx.float(), p * (dy.float() - (p * dy.float()).sum(-1, keepdim=True)), atol=4e-3)
    assert plan.choose(64, False) != wanted  # the table is what it was


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [256, 1000, 4096, 50_257, 262_144])
def test_neighbours_hold_the_row(plans, n, dtype):
    for backward in (False, True):
        found = plans.neighbours(n, backward, dtype)
        assert len(found) == len(set(found)) > 1
        assert all(one.block_n * one.pieces * one.parts >= n and one.parts <= 16 and one.warps <= 32 for one in found)
        assert all(dtype == torch.bfloat16 for one in found if one.narrow)
