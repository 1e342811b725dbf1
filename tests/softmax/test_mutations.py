"""The suite's own test: kernels with one thing broken must not agree with the truth. Each mutant is the real source with one change."""
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from onchip.softmax import triton as kernels
from onchip.softmax.triton import plan
from onchip.testing.softmax import DEVICE, agree

SOURCES = Path(kernels.__file__).parent


def data(*shape, size=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * size).to(DEVICE)


@pytest.fixture
def mutate(monkeypatch, tmp_path):
    """Replace `old` by `new`, which must be there, in a kernel file, and use what comes out."""
    def replace(name, old, new):
        source = (SOURCES / f"{name}.py").read_text()
        assert old in source
        path = tmp_path / f"mutant_{name}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(kernels, name, getattr(module, name))

    return replace


MUTANTS = {
    "no maximum": ("forward", "_shift(tl.max(s, axis=1))", "_shift(tl.max(s, axis=1)) * 0.0", {"size": 40}),
    "no guard for a row of −∞": ("forward", "tl.where(m == float(\"-inf\"), 0.0, m)", "m", {"mask": "empty"}),
    "no value for an empty row": ("forward", "l = tl.where(l == 0.0, 1.0, l)", "l = l", {"mask": "empty"}),
    "no scale": ("forward", "s *= scale", "s = s", {"scale": 0.5}),
    "padding that counts": ("forward", "tl.where(keep, s, float(\"-inf\"))", "s", {}),
    "no mask": ("forward", "!= 0", ">= 0", {"mask": "half"}),
    "triangle shifted by one": ("forward", "columns <= (i0", "columns < (i0", {"causal": True}),
    "triangle in the top left corner": ("forward", "(i0 + (n - n0))", "i0", {"causal": True}),
    "maximum without the rescale": ("forward", "l * tl.exp(m_old - _shift(m)) +", "l +", {"streamed": True}),
    "statistics without the last block": ("forward", "for block in range(blocks):", "for block in range(blocks - 1):", {"streamed": True}),
    "result without the first block": ("forward", "for back in range(blocks):", "for back in range(blocks - 1):", {"streamed": True}),
    "log without the sum": ("forward", "s - tl.log(l)[:, None]", "s", {"log": True}),
    "gradient without the total": ("backward", "p * (d - total[:, None])", "p * d", {}),
    "log gradient without the total": ("backward", "d - p * total[:, None]", "d", {"log": True}),
    "gradient without the scale": ("backward", "dx *= scale", "dx = dx", {"scale": 0.5}),
    "log gradient of hidden positions": ("backward", "tl.where(gone, 0.0, dx)", "dx", {"log": True, "mask": "half"}),
    "gradient's total without a block": ("backward", "for block in range(blocks):", "for block in range(blocks - 1):", {"streamed": True}),
    "total of the last block alone": ("backward", "total += tl.sum", "total = tl.sum", {"streamed": True}),
}


@pytest.mark.parametrize(("name", "old", "new", "case"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_kernel_is_noticed(mutate, force, name, old, new, case):
    case = dict(case)
    x = data(5, 100, size=case.pop("size", 3.0))
    if case.pop("streamed", False):
        force(plan.Plan(False, 4, 32, 4, 1))
    masks = {"empty": torch.arange(5, device=DEVICE)[:, None] != 2, "half": torch.arange(100, device=DEVICE) % 2 == 0}
    case |= {"mask": masks[case["mask"]]} if "mask" in case else {}
    agree(x, **case)
    mutate(name, old, new)
    with pytest.raises(AssertionError):
        agree(x, **case)


@pytest.mark.parametrize("n", [2, 100, 1024, 5000])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_zeros_are_noticed_at_every_width(monkeypatch, name, log, n):
    """A softmax over n has values near 1/n: no tolerance may be that wide."""
    right = getattr(kernels, name)
    agree(data(2, n).half(), log=log)
    monkeypatch.setattr(kernels, name, lambda *arguments: torch.zeros_like(right(*arguments)))
    with pytest.raises(AssertionError):
        agree(data(2, n).half(), log=log)
