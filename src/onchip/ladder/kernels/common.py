"""What the rungs' kernels share: loading a tile, scores of a tile, and the launch.

Tensors are (batch, heads, seq, dim), contiguous; `head` counts over batch and heads, and reads the K and V of head // group.
Scores are kept in units of log₂: s = q kᵀ · scale · log₂e, so that exp(x) is one exp2.
"""
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.attention.triton.common import cast, dot, zeros
from onchip.errors import require

__all__ = ["LOG2E", "Launch", "block", "cast", "dot", "finite", "load_rows", "reciprocal", "scores", "sizes", "start", "store_rows",
           "zeros"]

LOG2E = 1.4426950408889634


class Launch(NamedTuple):
    """How a kernel is built: br query rows × bc keys a tile, warps, and the depth of the load pipeline."""

    br: int
    bc: int
    warps: int
    stages: int


@triton.jit
def load_rows(x, head, first, rows, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr):
    """Rows first … first + B − 1 of a head of `x`, (B, BD); zeros outside."""
    i, d = first + tl.arange(0, B), tl.arange(0, BD)
    at = (head.to(tl.int64) * rows + i[:, None]) * D + d[None, :]
    return tl.load(x + at, mask=(i[:, None] < rows) & (d[None, :] < D), other=0.0)


@triton.jit
def store_rows(x, head, first, rows, tile, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr):
    """The inverse of `load_rows`."""
    i, d = first + tl.arange(0, B), tl.arange(0, BD)
    at = (head.to(tl.int64) * rows + i[:, None]) * D + d[None, :]
    tl.store(x + at, cast(tile, x.dtype.element_ty), mask=(i[:, None] < rows) & (d[None, :] < D))


@triton.jit
def scores(q_tile, k_tile, i0, j0, seq_k, offset, factor, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """s (BM, BN), −∞ where a key is hidden or past the end."""
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    s = dot(q_tile, tl.trans(k_tile), tl.zeros([BM, BN], tl.float32), "ieee") * factor
    seen = (j < seq_k)[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + offset)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def finite(m):
    """A row maximum to subtract: 0 where the row has seen nothing, for −∞ − (−∞) is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def reciprocal(l):
    """1 / l, and 0 for a row that saw nothing."""
    return tl.where(l == 0.0, 0.0, 1.0 / tl.where(l == 0.0, 1.0, l))


def sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The arguments every kernel takes about its tensors. Raises `InputError` for what the rungs do not serve."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.is_contiguous(), name, f"strides {x.stride()}", "a contiguous tensor: the rungs have one layout")
    require(q.dtype in (torch.float16, torch.bfloat16, torch.float32), "q", q.dtype, "float16, bfloat16 or float32")
    d, dv = q.shape[-1], v.shape[-1]
    return {"seq_q": q.shape[2], "seq_k": k.shape[2], "group": q.shape[1] // k.shape[1], "offset": k.shape[2] - q.shape[2],
            "factor": d**-0.5 * LOG2E, "D": d, "DV": dv, "BD": block(d), "BDV": block(dv),
            "WGMMA": q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9}


def block(dim: int) -> int:
    """Columns of a tile that holds `dim` of them."""
    return max(16, triton.next_power_of_2(dim))


def start(kernel: Any, grid: int, launch: Launch, *tensors: Any, **more: Any) -> None:
    """Launch `kernel` on `grid` thread blocks, with those of `more` that it takes."""
    named = {name: more[name] for name in kernel.arg_names if name in more}
    kernel[(grid,)](*tensors, **named, num_warps=launch.warps, num_stages=launch.stages)
