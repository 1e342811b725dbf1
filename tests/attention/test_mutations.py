"""The checks themselves: an implementation with one typical fault must fail them. A mutation stands between operator and reference."""
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from onchip.attention import ops
from onchip.attention.dispatch import implementation
from onchip.attention.reference import blocks, passes
from onchip.testing.attention import Case, Target, check

CASE = Case(batch=2, heads=4, kv_heads=2, seq_q=40, seq_k=48, causal=True, window=(20, None))
REFERENCE = Target("reference", "cpu")


def _mutate(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
    """Let `change(direction, function, args)` answer in place of every implementation."""
    def mutated(backend: str, direction: str) -> Callable[..., Any]:
        function = implementation(backend, direction)
        return lambda *args: change(direction, function, args)

    monkeypatch.setattr(ops, "implementation", mutated)


def _spec(**fields: Any) -> Callable[..., Any]:
    """A mutation of the spec in both passes."""
    def change(direction: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        at = 10 if direction == "forward" else 14
        return function(*args[:at], replace(args[at], **fields), *args[at + 1 :])

    return change


def _results(direction: str, at: int, fault: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A mutation of one result of one pass."""
    def change(called: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        results = list(function(*args))
        if called == direction:
            results[at] = fault(results[at])
        return tuple(results)

    return change


def _wrong_head(direction: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """hq % Hkv in place of hq // group."""
    first = 0 if direction == "forward" else 2
    q, k, v = args[first : first + 3]
    order = torch.arange(4) % 2
    return function(*args[:first], q, *(x[:, order] for x in (k, v)), *args[first + 3 :]) if direction == "forward" else function(*args)


def _without_delta(direction: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A backward that forgets rowsum(do ∘ o)."""
    return function(*args[:5], torch.zeros_like(args[5]), *args[6:]) if direction == "backward" else function(*args)


def _without_dlse(direction: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(args[0], None, *args[2:]) if direction == "backward" else function(*args)


MUTATIONS = {
    "zeros": _results("forward", 0, torch.zeros_like),
    "last head missing": _results("forward", 0, lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1)),
    "lse in base 2": _results("forward", 1, lambda x: x / math.log(2)),
    "lse without its maximum": _results("forward", 1, lambda x: x - 1),
    "mask shifted by one key": _spec(window_right=1),
    "mask anchored at the other corner": _spec(causal=2),
    "no mask": _spec(window_right=-1),
    "one key too many in the window": _spec(window_left=21),
    "scale twice": _spec(scale=0.5),
    "wrong kv head": _wrong_head,
    "dq zeros": _results("backward", 0, torch.zeros_like),
    "dq without scale": _results("backward", 0, lambda x: x * 4),
    "dk of one query head of two": _results("backward", 1, lambda x: x / 2),
    "dv rows shifted": _results("backward", 2, lambda x: x.roll(1, 2)),
    "no rowsum(do ∘ o)": _without_delta,
    "no gradient of lse": _without_dlse,
}


def test_the_unmutated_reference_passes() -> None:
    check(CASE, REFERENCE)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    _mutate(monkeypatch, MUTATIONS[name])
    with pytest.raises(AssertionError):
        check(replace(CASE, dtype=dtype), REFERENCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dropped_tile_and_a_missing_rescale_are_caught(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    case = replace(CASE, causal=False, window=None, dtype=dtype)
    visible_product = blocks.visible_product
    with monkeypatch.context() as patch:  # the last 16 keys never reach p v
        patch.setattr(passes, "visible_product", lambda p, x, hidden: visible_product(p[..., :-16], x[:, :-16], None))
        with pytest.raises(AssertionError):
            check(case, REFERENCE)

    def two_blocks(call: blocks.Call) -> tuple[Tensor, Tensor]:
        """Online softmax over two blocks of keys that forgets exp(m_old − m_new) on what it has."""
        parts = [passes_forward(replace(call, k=call.k[:, :, s], v=call.v[:, :, s])) for s in (slice(0, 24), slice(24, 48))]
        (out_a, lse_a), (out_b, lse_b) = parts
        lse = torch.logaddexp(lse_a, lse_b)
        return ((out_a + out_b * (lse_b - lse).exp()[..., None]).to(out_a.dtype), lse)

    passes_forward = passes._forward
    monkeypatch.setattr(passes, "_forward", two_blocks)
    with pytest.raises(AssertionError):
        check(case, REFERENCE)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_dropout_mask_in_one_pass_is_caught(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def change(direction: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        at = 9 if direction == "forward" else 13
        seed = args[at] + 1 if direction == where else args[at]
        return function(*args[:at], seed, *args[at + 1 :])

    _mutate(monkeypatch, change)
    with pytest.raises(AssertionError):
        check(replace(CASE, dropout_p=0.3), REFERENCE)
