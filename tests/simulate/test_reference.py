import math

import numpy as np
import pytest

from onchip.roofline.shape import AttentionShape
from onchip.simulate.reference import Error, distance, reference

SHAPES = [
    AttentionShape(5, 7, 3, 2, heads=2, kv_heads=1),
    AttentionShape(5, 3, 3, 2, causal="bottom-right"),  # two empty rows
    AttentionShape(6, 4, 2, 3, batch=2, heads=2, kv_heads=2, causal="top-left"),
    AttentionShape(6, 8, 2, 3, window=(1, 2)),
]


def by_hand(shape, scale, q, k, v):
    """Rows by plain sums over the keys that the definition of the mask lets a query see."""
    out, lse = np.zeros((len(q), shape.seq_q, shape.head_dim_v)), np.full((len(q), shape.seq_q), -np.inf)
    for n in range(len(q)):
        for i in range(shape.seq_q):
            at = i + (0 if shape.causal == "top-left" else shape.seq_k - shape.seq_q)
            left, right = shape.window
            seen = [j for j in range(shape.seq_k)
                    if (left is None or j >= at - left) and (right is None or j <= at + right) and (shape.causal is None or j <= at)]
            if not seen:
                continue
            s = [scale * math.fsum(a * b for a, b in zip(q[n, i], k[n // shape.group, j], strict=True)) for j in seen]
            lse[n, i] = math.log(math.fsum(math.exp(x) for x in s))
            for c in range(shape.head_dim_v):
                out[n, i, c] = math.fsum(math.exp(x - lse[n, i]) * v[n // shape.group, j, c] for x, j in zip(s, seen, strict=True))
    return out, lse


def tensors(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, s, d)) for n, s, d in (
        (shape.query_heads, shape.seq_q, shape.head_dim), (shape.kv_pairs, shape.seq_k, shape.head_dim),
        (shape.kv_pairs, shape.seq_k, shape.head_dim_v), (shape.query_heads, shape.seq_q, shape.head_dim_v)))


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_by_hand(shape):
    q, k, v, _ = tensors(shape)
    out, lse = by_hand(shape, 0.7, q, k, v)
    truth = reference(shape, 0.7, q, k, v)
    np.testing.assert_allclose(truth.out, out, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(truth.lse[..., 0], lse, rtol=1e-14)
    assert np.isneginf(lse).any() == (shape.seq_q > shape.seq_k and shape.causal == "bottom-right")


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_by_finite_differences(shape):
    q, k, v, dout = tensors(shape)
    truth, h = reference(shape, 0.7, q, k, v, dout), 1e-6
    for x, gradient in ((q, truth.dq), (k, truth.dk), (v, truth.dv)):
        for index in np.ndindex(x.shape):
            kept, sides = x[index], []
            for step in (h, -h):
                x[index] = kept + step
                sides.append((by_hand(shape, 0.7, q, k, v)[0] * dout).sum())
            x[index] = kept
            assert abs((sides[0] - sides[1]) / (2 * h) - gradient[index]) < 1e-7


def test_wanted_rows_only():
    shape = SHAPES[0]
    q, k, v, dout = tensors(shape)
    wanted = np.zeros((2, 5), bool)
    wanted[1, 2:4] = True
    whole, part = reference(shape, 0.5, q, k, v, dout), reference(shape, 0.5, q, k, v, dout, wanted)
    np.testing.assert_array_equal(np.isfinite(part.out).all(axis=2), wanted)
    np.testing.assert_allclose(part.dq[wanted], whole.dq[wanted], rtol=1e-14)
    rest = reference(shape, 0.5, q, k, v, dout, ~wanted)
    np.testing.assert_allclose(part.dk + rest.dk, whole.dk, rtol=1e-13)
    np.testing.assert_allclose(part.dv + rest.dv, whole.dv, rtol=1e-13)


def test_distance():
    assert distance(np.array([1.0, -np.inf, 5.0]), np.array([1.0, -np.inf, np.nan])) == Error(0, 0, 0)
    assert distance(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == Error(0.5, 0.125, 0.1)
    assert distance(np.array([1.0]), np.array([-np.inf])).max_abs == np.inf
    assert np.isnan(distance(np.array([np.nan, 1.0]), np.array([1.0, 1.0])).max_abs)
    assert distance(np.array([1.0]), np.array([0.0])) == Error(1.0, np.inf, np.inf)
