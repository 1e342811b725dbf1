"""Softmax that reads its row three times, and twice: what the library's own kernels save.

Ledgers: `safe` and `online` of `onchip.roofline.softmax`. A row is read anew in every pass, from wherever it is by then: from L2, as long
as the rows of all blocks that run at once fit there.

Source: Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867, Alg. 2 and 3).
"""
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from onchip.errors import require
from onchip.ladder.kernels.common import LOG2E, Launch, cast, finite, start

BLOCK = 4096  # elements a program reads at a time
LAUNCH = Launch(1, BLOCK, 8, 1)


@triton.jit
def load_block(x, at, j0, n, factor, BN: tl.constexpr):
    """x · log₂e of a block, −∞ past the end."""
    j = j0 + tl.arange(0, BN)
    return tl.load(x + at + j, mask=j < n, other=float("-inf")).to(tl.float32) * factor


@triton.jit
def write_result(x, y, at, n, factor, m, l, BN: tl.constexpr):
    """The last pass: y = 2^(x − m) / l."""
    for j0 in tl.range(0, n, BN):
        j = j0 + tl.arange(0, BN)
        p = tl.exp2(load_block(x, at, j0, n, factor, BN) - m) / l
        tl.store(y + at + j, cast(p, y.dtype.element_ty), mask=j < n)


@triton.jit
def safe_kernel(x, y, n, factor, BN: tl.constexpr):
    """The maximum; the sum; the result: three reads."""
    at = tl.program_id(0).to(tl.int64) * n
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    for j0 in tl.range(0, n, BN):
        m = tl.maximum(m, tl.max(load_block(x, at, j0, n, factor, BN), 0))
    for j0 in tl.range(0, n, BN):
        l += tl.sum(tl.exp2(load_block(x, at, j0, n, factor, BN) - m), 0)
    write_result(x, y, at, n, factor, m, l, BN)


@triton.jit
def online_kernel(x, y, n, factor, BN: tl.constexpr):
    """m and l together, l rescaled whenever m rises; the result: two reads."""
    at = tl.program_id(0).to(tl.int64) * n
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    for j0 in tl.range(0, n, BN):
        s = load_block(x, at, j0, n, factor, BN)
        m_new = tl.maximum(m, tl.max(s, 0))
        l = l * tl.exp2(m - finite(m_new)) + tl.sum(tl.exp2(s - finite(m_new)), 0)
        m = m_new
    write_result(x, y, at, n, factor, m, l, BN)


def _run(kernel: Any, x: Tensor) -> Tensor:
    require(x.is_contiguous() and x.ndim == 2, "x", f"shape {tuple(x.shape)}, strides {x.stride()}", "a contiguous (rows, n) tensor")
    y = x.new_empty(x.shape)
    start(kernel, x.shape[0], LAUNCH, x, y, n=x.shape[1], factor=LOG2E, BN=LAUNCH.bc)
    return y


def safe(x: Tensor) -> Tensor:
    """Softmax of each row of (rows, n), three reads and one write."""
    return _run(safe_kernel, x)


def online(x: Tensor) -> Tensor:
    """Softmax of each row, two reads and one write."""
    return _run(online_kernel, x)
