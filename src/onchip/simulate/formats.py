"""Number formats in numpy: rounding to a format, overflow as the hardware does it, and matmuls that accumulate in a chosen format.

A value on the chip is held in a *carrier* (float32, or float64 when a format of the run needs it) and rounded to its format after every
operation: float16, bfloat16 and the 8-bit formats have no arithmetic of their own in numpy, and none that is fast.
"""
from dataclasses import dataclass, fields
from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onchip.errors import InputError, require
from onchip.roofline.dtypes import BYTES, parse_dtype

Array = NDArray[np.floating]
Mask = NDArray[np.bool_]

# A tensor core adds the products of this many elements of k to its accumulator at once (mma.m16n8k16 for 16-bit inputs).
MMA_K = 16

# OpenBLAS hands a product of more than EDGE³ multiply-adds to its threads. Where the cores are busy that costs a hundred times what it
# saves: 3 ms and more for a tile of 64 × 64 × 128, which one thread multiplies in 20 µs. Blocks of EDGE stay on this thread.
EDGE = 64

_DTYPES: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class Format:
    """A number format: `max` the largest finite value, `tiny` the smallest normal one, `eps` the spacing above 1.

    Rounding is to nearest, ties to even. Past `max`, float16 and bfloat16 become infinite as cvt.rn does; the 8-bit formats saturate to
    ±max, as cvt.rn.satfinite does (the only conversion to 8 bits that PTX has). NaN stays NaN. e4m3 has no infinity at all.
    """

    name: str
    dtype: np.dtype
    max: float
    tiny: float
    eps: float

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return BYTES[self.name]

    @property
    def saturates(self) -> bool:
        """True where overflow gives ±max and not ±∞: a score of −∞ cannot be told from a large negative one."""
        return self.itemsize == 1

    def cast(self, x: Array) -> Array:
        """`x` rounded to this format, stored in it."""
        if x.dtype == self.dtype:
            return x
        if self.saturates:
            x = np.clip(x, -self.max, self.max)
        with np.errstate(over="ignore", invalid="ignore"):  # to infinity; from a signalling NaN
            return x.astype(self.dtype)

    def round(self, x: Array) -> Array:
        """`x` rounded to this format, in `x`'s own dtype; `x` itself where that dtype is no wider than the format."""
        return x if x.dtype.itemsize <= self.itemsize else self.cast(x).astype(x.dtype)


@lru_cache
def parse_format(name: str, argument: str = "dtype") -> Format:
    """The format called `name` (any spelling `parse_dtype` knows). Raises `InputError` for tf32, which no memory stores."""
    key = parse_dtype(name, argument)
    require(key in _DTYPES, argument, repr(name), ", ".join(_DTYPES))
    dtype = _DTYPES[key]
    info = ml_dtypes.finfo(dtype)
    return Format(key, dtype, float(info.max), float(info.smallest_normal), float(info.eps))


@dataclass(frozen=True)
class Precision:
    """Which format holds what.

    `inputs`: Q, K, V, O and gradients in device memory. `scores`: S and P where they go through memory, and P (backward: P and dS) as a
    matmul's operand; as `inputs` unless given. `state`: elementwise arithmetic on the chip, the statistics m, l, lse, D and unfinished
    sums of O and dQ, on the chip and in memory. `accumulation`: the matmuls' accumulator.
    """

    inputs: str = "bfloat16"
    scores: str = ""
    state: str = "float32"
    accumulation: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name) or self.inputs  # `inputs` comes first and is canonical by now
            object.__setattr__(self, field.name, parse_format(value, field.name).name)
        if parse_format(self.state).saturates:
            raise InputError(f"state: got {self.state}, accepted: a format with an infinity (the maximum of an empty row is −∞)")

    @classmethod
    def uniform(cls, name: str) -> "Precision":
        """Everything in one format."""
        return cls(name, name, name, name)

    @property
    def carrier(self) -> np.dtype:
        """What numpy computes in: float64 if any format is, float32 otherwise."""
        return _DTYPES["float64" if "float64" in (self.inputs, self.scores, self.state, self.accumulation) else "float32"]


def matmul(a: Array, b: Array, accumulation: Format) -> Array:
    """a @ b, `a` (m, k) and `b` (k, n) in the carrier, with the accumulator in `accumulation`.

    Where the accumulator is the carrier this is `product`: products of formats up to 16 bits are exact in float32, their sum is rounded in
    float32, in BLAS's order. Otherwise the sum of `MMA_K` products, itself in the carrier, is added to the accumulator and the accumulator
    rounded, block after block along k.
    """
    if accumulation.itemsize >= a.dtype.itemsize:
        return product(a, b)
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for k in range(0, a.shape[1], MMA_K):
        total = accumulation.round(total + product(a[:, k:k + MMA_K], b[k:k + MMA_K]))
    return total


def product(a: Array, b: Array) -> Array:
    """a @ b in blocks of `EDGE`, on this thread alone."""
    (m, k), n = a.shape, b.shape[1]
    if m * k * n <= EDGE**3:
        return a @ b
    out = np.zeros((m, n), a.dtype)
    for i in range(0, m, EDGE):
        for j in range(0, n, EDGE):
            block = out[i:i + EDGE, j:j + EDGE]
            for c in range(0, k, EDGE):
                block += a[i:i + EDGE, c:c + EDGE] @ b[c:c + EDGE, j:j + EDGE]
    return out
