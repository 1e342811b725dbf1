"""The softmax schedules executed: bytes equal to the ledger tensor by tensor, values equal to float64."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.simulate.formats import Precision, parse_format
from onchip.simulate.meter import OutOfSram
from onchip.simulate.softmax import BACKWARD, FORWARD, Result, softmax, softmax_backward

FLOAT64 = Precision.uniform("float64")


def uncounted(result: Result) -> list[str]:
    """Every (kernel, tensor, direction) whose counted bytes are not the ledger's."""
    wrong = []
    for counted, closed in zip(result.kernels, result.ledger.kernels, strict=True):
        tensors = {s.tensor for s in closed.streams} | set(counted.reads) | set(counted.writes)
        wrong += [f"{closed.name}, {t}" for t in tensors if (counted.read(t), counted.written(t)) != (closed.read(t), closed.written(t))]
    return wrong


def probabilities(x):
    p = np.exp(x - x.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORWARD), st.integers(1, 4), st.integers(1, 90), st.integers(1, 40), st.integers(1, 90), st.integers(0, 200),
       st.sampled_from(["float64", "float32", "bfloat16", "float16"]), st.integers(0, 2**32 - 1))
def test_counted_is_closed_form_and_exact(schedule, rows, n, block, splits, spare, dtype, seed):
    x = np.random.default_rng(seed).normal(0, 2, (rows, n))
    state = "float64" if dtype == "float64" else "float32"
    # from room for a single block to room for the row and some more
    item, statistic = parse_format(dtype).itemsize, parse_format(state).itemsize
    sram = min(block, n) * item + 2 * statistic + spare * n * item // 100 if schedule == "partial" else None
    precision = Precision(dtype, "float32" if schedule == "eager" else "", state)
    result = softmax(x, schedule, precision, block=block, splits=min(splits, n), sram=sram)
    assert uncounted(result) == []
    stored = parse_format(dtype).cast(x).astype(np.float64)
    expected = probabilities(stored)
    if dtype == "float64":
        np.testing.assert_allclose(result.out, expected, rtol=0, atol=1e-12 * expected.max() if schedule != "eager" else 1e-6)
    else:
        eps = parse_format(dtype).eps
        np.testing.assert_allclose(result.out, expected, rtol=eps / 2 + 1e-5, atol=parse_format(dtype).tiny * eps)
    assert sram is None or result.peak <= sram


@pytest.mark.parametrize("schedule", FORWARD)
def test_float64_to_1e12_relative(schedule):
    x = np.random.default_rng(1).normal(0, 30, (5, 1000))
    result = softmax(x, schedule, FLOAT64, block=64, sram=8 * 600 if schedule == "partial" else None)
    np.testing.assert_allclose(result.out, probabilities(x), rtol=1e-12)
    assert result.error.max_abs < 1e-15


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BACKWARD), st.integers(1, 4), st.integers(1, 90), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_backward(schedule, rows, n, block, seed):
    rng = np.random.default_rng(seed)
    y, dy = probabilities(rng.normal(size=(rows, n))), rng.normal(size=(rows, n))
    result = softmax_backward(y, dy, schedule, FLOAT64, block=block)
    jacobian = np.einsum("ri,ij->rij", y, np.eye(n)) - np.einsum("ri,rj->rij", y, y)
    np.testing.assert_allclose(result.out, np.einsum("rij,rj->ri", jacobian, dy), rtol=0, atol=1e-13)
    assert uncounted(result) == []


def test_the_first_blocks_stay_and_the_middle_is_read_again():
    result = softmax(np.zeros((1, 100)), "partial", Precision("fp16"), block=10, sram=2 * 30 + 8)
    assert result.kernels[0].read("x") == 2 * (100 + 70)
    assert result.peak == 68


@pytest.mark.parametrize("sram", [2 * 95 + 8, 2 * 95 + 9])
def test_a_row_that_fits_is_read_once_with_nothing_to_spare(sram):
    result = softmax(np.zeros((2, 95)), "partial", Precision("fp16"), block=10, sram=sram)
    assert result.kernels[0].read("x") == 2 * 2 * 95
    assert result.peak == 2 * 95 + 8


def test_on_chip_peaks():
    x = np.zeros((2, 1000))
    peaks = {s: softmax(x, s, Precision("bf16"), block=64, sram=4096).peak for s in FORWARD}
    assert peaks["naive"] == peaks["safe"] == peaks["online"] == 64 * 2 + 8
    assert peaks["resident"] == 1000 * 2 + 8
    assert peaks["split"] == 64 * 2 + 2 * 4 * 4  # the second kernel holds the four splits' m and l


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(OutOfSram, match=r"^sram: got 2,000 B, .*2,008 B.*x 2,000"):
        softmax(np.zeros((1, 1000)), "resident", Precision("bf16"), sram=2000)


@pytest.mark.parametrize("schedule", FORWARD)
def test_masked_blocks_and_empty_rows(schedule):
    x = np.random.default_rng(2).normal(size=(3, 40))
    x[0, :16] = -np.inf   # a leading block and a half
    x[1, 8:] = -np.inf
    x[2] = -np.inf
    result = softmax(x, schedule, FLOAT64, block=10, sram=8 * 24 if schedule == "partial" else None)
    np.testing.assert_allclose(result.out[:2], probabilities(x[:2]), rtol=1e-12)
    assert (result.out[:2][np.isinf(x[:2])] == 0).all()
    assert np.isnan(result.out[2]).all()  # as torch.softmax


@pytest.mark.parametrize("schedule", FORWARD)
def test_nan_reaches_its_row_and_no_other(schedule):
    x = np.zeros((2, 40))
    x[0, 25] = np.nan
    result = softmax(x, schedule, FLOAT64, block=10, sram=8 * 24 if schedule == "partial" else None)
    assert np.isnan(result.out[0]).all()
    np.testing.assert_allclose(result.out[1], 1 / 40, rtol=1e-15)


def test_naive_alone_overflows():
    x = np.array([[0.0, 89.0, 1.0]])  # fp32 ends at 88.7
    assert np.isnan(softmax(x, "naive", Precision("fp32")).out).any()
    for schedule in set(FORWARD) - {"naive"}:
        assert np.isfinite(softmax(x, schedule, Precision("fp32"), splits=2, sram=64, block=2).out).all()


def test_eager_in_half_precision_pays_for_its_intermediates():
    x = np.random.default_rng(3).normal(0, 3, (4, 500))
    half, single = (softmax(x, "eager", Precision("bf16", scores)).error.rms for scores in ("bf16", "fp32"))
    assert 1.5 * single < half < 2**-7


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: softmax(x, "two-pass"), "schedule: got 'two-pass', accepted: eager, naive"),
    (lambda x: softmax(x[0], "online"), r"x: got shape \(8,\), accepted: \(rows, n\)"),
    (lambda x: softmax(x, "online", block=0), "block: got 0"),
    (lambda x: softmax(x, "split", splits=9), r"splits: got 9, accepted: 1 … n = 8"),
    (lambda x: softmax(x, "partial"), "sram: got None"),
    (lambda x: softmax(x, "partial", sram=3), "sram: got 3"),
    (lambda x: softmax_backward(x, x, "online"), "schedule: got 'online', accepted: backward_resident"),
    (lambda x: softmax_backward(x, x[:1], "backward_resident"), r"dy: got shape \(1, 8\)")])
def test_bad_input(call, message):
    with pytest.raises(InputError, match=f"^{message}"):
        call(np.zeros((2, 8)))
