import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.attention import Tile
from onchip.roofline.shape import AttentionShape
from onchip.simulate.backward import apart_backward, fa2_backward
from onchip.simulate.formats import Precision
from onchip.simulate.problem import Problem
from onchip.simulate.unfused import naive_backward

FLOAT64 = Precision.uniform("float64")
BACKWARDS = pytest.mark.parametrize("schedule", [naive_backward, apart_backward, fa2_backward])


@BACKWARDS
def test_empty_rows_give_zero_gradient_whatever_dout_holds(schedule):
    shape, tile = AttentionShape(12, 5, 8, 4, causal="bottom-right"), Tile(4, 4)
    plain = Problem.random(shape, FLOAT64, grad=True)
    loud = Problem(shape, FLOAT64, plain.q, plain.k, plain.v, np.where(np.arange(12)[:, None] < 7, 1e4, plain.dout))
    results = [schedule(problem, tile) for problem in (plain, loud)]
    for result in results:
        assert (result.tensors["dq"][0, 0, :7] == 0).all()
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(results[0].tensors[name], results[1].tensors[name])


@BACKWARDS
def test_keys_that_nobody_sees_get_zero(schedule):
    result = schedule(Problem.random(AttentionShape(4, 30, 8, 8, causal="top-left"), FLOAT64, grad=True), Tile(4, 8))
    assert (result.tensors["dk"][0, 0, 4:] == 0).all()
    assert (result.tensors["dv"][0, 0, 4:] == 0).all()
    assert np.abs(result.tensors["dv"][0, 0, :4]).min() > 0


@BACKWARDS
def test_bfloat16_gradients_are_close_and_not_exact(schedule):
    result = schedule(Problem.random(AttentionShape.square(128, 32, causal="bottom-right"), grad=True), Tile(32, 32))
    for error in result.errors.values():
        assert 5e-4 < error.rms < 1e-2


@BACKWARDS
def test_needs_dout(schedule):
    shape = AttentionShape.square(8, 4)
    with pytest.raises(InputError, match="sample: got 2, accepted: 0 or None: the problem has no dout"):
        schedule(Problem.random(shape), Tile(4, 4), sample=2)
    assert schedule(Problem.random(shape), Tile(4, 4)).executed == 0  # counted only


def test_no_quadratic_bytes():
    # every stream of the recomputing backward is linear in the sequence, times the visits
    result = fa2_backward(Problem(AttentionShape.square(1024, 64)), Tile(64, 64))
    assert max(result.memory.values()) == 1024 * 64 * 4  # the fp32 dQ accumulator
    assert set(result.memory) == {"Q", "K", "V", "dO", "O", "lse", "D", "dQ acc", "dQ", "dK", "dV"}
