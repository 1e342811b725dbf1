"""Each term is named where it, and nothing else, makes the gap."""
from dataclasses import replace

import pytest

from onchip.report.gaps import crossing_term, dram_term, explain, time_term
from onchip.report.results import Climb, Expected, Launch, Roof, Step
from onchip.roofline.shape import AttentionShape

SHAPE = AttentionShape.square(4096, 128, heads=16)
ROOF = Roof(4e12, 7e14, "a test", sms=100, clock=1e9, l2_bytes=60_000_000)
CLIMB = Climb(SHAPE, "bfloat16", "card", (), ROOF)
Q = 4096 * 128 * 16 * 2  # bytes of one of q, k, v, o


def step(key: str = "fa2", **changes) -> Step:
    """100 µs predicted and measured, compulsory bytes predicted and counted."""
    base = Step(key, key, 100e-6, "tensor cores", 100e-6, dram_predicted=4 * Q, dram_counted=4 * Q, tensor_pipe=90.0, conflicts=0.0,
                launches=(Launch("k", 100e-6, 3.0 * Q, 1.0 * Q),), expected=(Expected("k", 100e-6, "tensor cores", 3.0 * Q, 1.0 * Q),))
    return replace(base, **changes)


def kernels(*found: tuple[str, float, float, float]) -> dict:
    """Launches of (name, µs, q's read, q's written), each expected to take 100 µs, read 10 q's and write 5."""
    return {"launches": tuple(Launch(name, us * 1e-6, read * Q, written * Q) for name, us, read, written in found),
            "expected": tuple(Expected(name, 100e-6, "DRAM", 10.0 * Q, 5.0 * Q) for name, *_ in found)}


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


def test_time_of_one_kernel_among_several():
    slow = step(measured=400e-6, predicted=200e-6, **kernels(("S", 110, 10, 5), ("softmax", 280, 10, 5)))
    assert time_term(slow, CLIMB) == "time: softmax, 2.8x of its DRAM time, 90% of the gap"


def test_a_surplus_or_a_lack_of_dram_bytes_is_named_by_kernel_and_way():
    more = kernels(("S", 100, 10, 5), ("softmax", 100, 10, 15))
    assert dram_term(step(dram_predicted=30 * Q, dram_counted=40 * Q, **more)) == (
        "DRAM: more writes of softmax than the L2 model lets through")
    fewer = kernels(("S", 100, 2, 5), ("softmax", 100, 9, 5))
    assert dram_term(step(dram_predicted=30 * Q, dram_counted=21 * Q, **fewer)) == "DRAM: fewer reads of S than the L2 model lets through"


@pytest.mark.parametrize(("read", "written", "says"), [(9.0, 1.0, "reads"), (3.0, 5.0, "writes")])
def test_one_kernel_needs_no_name(read, written, says):
    found = step(dram_counted=(read + written) * Q, launches=(Launch("k", 1e-4, read * Q, written * Q),))
    assert dram_term(found) == f"DRAM: more {says} than the L2 model lets through"


def test_other_kernels_than_the_ledgers_are_summed():
    found = step(dram_counted=8 * Q, launches=(Launch("a", 5e-5, 3.0 * Q, Q), Launch("b", 5e-5, 3.0 * Q, Q)))
    assert dram_term(found) == "DRAM: more reads than the L2 model lets through"


def test_spilled_registers_are_counted_by_themselves():
    found = step(dram_counted=6 * Q, sm_bytes=12 * Q, issued=10 * Q, launches=(Launch("k", 1e-4, 3.5 * Q, 2.5 * Q, spilled=1.5 * Q),))
    assert dram_term(found) == "DRAM: registers spilled to memory"
    assert crossing_term(found) == "L2 to SMs: registers spilled to memory"


def test_what_crosses_from_l2():
    assert crossing_term(step(sm_bytes=10.5 * Q, issued=10 * Q)) == ""
    assert crossing_term(step(sm_bytes=7 * Q, issued=10 * Q)) == "L2 to SMs: read again from L1"
    assert crossing_term(step(sm_bytes=13 * Q, issued=10 * Q)) == "L2 to SMs: other tiles than the ledger's"
