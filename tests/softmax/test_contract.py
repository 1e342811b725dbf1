"""What is refused, and in which words."""
import numpy as np
import pytest
import torch

from onchip.errors import InputError
from onchip.softmax.api import log_softmax, softmax, softmax_topk
from onchip.softmax.contract import check
from onchip.testing.softmax import DEVICE

X = torch.zeros(2, 3)


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize(("x", "arguments", "error", "words"), [
    ([1.0], {}, TypeError, "x: got list"),
    (torch.arange(3), {}, TypeError, "x: got torch.int64, accepted: torch.float16"),
    (X.bool(), {}, TypeError, "need dtype="),
    (X.to(torch.complex64), {}, TypeError, "x: got torch.complex64"),
    (X.to(torch.complex64), {"dtype": torch.float32}, TypeError, "accepted: real types"),
    (X.to(torch.float8_e4m3fn), {}, TypeError, "x: got torch.float8_e4m3fn"),
    (X, {"dtype": torch.int64}, TypeError, "dtype: got torch.int64"),
    (X, {"dtype": "float32"}, TypeError, "dtype: got float32"),
    (X, {"dim": 2}, IndexError, "dim: got 2, accepted: -2 … 1"),
    (X, {"dim": -3}, IndexError, "dim: got -3, accepted: -2 … 1"),
    (X[0, 0], {"dim": 1}, IndexError, "dim: got 1, accepted: -1 … 0"),
    (X, {"dim": 0.5}, TypeError, "dim: got 0.5"),
    (X, {"dim": True}, TypeError, "dim: got True"),
    (X, {"scale": float("nan")}, InputError, "scale: got nan, accepted: None or a finite number"),
    (X, {"scale": float("-inf")}, InputError, "scale: got -inf"),
    (X, {"scale": "two"}, TypeError, "scale: got 'two'"),
    (X, {"scale": torch.ones(2)}, TypeError, "scale: got tensor"),
    (X, {"causal": 1}, TypeError, "causal: got 1"),
    (X, {"causal": True, "dim": 0}, InputError, "dim: got -2, accepted: -1 with causal=True"),
    (X[0], {"causal": True}, InputError, "causal: got an x of 1 dimensions"),
    (X, {"mask": torch.ones(2, 3)}, TypeError, "mask: got torch.float32, accepted: a bool tensor"),
    (X, {"mask": [True]}, TypeError, "mask: got list"),
    (X, {"mask": torch.ones(2, dtype=torch.bool)}, InputError, r"mask: got shape \(2,\), .* x's \(2, 3\)"),
    (X, {"mask": torch.ones(4, 2, 3, dtype=torch.bool)}, InputError, r"mask: got shape \(4, 2, 3\)"),
    (X, {"mask": torch.ones(3, dtype=torch.bool, device="meta")}, InputError, "mask: got a tensor on meta"),
    (X, {"bias": torch.ones(2, 3, dtype=torch.int32)}, TypeError, "bias: got torch.int32, accepted: a tensor of torch.float16"),
    (X, {"bias": 1.0}, TypeError, "bias: got float"),
    (X, {"bias": torch.ones(2)}, InputError, r"bias: got shape \(2,\), .* x's \(2, 3\)"),
    (X, {"bias": torch.ones(3, device="meta")}, InputError, "bias: got a tensor on meta"),
    (X, {"inplace": 1}, TypeError, "inplace: got 1"),
    (X, {"inplace": True, "dtype": torch.float16}, InputError, "dtype: got torch.float16, accepted: x's own, torch.float32, with inplace"),
    (X[:1].expand(2, 3), {"inplace": True}, InputError, r"inplace: got True for an x of strides \(0, 1\), elements of which share memory"),
    (X.as_strided((2, 2), (1, 1)), {"inplace": True}, InputError, "share memory"),
    (X.clone().requires_grad_(), {"inplace": True}, InputError, "inplace: got True where a gradient is asked for"),
    (X, {"inplace": True, "bias": X.clone().requires_grad_()}, InputError, "inplace: got True where a gradient is asked for"),
    (X, {"backend": "cuda"}, InputError, "backend: got 'cuda', accepted: 'auto', 'triton', 'reference'"),
])
def test_refusals(function, x, arguments, error, words):
    with pytest.raises(error, match=words):
        function(x, **arguments)


@pytest.mark.parametrize(("x", "arguments", "error", "words"), [
    (X, {"k": 4}, InputError, "k: got 4, accepted: 1 … 3 for rows of 3 elements"),
    (X, {"k": 0}, InputError, "k: got 0"),
    (torch.zeros(2, 200), {"k": 129}, InputError, "accepted: 1 … 128 for rows of 200"),
    (X, {"k": 3, "dim": 0}, InputError, "for rows of 2 elements"),
    (X, {"k": 1.5}, TypeError, "k: got 1.5"),
    (X, {"k": True}, TypeError, "k: got True"),
    (X, {"k": 1, "dim": 2}, IndexError, "dim: got 2"),
    (X, {"k": 1, "renormalize": 1}, TypeError, "renormalize: got 1"),
    (torch.arange(3), {"k": 1}, TypeError, "x: got torch.int64"),
    ([1.0], {"k": 1}, TypeError, "x: got list"),
    (torch.empty(1, device=DEVICE).expand(2**20 + 1), {"k": 1, "backend": "triton"}, InputError,
     "rows have 1048577 elements, .* takes up to 1048576"),
])
def test_refusals_of_a_selection(x, arguments, error, words):
    with pytest.raises(error, match=words):
        softmax_topk(x, **arguments)


@pytest.mark.parametrize("scale", [2, np.float32(2), torch.tensor(2.0), 2.0])
def test_scale_may_be_any_number(scale):
    x = torch.tensor([0.0, 1.0])
    assert torch.equal(softmax(x, scale=scale), torch.softmax(2 * x, 0))


def test_no_scale_is_one_and_zero_is_zero():
    x = torch.tensor([0.0, 1.0])
    assert torch.equal(softmax(x, scale=None), torch.softmax(x, 0))
    assert softmax(x, scale=0.0).tolist() == [0.5, 0.5]


def test_dim_may_be_any_integer():
    assert torch.equal(softmax(X.double(), np.int64(0)), torch.full((2, 3), 0.5, dtype=torch.float64))


def test_a_device_without_autocast():
    assert softmax(X.half().to("meta")).dtype == torch.float16


def test_dimensions_are_counted_from_the_end():
    assert [check(X[None], dim, None, None, None, False, False)[2].dim for dim in (0, 1, 2, -3, -1)] == [-3, -2, -1, -3, -1]


@pytest.mark.parametrize(("source", "dtype", "read"), [
    (torch.float16, torch.float32, torch.float16),  # widened while it is read
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float64, torch.float64),
    (torch.float32, torch.float16, torch.float16),
    (torch.float16, torch.bfloat16, torch.bfloat16),
    (torch.int32, torch.float16, torch.float16),
])
def test_only_widening_to_float32_is_left_to_the_kernel(source, dtype, read):
    x, _, spec = check(X.to(source), -1, dtype, None, None, False, False)
    assert (x.dtype, spec.dtype) == (read, dtype)
