"""The reference: right in float64 to every order, and O(x) in memory."""
import pytest
import torch

from onchip.bench.memory import peak_extra_bytes
from onchip.softmax import reference
from onchip.softmax.api import log_softmax, softmax
from onchip.softmax.contract import Spec

CASES = [{}, {"scale": -0.7}, {"causal": True}, {"mask": torch.tensor([True, False, True, True])}]
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's, at first forward mode
KEPT = torch.tensor([[True, False, True], [False] * 3, [True] * 3])


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("arguments", CASES)
def test_derivatives_of_first_and_second_order(function, arguments):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def finite(x):
        return function(x, backend="reference", **arguments).masked_fill(hidden, 0.0)

    hidden = function(x.detach(), backend="reference", **arguments).isneginf()
    assert torch.autograd.gradcheck(finite, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(finite, x)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("hiding", [False, True])
def test_the_explicit_backward_and_tangent_are_those_of_autograd(log, hiding):
    x, v = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    mask, spec = KEPT if hiding else None, Spec(-1, log, -0.7, False, hiding, torch.float64)

    def function(x):
        return reference.forward(x, mask, spec)

    y, pull = torch.func.vjp(function, x)
    torch.testing.assert_close(reference.backward(v, y, spec), pull(v)[0])
    torch.testing.assert_close(reference.tangent(v, y, spec), torch.func.jvp(function, (x,), (v,))[1])


def test_visible_is_the_bottom_right_triangle():
    assert reference.visible(torch.zeros(2, 3)).tolist() == [[True, True, False], [True, True, True]]
    assert reference.visible(torch.zeros(3, 2)).tolist() == [[False, False], [True, False], [True, True]]


def test_memory_is_a_few_inputs():
    x = torch.randn(256, 1024, requires_grad=True)
    mask = torch.rand(1024) < 0.5
    extra, _ = peak_extra_bytes(lambda: softmax(x, mask=mask, causal=True, scale=0.5).sum().backward())
    assert extra <= 8 * x.numel() * x.element_size()
