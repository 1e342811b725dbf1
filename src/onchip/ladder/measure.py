"""The plain-torch rungs timed on this very machine, beside what it could do at best.

For each rung of `onchip.ladder.eager`, and torch's own SDPA for orientation: time, FLOP/s, shares of the measured ceilings, peak extra
memory, and error against float64. torch is imported when something is measured; without it `MissingExtra` says which extra brings it.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from onchip.bench.machine import Ceilings, measure_ceilings
from onchip.bench.timing import median_time
from onchip.bench.torch_extra import MATMUL_DTYPES, load_torch, parse_device, parse_torch_dtype
from onchip.ladder.inputs import Inputs
from onchip.roofline.attention import Formats, Sizes, useful_flops
from onchip.roofline.dtypes import BYTES
from onchip.roofline.shape import AttentionShape, parse_causal
from onchip.simulate.formats import Array
from onchip.simulate.reference import Error, distance, reference

if TYPE_CHECKING:
    import torch

# rung → its title
RUNGS = {"naive": "naive, scale apart", "tiled": "tiled, whole rows", "online": "online, one pass", "sdpa": "torch SDPA"}
# Scores that are checked against float64, at most: 2²⁴ of them take about a second at d = 64. Rows are sampled beyond.
CHECKED = 1 << 24


@dataclass(frozen=True)
class Budget:
    """What a measurement may cost; a rung that would cost more is skipped, and the reason kept."""

    memory: int = 1 << 30  # bytes: naive keeps two arrays of Sq · Sk scores alive
    seconds: float = 1.0  # a call, at the measured matmul rate; it is made half a dozen times


@dataclass(frozen=True)
class Measurement:
    """One rung on this machine."""

    key: str
    title: str
    seconds: float  # median of a call
    flops: float  # useful FLOP/s: 2(d + dv) for each visible pair
    matmul_share: float  # of the measured matmul rate
    copy_share: float  # of the measured copy bandwidth, q, k, v and out crossing memory once
    peak_bytes: int  # most bytes alive at once beyond q, k and v; out included
    error: Error  # against float64 on the same rounded inputs


@dataclass(frozen=True)
class Report:
    """All rungs measured on one device; `skipped` says in words why a rung is not among them."""

    ceilings: Ceilings
    shape: AttentionShape
    dtype: str
    measurements: tuple[Measurement, ...]
    skipped: dict[str, str]
    checked_rows: float  # share of the query rows the error was taken over


def measure_rungs(inputs: Inputs, device: "str | torch.device" = "cpu", causal: bool | str | None = None, dtype: str | None = None,
                  budget: Budget = Budget(), ceilings: Ceilings | None = None,
                  on_rung: Callable[[str], None] = lambda title: None) -> Report:
    """Run every rung on `inputs` on `device`; `on_rung` hears the title of each before it runs.

    `dtype` is float32 on a CPU unless given (half precision is emulated there), elsewhere the format the inputs were stored in. `ceilings`
    are measured first unless given. Raises `InputError` for a device or dtype torch does not have here, `MissingExtra` without torch.
    """
    torch = load_torch("timing the rungs on this machine")
    from onchip.bench.memory import peak_extra_bytes
    from onchip.ladder import eager

    torch_device, shape = parse_device(device), inputs.shape(parse_causal(causal))
    if dtype is None:
        dtype = "float32" if torch_device.type == "cpu" or inputs.dtype not in MATMUL_DTYPES else inputs.dtype
    torch_dtype = parse_torch_dtype(dtype)
    dtype = str(torch_dtype).removeprefix("torch.")
    on_rung("copy and matmul")
    ceilings = ceilings or measure_ceilings(torch_device, dtype)

    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)).to(torch_device, torch_dtype) for x in (inputs.q, inputs.k, inputs.v))
    truth, rows = _truth(shape, *(x.cpu().double().numpy() for x in (q, k, v)))
    flops, compulsory = useful_flops(shape), Sizes(shape, Formats(dtype)).forward
    measurements, skipped = [], {}
    for key, title in RUNGS.items():
        on_rung(title)
        if reason := _too_much(key, shape, dtype, flops / ceilings.matmul, budget):
            skipped[key] = reason
            continue
        call = partial(getattr(eager, key), q, k, v, shape.causal)
        peak, out = peak_extra_bytes(call, torch_device)
        error = distance(out.cpu().double().numpy().reshape(truth.shape), truth)
        del out
        seconds = median_time(call, torch_device)
        measurements.append(Measurement(key, title, seconds, flops / seconds, flops / seconds / ceilings.matmul,
                                        compulsory / seconds / ceilings.copy, peak, error))
    return Report(ceilings, shape, dtype, tuple(measurements), skipped, rows)


def _too_much(key: str, shape: AttentionShape, dtype: str, least: float, budget: Budget) -> str:
    """Why rung `key` is not measured; empty when it is. `least`: seconds a call takes if its matmuls run at the measured rate."""
    scores = 2 * shape.query_heads * shape.seq_q * shape.seq_k * BYTES[dtype]
    if key == "naive" and scores > budget.memory:
        return f"S before and after the scale would take {scores / 1e9:.3g} GB, more than the {budget.memory / 1e9:.3g} GB allowed"
    if least > budget.seconds:
        return f"a call would take {least:.3g} s at least, more than the {budget.seconds:.3g} s allowed"
    return ""


def _truth(shape: AttentionShape, q: Array, k: Array, v: Array) -> tuple[Array, float]:
    """The float64 result (heads, rows, dv), NaN in rows that were not computed, and the share that were."""
    stride = -(-shape.query_heads * shape.seq_q * shape.seq_k // CHECKED)
    wanted = np.zeros((shape.query_heads, shape.seq_q), bool)
    wanted[:, ::-stride] = True  # the last row, which under a causal mask sees most, is always among them
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return reference(shape, shape.head_dim ** -0.5, q, k, v, wanted=wanted).out, float(wanted.mean())
