"""An experiment as data: the claim, what it predicts, how it is measured, and the verdict, a pure function of the two.

A prediction is an interval that a number must fall into, made from `onchip.roofline` before anything runs. The verdict needs no GPU: given
predictions and measured numbers it says which hold.
"""
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from onchip.lab.compiler import Source
from onchip.roofline.hardware import GPU

if TYPE_CHECKING:
    from onchip.lab.bench import Bench


class Interval(NamedTuple):
    """low ≤ x ≤ high."""

    low: float
    high: float

    def __contains__(self, x: object) -> bool:
        return isinstance(x, int | float) and self.low <= x <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:,.6g}"
        if self.low == -math.inf or self.low == 0:
            return f"≤ {self.high:,.4g}"
        return f"≥ {self.low:,.4g}" if self.high == math.inf else f"{self.low:,.4g} … {self.high:,.4g}"


def exactly(value: float) -> Interval:
    """A count."""
    return Interval(value, value)


def about(value: float, within: float) -> Interval:
    """`value` times 1 − within … 1 + within."""
    return Interval(value * (1 - within), value * (1 + within))


def at_least(value: float) -> Interval:
    """A bound that nothing may pass from above."""
    return Interval(value, math.inf)


def at_most(value: float) -> Interval:
    """A bound that nothing may pass."""
    return Interval(0.0, value)


def between(one: float, other: float) -> Interval:
    """The two in either order."""
    return Interval(min(one, other), max(one, other))


# What a quantity that Nsight Compute counts ends in (`bench.counters`). "conflicts": wavefronts of shared memory beyond the unavoidable;
# "sm_read", "sm_written": bytes between the SMs and L2.
COUNTERS = ("conflicts", "dram_read", "dram_written", "dram_bytes", "sm_read", "sm_written")


@dataclass(frozen=True)
class Prediction:
    """One number that a claim commits itself to."""

    quantity: str  # the key its measurement is found under; one that ends in a name of COUNTERS comes from Nsight Compute
    what: str  # in words
    interval: Interval
    unit: str = ""  # "s", "B", "B/s", "clocks", "yes/no", or nothing for counts and ratios
    source: str = ""  # the part of the model it comes from

    @property
    def counted(self) -> bool:
        """True where only hardware counters can tell."""
        return self.quantity.rpartition(".")[2] in COUNTERS

    def judge(self, measured: Mapping[str, float]) -> "Judgement":
        """Hold it against what was measured."""
        return Judgement(self, measured.get(self.quantity))


@dataclass(frozen=True)
class Judgement:
    """A prediction and its measurement; None: not measured."""

    prediction: Prediction
    measured: float | None

    @property
    def holds(self) -> bool | None:
        """None while nothing was measured."""
        return None if self.measured is None else self.measured in self.prediction.interval


@dataclass(frozen=True)
class Experiment:
    """A claim, and the code that puts it to the test.

    `predict(gpu, sizes)` gives its predictions; `measure(bench)` checks each kernel against float64 and then leaves measured numbers in
    `bench.found`. `pitfall` is the mistake it belongs to, in words; None where it only measures the machine.
    """

    name: str
    claim: str
    sources: tuple[Source, ...]
    predict: "Callable[[GPU, Sizes], tuple[Prediction, ...]]"
    measure: "Callable[[Bench], None]"
    pitfall: str | None = None


@dataclass(frozen=True)
class Sizes:
    """How large the problems are. The defaults fill a data-centre card and pass its L2; `small` is for a machine that emulates one."""

    floats: int = 1 << 27  # of the array that is walked: 512 MiB
    loops: tuple[int, int] = (128, 1024)  # heads, N: where loops over tiles are compared; FA1 has one block a head
    scores: tuple[int, int] = (8, 4096)  # heads, N: where S and P go through memory, 256 MiB each in fp16

    @classmethod
    def small(cls) -> "Sizes":
        """Seconds of emulation."""
        return cls(1 << 15, (2, 128), (2, 128))


def verdict(judgements: "tuple[Judgement, ...]", problem: str | None = None) -> str:
    """In words: ``'confirmed'``, ``'refuted: …'``, ``'confirmed as far as measured (3 of 5)'``, ``'not measured yet'`` or ``'failed: …'``.

    One prediction that does not hold refutes the claim. `problem`: what kept the experiment from running to its end.
    """
    if problem:
        return f"failed: {problem}"
    known = [judgement for judgement in judgements if judgement.holds is not None]
    wrong = [judgement.prediction.what for judgement in known if not judgement.holds]
    if wrong:
        return f"refuted: {'; '.join(wrong)}"
    if not known:
        return "not measured yet"
    if len(known) < len(judgements):
        return f"confirmed as far as measured ({len(known)} of {len(judgements)})"
    return "confirmed"
