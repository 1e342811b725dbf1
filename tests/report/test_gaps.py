"""Each term is named where it, and nothing else, makes the gap."""
from dataclasses import replace

import pytest

from onchip.report.gaps import dram_term, explain, time_term
from onchip.report.results import Climb, Launch, Roof, Step
from onchip.roofline.shape import AttentionShape

SHAPE = AttentionShape.square(4096, 128, heads=16)
ROOF = Roof(4e12, 7e14, "a test", sms=100, clock=1e9, l2_bytes=60_000_000)
CLIMB = Climb(SHAPE, "bfloat16", "card", (), ROOF)
Q = 4096 * 128 * 16 * 2  # bytes of one of q, k, v, o


def step(key: str = "fa2", **changes) -> Step:
    """100 µs predicted and measured, compulsory bytes predicted and counted."""
    base = Step(key, key, 100e-6, "tensor cores", 100e-6, dram_predicted=4 * Q, dram_counted=4 * Q, tensor_pipe=90.0, conflicts=0.0,
                launches=(Launch("k", 100e-6, 3.0 * Q, 1.0 * Q),))
    return replace(base, **changes)


def test_agreement_needs_no_words():
    assert explain(step(), CLIMB) == ""
    assert explain(step(measured=109e-6, dram_counted=4.3 * Q), CLIMB) == ""
    assert explain(step(measured=None, dram_counted=None), CLIMB) == ""
    assert explain(step(predicted=None, dram_predicted=None), CLIMB) == ""


def test_time_behind_extra_dram_bytes():
    # 1.2 GB at 4 TB/s is 300 µs: all of the measured time
    found = time_term(step(measured=300e-6, dram_counted=1.2e9, launches=(Launch("k", 300e-6),)), CLIMB)
    assert found == "time: DRAM traffic, 100% of the gap"


def test_time_between_kernels():
    launches = tuple(Launch("k", 40e-6) for _ in range(3))
    assert time_term(step(measured=200e-6, launches=launches), CLIMB) == "time: gaps between 3 kernels, 80% of the gap"
    assert "before the kernel" in time_term(step(measured=200e-6), CLIMB)


def test_time_lost_to_bank_conflicts():
    # 8e6 clocks over 100 SMs at 1 GHz: 80 µs of a gap of 100
    found = time_term(step(measured=200e-6, conflicts=8e6, launches=(Launch("k", 200e-6),)), CLIMB)
    assert found == "time: bank conflicts, 80% of the gap"
    unknown_clock = replace(CLIMB, roof=replace(ROOF, clock=None))
    assert "bank" not in time_term(step(measured=200e-6, conflicts=8e6, launches=(Launch("k", 200e-6),)), unknown_clock)


def test_what_no_counter_shows_is_latency():
    slow = step(measured=200e-6, tensor_pipe=45.0, launches=(Launch("k", 199e-6),))
    assert time_term(slow, CLIMB) == "time: latency that the roofs leave out (tensor pipe busy 45 % of the time)"
    assert time_term(replace(slow, roof="exp unit"), CLIMB) == "time: latency that the roofs leave out"
    assert time_term(replace(slow, launches=(), conflicts=None, dram_counted=None, tensor_pipe=None), replace(CLIMB, roof=None))


def test_faster_than_predicted():
    assert time_term(step(measured=50e-6, roof="L2"), CLIMB) == "time: the L2 roof is higher than the model's rate"
    assert time_term(step(measured=50e-6, roof="DRAM", dram_counted=2 * Q), CLIMB) == "time: 0.50x of the predicted DRAM bytes"


@pytest.mark.parametrize(("key", "read", "written", "says"), [
    ("fa2", 9.0, 1.0, "DRAM: more reads of K and V, which did not stay in L2"),
    ("fa2", 3.0, 5.0, "DRAM: more writes of O"),
    ("naive", 9.0, 1.0, "DRAM: more reads of S and P"),
    ("fa1", 3.0, 9.0, "DRAM: more writes of O, m and l"),
])
def test_more_dram_bytes(key, read, written, says):
    found = step(key, dram_counted=(read + written) * Q, launches=(Launch("k", 1e-4, read * Q, written * Q),))
    assert dram_term(found, CLIMB) == says


def test_bytes_expected_of_intermediates_are_not_a_surplus():
    # naive: S and P once each way, 40 q's worth read and as much written, as predicted; 20 more written
    found = step("naive", dram_predicted=84 * Q, dram_counted=104 * Q, launches=(Launch("k", 1e-4, 43.0 * Q, 61.0 * Q),))
    assert dram_term(found, CLIMB) == "DRAM: more writes of S and P"


def test_fewer_dram_bytes():
    kept = step(dram_predicted=10 * Q, dram_counted=8.5 * Q)  # 25 MB less: they fit in half the L2
    assert dram_term(kept, CLIMB) == "DRAM: written lines still in L2 when the kernel ended"
    assert dram_term(replace(kept, dram_counted=4.0 * Q), CLIMB) == "DRAM: more is found in L2 than the model lets stay"
