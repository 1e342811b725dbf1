"""Which backend runs, and the reasons why another one does not."""
import pytest
import torch

from onchip.errors import InputError
from onchip.softmax import contract, dispatch
from onchip.softmax.api import softmax

X = torch.randn(3, 5)


class On:
    """Stands for a tensor on `device`: dispatch reads no more than the type and the place."""

    def __init__(self, device, dtype=torch.float32):
        self.device, self.dtype = torch.device(device), dtype


def test_auto_prefers_triton_on_a_gpu_and_torch_elsewhere():
    assert dispatch.choose(On("cuda:1"), "auto") == "triton"
    assert dispatch.choose(On("cuda", torch.float64), "auto") == "reference"
    assert dispatch.choose(On("cpu"), "auto") == "reference"
    assert dispatch.choose(On("meta"), "auto") == "reference"


def test_a_named_backend_runs_or_says_why_not(monkeypatch):
    with pytest.raises(InputError, match="backend 'triton' cannot run: its arithmetic is float32 and x is float64"):
        softmax(X.double(), backend="triton")
    with pytest.raises(InputError, match="backend 'triton' cannot run: x is on meta"):
        softmax(X.to("meta"), backend="triton")
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    with pytest.raises(InputError, match="x is on cpu: it needs a GPU, or TRITON_INTERPRET=1"):
        softmax(X, backend="triton")
    monkeypatch.setattr(dispatch, "_HAS_TRITON", False)
    with pytest.raises(InputError, match="Triton is not installed"):
        dispatch.choose(On("cuda"), "triton")
    assert dispatch.choose(On("cuda"), "auto") == "reference"


def test_every_backend_that_gives_no_reason_runs():
    for backend in dispatch.BACKENDS[1:]:
        for dtype in contract.DTYPES:
            x = X.to("cuda" if torch.cuda.is_available() else "cpu", dtype)
            if dispatch.why_not(backend, x) is None:
                assert softmax(x, backend=backend).sum(-1).allclose(torch.ones(3, dtype=dtype, device=x.device), rtol=1e-2)


def test_auto_on_a_cpu_is_torch_bit_for_bit():
    assert torch.equal(softmax(X), torch.softmax(X, -1))
    assert softmax(X.requires_grad_()).grad_fn.name() == "SoftmaxBackward0"
