"""The backward's rungs timed on a GPU, each beside its prediction; as `onchip.ladder.measure` does for the forward's."""
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from onchip.bench.machine import Ceilings, measure_ceilings
from onchip.bench.timing import median_time
from onchip.bench.torch_extra import load_torch, parse_device, parse_torch_dtype
from onchip.errors import InputError
from onchip.ladder.inputs import Inputs
from onchip.ladder.measure import Budget, Measurement, Report
from onchip.roofline.attention import Formats, Sizes, useful_flops
from onchip.roofline.shape import parse_causal
from onchip.simulate.reference import Error

if TYPE_CHECKING:
    from torch import Tensor

MATMULS = 2.5  # of the forward's FLOPs: S, dV, dP, dQ and dK, of which the naive rungs keep S


def measure_backward(inputs: Inputs, device: str = "cuda", causal: bool | str | None = None, dtype: str | None = None,
                     budget: Budget = Budget(), ceilings: Ceilings | None = None, on_rung: Callable[[str], None] = lambda title: None,
                     keys: Collection[str] | None = None) -> Report:
    """Run the backward's rungs, or those of `keys`, on `inputs` and a random gradient of the output, on `device`; other arguments as in
    `measure_rungs`. They are kernels: a CPU runs them under Triton's interpreter alone.

    A measurement's FLOP/s are 2.5 times the forward's FLOPs over its time, its error is the worst of dq, dk and dv against float64.
    Raises `InputError` for a device or dtype torch does not have here, `MissingExtra` without torch.
    """
    torch = load_torch("timing the rungs on this machine")
    from onchip.bench.memory import peak_extra_bytes
    from onchip.ladder.gpu import card, problem_of
    from onchip.ladder.gpu_backward import BACKWARD_RUNGS, true_gradients

    torch_device, shape = parse_device(device), inputs.shape(parse_causal(causal))
    on_card = torch_device.type == "cuda"
    torch_dtype = parse_torch_dtype(dtype or "bfloat16")
    name = str(torch_dtype).removeprefix("torch.")
    on_rung("copy and matmul")
    ceilings = ceilings or measure_ceilings(torch_device, name)
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)).to(torch_device, torch_dtype) for x in (inputs.q, inputs.k, inputs.v))
    dout = torch.randn(*q.shape[:3], v.shape[-1], generator=torch.Generator().manual_seed(1)).to(torch_device, torch_dtype)
    truth = true_gradients(q, k, v, dout, shape.masked)
    flops, compulsory = MATMULS * useful_flops(shape), Sizes(shape, Formats(name)).backward
    problem = problem_of(shape, name)
    try:
        gpu = card(ceilings)
    except InputError:
        gpu = None
    measurements, skipped = [], {}
    for rung in BACKWARD_RUNGS:
        if keys is not None and rung.key not in keys:
            continue
        on_rung(rung.title)
        torch.cuda.empty_cache()  # a rung's arrays may need it all
        free = torch.cuda.mem_get_info(torch_device)[0] if on_card else budget.memory
        needed, least, reason = rung.needed_bytes(problem), flops / ceilings.matmul, rung.refusal(problem)
        if needed > free:
            reason = f"P, dP and dS would take {needed / 1e9:.3g} GB, more than the {free / 1e9:.3g} GB free: out of memory"
        if least > budget.seconds:
            reason = f"a call would take {least:.3g} s at least, more than the {budget.seconds:.3g} s allowed"
        if reason:
            skipped[rung.key] = reason
            continue
        call = rung.prepare(q, k, v, dout, shape.masked)
        peak, found = peak_extra_bytes(call, torch_device)
        error = worst(found, truth)
        del found
        seconds = median_time(call, torch_device)
        del call
        prediction = None if gpu is None else rung.predict(problem, gpu)
        measurements.append(Measurement(
            rung.key, rung.title, seconds, flops / seconds, flops / seconds / ceilings.matmul, compulsory / seconds / ceilings.copy, peak,
            error, *((prediction.time, prediction.binding) if prediction else (None, None))))
    return Report(ceilings, shape, name, tuple(measurements), skipped, 1.0)


def worst(found: "tuple[Tensor, ...]", truth: "tuple[Tensor, ...]") -> Error:
    """The largest of the gradients' errors."""
    errors = []
    for x, t in zip(found, truth, strict=True):
        difference = (x.double() - t).abs()
        most = float(difference.max())
        errors.append(Error(most, most / float(t.abs().max()), float(difference.norm() / t.norm())))
    return max(errors, key=lambda error: (error.rms != error.rms, error.rms))  # a NaN is the largest
