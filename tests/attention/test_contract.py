"""Every argument check, its error and its words; and what a checked call looks like."""
import dataclasses
from itertools import product

import pytest
import torch

from onchip.attention import attention, attention_varlen
from onchip.attention.contract import Spec, check_dense, describe, empty_like_q, empty_lse
from onchip.errors import InputError

Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"q": [1.0]}, TypeError, "q: got list, accepted: a torch.Tensor"),
    ({"q": Q[0]}, InputError, r"q: got 3 dimensions \(4, 5, 8\), accepted: 4 \(batch, heads, seq, dim\)"),
    ({"q": Q.int(), "k": K.int(), "v": V.int()}, InputError, "q: got torch.int32, accepted: torch.bfloat16"),
    ({"k": K.double()}, InputError, "k: got torch.float64, accepted: the dtype of q, torch.float32"),
    ({"v": V.to("meta")}, InputError, "v: got a tensor on meta, accepted: the device of q, cpu"),
    ({"k": K[:1]}, InputError, r"k: got shape \(1, 2, 7, 8\), accepted: \(2, kv heads, seq, 8\)"),
    ({"k": K[..., :4]}, InputError, r"k: got shape \(2, 2, 7, 4\)"),
    ({"v": V[:, :, :3]}, InputError, r"v: got shape \(2, 2, 3, 6\), accepted: \(2, 2, 7, dim\)"),
    ({"q": Q[:, :3]}, InputError, "k: got 2 heads, accepted: a divisor of q's 3 heads"),
    ({"causal": "left"}, InputError, "causal: got 'left', accepted: True, False, 'bottom-right', 'top-left'"),
    ({"window": 3}, InputError, r"window: got 3, accepted: \(left, right\)"), ({"window": (1, 2, 3)}, InputError, "window: got"),
    ({"window": (-1, 0)}, InputError, r"window: got \(-1, 0\), accepted: \(left, right\), each an integer ≥ 0 or None"),
    ({"window": (True, 0)}, InputError, "window: got"), ({"window": (1.5, 0)}, InputError, "window: got"),
    ({"scale": float("nan")}, InputError, "scale: got nan, accepted: a finite number, or None"),
    ({"scale": "1"}, TypeError, "scale: got str"),
    ({"softcap": 0.0}, InputError, "softcap: got 0.0, accepted: a finite number > 0, or None"), ({"softcap": -1}, InputError, "softcap"),
    ({"bias": torch.zeros(5, 7, dtype=torch.bool)}, InputError, "bias: got torch.bool, accepted: a floating point tensor"),
    ({"bias": torch.zeros(5, 6)}, InputError, r"bias: got shape \(5, 6\), accepted: anything that broadcasts to \(2, 4, 5, 7\)"),
    ({"bias": torch.zeros(1, 1, 1, 5, 7)}, InputError, "bias: got shape"), ({"bias": [0]}, TypeError, "bias: got list"),
    ({"mask": torch.zeros(5, 7)}, InputError, "mask: got torch.float32, accepted: torch.bool, True where the query sees the key"),
    ({"mask": torch.ones(3, 1, 5, 7, dtype=torch.bool)}, InputError, "mask: got shape"),
    ({"alibi_slopes": torch.zeros(3)}, InputError, r"alibi_slopes: got shape \(3,\), accepted: \(4,\) or \(2, 4\)"),
    ({"alibi_slopes": torch.zeros(4).double()}, InputError, "alibi_slopes: got torch.float64, accepted: torch.float32"),
    ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, InputError, "alibi_slopes: got a tensor that requires grad"),
    ({"sinks": torch.zeros(2)}, InputError, r"sinks: got torch.float32 \(2,\), accepted: a floating point \(4,\)"),
    ({"sinks": torch.zeros(4, device="meta")}, InputError, "sinks: got a tensor on meta"),
    ({"backend": "cuda"}, InputError, "backend: got 'cuda', accepted: auto, ")])
