import ml_dtypes
import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.dtypes import BYTES
from onchip.simulate.formats import MMA_K, Precision, matmul, parse_format, product

NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2")
# largest finite, smallest normal, spacing above 1: from each format's exponent and mantissa bits
LIMITS = {
    "float16": (65504, 2.0**-14, 2.0**-10),
    "bfloat16": (2.0**127 * (2 - 2.0**-7), 2.0**-126, 2.0**-7),
    "float8_e4m3": (448, 2.0**-6, 2.0**-3),
    "float8_e5m2": (57344, 2.0**-14, 2.0**-2),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    fmt = parse_format(name)
    assert (fmt.max, fmt.tiny, fmt.eps) == LIMITS[name]


@pytest.mark.parametrize("name", NAMES)
def test_size_is_that_of_the_stored_array(name):
    fmt = parse_format(name)
    assert fmt.itemsize == BYTES[name] == fmt.cast(np.ones(3)).itemsize


@pytest.mark.parametrize("name", LIMITS)
def test_every_code_is_a_fixed_point(name):
    fmt = parse_format(name)
    values = np.arange(1 << 8 * fmt.itemsize, dtype=f"u{fmt.itemsize}").view(fmt.dtype).astype(np.float32)
    if fmt.saturates:
        values = values[~np.isinf(values)]
    np.testing.assert_array_equal(fmt.round(values), values)


def test_rounding_is_to_nearest_even():
    bf16 = parse_format("bf16")  # spacing 2⁻⁷ above 1: halfway cases go to the even neighbour
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20], np.float32)
    np.testing.assert_array_equal(bf16.round(x), np.array([1, 1 + 2.0**-6, 1 + 2.0**-7], np.float32))


def test_overflow():
    x = np.array([1e5, -np.inf, np.nan, 70000.0], np.float32)
    np.testing.assert_array_equal(parse_format("fp16").round(x), np.array([np.inf, -np.inf, np.nan, np.inf], np.float32))
    np.testing.assert_array_equal(parse_format("e4m3").round(x), np.array([448, -448, np.nan, 448], np.float32))
    assert parse_format("e4m3").cast(x).dtype == ml_dtypes.float8_e4m3fn
    assert np.isnan(x.astype(ml_dtypes.float8_e4m3fn)[0])  # what a conversion without saturation would give


def test_unknown_formats():
    with pytest.raises(InputError, match="inputs: got 'int8'"):
        Precision("int8")
    with pytest.raises(InputError, match="scores: got 'tf32'"):
        Precision(scores="tf32")
    with pytest.raises(InputError, match="state: got float8_e4m3, accepted: a format with an infinity"):
        Precision(state="e4m3")


def test_precision_defaults_and_carrier():
    assert Precision("fp16") == Precision("float16", "float16", "float32", "float32")
    assert Precision("e4m3").carrier == np.float32
    assert Precision(accumulation="fp64").carrier == np.float64
    assert Precision.uniform("fp64").scores == "float64"


@pytest.mark.parametrize(("name", "stall"), [("bfloat16", 4096), ("float16", 32768)])
def test_accumulator_stalls_where_half_its_spacing_reaches_a_block(name, stall):
    # MMA_K ones are added at a time: once the spacing is 2 · MMA_K the sum is halfway and rounds back to even
    assert MMA_K == 16
    k = 2 * stall
    assert matmul(np.ones((1, k), np.float32), np.ones((k, 1), np.float32), parse_format(name)).item() == stall


@pytest.mark.parametrize("accumulation", ["float64", "float32", "float16"])
def test_matmul_against_float64(accumulation):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((70, 100)), rng.standard_normal((100, 90))
    fmt = parse_format(accumulation)
    carrier = np.float64 if accumulation == "float64" else np.float32
    got = matmul(a.astype(carrier), b.astype(carrier), fmt)
    assert got.dtype == carrier
    blocks = 1 if accumulation == "float32" else -(-100 // MMA_K)
    # ½ eps a rounded step of a sum of at most |a| |b|; float32 in BLAS rounds each of the 100 products
    bound = (np.abs(a) @ np.abs(b)) * fmt.eps * (50 if accumulation != "float16" else blocks / 2)
    assert np.all(np.abs(got - a @ b) <= bound + 1e-6)
    if accumulation == "float16":
        np.testing.assert_array_equal(fmt.round(got), got)
        assert np.abs(got - a @ b).max() > fmt.eps  # it did round


@pytest.mark.parametrize("m", [1, 64, 130])
@pytest.mark.parametrize("k", [64, 65, 200])
@pytest.mark.parametrize("n", [7, 64, 150])
def test_blocks_give_the_whole_product(m, k, n):
    a, b = np.arange(m * k).reshape(m, k) % 7, np.arange(k * n).reshape(k, n) % 5  # integers: any order of summation is exact
    np.testing.assert_array_equal(product(a.astype(float), b.astype(float)), a @ b)
