"""Which term explains a gap over 10 % between prediction and measurement.

**Time.** What may lie between the roofs' time P and the measured time T, each in seconds from the counters:

* DRAM: counted bytes over the copy rate, less P;
* gaps between kernels: T less the sum of the kernels' own times;
* bank conflicts: clocks lost over (SMs × clock);
* one kernel of several: its own time over its prediction.

The largest is named if it makes up half of T − P; otherwise it is latency (fill, drain, dependent instructions), which the roofs leave
out, with the tensor pipe's share where that pipe is the roof. A rung faster than its prediction has a roof whose rate is set too low, or
moved fewer bytes.

**DRAM bytes.** Reads and writes apart, kernel by kernel where as many ran as the ledger has: the largest difference is named. Where half of
a surplus is registers that spilled, that is what it is.

**Bytes between L2 and SMs.** All that is issued crosses: TMA and asynchronous copies go past the L1, plain loads of a tile meet nothing of
theirs in it. Fewer cross where a block reads again what its L1 still holds, more where registers spill.
"""
from onchip.report.results import Climb, Step

TOLERANCE = 0.1


def ratio(value: float | None, predicted: float | None) -> float | None:
    """`value` over `predicted`; None where either is missing or the prediction is zero."""
    return value / predicted if value is not None and predicted else None


def explain(step: Step, climb: Climb) -> str:
    """The terms behind this rung's gaps, in words; empty where prediction and measurement agree within 10 %, or one is missing."""
    return "; ".join(filter(None, (time_term(step, climb), dram_term(step), crossing_term(step))))


def _agrees(found: float | None) -> bool:
    return found is None or abs(found - 1) <= TOLERANCE


def time_term(step: Step, climb: Climb) -> str:
    """The term behind a gap in time."""
    found = ratio(step.measured, step.predicted)
    if found is None or step.measured is None or step.predicted is None or _agrees(found):
        return ""
    fewer = ratio(step.dram_counted, step.dram_predicted)
    if found < 1:
        if step.roof == "DRAM" and fewer is not None and fewer < 1 - TOLERANCE:
            return f"time: {fewer:.2f}x of the predicted DRAM bytes"
        return f"time: the {step.roof} roof is higher than the model's rate"
    gap, terms, roof = step.measured - step.predicted, {}, climb.roof
    if step.dram_counted is not None and roof is not None:
        terms["DRAM traffic"] = step.dram_counted / roof.bandwidth - step.predicted
    kernels = [launch.seconds for launch in step.launches if launch.seconds is not None]
    if kernels:
        terms["before the kernel" if len(kernels) == 1 else f"gaps between {len(kernels)} kernels"] = step.measured - sum(kernels)
    if step.conflicts is not None and roof is not None and roof.sms and roof.clock:
        terms["bank conflicts"] = step.conflicts / (roof.sms * roof.clock)
    if len(step.pairs) > 1:
        for expected, launch in step.pairs:
            if launch.seconds is not None:
                terms[f"{expected.kernel}, {launch.seconds / expected.seconds:.1f}x of its {expected.roof} time"] = (
                    launch.seconds - expected.seconds)
    name = max(terms, key=lambda term: terms[term], default="")
    if name and terms[name] >= gap / 2:
        return f"time: {name}, {min(1.0, terms[name] / gap):.0%} of the gap"
    busy = f" (tensor pipe busy {step.tensor_pipe:.0f} % of the time)" if step.roof == "tensor cores" and step.tensor_pipe else ""
    return f"time: latency that the roofs leave out{busy}"


def dram_term(step: Step) -> str:
    """The term behind a gap in DRAM bytes."""
    if _agrees(ratio(step.dram_counted, step.dram_predicted)) or step.dram_counted is None or step.dram_predicted is None:
        return ""
    surplus, spilled = step.dram_counted - step.dram_predicted, sum(launch.spilled or 0.0 for launch in step.launches)
    if spilled and spilled >= surplus / 2 > 0:
        return "DRAM: registers spilled to memory"
    pairs = step.pairs or ((step.expected_sum, step.launch_sum),)
    terms = {}
    for expected, launch in pairs:
        where = f" of {expected.kernel}" * (len(pairs) > 1)
        terms[f"reads{where}"] = (launch.dram_read or 0.0) - expected.dram_read
        terms[f"writes{where}"] = (launch.dram_written or 0.0) - expected.dram_written
    sign = 1 if surplus > 0 else -1
    name = max(terms, key=lambda term: sign * terms[term])
    return f"DRAM: {'more' if sign > 0 else 'fewer'} {name} than the L2 model lets through"


def crossing_term(step: Step) -> str:
    """The term behind a gap between what is issued and what crosses from L2 to the SMs."""
    if _agrees(ratio(step.sm_bytes, step.issued)) or step.sm_bytes is None or step.issued is None:
        return ""
    surplus, spilled = step.sm_bytes - step.issued, sum(launch.spilled or 0.0 for launch in step.launches)
    if surplus < 0:
        return "L2 to SMs: read again from L1"
    return "L2 to SMs: registers spilled to memory" if spilled >= surplus / 4 else "L2 to SMs: other tiles than the ledger's"
