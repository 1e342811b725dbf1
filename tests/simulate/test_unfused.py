import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.attention import Tile
from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Precision
from onchip.simulate.meter import OutOfSram
from onchip.simulate.problem import Problem
from onchip.simulate.unfused import naive, naive_backward

SHAPE, N, D = AttentionShape.square(96, 16), 96, 16
TILE = Tile(16, 32)


def s_reads(result):
    return next(k for k in result.kernels if k.name == "P = softmax(S)").read("S")


def test_textbook_bytes():
    for kwargs, quadratic in (({}, 8), ({"scale_kernel": True}, 12), ({"scale_kernel": True, "mask_kernel": True}, 16)):
        assert naive(Problem(SHAPE, Precision("float16")), **kwargs).issued == quadratic * N * N + 8 * N * D
    assert naive(Problem(SHAPE, Precision("float16", "float32"))).issued == 16 * N * N + 8 * N * D


def test_gemms_reload_their_operands_for_every_tile():
    qk, _, pv = naive(Problem(SHAPE, Precision("float16")), TILE).kernels
    assert qk.read("Q") == 3 * N * D * 2  # ⌈96 / 32⌉ columns of tiles
    assert qk.read("K") == pv.read("V") == 6 * N * D * 2  # ⌈96 / 16⌉ rows of tiles
    assert pv.read("P") == N * N * 2


def test_row_on_chip_or_not():
    problem = Problem.random(SHAPE, Precision.uniform("float64"))
    row = 8 * N + 16  # a row of S, m and l in float64
    assert s_reads(naive(problem, TILE)) == 8 * N * N
    room = 16 * (D + D + 32) * 8 + 32 * D * 8  # what the matmuls need: more than one row and less than sixteen
    assert row < room < 16 * row
    some = naive(problem, TILE, sram=room)
    assert s_reads(some) == 8 * N * N
    small = Tile(1, 2)  # the matmuls fit in less than a row
    two_reads = naive(problem, small, sram=row - 1)
    assert s_reads(two_reads) == 2 * 8 * N * N
    assert s_reads(naive(problem, small, sram=row)) == 8 * N * N
    for result in (some, two_reads):
        assert result.errors["out"].relative < 1e-14
        assert result.peak <= room
    with pytest.raises(OutOfSram, match=r"'P = softmax\(S\)'"):
        naive(problem, small, sram=row - 1, row_on_chip=True)


def test_device_memory_holds_s_and_p():
    result = naive(Problem(SHAPE, Precision("float16")))
    assert result.memory["S"] == result.memory["P"] == N * N * 2
    assert naive_backward(Problem(SHAPE)).memory.keys() == {"Q", "K", "V", "dO", "P", "dP", "dS", "dQ", "dK", "dV"}


def test_a_mask_kernel_needs_infinity():
    causal = AttentionShape.square(8, 4, causal="bottom-right")
    with pytest.raises(InputError, match="scores: got float8_e4m3"):
        naive(Problem.random(causal, Precision("float16", "e4m3")), mask_kernel=True)
    masked_in_softmax = naive(Problem.random(causal, Precision("float16", "e4m3")))
    assert masked_in_softmax.errors["out"].relative < 0.15


def test_scores_overflow_where_the_format_says():
    # s = 16 · 100² / 4 = 40,000 fits float16; unscaled it is 160,000 and does not
    x = np.full((1, 1, 8, 16), 100.0)
    problem = Problem(AttentionShape.square(8, 16), Precision("float16"), x, x, np.ones_like(x))
    assert naive(problem).errors["out"].max_abs == 0
    assert np.isnan(naive(problem, scale_kernel=True).out).all()
    wider = Problem(problem.shape, Precision("float16", "bfloat16"), x, x, np.ones_like(x))
    assert naive(wider, scale_kernel=True).errors["out"].max_abs == 0


def test_sampled_scores_cost_their_sample():
    # one query tile of 4096 × 4096: S and P would be 64 MB each
    result = naive(Problem.random(AttentionShape.square(4096, 8), Precision("float16", "float32")), Tile(64, 512), sample=1)
    assert result.executed == 64 / 4096
    assert result.errors["out"].rms < 1e-3
    assert result.memory["S"] == 4 * 4096**2
