import numpy as np
import pytest

from onchip.simulate.arithmetic import DRY, Arithmetic
from onchip.simulate.formats import Precision

MATH = Arithmetic(Precision.uniform("float64"), 0.5)


def start(width=0):
    m, l, o = np.full((1, 1), -np.inf), np.zeros((1, 1)), np.zeros((1, width))
    return m, l, o


def row(*values):
    return np.array([values], float)


def test_worked_merge_of_two_blocks():
    m, l, _ = start()
    MATH.online(row(1, 3), m, l)
    assert (m.item(), l.item()) == (3, pytest.approx(1.1353, abs=5e-5))
    MATH.online(row(2, 4), m, l)
    assert m.item() == 4
    assert 1.1353 * np.exp(3 - 4) == pytest.approx(0.4177, abs=5e-5)
    assert l.item() == pytest.approx(1.5530, abs=5e-5)
    assert l.item() == pytest.approx(sum(np.exp(x - 4) for x in (1, 3, 2, 4)), rel=1e-15)


def test_leading_trailing_and_only_empty_tiles():
    empty, tile = row(-np.inf, -np.inf), row(1, 3)
    m, l, o = start(2)
    np.testing.assert_array_equal(MATH.online(empty, m, l, o), [[0, 0]])
    assert (m.item(), l.item()) == (-np.inf, 0)
    np.testing.assert_array_equal(MATH.normalised(o, l), [[0, 0]])
    assert MATH.lse(m, l).item() == -np.inf
    np.testing.assert_array_equal(MATH.probabilities(empty, m, l), [[0, 0]])
    MATH.online(tile, m, l, o)
    once = l.item()
    MATH.online(empty, m, l, o)
    assert (m.item(), l.item()) == (3, once)
    assert once == pytest.approx(1 + np.exp(-2))


def test_normalised_step_starts_and_survives_empty_tiles():
    v, m, l, o = np.array([[1.0, 2.0], [3.0, -1.0]]), *start(2)
    MATH.online_normalised(row(-np.inf, -np.inf), v, m, l, o)
    np.testing.assert_array_equal(o, [[0, 0]])
    MATH.online_normalised(row(0, np.log(3)), v, m, l, o)
    np.testing.assert_allclose(o, row(0.25, 0.75) @ v)
    MATH.online_normalised(row(-np.inf, -np.inf), v, m, l, o)
    np.testing.assert_allclose(o, row(0.25, 0.75) @ v)
    MATH.online_normalised(row(np.log(4), -np.inf), v, m, l, o)  # another 4 : 4 to the first key
    np.testing.assert_allclose(o, row(5 / 8, 3 / 8) @ v)


def test_merge_ignores_empty_parts_in_any_place():
    parts = [(row(7.0), row(-np.inf)), (row(1.0), row(0.0)), (row(7.0), row(-np.inf)), (row(2.0), row(np.log(3))), (row(7.0), row(-np.inf))]
    m, l, o = start(1)
    MATH.merge(*parts[0], m, l, o)
    assert MATH.normalised(o, l).item() == 0
    for part in parts:
        MATH.merge(*part, m, l, o)
    assert MATH.normalised(o, l).item() == pytest.approx((1 * 1 + 3 * 2) / 4)
    assert MATH.lse(m, l).item() == pytest.approx(np.log(4))


def test_masked_selects_and_never_adds():
    s, mask = row(np.nan, 1, np.inf), np.array([[False, True, False]])
    np.testing.assert_array_equal(MATH.masked(s, mask), [[-np.inf, 1, -np.inf]])
    assert MATH.masked(s, None) is s


def test_nan_among_visible_scores_reaches_the_result():
    m, l, o = start(1)
    MATH.online(row(np.nan, 1), m, l, o)
    assert np.isnan(l).all()
    assert np.isnan(MATH.normalised(o, l)).all()


def test_every_operation_rounds_to_the_state():
    math = Arithmetic(Precision("float32", state="bfloat16"), 1.0)
    m, l = np.full((1, 1), -np.inf, np.float32), np.zeros((1, 1), np.float32)
    p = math.online(np.array([[0.3, 0.1, -1.7]], np.float32), m, l)
    for x in (p, l, math.lse(m, l), math.scaled(np.float32([[1.003]]))):
        np.testing.assert_array_equal(x.view(np.uint32) & 0xFFFF, 0)  # a bfloat16 is a float32 whose lower half is zero


def test_dry_arithmetic_has_every_method_and_does_nothing():
    for name in vars(Arithmetic):
        if not name.startswith("_"):
            assert getattr(DRY, name)(None, None) is None
