"""Which term explains a gap over 10 % between prediction and measurement.

**Time.** What may lie between the roofs' time P and the measured time T, each in seconds from the counters:

* DRAM: counted bytes over the copy rate, less P;
* gaps between kernels: T less the sum of the kernels' own times;
* bank conflicts: clocks lost over (SMs × clock).

The largest is named if it makes up half of T − P; otherwise it is latency (fill, drain, dependent instructions), which the roofs leave
out, with the tensor pipe's share where that pipe is the roof. A rung faster than its prediction has a roof whose rate is set too low, or
moved fewer bytes.

**DRAM bytes.** Reads and writes apart. A kernel that keeps its results on the chip writes O and nothing else; naive's S and P and FA1's
O, m and l are read as often as they are written. What is missing, up to half the L2 a kernel, is written lines that were still in the
cache when the kernel ended.
"""
from onchip.report.results import Climb, Step

TOLERANCE = 0.1
THROUGH_MEMORY = {"eager": "S and P", "naive_scaled": "S and P", "naive": "S and P", "fa1": "O, m and l"}


def ratio(value: float | None, predicted: float | None) -> float | None:
    """`value` over `predicted`; None where either is missing or the prediction is zero."""
    return value / predicted if value is not None and predicted else None


def explain(step: Step, climb: Climb) -> str:
    """The terms behind this rung's gaps, in words; empty where prediction and measurement agree within 10 %, or one is missing."""
    return "; ".join(filter(None, (time_term(step, climb), dram_term(step, climb))))


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
    name = max(terms, key=lambda term: terms[term], default="")
    if name and terms[name] >= gap / 2:
        return f"time: {name}, {min(1.0, terms[name] / gap):.0%} of the gap"
    busy = f" (tensor pipe busy {step.tensor_pipe:.0f} % of the time)" if step.roof == "tensor cores" and step.tensor_pipe else ""
    return f"time: latency that the roofs leave out{busy}"


def dram_term(step: Step, climb: Climb) -> str:
    """The term behind a gap in DRAM bytes."""
    found = ratio(step.dram_counted, step.dram_predicted)
    if found is None or step.dram_counted is None or step.dram_predicted is None or _agrees(found):
        return ""
    missing, l2 = step.dram_predicted - step.dram_counted, climb.roof.l2_bytes if climb.roof else None
    if missing > 0:
        if l2 and missing <= max(1, len(step.launches)) * l2 / 2:
            return "DRAM: written lines still in L2 when the kernel ended"
        return "DRAM: more is found in L2 than the model lets stay"
    sizes, through = climb.sizes, THROUGH_MEMORY.get(step.key)
    crossing = (step.dram_predicted - sizes.forward) / 2 if through else 0.0  # written by one kernel or step for another
    written = sum(launch.dram_written or 0.0 for launch in step.launches) - (sizes.o + crossing)
    read = sum(launch.dram_read or 0.0 for launch in step.launches) - (step.dram_predicted - sizes.o - crossing)
    what = through or ("K and V, which did not stay in L2" if read >= written else "O")
    return f"DRAM: more {'reads' if read >= written else 'writes'} of {what}"
