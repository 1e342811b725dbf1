"""A call of a kind met before takes the route of the first: which calls are of one kind, and that nothing of their data is remembered."""
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onchip
from onchip.attention import ops
from onchip.testing.attention import Case, Target, check

DIFFERENT: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "another length": lambda q: {"k": q[:, :, :7], "v": q[:, :, :7]},
    "another stride": lambda q: {"q": q.transpose(1, 2).contiguous().transpose(1, 2)},
    "another dtype": lambda q: {name: q.half() for name in "qkv"},
    "an address off by one element": lambda q: {"q": torch.cat([q.flatten(), q.flatten()])[1 : q.numel() + 1].view(q.shape)},
    "a mask": lambda q: {"mask": torch.ones(8, 8, dtype=torch.bool)},
    "causal": lambda q: {"causal": True},
    "a scale": lambda q: {"scale": 0.5},
    "another backend": lambda q: {"backend": "reference"},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_of_another_kind_have_a_route_of_their_own(name: str) -> None:
    q = torch.randn(1, 2, 8, 16)
    same = {"q": q, "k": q, "v": q}
    onchip.attention(**same)
    onchip.attention(**{key: torch.randn(1, 2, 8, 16) for key in same})
    assert len(ops._ROUTES) == 1
    onchip.attention(**{**same, **DIFFERENT[name](q)})
    assert len(ops._ROUTES) == 2


def test_deterministic_mode_is_read_at_every_call() -> None:
    q = torch.randn(1, 2, 8, 16)
    onchip.attention(q, q, q)
    torch.use_deterministic_algorithms(True)
    try:
        onchip.attention(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(ops._ROUTES) == 2


def test_routes_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_MOST_ROUTES", 3)
    for keys in range(1, 9):
        onchip.attention(torch.randn(1, 1, 4, 8), *torch.randn(2, 1, 1, keys, 8))
        assert len(ops._ROUTES) <= 3


@pytest.mark.parametrize("case", [
    Case(heads=4, seq_q=33, seq_k=40, causal=True, sinks=True), Case(seq_q=9, seq_k=20, bias=(1, 2, 9, 20), mask=(1, 1, 9, 20)),
    Case(lengths=((5, 9), (0, 3), (7, 1)), tail=2, alibi=1), Case(seq_q=17, seq_k=17, dropout_p=0.3, softcap=5.0)], ids=str)
def test_the_second_call_of_a_kind_is_right_too(case: Case, target: Target) -> None:
    """Forward and backward: what the first call left for the second holds nothing of its tensors."""
    for seed in range(3):
        check(Case(**{**case.__dict__, "seed": seed}), target)
