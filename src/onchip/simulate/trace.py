"""Softmax of one row, block by block: how m and l evolve under four ways to choose the shift, in any number format.

    p = exp(x − shift);   l ← l · e^(shift_old − shift) + Σ p over the block;   y = p / l

    naive     shift 0                                        overflows once x > ln(largest finite): 11.09 in float16, 88.7 in float32
    safe      shift max x, known from a pass of its own      one pass more over x
    online    shift = running maximum m                      l is rescaled by e^(m_old − m) whenever the maximum grows
    anchored  shift = maximum of the first block visited     no maximum and no rescale afterwards; right unless the row leaves a range that
                                                             is checked once at the end, then `online` must redo the row

naive, online and anchored know (m, l) after a single pass over x, safe after two. The probabilities y take one more pass in every mode:
p must be formed again with the final shift and divided by the final l (attention avoids it by rescaling its output instead).

The shift is invisible in real arithmetic. In a number format it is not, so each result comes with its distance from float64.

Source of online: Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867, Alg. 3).
"""
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError, require
from onchip.roofline.shape import count_blocks
from onchip.simulate.arithmetic import Arithmetic
from onchip.simulate.formats import Array, Format, Precision, parse_format
from onchip.simulate.reference import Error, distance
from onchip.simulate.run import spans

# mode → passes over x until m and l are known; the probabilities take one more
MODES = {"naive": 1, "safe": 2, "online": 1, "anchored": 1}

# The range a row's l must end in for the anchored result to stand, with room on both sides of float32's 2^−126 … 2^128.
ANCHORED_RANGE = (2.0**-60, 2.0**100)


@dataclass(frozen=True)
class Step:
    """The state after one block: l = carried + added, where carried = l_old · factor and factor = e^(m_old − m)."""

    block: int
    start: int  # the block's elements: start … stop − 1
    stop: int
    block_max: float
    m: float  # the shift the block's exponentials were taken with
    factor: float
    carried: float
    added: float
    l: float
    abs_error: float  # |l − L|, L = Σ exp(x − m) over what has been visited, in float64; NaN where L itself is not finite
    rel_error: float  # |l − L| / L


@dataclass(frozen=True)
class Breakdown:
    """Where a mode fails in its format: the first exponential that overflows (of `element`), the first l that does, or an l that is 0."""

    block: int
    element: int | None
    message: str


@dataclass(frozen=True)
class Trace:
    """One mode's way through the row, in the order the blocks were visited."""

    mode: str
    dtype: str
    state: str
    steps: tuple[Step, ...]
    y: Array  # the probabilities, in float64, in x's own order
    error: Error  # of y against float64; NaN for a row that is all −∞
    breakdown: Breakdown | None
    redo: str | None  # anchored: why `online` must redo the row; None where the result stands

    @property
    def m(self) -> float:
        """The final shift."""
        return self.steps[-1].m

    @property
    def l(self) -> float:  # noqa: E743
        """The final sum."""
        return self.steps[-1].l


def exp_limit(fmt: Format) -> float:
    """ln of the largest finite value: exp overflows above it."""
    return float(np.log(fmt.max))


def block_order(order: str | Sequence[int], n: int, block: int) -> list[int]:
    """Blocks in the order they are visited: ``'forward'``, ``'reverse'`` or each block's number once, as a list or ``'2,0,1'``."""
    count = count_blocks(n, block)
    if order == "forward":
        return list(range(count))
    if order == "reverse":
        return list(range(count))[::-1]
    try:
        listed = [int(part) for part in (order.split(",") if isinstance(order, str) else order)]
    except ValueError:
        listed = []
    require(sorted(listed) == list(range(count)), "order", order, f"forward, reverse, or each of the blocks 0 … {count - 1} once")
    return listed


def stored(x: Array, fmt: Format) -> Array:
    """A row as `fmt` holds it, in float64. −∞ marks a masked element in every format, e4m3 included, which has no infinity of its own."""
    return np.where(np.isneginf(x), x, fmt.round(x))


def truth(x: Array) -> Array:
    """softmax(x) rounded to float64 once, where the machine has a wider type; NaN throughout when every element is −∞, as torch has it."""
    p = np.exp(x.astype(np.longdouble) - x.max())
    return (p / p.sum()).astype(np.float64)


def trace(x: Array, block: int, mode: str = "online", *, order: str | Sequence[int] = "forward", dtype: str = "float64",
          state: str = "") -> Trace:
    """Softmax of the row `x` (n,) in blocks of `block`, the last one ragged, visited in `order`.

    `dtype` holds x, the exponentials and y; `state` holds m, l and the arithmetic: float32 unless given, float64 for a float64 row.
    A block's own sum is taken in float32 (float64 in a float64 run) and rounded once. y is compared with the float64 softmax of x as
    `dtype` stores it, so the error is the arithmetic's alone.

    A first block that is all −∞ has no maximum: online then shifts by 0 until there is one, anchored keeps the 0.
    Raises `InputError` for a row that is not 1-D or empty, an unknown mode, order or format, and for NaN, +∞ or what `dtype` cannot hold.
    """
    require(mode in MODES, "mode", repr(mode), ", ".join(MODES))
    require(block >= 1, "block", block, "an integer ≥ 1")
    require(x.ndim == 1 and x.size >= 1, "x", f"shape {x.shape}", "a row of at least one value")
    fmt = parse_format(dtype)
    x = x.astype(np.float64)
    bad = np.flatnonzero(~(np.isneginf(x) | (np.abs(x) <= fmt.max)))
    if bad.size:
        raise InputError(f"x: got {x[bad[0]]:g} at element {bad[0]}, accepted: −inf and what {fmt.name} holds, up to ±{fmt.max:g}")
    precision = Precision(fmt.name, state=state or ("float64" if fmt.name == "float64" else "float32"))
    row = stored(x, fmt)
    with np.errstate(all="ignore"):
        walk = _Walk(row, block, mode, block_order(order, x.size, block), precision)
        y = walk.probabilities()
        error = distance(y, truth(row)) if np.isfinite(row).any() else Error(np.nan, np.nan, np.nan)
        redo = walk.redo() if mode == "anchored" else None
    return Trace(mode, fmt.name, precision.state, tuple(walk.steps), y, error, walk.breakdown, redo)


