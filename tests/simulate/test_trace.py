"""The block-by-block softmax: worked figures, invariances, and where each mode breaks."""
import math
from itertools import permutations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.simulate.formats import parse_format
from onchip.simulate.trace import MODES, block_order, exp_limit, trace

INF = math.inf
SHIFTED = ("safe", "online", "anchored")


def row(*values):
    return np.array(values, float)


def softmax(x):
    p = np.array([math.exp(v - max(x)) for v in x])
    return p / math.fsum(p)


def test_worked_example():
    first, second = trace(row(1, 3, 2, 4), 2).steps
    assert (first.m, round(first.l, 4)) == (3, 1.1353)
    assert (second.m, round(second.factor, 4), round(second.carried, 4), round(second.l, 4)) == (4, 0.3679, 0.4177, 1.5530)
    assert trace(row(1, 3, 2, 4), 2).error.max_abs < 2**-52


def test_the_same_example_under_the_other_shifts():
    e = math.exp
    naive, safe, anchored = (trace(row(1, 3, 2, 4), 2, mode).steps for mode in ("naive", "safe", "anchored"))
    assert [s.l for s in naive] == pytest.approx([e(1) + e(3), e(1) + e(3) + e(2) + e(4)])
    assert [s.m for s in safe] == [4, 4]
    assert [s.l for s in safe] == pytest.approx([e(-3) + e(-1), 1.5530018])
    assert [s.m for s in anchored] == [3, 3]
    assert [s.l for s in anchored] == pytest.approx([e(-2) + 1, e(-2) + 1 + e(-1) + e(1)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.floats(-40, 40), st.just(-INF)), min_size=1, max_size=40), st.integers(1, 12),
       st.randoms(use_true_random=False), st.sampled_from(list(MODES)))
