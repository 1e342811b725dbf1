"""Where an experiment is measured: a card, the sizes, what was found; and the checks that come before any time."""
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from onchip.lab.card import Grid
from onchip.lab.compiler import Source
from onchip.lab.experiment import Sizes
from onchip.roofline.attention import Tile
from onchip.roofline.hardware import GPU
from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Array, Precision
from onchip.simulate.problem import Problem, Result
from onchip.simulate.reference import distance

HEAD_DIM = 64  # D of all attention kernels
TILE = Tile(64, 64)  # and their tile


class WrongResult(AssertionError):
    """A kernel's output is not what float64 says."""


class Device(Protocol):
    """What an experiment asks of a card; `onchip.lab.card.Card` is one."""

    def kernel(self, source: Source, name: str) -> Any: ...  # noqa: D102
    def array(self, values: np.ndarray) -> Any: ...  # noqa: D102
    def empty(self, shape: Grid, dtype: Any) -> Any: ...  # noqa: D102
    def numpy(self, array: Any) -> np.ndarray: ...  # noqa: D102
    def launch(self, kernel: Any, grid: Grid, block: Grid, *args: Any, shared: int = 0) -> None: ...  # noqa: D102
    def allow_shared(self, kernel: Any, nbytes: int) -> None: ...  # noqa: D102
    def blocks_per_sm(self, kernel: Any, threads: int, shared: int) -> int: ...  # noqa: D102
    def wait(self) -> None: ...  # noqa: D102
    def seconds(self, call: Callable[[], None]) -> float: ...  # noqa: D102
    def fault(self, source: Source, kernel: str, grid: Grid, block: Grid, *args: np.ndarray) -> str | None: ...  # noqa: D102
    def profile(self, call: Callable[[], None]) -> int: ...  # noqa: D102


@dataclass
class Bench:
    """What `Experiment.measure` works with. `found`: quantity → number."""

    card: Device
    gpu: GPU
    sizes: Sizes = field(default_factory=Sizes)
    counting: bool = False  # under a profiler: calls are counted, once, and not timed
    found: dict[str, float] = field(default_factory=dict)
    counted: list[tuple[str, int]] = field(default_factory=list)  # what was profiled, in order: key, launches

    def measure(self, key: str, call: Callable[[], None]) -> None:
        """Time ``call()`` as ``key.seconds``, or let a profiler count it under `key`. Check its results first."""
        if self.counting:
            self.counted.append((key, self.card.profile(call)))
        else:
            self.found[f"{key}.seconds"] = self.card.seconds(call)

    def ratio(self, quantity: str, over: str, under: str) -> None:
        """`quantity` = `over` / `under`, where both were found."""
        if over in self.found and under in self.found:
            self.found[quantity] = self.found[over] / self.found[under]

    def equal(self, what: str, got: np.ndarray, truth: np.ndarray, tolerance: float) -> None:
        """Raise `WrongResult` unless ‖got − truth‖ / ‖truth‖ ≤ tolerance; a NaN that truth has not is always wrong."""
        error = distance(np.asarray(got, np.float64), np.asarray(truth, np.float64)).rms
        if not error <= tolerance:
            raise WrongResult(f"{what}: off by {error:.2g} of the float64 result, allowed {tolerance:.2g}")


class Case:
    """Random q, k, v (heads, n, 64) in fp16, and what attention must give for them.

    Truth is float64. The yardstick of a kernel is its own schedule, executed in the kernel's formats by `onchip.simulate`: an error up to
    twice as large passes. One head is held against it; the launch computes them all, and every element must have been written.
    """

    def __init__(self, heads: int, n: int, seed: int = 0) -> None:
        self.heads, self.n = heads, n
        values = np.random.default_rng(seed).standard_normal((3, heads, n, HEAD_DIM), np.float32).astype(np.float16)
        self.q, self.k, self.v = values
        self.scale = HEAD_DIM ** -0.5
        self.checked = heads - 1  # the last head: the one that a wrong stride misses
        self._yardsticks: dict[Callable[..., Result], float] = {}

    @property
    def shape(self) -> AttentionShape:
        """As the ledgers take it."""
        return AttentionShape.square(self.n, HEAD_DIM, heads=self.heads)

    @cached_property
    def _problem(self) -> Problem:
        q, k, v = (x[self.checked][None, None].astype(np.float64) for x in (self.q, self.k, self.v))
        return Problem(AttentionShape.square(self.n, HEAD_DIM), Precision("float16"), q, k, v)

    @cached_property
    def truth(self) -> Array:
        """(n, 64), float64, of the head that is checked."""
        return self._problem.truth(np.ones((1, self.n), bool), grad=False).out[0]

    def check(self, what: str, out: np.ndarray, schedule: Callable[..., Result]) -> None:
        """Raise `WrongResult` unless `out` (heads, n, 64) is written everywhere and as exact as `schedule` on the head that is checked."""
        if np.isnan(out).any():
            raise WrongResult(f"{what}: {np.isnan(out).mean():.2g} of the output is NaN or was not written")
        if schedule not in self._yardsticks:
            self._yardsticks[schedule] = schedule(self._problem, TILE).errors["out"].rms
        yardstick = self._yardsticks[schedule]
        error = distance(out[self.checked].astype(np.float64), self.truth).rms
        if not error <= 2 * yardstick:
            raise WrongResult(f"{what}: off by {error:.2g} of the float64 result, its schedule in these formats by {yardstick:.2g}")
