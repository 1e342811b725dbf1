"""Clocks and power without a card: a stand-in for NVML."""
import time
from typing import Any

import pytest

from onchip.bench.clocks import Meter, Sample, mean_power, reason_shares, sustain
from onchip.errors import InputError

UUID = "GPU-0a"


class Library:
    """NVML of one card at 1500 MHz, 600 of 700 W, whose energy counter moves every 20 ms."""

    def __init__(self, mhz: int = 1500, reasons: int = 0x4, energy: bool = True) -> None:
        self.mhz, self.reasons, self.energy = mhz, reasons, energy

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 77
        return 0 if uuid == UUID.encode() else 6

    def nvmlDeviceGetClockInfo(self, card: Any, which: int, value: Any) -> int:
        assert (card.value, which) == (77, 1)  # the SMs' clock, not the memory's
        value._obj.value = self.mhz
        return 0 if self.mhz else 3

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Any, value: Any) -> int:
        value._obj.value = self.reasons
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Any, value: Any) -> int:
        value._obj.value = int(time.perf_counter() / 0.02) * 12_000  # mJ
        return 0 if self.energy else 3

    def nvmlDeviceGetPowerUsage(self, card: Any, value: Any) -> int:
        value._obj.value = 550_000
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Any, value: Any) -> int:
        value._obj.value = 700_000
        return 0


class NewLibrary(Library):
    """A driver that has both names of the reasons."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: Any, value: Any) -> int:
        value._obj.value = 0x24
        return 0


def sample(at: float, joules: float | None, watts: float | None = 500.0, reasons: int = 0) -> Sample:
    return Sample(at, 1500, joules, watts, reasons)


def test_a_call_is_repeated_and_the_card_looked_at_meanwhile() -> None:
    calls = []

    def call() -> None:
        calls.append(0)
        time.sleep(0.01)

    found = sustain(call, lambda: None, Meter(UUID, Library()), 0.01, seconds=0.3, settle=0.02)
    assert len(calls) == 32
    assert 0.01 <= found.seconds < 0.1
    assert (found.mhz, found.limit_watts, found.reasons) == (1500, 700, {"power cap": 1.0})
    assert found.samples > 10
    assert found.watts is not None
    assert 400 < found.watts < 900  # 600 by its steps of 12 J, each seen 5 ms late or, on a busy machine, more


def test_the_time_is_that_of_the_work_not_of_handing_it_in() -> None:
    found = sustain(lambda: None, lambda: time.sleep(0.1), Meter(UUID, Library()), 0.01, seconds=0.1, settle=0.0)
    assert found.seconds >= 0.01


def test_power_is_energy_between_steps_of_its_counter() -> None:
    # steps at 0.1 and 0.3 s: 140 J in 0.2 s; what was drawn before the first step is of the time before the samples
    samples = [sample(0.0, 1.0), sample(0.1, 50.0), sample(0.2, 50.0), sample(0.3, 190.0), sample(0.4, 190.0)]
    assert mean_power(samples) == pytest.approx(700)


@pytest.mark.parametrize("joules", [[None, None, None], [1.0, 1.0, 1.0], [1.0, 1.0, 9.0]])
def test_without_two_steps_it_is_what_the_card_last_said(joules) -> None:
    assert mean_power([sample(i, j, 500.0 + i) for i, j in enumerate(joules)]) == 502


def test_a_card_without_an_energy_counter_is_metered_by_its_power() -> None:
    assert sustain(lambda: None, lambda: time.sleep(0.02), Meter(UUID, Library(energy=False)), 1.0).watts == 550


def test_reasons_are_shares_of_the_samples() -> None:
    samples = [sample(0, 0, reasons=bits) for bits in (0x4, 0x4 | 0x20, 0, 0x200)]
    assert reason_shares(samples) == {"power cap": 0.5, "thermal": 0.25, "0x200": 0.25}


def test_the_name_of_newer_drivers_is_asked_where_there_is_one() -> None:
    assert Meter(UUID, Library()).look().reasons == 0x4
    assert Meter(UUID, NewLibrary()).look().reasons == 0x24


@pytest.mark.parametrize(("uuid", "library", "query"), [
    ("GPU-other", Library(), "nvmlDeviceGetHandleByUUID answered with error 6"),
    (UUID, Library(mhz=0), "nvmlDeviceGetClockInfo answered with error 3")])
def test_a_card_that_does_not_answer_is_an_error_before_anything_runs(uuid, library, query) -> None:
    with pytest.raises(InputError, match=query):
        Meter(uuid, library)


def test_a_machine_without_the_driver_says_so(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("onchip.bench.clocks.ctypes.CDLL", absent)
    with pytest.raises(InputError, match=r"found no libnvidia-ml\.so\.1"):
        Meter(UUID)
