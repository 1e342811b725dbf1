import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.attention import Tile
from onchip.roofline.shape import AttentionShape
from onchip.simulate.attention import fa2
from onchip.simulate.formats import Precision
from onchip.simulate.problem import Problem

SHAPE = AttentionShape(6, 5, 4, 3, batch=2, heads=4, kv_heads=2)
Q, K, V = np.ones((2, 4, 6, 4)), np.ones((2, 2, 5, 4)), np.ones((2, 2, 5, 3))


def with_one(x, value):
    x = x.copy()
    x[1, 1, 2, 1] = value
    return x


@pytest.mark.parametrize(("tensors", "message"), [
    ((Q[:, :2], K, V), r"q: got shape \(2, 2, 6, 4\), accepted: \(2, 4, 6, 4\)"),
    ((Q, K, K), r"v: got shape \(2, 2, 5, 4\), accepted: \(2, 2, 5, 3\)"),
    ((Q, with_one(K, np.nan), V), "k: got 1 values that are NaN or infinite, accepted: finite values"),
    ((Q, K, with_one(V, -np.inf)), "v: got 1 values that are NaN or infinite"),
    ((with_one(Q, 1e5), K, V), "q: got 1 values that are NaN or infinite in float16"),
    ((Q, K, None), "tensors: got q, k, accepted: q, k, v"),
    ((Q, K, V, Q), r"dout: got shape \(2, 4, 6, 4\), accepted: \(2, 4, 6, 3\)"),
])
def test_bad_tensors(tensors, message):
    with pytest.raises(InputError, match=message):
        Problem(SHAPE, Precision("float16"), *tensors)


def test_bad_scale():
    with pytest.raises(InputError, match="scale: got nan"):
        Problem(SHAPE, scale=float("nan"))


def test_inputs_are_kept_in_their_format():
    problem = Problem(SHAPE, Precision("bfloat16"), Q + 2.0**-9, K, V)
    assert (problem.q.astype(float) == 1).all()
    assert fa2(problem, Tile(4, 4)).errors["out"].max_abs == 0  # the error is the schedule's, not that of rounding the inputs


def test_scale_defaults_to_the_root_of_the_head_dim():
    assert Problem(SHAPE).factor == 0.5
    assert Problem(SHAPE, scale=-2.0).factor == -2