class _Walk:
    """The pass that finds m and l, (1, 1) arrays in the carrier as `Arithmetic` wants them."""

    def __init__(self, row: Array, block: int, mode: str, order: list[int], precision: Precision) -> None:
        self.row, self.online = row, mode == "online"
        self.arithmetic, self.format, self.state = Arithmetic(precision, 1.0), parse_format(precision.inputs), parse_format(precision.state)
        self.x = self.state.round(row.astype(precision.carrier))[None]
        columns = spans(row.size, block)
        start = {"naive": 0.0, "safe": self.x.max(), "online": -np.inf, "anchored": self.x[:, columns[order[0]]].max()}[mode]
        self.m = np.full((1, 1), 0.0 if np.isneginf(start) and not self.online else start, precision.carrier)
        self.l = np.zeros_like(self.m)
        self.largest = 0.0  # of all exponentials
        self.breakdown: Breakdown | None = None
        exact = _Exact()
        self.steps = [self.absorb(number, columns[number], exact) for number in order]
        if self.l.item() == 0 and np.isfinite(row).any():
            last = self.steps[-1]
            self.breakdown = Breakdown(last.block, None, f"l is 0: every exponential is below {self.format.name}'s smallest value")

    def absorb(self, number: int, span: slice, exact: "_Exact") -> Step:
        """One block: the maximum, the rescale of l, the block's exponentials and their sum."""
        x, factor, before = self.x[:, span], np.ones_like(self.m), self.l.item()
        if self.online:
            old = self.m.copy()
            self.arithmetic.maximum(x, self.m)
            factor = self.arithmetic.exp(old, self.m)
        carried = self.state.round(self.l * factor)
        p, added = self.exponentials(x), np.zeros_like(self.l)
        self.arithmetic.add_rows(p, added)
        self.l = self.state.round(carried + added)
        self.largest = max(self.largest, p.max().item())
        self.breakdown = self.breakdown or self.find_overflow(number, span.start, x, p, before)
        exact.absorb(self.row[span])
        m, l, expected = self.m.item(), self.l.item(), exact.at(self.m.item())
        difference = abs(l - expected) if np.isfinite(expected) else np.nan
        return Step(number, span.start, span.stop, x.max().item(), m, factor.item(), carried.item(), added.item(), l,
                    difference, difference / expected if difference else 0.0)

    def exponentials(self, x: Array) -> Array:
        """p = exp(x − m), in the row's format."""
        return self.format.round(self.arithmetic.exp(x, self.m))

    def find_overflow(self, number: int, start: int, x: Array, p: Array, before: float) -> Breakdown | None:
        """The block's first exponential, else its sum, that does not fit the format."""
        saturates, name, largest = self.format.saturates, self.format.name, self.format.max
        over = np.flatnonzero(self.arithmetic.exp(x, self.m) > largest if saturates else np.isinf(p))
        if over.size:
            at = int(over[0])
            became = f"saturates at {largest:g}" if saturates else "is inf"
            return Breakdown(number, start + at, f"exp({x[0, at]:.6g} − {self.m.item():.6g}) {became}: {name} ends at {largest:.6g}")
        if np.isinf(self.l).any():
            return Breakdown(number, None, f"l is inf after {before:.6g}: {self.state.name} ends at {self.state.max:.6g}")
        return None

    def probabilities(self) -> Array:
        """The second pass: y = exp(x − m) / l with the final m and l."""
        return self.format.round(self.state.round(self.exponentials(self.x) / self.l))[0].astype(np.float64)

    def redo(self) -> str | None:
        """Why the anchored result does not stand."""
        low, high = ANCHORED_RANGE
        total, tiny = self.l.item(), self.format.tiny
        if self.breakdown is not None:
            return self.breakdown.message
        if not low < total < high:
            return f"l = {total:.4g} is outside 2^-60 … 2^100"
        if self.largest < tiny:
            return f"the largest exponential, {self.largest:.4g}, is below the normal range of {self.format.name}, from {tiny:.4g}"
        return None


class _Exact:
    """Σ exp(x) over the blocks seen, in the widest type there is, held as a maximum and a sum."""

    def __init__(self) -> None:
        self.m, self.l = -np.inf, 0.0

    def absorb(self, x: Array) -> None:
        m = max(self.m, x.max())
        if m > -np.inf:
            self.l, self.m = self.l * np.exp(self.m - m) + np.exp(x.astype(np.longdouble) - m).sum(), m

    def at(self, shift: float) -> float:
        """Σ exp(x − shift); a shift of −∞ counts as 0."""
        return float(self.l * np.exp(self.m - (0.0 if shift == -np.inf else shift)))
