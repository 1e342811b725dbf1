"""The softmax schedules executed with counted memory: eager → naive → safe → online → part of a row kept → row on chip; split; backward.

Each counts, kernel by kernel and tensor by tensor, the bytes that the ledger of the same name in `onchip.roofline.softmax` derives in
closed form, and computes what it says: ``y = exp(x − m) / l``, NaN in a row that is all −∞, as torch has it.
"""
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.errors import require
from onchip.roofline import softmax as ledger
from onchip.roofline.ledger import Pipeline
from onchip.simulate.arithmetic import Arithmetic
from onchip.simulate.formats import Array, Precision, parse_format
from onchip.simulate.meter import Chip, KernelCount
from onchip.simulate.reference import Error, distance
from onchip.simulate.run import spans

FORWARD = ("eager", "naive", "safe", "online", "partial", "resident", "split")
BACKWARD = ("backward_resident", "backward_two_pass")


@dataclass(frozen=True, eq=False)
class Result:
    """A schedule after its run."""

    ledger: Pipeline  # the closed form: ``ledger.kernels[i].read(tensor)`` beside ``kernels[i].read(tensor)``
    kernels: tuple[KernelCount, ...]
    out: Array  # y or dx (rows, n), in float64
    error: Error  # against float64 on the same (rounded) inputs
    peak: int  # most on-chip bytes alive at once in a thread block


def softmax(x: Array, schedule: str, precision: Precision | None = None, *, block: int = 1024, splits: int = 4,
            sram: int | None = None) -> Result:
    """y = softmax(x) along the rows of x (rows, n) by `schedule`, one of `FORWARD`.

    ``precision.inputs`` is the format of x and y, ``scores`` that of eager's intermediates s, p, m, l, ``state`` that of the arithmetic.
    `block` elements are loaded at a time, the last block ragged; `splits` is for "split"; `sram` bounds the on-chip bytes of a thread
    block and decides how much of a row "partial" keeps. Raises `InputError` for an unknown schedule, a shape that is not (rows, n), and
    bounds that do not fit (`OutOfSram`).
    """
    require(schedule in FORWARD, "schedule", repr(schedule), ", ".join(FORWARD))
    require(schedule != "partial" or sram is not None, "sram", None, "bytes: they decide what part of a row is kept")
    run = _Run(precision, block, sram, splits, x=x)
    with np.errstate(all="ignore"):  # naive overflows, an empty row is 0 / 0
        pipeline = getattr(run, schedule)()
        t = run.given("x")
        p = np.exp(t - t.max(axis=1, keepdims=True))
        return run.result(pipeline, "y", p / p.sum(axis=1, keepdims=True))


def softmax_backward(y: Array, dy: Array, schedule: str, precision: Precision | None = None, *, block: int = 1024,
                     sram: int | None = None) -> Result:
    """dx = y ∘ (dy − rowsum(y ∘ dy)) for y and dy (rows, n) by `schedule`, one of `BACKWARD`; the rest as in `softmax`."""
    require(schedule in BACKWARD, "schedule", repr(schedule), ", ".join(BACKWARD))
    require(y.shape == dy.shape, "dy", f"shape {dy.shape}", f"{y.shape}, as y")
    run = _Run(precision, block, sram, 1, y=y, dy=dy)
    pipeline = getattr(run, schedule)()
    p, g = run.given("y"), run.given("dy")
    return run.result(pipeline, "dx", p * (g - (p * g).sum(axis=1, keepdims=True)))


