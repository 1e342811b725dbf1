"""The suite's own test: kernels with one thing broken must not agree with the truth. Each mutant is the real source with one change."""
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from onchip.softmax.triton import launch, plan
from onchip.testing.softmax import DEVICE, agree
from tests.softmax.conftest import forget

SOURCES = Path(launch.__file__).parent


def data(*shape, size=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * size).to(DEVICE)


@pytest.fixture
def mutate(monkeypatch, tmp_path):
    """Replace `old` by `new`, which must be there, in a kernel file, and use what comes out: by itself, or in the forward kernels."""
    def load(name, change):
        source = (SOURCES / f"{name}.py").read_text()
        assert change[0] in source
        path = tmp_path / f"mutant_{name}.py"
        path.write_text(source.replace(*change))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    def replace(name, old, new):
        module = load(name, (old, new))
        if name == "scores":
            name, module = "tile_forward", load("tile_forward", ("onchip.softmax.triton.scores", "mutant_scores"))
        monkeypatch.setattr(launch, name, module)
        forget()

    yield replace
    forget()


MUTANTS = {
    "no maximum": ("tile_forward", "m = tl.max(whole(best, scale, SCALED, NARROW), axis=1)", "m = tl.zeros([BLOCK_M], tl.float32)",
                   {"size": 40}),
    "no guard for a row of −∞": ("tile_forward", "m = tl.where(m == float(\"-inf\"), 0.0, m)", "m = m", {"mask": "empty"}),
    "no value for an empty row": ("tile_forward", "l = tl.where(l == 0.0, 1.0, l)", "l = l", {"mask": "empty"}),
    "no scale": ("scores", "s *= scale", "s = s", {"scale": 0.5}),
    "padding that counts": ("scores", "tl.where(seen, s, float(\"-inf\"))", "s", {"scale": 0.5}),
    "no mask": ("scores", "!= 0", ">= 0", {"mask": "half"}),
    "triangle shifted by one": ("scores", "VECTOR * VECTOR <= last", "VECTOR * VECTOR < last", {"causal": True}),
    "triangle in the top left corner": ("scores", "i0 + (n - n0)", "i0", {"causal": True}),
    "half a tile for rows that see more": ("tile_forward", "+ (n - n0) < BLOCK_N // 2", "+ (n - n0) < BLOCK_N",
                                           {"causal": True, "n": 1024}),
    "a tile that is begun twice": ("tile_forward", "tiles - 1 - tile // 2", "tiles - 2 - tile // 2", {"causal": True, "n": 1024}),
    "maximum without the rescale": ("tile_forward", "l * _exp(m_old - _shift(m, WANTED)) +", "l +", {"streamed": True}),
    "statistics without the last block": ("tile_forward", "for block in range(blocks):",
                                           "for block in range(blocks - 1):", {"streamed": True}),
    "result without the first block": ("tile_forward", "for back in range(blocks):", "for back in range(blocks - 1):", {"streamed": True}),
    "log without the sum": ("tile_forward", "d - tl.log(l)", "d", {"log": True}),
    "padding that is not −∞": ("scores", "MASKED):\n        absent = float(\"-inf\")", "MASKED):\n        absent = 0.0", {}),
    "padding of 16 bits that counts": ("scores", "return float(\"inf\") if SCALED < 0", "return float(\"-inf\") if SCALED < 0",
                                       {"scale": -0.5, "half": True, "n": 1504}),
    "bias that is not added": ("scores", "s += add.to(tl.float32)", "s += 0.0 * add.to(tl.float32)", {"bias": True}),
    "maximum of the first piece": ("tile_forward", "best = larger(best, row[piece], SCALED, NARROW)", "best = best",
                                   {"late": True, "half": True, "n": 1504}),
    "largest where the scale is negative": ("scores", "SMALLER: tl.constexpr = SCALED < 0", "SMALLER: tl.constexpr = False",
                                            {"scale": -1.5, "early": True, "half": True, "n": 1504}),
    "16 bits that are not scaled": ("scores", "tl.fma(s, scale, -shift)", "s - shift", {"scale": 0.5, "half": True, "n": 1504}),
    "exponent without the sum": ("tile_forward", "-tl.log2(l)", "0.0 * l", {"half": True, "n": 1504}),
    "terms of the first piece": ("tile_forward", "terms += _exp(below(row[piece]", "terms += 0.0 * _exp(below(row[piece]",
                                 {"half": True, "n": 1504}),
    "maximum without the ends": ("tile_forward", "m = tl.maximum(m, tl.max(s_ends, axis=0))", "m = m", {"n": 601, "late": True}),
    "sum without the ends": ("tile_forward", "l += tl.sum(_exp(s_ends - only(_shift(m, WANTED))), axis=0)", "l += 0.0", {"n": 601}),
    "ends that are not written": ("tile_forward", "WANTED, HIDING), mask=keep)", "WANTED, HIDING), mask=w < 0)", {"n": 601}),
    "gradient's total without the ends": ("tile_backward", "total += tl.sum(d_ends if LOG", "total += 0.0 * tl.sum(d_ends if LOG",
                                          {"n": 601}),
    "gradient without the total": ("tile_backward", "p * (d - total)", "p * d", {}),
    "log gradient without the total": ("tile_backward", "d - p * total if", "d if", {"log": True}),
    "gradient without the scale": ("tile_backward", "dx *= scale", "dx = dx", {"scale": 0.5}),
    "log gradient of hidden positions": ("tile_backward", "tl.where(gone, 0.0, dx)", "dx", {"log": True, "mask": "half"}),
    "gradient's total without a block": ("tile_backward",
                                         "for block in range(blocks):", "for block in range(blocks - 1):", {"streamed": True}),
    "total of the last block alone": ("tile_backward", "total += tl.sum", "total = tl.sum", {"streamed": True}),
}


@pytest.mark.parametrize(("name", "old", "new", "case"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_kernel_is_noticed(mutate, force, name, old, new, case):
    case = dict(case)
    n = case.pop("n", 100)
    x = data(5, n, size=case.pop("size", 3.0))
    if case.pop("late", False):
        x[:, n - 1] = 200.0
    if case.pop("early", False):
        x[:, 0] = -200.0
    if case.pop("half", False):
        x = x.half()
    if case.pop("bias", False):
        case["bias"] = data(n)
    if case.pop("streamed", False):
        force(plan.Plan(False, 4, 32, 4, 1))
    masks = {"empty": torch.arange(5, device=DEVICE)[:, None] != 2, "half": torch.arange(n, device=DEVICE) % 2 == 0}
    case |= {"mask": masks[case["mask"]]} if "mask" in case else {}
    agree(x, **case)
    mutate(name, old, new)
    with pytest.raises(AssertionError):
        agree(x, **case)


@pytest.mark.parametrize("n", [2, 100, 1024, 1025, 5000])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_zeros_are_noticed_at_every_width(monkeypatch, name, log, n):
    """A softmax over n has values near 1/n: no tolerance may be that wide."""
    right = getattr(launch, name)
    agree(data(2, n).half(), log=log)
    monkeypatch.setattr(launch, name, lambda *arguments: torch.zeros_like(right(*arguments)))
    with pytest.raises(AssertionError):
        agree(data(2, n).half(), log=log)
