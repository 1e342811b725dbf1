"""Hygiene of every softmax test."""
import numpy as np
import pytest
import torch

from onchip.softmax.triton import launch, rows
from onchip.softmax.triton.plan import Plan


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """Deterministic mode fills torch.empty with NaN: what a kernel leaves unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with np.errstate(all="ignore"):  # the interpreter computes in numpy, where NaN and −∞ warn
        yield
    torch.use_deterministic_algorithms(False)


def forget():
    """What has been worked out for kinds of calls."""
    rows.layout.cache_clear()
    launch._LAUNCHES.clear()


@pytest.fixture
def force(monkeypatch):
    """`force(plan)`: that tile for every row from now on."""
    def use(chosen):
        monkeypatch.setattr(rows.plans, "choose", lambda *_: chosen)
        monkeypatch.setattr(rows.plans, "choose_parts", lambda *_: None)
        monkeypatch.setattr(rows.plans, "choose_stripe", lambda *_: None)
        forget()

    yield use
    forget()


@pytest.fixture
def streamed(force):
    """Every row in blocks of 32 columns and tiles of 4 rows."""
    force(Plan(False, 4, 32, 4, 2))
