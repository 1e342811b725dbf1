"""Hygiene of every softmax test."""
import numpy as np
import pytest
import torch

from onchip.softmax.triton import rows
from onchip.softmax.triton.plan import Plan


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """Deterministic mode fills torch.empty with NaN: what a kernel leaves unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with np.errstate(all="ignore"):  # the interpreter computes in numpy, where NaN and −∞ warn
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def force(monkeypatch):
    """`force(plan)`: that tile for every row from now on."""
    def use(chosen):
        monkeypatch.setattr(rows.plans, "choose", lambda n, across: chosen)
        rows.layout.cache_clear()

    yield use
    rows.layout.cache_clear()


@pytest.fixture
def streamed(force):
    """Every row in blocks of 32 columns and tiles of 4 rows."""
    force(Plan(False, 4, 32, 4, 2))
