"""No kernel touches what is not its tensors', not a byte behind the last row: the interpreter's addresses, looked at one by one."""
import pytest
import torch

from onchip.softmax import softmax_topk
from onchip.softmax.triton.plan import Plan
from onchip.testing.softmax import DEVICE, agree

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's addresses; on a GPU benchmarks/sanitize.py looks")
if DEVICE == "cpu":
    from tests.bounds import bounded


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_an_access_outside_is_seen():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, n, BEYOND: tl.constexpr):
        i = tl.arange(0, 16)
        tl.store(x + i, tl.load(x + i + BEYOND, mask=i < n), mask=i < n)

    with bounded() as counted:
        kernel[(1,)](torch.zeros(11), 11, 0)
    assert counted == [22]
    for beyond in (1, -1):
        with pytest.raises(pytest.fail.Exception, match="4 bytes at"), bounded():
            kernel[(1,)](torch.zeros(11), 11, beyond)


# Ends of 2 … 14 bytes in a vector; rows that share a tile, that start inside vectors, that wait in 16 bits, in blocks.
@pytest.mark.parametrize("shape", [(5, 3), (7, 125), (3, 1029), (2, 4099)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_softmax(shape, dtype):
    x = rows(*shape, dtype=dtype)
    with bounded():
        agree(x)
        agree(x, log=True, causal=True)
        agree(x, mask=rows(1, shape[1]) > 0)
        agree(x, mask=rows(*shape) > 0)


def test_softmax_in_blocks(force):
    force(Plan(False, 4, 32, 4, 2))
    with bounded():
        agree(rows(5, 77))
        agree(rows(5, 77), causal=True)


def test_softmax_across():
    with bounded():
        agree(rows(33, 21), 0)


@pytest.mark.parametrize(("shape", "k"), [((3, 7), 2), ((3, 1029), 5), ((3, 2049), 3), ((2, 9001), 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_topk(shape, k, dtype):
    with bounded():
        softmax_topk(rows(*shape, dtype=dtype), k, backend="triton")