def test_what_does_not_fit_is_named_with_what_came_and_what_is_accepted(change: dict, error: type, says: str) -> None:
    arguments = {"q": Q, "k": K, "v": V, **change}
    with pytest.raises(error, match=says):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"q": Q}, InputError, r"q: got 4 dimensions .*accepted: 3 \(tokens, heads, dim\)"),
    ({"q": torch.zeros(5, 3, 8)}, InputError, "k: got 2 heads"),
    ({"k": torch.zeros(7, 2, 4)}, InputError, r"k: got shape \(7, 2, 4\), accepted: \(tokens, kv heads, 8\)"),
    ({"v": torch.zeros(6, 2, 8)}, InputError, r"v: got shape \(6, 2, 8\), accepted: \(7, 2, dim\)"),
    ({"cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q: got list"),
    ({"cu_seqlens_k": torch.tensor([0.0, 7.0])}, InputError, "cu_seqlens_k: got"),
    ({"cu_seqlens_q": torch.tensor([[0, 5]])}, InputError, "cu_seqlens_q: got"), ({"max_seqlen_q": -1}, InputError, "max_seqlen_q: got -1"),
    ({"alibi_slopes": torch.zeros(2, 4)}, InputError, r"accepted: \(4,\) or \(1, 4\)")])
def test_packed_arguments_too(change: dict, error: type, says: str) -> None:
    arguments = {"q": torch.zeros(5, 4, 8), "k": torch.zeros(7, 2, 8), "v": torch.zeros(7, 2, 8), "cu_seqlens_q": torch.tensor([0, 5]),
                 "cu_seqlens_k": torch.tensor([0, 7]), **change}
    with pytest.raises(error, match=says):
        attention_varlen(**arguments)


DEFAULTS = {"causal": False, "window": None, "scale": None, "softcap": None, "bias": None, "mask": None, "alibi_slopes": None,
            "sinks": None, "dropout_p": 0.0, "dropout_seed": None, "deterministic": False, "backend": "auto"}


def test_a_problem_says_what_the_call_asks_for() -> None:
    asked = {"causal": True, "window": (3, 4), "softcap": 5, "bias": torch.zeros(7), "sinks": torch.zeros(4)}
    call = check_dense(Q, K, V, **{**DEFAULTS, **asked})
    problem = describe(call)
    assert problem.features == ("causal", "window", "softcap", "bias", "sinks", "gqa", "cross", "dv")
    assert dataclasses.astuple(problem)[:10] == (2, 4, 2, 5, 7, 8, 6, "float32", "cpu", "bhsd")
    assert problem.spec == Spec(1, 3, 0, 8**-0.5, 5.0, 0.0, 5, 7, False, False)
    assert problem.shape.pairs() == 3 + 4 + 4 + 4 + 4  # row 0 stands at key 2
    assert call.bias.shape == (1, 1, 1, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 3


def test_a_window_that_hides_nothing_is_none() -> None:
    for window, kept in (((7, 7), (None, None)), ((6, 2), (6, 2)), ((None, 9), (None, None)), ((2**70, 0), (None, 0))):
        assert describe(check_dense(Q, K, V, **{**DEFAULTS, "window": window})).window == kept


def test_the_memory_order_of_an_output() -> None:
    assert empty_like_q(Q, 6).stride() == (4 * 5 * 6, 5 * 6, 6, 1)
    assert empty_like_q(Q.transpose(1, 2).contiguous().transpose(1, 2), 6).stride() == (5 * 4 * 6, 6, 4 * 6, 1)
    assert empty_like_q(torch.zeros(9, 4, 8), 6).stride() == (24, 6, 1)
    for b, h, s, d, dim in product((1, 2), (1, 3), (1, 5), (1, 8), (1, 8, 4)):
        packed = torch.zeros(b, s, 3, h, d, dtype=torch.float16)
        cut, inside, outside = packed.transpose(1, 3).unbind(2)
        for q in (cut, inside.transpose(1, 2).contiguous().transpose(1, 2), outside.contiguous()):
            out, lse = empty_like_q(q, dim), empty_lse(q)
            right = torch.zeros(b, s, h, dim).transpose(1, 2) if q.stride(1) < q.stride(2) else torch.zeros(b, h, s, dim)
            assert (out.shape, out.dtype, out.stride()) == (right.shape, torch.float16, right.stride())
            assert (lse.shape, lse.dtype, lse.stride()) == ((b, h, s), torch.float32, torch.zeros(b, h, s).stride())


def test_global_switches_are_read_at_the_call() -> None:
    call = check_dense(Q, K, V, **DEFAULTS)
    assert not describe(call).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert describe(call).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
