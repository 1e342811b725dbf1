"""What a card did while a kernel ran: its SM clock, its power, and what held the clock down, by NVML (the driver's own library).

A card under a power limit does not run at one clock: a kernel that does more in a clock draws more, and the driver takes clocks away until
the limit is met. Two kernels at the limit then differ by what an operation costs in energy, not by what they leave idle. So a rate is told
together with the clock it was reached at, and with the share of the tensor cores' peak *at that clock*:

    share = FLOP/s / (SMs · FLOP a clock and SM · clock)

The driver reacts within tens of milliseconds, and its figures are means over as much: a kernel is called again and again for about a
second, and sampled meanwhile. Nothing is set on the card.

Source: NVML API Reference Guide (device queries; the reasons are its `nvmlClocksEventReasons`).
"""
import ctypes
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Event, Thread
from time import perf_counter
from typing import Any

from onchip.errors import InputError

SM_CLOCK = 1  # NVML_CLOCK_SM
# Bits of what holds the clock under its highest.
REASONS = {0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal",
           0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks"}


@dataclass(frozen=True)
class Sample:
    """One look at the card."""

    at: float  # seconds, of `time.perf_counter`
    mhz: float  # SM clock
    joules: float | None  # drawn since the driver was loaded; None: the card does not say
    watts: float | None  # drawn lately, a mean over up to a second
    reasons: int  # bits of `REASONS`


@dataclass(frozen=True)
class Sustained:
    """A call repeated back to back, and what the card did meanwhile."""

    seconds: float  # a call
    mhz: float  # mean SM clock
    watts: float | None  # mean power
    limit_watts: float | None  # the power limit in force
    reasons: dict[str, float]  # share of the samples in which each held the clock down
    samples: int


class Meter:
    """The NVML queries of one card, by its UUID ("GPU-…"). Raises `InputError` where there is no NVML, or no such card."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self._nvml = _load() if library is None else library
        self._check("nvmlInit_v2")
        self._card = ctypes.c_void_p()
        self._check("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._card))
        # The same query under its name of today and that of drivers before 535.
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        self._why = next((name for name in names if hasattr(self._nvml, name)), names[1])
        self.look()  # a card that does not tell its clock says so here

    def look(self) -> Sample:
        """The card now."""
        mhz, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        self._check("nvmlDeviceGetClockInfo", self._card, SM_CLOCK, ctypes.byref(mhz))
        self._check(self._why, self._card, ctypes.byref(reasons))
        return Sample(perf_counter(), mhz.value, self._thousandth("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong),
                      self._thousandth("nvmlDeviceGetPowerUsage"), reasons.value)

    def limit(self) -> float | None:
        """The power limit in force, W; None where the card does not say."""
        return self._thousandth("nvmlDeviceGetEnforcedPowerLimit")

    def _thousandth(self, query: str, kind: type[Any] = ctypes.c_uint) -> float | None:
        """mJ → J, mW → W; None where the card has no answer."""
        value = kind()
        return None if getattr(self._nvml, query)(self._card, ctypes.byref(value)) else value.value / 1e3

    def _check(self, query: str, *args: Any) -> None:
        status = getattr(self._nvml, query)(*args)
        if status:
            raise InputError(f"nvml: {query} answered with error {status}; accepted: a driver and a card that tell clocks and power")


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise InputError("nvml: found no libnvidia-ml.so.1, accepted: a machine with NVIDIA's driver") from None


def sustain(call: Callable[[], object], synchronize: Callable[[], object], meter: Meter, seconds_a_call: float, *, seconds: float = 1.0,
            settle: float = 0.3, interval: float = 0.005) -> Sustained:
    """Call for about `settle` seconds, until the clock has come down, then for about `seconds`, looking at the card every `interval`.

    `call` may return before its work is done, `synchronize` not; `seconds_a_call` is what one takes, roughly.
    """
    for _ in range(math.ceil(settle / seconds_a_call)):
        call()
    synchronize()
    calls = math.ceil(seconds / seconds_a_call)
    samples: list[Sample] = []
    done = Event()

    def watch() -> None:
        samples.append(meter.look())
        while not done.wait(interval):
            samples.append(meter.look())

    watcher = Thread(target=watch, daemon=True)
    start = perf_counter()
    watcher.start()
    try:
        for _ in range(calls):
            call()
        synchronize()
        end = perf_counter()
    finally:
        done.set()
        watcher.join()
    return Sustained((end - start) / calls, statistics.fmean(sample.mhz for sample in samples), mean_power(samples), meter.limit(),
                     reason_shares(samples), len(samples))


def mean_power(samples: Sequence[Sample]) -> float | None:
    """W between the first and the last step of the energy counter, which moves every 20 … 100 ms; where it does not move twice, the power
    the card last said it drew."""
    steps = [(b.at, b.joules) for a, b in pairwise(samples) if a.joules is not None and b.joules is not None and a.joules != b.joules]
    if len(steps) < 2:
        return samples[-1].watts
    (first, before), (last, after) = steps[0], steps[-1]
    return (after - before) / (last - first)


def reason_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Of all samples, those in which each reason held; reasons that never did are left out, those without a name are its bit."""
    bits = Counter(1 << i for sample in samples for i in range(sample.reasons.bit_length()) if sample.reasons >> i & 1)
    return {REASONS.get(bit, hex(bit)): count / len(samples) for bit, count in sorted(bits.items())}
