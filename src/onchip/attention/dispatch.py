"""Which implementation runs a call, and in words why each other one does not.

What a backend can do is data: `CAPABILITIES`. `why_not` reads it, `choose` and `explain` read `why_not`, and the capability table of the
documentation is printed from it.
"""
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from onchip.attention.problem import FEATURES, AttentionProblem
from onchip.errors import InputError

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Capability:
    """What one backend serves. A call it serves must be right to the last contract line: everything else is listed as missing."""

    forward: str  # module:function, imported when first chosen
    backward: str
    devices: tuple[str, ...] | None  # None: every device
    dtypes: tuple[str, ...] = DTYPES
    head_dims: tuple[int, int] = (0, 1 << 30)  # smallest and largest, of q/k and of v
    features: frozenset[str] = frozenset(FEATURES)
    only_named: tuple[str, ...] = ()  # devices where it runs when named, never by itself
    limits: Callable[[AttentionProblem], str | None] = lambda problem: None  # what the fields above cannot say


def _triton_limits(problem: AttentionProblem) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'onchip[torch]'"
    if problem.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on cpu, where Triton kernels run only under the interpreter (TRITON_INTERPRET=1, for tests)"
    return None


def _hopper_limits(problem: AttentionProblem) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'onchip[torch]'"
    from onchip.attention.hopper.launch import why_not  # Triton is imported when a GPU is asked about

    return why_not(problem)


def _torch_cpu_limits(problem: AttentionProblem) -> str | None:
    if 0 in (problem.batch, problem.heads, problem.seq_q, problem.seq_k):
        return "there is nothing to compute"
    if problem.causal is not None and problem.seq_q != problem.seq_k:
        return f"its causal mask is served for equal lengths only, and {problem.seq_q} queries meet {problem.seq_k} keys"
    if problem.causal is not None and problem.resolved_scale <= 0:
        return f"its causal path gives NaN for scale {problem.resolved_scale:g} ≤ 0"
    return None


CAPABILITIES: dict[str, Capability] = {
    "hopper": Capability(
        "onchip.attention.hopper.launch:forward", "onchip.attention.triton.backward:backward", devices=("cuda",),
        dtypes=("bfloat16", "float16"), head_dims=(8, 256), limits=_hopper_limits,
        features=frozenset({"causal", "window", "softcap", "sinks", "varlen", "gqa", "cross", "dv"})),
    "triton": Capability(
        "onchip.attention.triton.forward:forward", "onchip.attention.triton.backward:backward", devices=("cuda", "cpu"),
        dtypes=("bfloat16", "float16", "float32"), head_dims=(1, 512), only_named=("cpu",), limits=_triton_limits),
    "torch-cpu": Capability(
        "onchip.attention.torch_cpu:forward", "onchip.attention.torch_cpu:backward", devices=("cpu",), head_dims=(1, 1 << 30),
        features=frozenset({"causal", "gqa", "cross"}), limits=_torch_cpu_limits),
    "reference": Capability("onchip.attention.reference:forward", "onchip.attention.reference:backward", devices=None),
}
BACKENDS = ("auto", *CAPABILITIES)


def why_not(backend: str, problem: AttentionProblem) -> str | None:
    """Why `backend` cannot run `problem`, in words; None when it can."""
    able = CAPABILITIES[backend]
    if able.devices is not None and problem.device not in able.devices:
        return f"the tensors are on {problem.device}; it runs on {', '.join(able.devices)}"
    if problem.dtype not in able.dtypes:
        return f"the dtype is {problem.dtype}; it computes {', '.join(able.dtypes)}"
    for name, dim in (("q and k", problem.head_dim), ("v", problem.head_dim_v)):
        if not able.head_dims[0] <= dim <= able.head_dims[1]:
            return f"the head dim of {name} is {dim}; it takes {able.head_dims[0]} … {able.head_dims[1]}"
    missing = [FEATURES[name] for name in problem.features if name not in able.features]
    if missing:
        return f"it has no {', no '.join(missing)}"
    return able.limits(problem)


def choose(problem: AttentionProblem, backend: str = "auto") -> str:
    """The backend that runs `problem`: the named one, or the first that can. Raises `InputError` when the named one cannot."""
    if backend == "auto":
        able = (name for name in CAPABILITIES if problem.device not in CAPABILITIES[name].only_named and why_not(name, problem) is None)
        chosen = next(able, None)
        if chosen is None:  # the reference runs all that the contract lets through
            raise InputError(f"dtype: got {problem.dtype}, accepted: {', '.join(DTYPES)}")
        return chosen
    reason = why_not(backend, problem)
    if reason is not None:
        raise InputError(f"backend: got {backend!r}, which cannot run this call: {reason}")
    return backend


@cache
def implementation(backend: str, direction: str) -> Callable[..., Any]:
    """The function behind a backend's 'forward' or 'backward'."""
    module, function = getattr(CAPABILITIES[backend], direction).split(":")
    implementation: Callable[..., Any] = getattr(import_module(module), function)
    return implementation
