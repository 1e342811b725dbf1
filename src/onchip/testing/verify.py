"""What ``onchip verify`` checks: every backend this machine can run, against the definition in float64, over shapes and features.

Each check is one problem, forward and backward. It passes when every result lies within twice the error of an eager run of the same dtype,
plus rounding; it is skipped, with the dispatcher's reason, where the backend says that it cannot serve the problem.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from onchip.attention import explain
from onchip.attention.dispatch import CAPABILITIES
from onchip.softmax import dispatch as softmax_dispatch
from onchip.testing import attention, softmax
from onchip.testing.attention import Case, Target

# One problem a line of the contract. Lengths are off the tiles' multiples, heads differ so that a wrong head shows.
ATTENTION = {
    "plain": Case(batch=2, heads=4, kv_heads=4, seq_q=70, seq_k=70, dim=64, dim_v=64),
    "causal": Case(batch=2, heads=4, kv_heads=2, seq_q=70, seq_k=70, dim=64, dim_v=64, causal=True),
    "causal, more keys": Case(heads=4, kv_heads=1, seq_q=33, seq_k=97, dim=32, dim_v=32, causal=True),
    "causal, rows without keys": Case(seq_q=65, seq_k=20, causal=True),
    "causal top-left": Case(seq_q=20, seq_k=65, causal="top-left"),
    "window": Case(seq_q=80, seq_k=80, causal=True, window=(17, 0)),
    "softcap and scale": Case(seq_q=40, seq_k=40, softcap=3.0, scale=0.7),
    "bias": Case(batch=2, seq_q=33, seq_k=49, bias=(1, 2, 33, 49)),
    "mask": Case(batch=2, seq_q=33, seq_k=49, mask=(2, 1, 1, 49)),
    "ALiBi": Case(seq_q=40, seq_k=56, alibi=1, causal=True),
    "sinks": Case(seq_q=40, seq_k=40, sinks=True, causal=True),
    "dropout": Case(seq_q=40, seq_k=40, dropout_p=0.3, seed=7),
    "packed": Case(heads=4, kv_heads=2, dim=32, dim_v=32, lengths=((17, 17), (0, 5), (40, 64), (1, 1)), causal=True),
    "dim 128": Case(heads=2, kv_heads=1, seq_q=130, seq_k=130, dim=128, dim_v=128, causal=True),
    "dims 192 and 128": Case(seq_q=40, seq_k=40, dim=192, dim_v=128, causal=True),
    "dim 20": Case(seq_q=40, seq_k=40, dim=20, dim_v=20, layout="bshd"),
}
DTYPES = ("bfloat16", "float16", "float32")
SOFTMAX = {"row on chip": ((6, 1000), -1), "short rows": ((300, 17), -1), "long row": ((2, 70000), -1), "across": ((64, 48), 0)}


@dataclass(frozen=True)
class Check:
    """One problem on one backend."""

    operator: str
    backend: str
    problem: str
    dtype: str
    outcome: str  # 'passed', 'failed' or 'skipped'
    detail: str = ""  # why not


def planned(quick: bool = False) -> int:
    """How many checks `checks` will yield."""
    dtypes = 1 if quick else len(DTYPES)
    return dtypes * (len(CAPABILITIES) * len(ATTENTION) + len(softmax_dispatch.BACKENDS[1:]) * len(SOFTMAX))


def checks(device: str, quick: bool = False) -> Iterator[Check]:
    """Run every check on `device`; `quick` keeps to one dtype a problem."""
    dtypes = DTYPES[:1] if quick else DTYPES
    for backend in CAPABILITIES:
        for problem, case in ATTENTION.items():
            for dtype in dtypes:
                yield _attention(backend, problem, replace(case, dtype=dtype), device)
    for backend in softmax_dispatch.BACKENDS[1:]:
        for problem, (shape, dim) in SOFTMAX.items():
            for dtype in dtypes:
                yield _softmax(backend, problem, shape, dim, dtype, device)


def _attention(backend: str, problem: str, case: Case, device: str) -> Check:
    inputs = attention.build(case, device)
    cu = attention.offsets(case, device) if case.lengths is not None else ()
    asked = {**case.arguments, "alibi_slopes": inputs.slopes, "sinks": inputs.sinks}
    if case.lengths is None:
        asked |= {"bias": inputs.bias, "mask": inputs.mask}
    plan = explain(inputs.q, inputs.k, inputs.v, *cu, **asked, backend=backend)
    if plan.backend is None:
        return Check("attention", backend, problem, case.dtype, "skipped", plan.reasons[backend])
    return _outcome("attention", backend, problem, case.dtype, lambda: attention.check(case, Target(backend, device), inputs))


def _softmax(backend: str, problem: str, shape: tuple[int, ...], dim: int, dtype: str, device: str) -> Check:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, getattr(torch, dtype))
    reason = softmax_dispatch.why_not(backend, x)
    if reason is not None:
        return Check("softmax", backend, problem, dtype, "skipped", reason)
    return _outcome("softmax", backend, problem, dtype, lambda: softmax.agree(x, dim, backend=backend))


def _outcome(operator: str, backend: str, problem: str, dtype: str, run: Callable[[], object]) -> Check:
    try:
        with np.errstate(all="ignore"):  # Triton's interpreter computes in numpy, where NaN and −∞ warn
            run()
    except Exception as error:  # whatever a broken installation, driver or kernel raises is a failed check, not the end of the run
        return Check(operator, backend, problem, dtype, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    return Check(operator, backend, problem, dtype, "passed")
