import itertools

import pytest

from onchip.bench import timing


class Clock:
    """A clock that only the timed call moves, by the given seconds one after the other."""

    def __init__(self, *durations: float) -> None:
        self.now, self.calls, self.durations = 100.0, 0, itertools.cycle(durations)

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.calls += 1
        self.now += next(self.durations)


@pytest.fixture
def clock(monkeypatch):
    def install(*durations: float) -> Clock:
        made = Clock(*durations)
        monkeypatch.setattr(timing, "perf_counter", made)
        return made

    return install


def test_median_of_what_follows_the_warm_up(clock):
    c = clock(5.0, 1.0, 2.0, 9.0)  # the first call is slow and warms up
    assert timing.median_time(c.work, warmup=0, budget=0) == 2.0
    assert c.calls == 1 + timing.LEAST


def test_warms_up_by_time(clock):
    c = clock(0.25)
    assert timing.median_time(c.work, warmup=1.0, budget=0) == 0.25
    assert c.calls == 4 + timing.LEAST


def test_spends_its_budget(clock):
    c = clock(0.25)
    timing.median_time(c.work, warmup=0, budget=2.0)
    assert c.calls == 1 + 8


def test_waits_for_the_device_inside_the_timed_span(clock):
    c = clock(0.0)

    def wait() -> None:
        c.now += 3.0

    assert timing.wall_median(c.work, wait, warmup=0, budget=0) == 3.0
