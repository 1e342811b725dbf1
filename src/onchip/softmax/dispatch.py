"""Which implementation runs, and in words why another one does not."""
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from onchip.errors import InputError, require

BACKENDS = ("auto", "triton", "reference")
LONGEST_TOPK = 2**20  # elements of a row

_HAS_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is defined; so do we, when we are imported


def why_not(backend: str, x: Tensor) -> str | None:
    """Why `backend` cannot compute a softmax of `x`, already cast as `dtype=` asks; None when it can."""
    if backend == "reference":
        return None
    if not _HAS_TRITON:
        return "Triton is not installed: pip install 'onchip[torch]'"
    if x.dtype == torch.float64:
        return "its arithmetic is float32 and x is float64"
    if x.device.type != "cuda" and not (_INTERPRETED and x.device.type == "cpu"):
        return f"x is on {x.device}: it needs a GPU, or TRITON_INTERPRET=1 in the environment before onchip is imported, for tests"
    return None


def choose(x: Tensor, backend: str = "auto") -> str:
    """The backend that runs: the named one, or for "auto" Triton on a GPU where it can and the reference otherwise.

    The interpreter is for tests, so "auto" never takes it. Raises `InputError` for an unknown name, or with the reason when the named
    backend cannot run.
    """
    if backend == "auto":
        return "triton" if x.device.type == "cuda" and why_not("triton", x) is None else "reference"
    require(backend in BACKENDS, "backend", repr(backend), ", ".join(map(repr, BACKENDS)))
    reason = why_not(backend, x)
    if reason is not None:
        raise InputError(f"backend {backend!r} cannot run: {reason}")
    return backend


def serves_topk(x: Tensor, dim: int, backend: str) -> bool:
    """Do the kernels of `softmax_topk` take rows as long as x's? If they were asked for by name and do not, `InputError` says so."""
    long = x.ndim > 0 and x.shape[dim] > LONGEST_TOPK
    if long and backend == "triton":
        raise InputError(f"backend 'triton' cannot run: rows have {x.shape[dim]} elements, and softmax_topk takes up to {LONGEST_TOPK}")
    return not long
