"""benchmarks/softmax_plans.py and softmax_cells.py without a GPU: a plan that is asked for runs, its neighbours hold the row."""
import sys
from pathlib import Path

import pytest
import torch

from onchip.softmax.triton import plan
from onchip.softmax.triton.plan import Plan


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("softmax", "softmax_cells", "softmax_plans"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import softmax_plans
    return softmax_plans


@pytest.mark.parametrize("wanted", [Plan(True, 2, 64, 1), Plan(True, 1, 64, 1, narrow=True), Plan(False, 1, 32, 1, 2)])
def test_a_forced_plan_runs(plans, wanted):
    x, dy = torch.randn(2, 6, 64).bfloat16()
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    forward, backward = (plans.arguments(what, *tensors) for what, tensors in (("forward", (x, y)), ("backward", (dy, dx, y))))
    for what, tensors in (("forward", forward), ("backward", backward)):
        launch = plans.made(plans.Candidate(wanted), tensors, what)
        assert launch.kernel.fn.__name__ == ("_resident" if wanted.resident else "_streamed")
        assert launch.options["num_warps"] == wanted.warps
        launch(*tensors)
    assert torch.allclose(y.float(), torch.softmax(x.float(), -1), atol=4e-3)
    p = y.float()
    assert torch.allclose(dx.float(), p * (dy.float() - (p * dy.float()).sum(-1, keepdim=True)), atol=4e-3)
    assert plan.choose(64, False) != wanted  # the table is what it was


@pytest.mark.parametrize(("what", "turn"), [("causal", None), ("mask", None), ("mask", 2), ("mask", 0)])
def test_a_forced_plan_runs_where_positions_are_hidden(plans, what, turn):
    x = torch.randn(3, 4, 64).bfloat16()
    y, seen = torch.full_like(x, torch.nan), torch.ones(4, 64, dtype=torch.bool).tril(60)
    tensors = plans.arguments(what, x, y, seen if what == "mask" else None)
    launch = plans.made(plans.Candidate(Plan(True, 1, 64, 1, narrow=True), turn), tensors, what)
    named = dict(zip([name for name in launch.kernel.arg_names if name not in ("x", "y", "mask", "bias")], launch.rest, strict=True))
    assert (named["CAUSAL"], named["MASKED"], named["SHARED"]) == (what == "causal", what == "mask", turn or 0)
    launch(*tensors)
    assert torch.allclose(y.float(), torch.softmax(x.float().masked_fill(~seen, -torch.inf), -1), atol=4e-3)


@pytest.mark.parametrize(("shape", "vector"), [((2, 6, 64), 8), ((1, 64, 64), 4)])
def test_the_copy_of_a_triangle_is_one(plans, shape, vector):
    """As benchmarks/softmax_cells.py demands on a GPU. Of a vector that nothing of is seen, no element is read."""
    x, y = torch.randn(shape), torch.full(shape, torch.nan)
    rows, n = shape[-2:]
    seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
    x.masked_fill_(~seen, torch.nan)
    sys.modules["softmax_cells"].copy_triangle[(y.numel() // 32,)](x, y, rows, n, 32, vector)
    assert torch.equal(y, x.masked_fill(~seen, 0.0))


def test_shapes(plans):
    assert plans.shape_of(4096, "forward", 2**27) == (2**15, 4096)
    assert plans.shape_of(8192, "mask", 2**27) == (4, 8192, 8192)  # as benchmarks/softmax.py has it
    assert plans.shape_of(2048, "causal", 2**27) == (32, 2048, 2048)
    assert plans.shape_of(32768, "causal", 2**27) == (1, 4096, 32768)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [256, 1000, 4096, 50_257, 262_144])
def test_neighbours_hold_the_row(plans, n, dtype):
    for what in plans.PASSES:
        found = plans.neighbours(n, what, dtype, False)
        assert len(found) == len(set(found)) > (n <= 2**17 or what != "causal")
        assert all(one.block_n * one.pieces * one.parts >= n and one.parts <= 16 and one.warps <= 32 for one in found)
        assert all(dtype == torch.bfloat16 for one in found if one.narrow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_rows_side_by_side_the_present_plan_and_two_passes(plans, dtype):
    for n, backward in ((1000, False), (1000, True), (10**6, False)):
        present, *others = plans.neighbours(n, "backward" if backward else "forward", dtype, True)
        assert present == (plan.choose_stripe(n, 64, backward, dtype == torch.bfloat16) or plan.ACROSS_STREAMED)
        assert others == [plan.ACROSS_STREAMED]
    x = torch.randn(6, 64)
    turned = plans.turned(x, True)
    assert torch.equal(turned, x)
    assert turned.stride() == (1, 6)
    assert plans.result(turned, "forward").stride() == (1, 6)
    assert plans.turned(x, False) is x


@pytest.mark.parametrize("value", ["1,8192,4", "1,8192,4,64,1,1", "1,8192,4,x,1", "1,-8192,4,64,1", "8192 × 4"])
def test_a_tile_that_is_none_is_refused_in_words(plans, monkeypatch, capsys, value):
    monkeypatch.setattr(sys, "argv", ["softmax_plans.py", "--tiles", value])
    with pytest.raises(SystemExit) as stopped:
        plans.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(
        f"argument --tiles: got {value!r}, accepted: whole numbers M,N,WARPS,REGISTERS,WAITS")
