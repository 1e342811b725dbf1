"""Neighbouring rows in parts for a cluster: under the interpreter every program works out its rows' sums, on a card they are exchanged."""
import pytest
import torch

from onchip.roofline.hardware import ARCHITECTURES
from onchip.softmax import logsumexp, softmax
from onchip.softmax.triton import plan
from onchip.softmax.triton.rows import fold
from onchip.testing.softmax import DEVICE, agree
from tests import fresh
from tests.softmax import compile_plans

KINDS = pytest.mark.parametrize(("narrow", "backward"), [(narrow, backward) for narrow in (True, False) for backward in (False, True)])


def data(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


def side_by_side(x, dim=-2):
    return fold({"x": x, "y": x}, dim).side_by_side


def stripe(dtype, rows=16, columns=32, most=2, warps=4):
    return lambda n: plan.stripe(n, dtype != torch.float32, rows, columns, most, warps, None)


@pytest.mark.parametrize("features", [{}, {"log": True, "scale": -0.5}, {"scale": 0.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("n", "side"), [(64, 32), (50, 40), (128, 16), (150, 24)], ids=str)
def test_neighbouring_rows_of_a_cluster(force, n, side, dtype, features):
    """One part and several, whole ones and ragged; a last stripe of fewer rows; groups of rows that lie apart."""
    force(stripe(dtype)(n))
    x = data(2, n, side, dtype=dtype)
    assert side_by_side(x) == 16 // dtype.itemsize
    x[:, -20:] += 20  # the largest in the last part
    agree(x, -2, **features)


@pytest.mark.parametrize("side", [16, 19])
def test_rows_that_do_not_lie_in_vectors_may_be_asked_for_too(force, side):
    force(stripe(torch.bfloat16)(100))
    x = data(3, 100, side + 1, dtype=torch.bfloat16)[..., :side]
    assert side_by_side(x) == 1
    agree(x, -2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_special_reaches_all_parts_of_its_row_and_no_other(force, poison):
    force(stripe(torch.float32)(150))
    x = data(150, 32)
    x[140, 3], x[:, 17], x[2, 30] = poison, -torch.inf, poison  # in the last part and in the first
    torch.testing.assert_close(softmax(x, 0, backend="triton"), torch.softmax(x, 0), equal_nan=True, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(logsumexp(x, 0, backend="triton"), torch.logsumexp(x, 0), equal_nan=True)


def test_neighbours_are_those_that_vectors_reach():
    def of(*shape, dtype=torch.bfloat16, dim=-2):
        return side_by_side(torch.empty(shape, dtype=dtype), dim)

    assert [of(100, 64), of(100, 8), of(5, 100, 24), of(100, 60), of(100, 1), of(64, 100)] == [8, 8, 8, 1, 1, 1]
    assert [of(100, width, dtype=torch.float32) for width in (64, 60, 62)] == [4, 4, 1]
    assert of(100, 64, dim=-1) == 1
    x = torch.empty(100, 136, dtype=torch.bfloat16)
    assert [side_by_side(x[:, start:start + 64]) for start in (0, 8, 4)] == [8, 8, 1]
    assert side_by_side(torch.empty(100, 132, dtype=torch.bfloat16)[:, :64]) == 1  # its columns do not start in vectors


@KINDS
def test_a_cluster_holds_neighbouring_rows(narrow, backward):
    table, vector = plan.STRIPES[narrow, backward], 8 if narrow else 4
    for n in (33, 64, 100, 128, 129, 256, 500, 512, 1000, 1024, 2048, 4096, 5000, 8192, 12_000, 16_384, 30_720, 30_721):
        for n0 in (16, 24, 32, 64, 5000):
            chosen = plan.choose_stripe(n, n0, backward, narrow)
            if chosen is None:
                assert not any(n <= longest and block[0] <= n0 for longest, block in table)
                continue
            assert chosen.block_m <= n0
            assert (chosen.parts - 1) * chosen.span(n) < n <= chosen.parts * chosen.span(n)
            assert chosen.span(n) <= chosen.pieces * chosen.block_n
            assert 1 <= chosen.parts <= 16
            assert chosen.block_m * chosen.block_n == vector * 32 * chosen.warps  # a vector a thread
    assert plan.choose_stripe(plan.STRIPES_BEYOND, 64, backward, narrow) is None
    assert plan.choose_stripe(100, 8, backward, narrow) is None


@KINDS
def test_enough_of_neighbouring_rows_waits_on_an_sm(narrow, backward):
    """64 KB, and 96 of what is longer than 128 elements; a fifth of the registers is left for addresses and terms."""
    card = ARCHITECTURES[9, 0]
    for longest, (_, _, most, warps, registers) in plan.STRIPES[narrow, backward]:
        read = most * (1 + backward) * 16  # bytes of a thread
        blocks = card.registers_per_sm // (32 * warps * registers)
        assert read // 4 <= 0.8 * registers
        assert blocks * 32 * warps * read >= (96 if longest > 128 else 64) * 1024


def test_stripes_compile_for_hopper():
    """All by 16 bytes, all loads first, one send for all rows of a part; hardly a spill."""
    cases = [((2, n, side), -2) for n, side in ((100, 128), (1000, 1000), (4096, 64))]
    kernels = fresh.call(compile_plans.main, cases)
    assert len(kernels) == 2 * 2 * len(cases)
    for kernel in kernels:
        assert kernel["kernel"] == "_resident", kernel
        assert kernel["accesses"] == kernel["wide"] > 0, kernel
        assert kernel["late"] == 0, kernel
        assert kernel["stack"] <= 64, kernel
        assert kernel["sends"] == (kernel["parts"] > 1), kernel
    assert {kernel["parts"] > 1 for kernel in kernels} == {False, True}