class _Run:
    """One execution. A method runs the schedule of its name and returns the ledger it must agree with."""

    def __init__(self, precision: Precision | None, block: int, sram: int | None, splits: int, **inputs: Array) -> None:
        self.precision = precision or Precision()
        first, values = next(iter(inputs.items()))
        require(values.ndim == 2 and values.size > 0, first, f"shape {values.shape}", "(rows, n), both at least 1")
        require(block >= 1, "block", block, "an integer ≥ 1")
        rows, n = values.shape
        self.x, self.block, self.sram, self.splits = ledger.Rows(rows, n, self.precision.inputs), block, sram, splits
        self.blocks = spans(n, block)
        self.chip, self.math = Chip(self.precision, sram), Arithmetic(self.precision, 1.0)
        self.inputs, self.state = parse_format(self.precision.inputs), parse_format(self.precision.state)
        for name, values in inputs.items():
            self.chip.malloc(name, self.inputs, 1, rows, n).fill(values[None])
        self.chip.malloc("dx" if "dy" in inputs else "y", self.inputs, 1, rows, n)

    # --- one thread block

    def rows(self, kernel: str) -> Iterator[slice]:
        """The thread blocks of a launch, each by the row it owns; their buffers are gone at their end."""
        with self.chip.kernel(kernel):
            for row in spans(self.x.rows, 1):
                yield row
                self.chip.clear()

    def row_splits(self, kernel: str, chunks: list[slice]) -> Iterator[tuple[slice, slice, slice]]:
        """The thread blocks of a launch with several to a row: (row, the split's place among the row's m and l, its columns)."""
        for row in self.rows(kernel):
            for index, chunk in enumerate(chunks):
                yield row, slice(index, index + 1), chunk
                self.chip.clear()

    def load(self, tensor: str, row: slice, cols: slice | None = None) -> Array:
        """Columns of a row, brought on chip; all of them unless given."""
        values = self.chip.load(tensor, 0, row, cols)
        assert values is not None  # never a dry run here
        return values

    def store(self, tensor: str, row: slice, values: Array, cols: slice | None = None) -> None:
        """Columns of a row, written to device memory."""
        self.chip.store(tensor, 0, row, values, cols)

    def statistic(self, name: str, fill: float) -> Array:
        """A (1, 1) buffer for m or l."""
        value = self.chip.alloc(name, 1, 1, fill=fill)
        assert value is not None
        return value

    def statistics(self) -> tuple[Array, Array]:
        """m = −∞ and l = 0."""
        return self.statistic("m", -np.inf), self.statistic("l", 0.0)

    def divided(self, x: Array, m: Array, l: Array) -> Array:
        """exp(x − m) / l."""
        return self.state.round(self.math.exp(x, m) / l)

    def normalise(self, row: slice, m: Array, l: Array, columns: list[slice]) -> None:
        """The last pass over memory: y = exp(x − m) / l."""
        for cols in columns:
            self.store("y", row, self.divided(self.load("x", row, cols), m, l), cols)

    # --- forward

    def eager(self) -> Pipeline:
        """Five kernels, every intermediate through memory."""
        scores = parse_format(self.precision.scores)
        for name, width in (("m", 1), ("s", self.x.n), ("p", self.x.n), ("l", 1)):
            self.chip.malloc(name, scores, 1, self.x.rows, width)
        for row in self.rows("max"):
            m = self.statistic("m", -np.inf)
            for cols in self.blocks:
                self.math.maximum(self.load("x", row, cols), m)
            self.store("m", row, m)
        for row in self.rows("subtract"):
            m = self.load("m", row)
            for cols in self.blocks:
                self.store("s", row, self.state.round(self.load("x", row, cols) - m), cols)
        for row in self.rows("exp"):
            for cols in self.blocks:
                self.store("p", row, self.state.round(np.exp(self.load("s", row, cols))), cols)
        for row in self.rows("sum"):
            l = self.statistic("l", 0.0)
            for cols in self.blocks:
                self.math.add_rows(self.load("p", row, cols), l)
            self.store("l", row, l)
        for row in self.rows("divide"):
            l = self.load("l", row)
            for cols in self.blocks:
                self.store("y", row, self.state.round(self.load("p", row, cols) / l), cols)
        return ledger.eager(self.x, scores.name)

    def naive(self) -> Pipeline:
        """l, then y, without a maximum."""
        for row in self.rows("softmax"):
            m, l = self.statistic("m", 0.0), self.statistic("l", 0.0)
            for cols in self.blocks:
                self.math.add_rows(self.math.exp(self.load("x", row, cols), m), l)
            self.normalise(row, m, l, self.blocks)
        return ledger.naive(self.x)

    def safe(self) -> Pipeline:
        """m; l; y."""
        for row in self.rows("softmax"):
            m, l = self.statistics()
            for cols in self.blocks:
                self.math.maximum(self.load("x", row, cols), m)
            for cols in self.blocks:
                self.math.add_rows(self.math.exp(self.load("x", row, cols), m), l)
            self.normalise(row, m, l, self.blocks)
        return ledger.safe(self.x)

    def online(self) -> Pipeline:
        """m and l together, then y."""
        for row in self.rows("softmax"):
            m, l = self.statistics()
            for cols in self.blocks:
                self.math.online(self.load("x", row, cols), m, l)
            self.normalise(row, m, l, self.blocks)
        return ledger.online(self.x, self.block)

    def resident(self) -> Pipeline:
        """The row loaded once, every pass over it on chip."""
        for row in self.rows("softmax"):
            m, l = self.statistics()
            x = self.load("x", row)
            self.math.maximum(x, m)
            self.math.add_rows(self.math.exp(x, m), l)
            self.store("y", row, self.divided(x, m, l))
        return ledger.resident(self.x)

    def partial(self) -> Pipeline:
        """As many blocks kept from the first pass as fit, the others loaded again in the second."""
        assert self.sram is not None
        keep = ledger.slots(self.x, self.block, self.sram, self.state.name) - 1  # beside the slot the others pass through
        for row in self.rows("softmax"):
            m, l = self.statistics()
            kept: list[Array] = []
            for index, cols in enumerate(self.blocks):
                x = self.load("x", row, cols)
                self.math.online(x, m, l)
                if index < keep:
                    self.chip.alloc("x", 0, 0, fill=None)  # its buffer changes hands
                    self.chip.alloc(f"x, slot {index}", 1, x.size, self.inputs, fill=None)
                    kept.append(x)
            on_chip = [(self.blocks[-1], x), *zip(self.blocks, kept, strict=False)]
            for cols, x in on_chip:
                self.store("y", row, self.divided(x, m, l), cols)
            self.normalise(row, m, l, self.blocks[keep:-1])
        return ledger.partial(self.x, self.block, self.sram, self.state.name)

    def split(self) -> Pipeline:
        """(m, l) of every split through memory; then every split merges them all and writes its part of y."""
        chunks = spans(self.x.n, ledger.split_length(self.x, self.splits))
        for name in ("m", "l"):
            self.chip.malloc(name, self.state, 1, self.x.rows, len(chunks))

        def blocks_of(chunk: slice) -> list[slice]:
            return [slice(chunk.start + b.start, chunk.start + b.stop) for b in spans(chunk.stop - chunk.start, self.block)]

        for row, index, chunk in self.row_splits("statistics", chunks):
            m, l = self.statistics()
            for cols in blocks_of(chunk):
                self.math.online(self.load("x", row, cols), m, l)
            self.store("m", row, m, index)
            self.store("l", row, l, index)
        for row, _, chunk in self.row_splits("normalise", chunks):
            part_m, part_l = self.load("m", row), self.load("l", row)
            m = part_m.max(axis=1, keepdims=True)
            l = self.state.round((part_l * self.math.exp(part_m, m)).sum(axis=1, keepdims=True))
            self.normalise(row, m, l, blocks_of(chunk))
        return ledger.split(self.x, self.splits, self.block, self.state.name)

    # --- backward

    def backward_resident(self) -> Pipeline:
        """y and dy loaded once."""
        for row in self.rows("softmax_backward"):
            y, dy = self.load("y", row), self.load("dy", row)
            self.store("dx", row, self.math.score_gradient(y, dy, self.math.row_dot(y, dy)))
        return ledger.backward_resident(self.x)

    def backward_two_pass(self) -> Pipeline:
        """D = Σ y ∘ dy, then dx."""
        for row in self.rows("softmax_backward"):
            delta = self.statistic("D", 0.0)
            for cols in self.blocks:
                delta[...] = self.state.round(delta + self.math.row_dot(self.load("y", row, cols), self.load("dy", row, cols)))
            for cols in self.blocks:
                y, dy = self.load("y", row, cols), self.load("dy", row, cols)
                self.store("dx", row, self.math.score_gradient(y, dy, delta), cols)
        return ledger.backward_two_pass(self.x)

    # --- the end

    def given(self, name: str) -> Array:
        """An input as stored, in float64."""
        return self.chip.memory[name].dense()[0].astype(np.float64)

    def result(self, pipeline: Pipeline, name: str, truth: Array) -> Result:
        """Gather counts and output."""
        out = self.given(name)
        return Result(pipeline, tuple(self.chip.kernels), out, distance(out, truth), self.chip.peak)