def test_any_block_and_any_order_give_softmax(values, block, random, mode):
    x = row(*values)
    order = list(range(-(-x.size // block)))
    random.shuffle(order)
    t = trace(x, block, mode, order=order)
    assert [s.block for s in t.steps] == order
    if max(values) == -INF:
        assert np.isnan(t.y).all()
        assert math.isnan(t.error.max_abs)
        return
    np.testing.assert_allclose(t.y, softmax(values), rtol=1e-12)
    seen: list[float] = []
    for s in t.steps:
        seen += values[s.start:s.stop]
        shift = 0 if s.m == -INF else s.m
        total = math.fsum(math.exp(v - shift) for v in seen)
        assert s.l == pytest.approx(total, rel=1e-13, abs=0)
        assert s.rel_error < 1e-13
        if mode == "online":
            assert s.m == max(seen)


def test_l_does_not_depend_on_the_order():
    x = np.random.default_rng(0).normal(0, 5, 12)
    finals = {round(trace(x, 3, order=order).l, 12) for order in permutations(range(4))}
    assert len(finals) == 1


@pytest.mark.parametrize(("dtype", "limit", "below", "above"), [
    ("fp16", 11.09, 11.0859375, 11.09375), ("fp32", 88.72, 88.72, 88.73), ("bf16", 88.72, 88.5, 89.0), ("fp64", 709.78, 709.78, 709.79)])
def test_exp_overflows_above(dtype, limit, below, above):
    assert exp_limit(parse_format(dtype)) == pytest.approx(limit, abs=5e-3)
    assert trace(row(0, below), 1, "naive", dtype=dtype).breakdown is None
    broken = trace(row(0, 1, above), 1, "naive", dtype=dtype)
    assert (broken.breakdown.block, broken.breakdown.element) == (2, 2)
    assert np.isnan(broken.y).any()
    for mode in ("safe", "online"):
        t = trace(row(0, 1, above), 1, mode, dtype=dtype)
        assert t.breakdown is None
        assert t.error.relative < parse_format(dtype).eps


def test_the_first_overflow_is_reported_where_it_was_visited():
    x = np.zeros(64)
    x[[9, 40]] = 12
    assert trace(x, 8, "naive", dtype="fp16").breakdown.element == 9
    assert trace(x, 8, "naive", dtype="fp16", order="reverse").breakdown.element == 40
    assert trace(x, 8, "anchored", dtype="fp16", order="reverse").breakdown.element == 40


def test_a_sum_can_overflow_where_no_exponential_does():
    x = np.zeros(70_000)
    t = trace(x, 1000, "online", dtype="fp16", state="fp16")
    assert (t.breakdown.block, t.breakdown.element) == (65, None)  # 65,000 fits, 66,000 does not
    assert t.breakdown.message == "l is inf after 64608: float16 ends at 65504"  # 65,000 but for fp16's steps of 32
    assert (t.y == 0).all()
    np.testing.assert_allclose(trace(x, 1000, "online", dtype="fp16").y, np.float16(1 / 70_000))


def test_every_exponential_can_vanish():
    t = trace(row(-200, -300), 1, "naive", dtype="fp32")
    assert "l is 0" in t.breakdown.message
    assert np.isnan(t.y).all()


def test_eight_bits_saturate_silently_and_are_caught():
    t = trace(row(0, 7), 1, "naive", dtype="e4m3")  # e⁷ = 1097 > 448
    assert t.breakdown.element == 1
    assert "saturates at 448" in t.breakdown.message
    assert t.y[1] == pytest.approx(448 / 449, rel=1 / 16)
    assert trace(row(0, 7), 1, "anchored", dtype="e4m3").redo


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16", "e4m3"])
@pytest.mark.parametrize("mode", MODES)
def test_masked_blocks(mode, dtype):
    for values in ([-INF, -INF, 2, 4], [2, 4, -INF, -INF], [-INF, 2, -INF, 4]):
        t = trace(row(*values), 2, mode, dtype=dtype)
        expected = softmax(values)
        np.testing.assert_allclose(t.y, expected, atol=parse_format(dtype).eps)
        assert (t.y[expected == 0] == 0).all()
    assert np.isnan(trace(row(-INF, -INF, -INF), 2, mode, dtype=dtype).y).all()  # as torch.softmax


@pytest.mark.parametrize(("values", "dtype", "redo"), [
    ([0, 69, 1], "fp32", None),                      # e⁶⁹ < 2¹⁰⁰ = e^69.3
    ([0, 70, 1], "fp32", "is outside 2^-60 … 2^100"),
    ([0, 70, 1], "bf16", "is outside 2^-60 … 2^100"),
    ([0, 100, 1], "fp32", "exp(100 − 0) is inf"),
    ([100, 0, 1], "fp32", None),                     # a first block far above the rest is no trouble
    ([-INF, -41, -80], "fp32", None),                # masked first block: the shift stays 0; e⁻⁴¹ > 2⁻⁶⁰ = e^−41.6
    ([-INF, -42, -80], "fp32", "is outside"),
    ([-INF, -INF], "fp32", "l = 0 is outside"),
    ([0, 11, 1], "fp16", None),                      # e¹¹ = 59,874 ≤ 65,504
    ([0, 12, 1], "fp16", "exp(12 − 0) is inf"),
    ([0, 12, 1], "bf16", None),
    ([-INF, -9, -12], "fp16", None),                 # e⁻⁹ = 1.2e-4 is normal in fp16
    ([-INF, -10, -12], "fp16", "below the normal range of float16"),
    ([-INF, -10, -12], "bf16", None)])
def test_anchored_checks_its_range(values, dtype, redo):
    t = trace(row(*values), 1, "anchored", dtype=dtype)
    if redo is None:
        assert t.redo is None
        np.testing.assert_allclose(t.y, softmax(values), atol=parse_format(dtype).eps)
    else:
        assert redo in t.redo
    assert trace(row(*values), 1, "online", dtype=dtype).redo is None


def test_order_decides_the_anchor():
    x = row(0, 0, 100, 0)
    assert trace(x, 2, "anchored", dtype="fp32").redo
    assert trace(x, 2, "anchored", dtype="fp32", order="reverse").redo is None


def test_errors_are_measured_on_the_stored_row():
    x = np.random.default_rng(1).normal(0, 3, 1000)
    rms = []
    for dtype, numpy_dtype in (("fp64", np.float64), ("fp32", np.float32), ("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        exact = softmax(x.astype(numpy_dtype).astype(float))
        for mode in SHIFTED:
            t = trace(x, 64, mode, dtype=dtype)
            assert t.error.max_abs == pytest.approx(np.abs(t.y - exact).max(), rel=1e-3, abs=1e-17)
            assert t.error.rms < 2 * parse_format(dtype).eps
        rms.append(t.error.rms)
    assert rms == sorted(rms)
    assert rms[-1] > 1e-3


def test_state_format_limits_l_alone():
    x = np.random.default_rng(2).normal(0, 1, 4096)
    coarse, fine = (trace(x, 16, dtype="bf16", state=state).steps[-1].rel_error for state in ("bf16", "fp32"))
    assert coarse > 10 * fine


def test_safe_pays_a_pass_more():
    assert MODES == {"naive": 1, "safe": 2, "online": 1, "anchored": 1}


def test_block_order():
    assert block_order("forward", 10, 4) == [0, 1, 2]
    assert block_order("reverse", 10, 4) == [2, 1, 0]
    assert block_order("2,0,1", 10, 4) == block_order([2, 0, 1], 10, 4) == [2, 0, 1]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: trace(row(1), 0), "block: got 0"),
    (lambda: trace(row(1), 1, "fast"), "mode: got 'fast', accepted: naive, safe, online, anchored"),
    (lambda: trace(row(), 1), r"x: got shape \(0,\)"),
    (lambda: trace(np.zeros((2, 2)), 1), r"x: got shape \(2, 2\)"),
    (lambda: trace(row(1, math.nan), 1), "x: got nan at element 1"),
    (lambda: trace(row(INF), 1), "x: got inf at element 0"),
    (lambda: trace(row(0, 70_000), 1, dtype="fp16"), r"x: got 70000 at element 1, accepted: −inf and what float16 holds, up to ±65504"),
    (lambda: trace(row(1), 1, dtype="int4"), "dtype: got 'int4'"),
    (lambda: trace(row(1), 1, state="e4m3"), "state: got float8_e4m3"),
    (lambda: trace(row(1, 2), 1, order="0,0"), "order: got 0,0, accepted: forward, reverse"),
    (lambda: trace(row(1, 2), 1, order="sideways"), "order: got sideways")])
def test_bad_input(call, message):
    with pytest.raises(InputError, match=f"^{message}"):
        call()
