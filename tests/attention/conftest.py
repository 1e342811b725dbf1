"""Where the attention tests run, and their hygiene."""
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from onchip.attention import ops
from onchip.attention.dispatch import CAPABILITIES, why_not
from onchip.attention.problem import AttentionProblem
from onchip.testing.attention import Target

_PLAIN = AttentionProblem(1, 1, 1, 8, 8, 16, 16, dtype="float32")


def _targets() -> Iterator[object]:
    """Every backend this machine can run, by itself and as "auto" puts them together."""
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        able = [name for name in CAPABILITIES if name != "torch-cpu" and why_not(name, replace(_PLAIN, device=device)) is None]
        for backend in (*able, "auto"):
            yield pytest.param(Target(backend, device), id=f"{backend}-{device}", marks=pytest.mark.gpu if device == "cuda" else ())


@pytest.fixture(params=list(_targets()), scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    """A backend and a device."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors: threads cost more than they bring, above all when several test processes share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):  # Triton's interpreter computes in numpy, where NaN and −∞ warn
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """What a test draws without a generator is the same in every run, so that what passed once passes again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_routes() -> None:
    """What earlier tests' calls settled (some under patched limits) is forgotten."""
    ops._ROUTES.clear()


@pytest.fixture(autouse=True, scope="module")
def _poison() -> Iterator[None]:
    """Fresh memory is NaN: what an implementation leaves unwritten is seen."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _filled(getattr(owner, name)))
        yield


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        with torch.no_grad():  # what is asked for may require a gradient
            return x.fill_(float("nan")) if x.is_floating_point() and not torch.compiler.is_compiling() else x

    return poisoned
