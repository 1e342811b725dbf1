"""The rungs timed on this very machine, beside what it could do at best.

On a CPU those in plain torch (`onchip.ladder.eager`), on a GPU the kernels (`onchip.ladder.gpu`), each beside its prediction; and torch's
own SDPA for orientation. For each: time, FLOP/s, shares of the measured ceilings, peak extra memory, and error against float64. torch is
imported when something is measured; without it `MissingExtra` says which extra brings it.
"""
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from onchip.bench.machine import Ceilings, measure_ceilings
from onchip.bench.timing import median_time
from onchip.bench.torch_extra import MATMUL_DTYPES, load_torch, parse_device, parse_torch_dtype
from onchip.errors import InputError
from onchip.ladder.inputs import Inputs
from onchip.roofline.attention import Formats, Sizes, useful_flops
from onchip.roofline.dtypes import BYTES
from onchip.roofline.shape import AttentionShape, parse_causal
from onchip.simulate.formats import Array
from onchip.simulate.reference import Error, distance, reference

if TYPE_CHECKING:
    import torch

# rung → its title, on a CPU
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
    predicted: float | None = None  # seconds by the roofs, of a rung on a GPU
    roof: str | None = None  # the one it is predicted to be bound by


@dataclass(frozen=True)
class Candidate:
    """A rung that may be measured."""

    key: str
    title: str
    call: "Callable[[], torch.Tensor]"
    reason: str  # why not; empty: it is
    predicted: float | None = None
    roof: str | None = None


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
                  on_rung: Callable[[str], None] = lambda title: None, keys: Collection[str] | None = None) -> Report:
    """Run every rung on `inputs` on `device`, or those of `keys`; `on_rung` hears the title of each before it runs.

    `dtype` is float32 on a CPU unless given (half precision is emulated there), elsewhere the format the inputs were stored in. `ceilings`
    are measured first unless given. Raises `InputError` for a device or dtype torch does not have here, `MissingExtra` without torch.
    """
    torch = load_torch("timing the rungs on this machine")
    from onchip.bench.memory import peak_extra_bytes

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
    for rung in (_on_gpu if torch_device.type == "cuda" else _on_cpu)(q, k, v, shape, dtype, ceilings, budget):
        if keys is not None and rung.key not in keys:
            continue
        on_rung(rung.title)
        if rung.reason:
            skipped[rung.key] = rung.reason
            continue
        peak, out = peak_extra_bytes(rung.call, torch_device)
        error = distance(out.cpu().double().numpy().reshape(truth.shape), truth)
        del out
        seconds = median_time(rung.call, torch_device)
        measurements.append(Measurement(rung.key, rung.title, seconds, flops / seconds, flops / seconds / ceilings.matmul,
                                        compulsory / seconds / ceilings.copy, peak, error, rung.predicted, rung.roof))
    return Report(ceilings, shape, dtype, tuple(measurements), skipped, rows)


def _on_cpu(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", shape: AttentionShape, dtype: str, ceilings: Ceilings,
            budget: Budget) -> Iterator[Candidate]:
    from onchip.ladder import eager

    scores = 2 * shape.query_heads * shape.seq_q * shape.seq_k * BYTES[dtype]
    for key, title in RUNGS.items():
        reason = _too_long(shape, ceilings, budget)
        if key == "naive" and scores > budget.memory:
            reason = f"S before and after the scale would take {scores / 1e9:.3g} GB, more than the {budget.memory / 1e9:.3g} GB allowed"
        yield Candidate(key, title, partial(getattr(eager, key), q, k, v, shape.causal), reason)


def _on_gpu(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", shape: AttentionShape, dtype: str, ceilings: Ceilings,
            budget: Budget) -> Iterator[Candidate]:
    """The kernels, predicted for this card as measured where the roofline knows it."""
    import torch

    from onchip.ladder import eager, gpu

    problem, free = gpu.problem_of(shape, dtype), torch.cuda.mem_get_info(q.device)[0]
    try:
        card = gpu.card(ceilings)
    except InputError:
        card = None
    for rung in gpu.GPU_RUNGS:
        needed = gpu.needed_bytes(rung, problem)
        reason = rung.refusal(problem) or _too_long(shape, ceilings, budget)
        if needed > free:
            reason = f"S and P would take {needed / 1e9:.3g} GB, more than the {free / 1e9:.3g} GB free: out of memory"
        prediction = None if card is None or reason else rung.predict(problem, card)
        yield Candidate(rung.key, rung.title, partial(rung.run, q, k, v, shape.masked), reason,
                        *((prediction.time, prediction.binding) if prediction else (None, None)))
    yield Candidate("sdpa", RUNGS["sdpa"], partial(eager.sdpa, q, k, v, shape.causal), _too_long(shape, ceilings, budget))


def _too_long(shape: AttentionShape, ceilings: Ceilings, budget: Budget) -> str:
    """Why a rung is not measured: a call takes too many seconds even if its matmuls run at the measured rate. Empty when it is."""
    least = useful_flops(shape) / ceilings.matmul
    return f"a call would take {least:.3g} s at least, more than the {budget.seconds:.3g} s allowed" if least > budget.seconds else ""


def _truth(shape: AttentionShape, q: Array, k: Array, v: Array) -> tuple[Array, float]:
    """The float64 result (heads, rows, dv), NaN in rows that were not computed, and the share that were."""
    stride = -(-shape.query_heads * shape.seq_q * shape.seq_k // CHECKED)
    wanted = np.zeros((shape.query_heads, shape.seq_q), bool)
    wanted[:, ::-stride] = True  # the last row, which under a causal mask sees most, is always among them
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return reference(shape, shape.head_dim ** -0.5, q, k, v, wanted=wanted).out, float(wanted.mean())
