"""What `tests.interpreter` leaves out: the language is itself again after a launch, and integers wrap as they did."""
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels compile here")


@triton.jit
def _largest(x):
    return tl.max(x, axis=0)


@triton.jit
def _kernel(x, out, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    s = tl.load(x + i)
    tl.store(out + i, s * n - _largest(s))


def test_a_launch_leaves_the_language_as_it_was():
    owners = (tl, tl.core, tl.math, tl.tensor)
    before = {(owner, name): member for owner in owners for name, member in vars(owner).items() if callable(member)}
    x, out = torch.arange(8.0), torch.empty(8)
    for _ in range(2):
        _kernel[(1,)](x, out, 3, 8)
        assert torch.equal(out, 3 * x - 7)
        assert [name for (owner, name), member in before.items() if getattr(owner, name) is not member] == []


def test_a_failed_launch_does_too():
    load = tl.core.load
    with pytest.raises(interpreter.InterpreterError):
        _kernel[(1,)](torch.ones(8), torch.empty(8), 3, 7)  # no power of two
    assert tl.core.load is tl.load is load


def test_what_is_left_out_had_no_say():
    assert not interpreter.interpreter_builder.options.debug
    x = torch.full((8,), 2**30, dtype=torch.int32)
    _kernel[(1,)](x, x, 4, 8)
    assert (x == -(2**30)).all()  # 2³² − 2³⁰, without its carry
