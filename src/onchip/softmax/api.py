"""The public functions: `softmax` and `log_softmax`."""
import torch
from torch import Tensor

from onchip.softmax import contract, dispatch, ops, reference


def softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, scale: float | None = None, mask: Tensor | None = None,
            causal: bool = False, backend: str = "auto") -> Tensor:
    """Softmax along one dimension, in one read and one write while a row fits on chip.

    ::

        s = scale · x          then −∞ selected where a position is hidden
        y = exp(s − m) / l     m = max s,  l = Σ exp(s − m),  both along `dim`

    Args:
        x: any shape, strides and alignment; float16, bfloat16, float32 or float64. Other types need `dtype`, as in torch.
        dim: the dimension that sums to one; negative counts from the end.
        dtype: cast x to this first; the result has it, the gradient has x's own. Under autocast a 16-bit x gets float32.
        scale: finite number, negative and zero allowed; None is 1.
        mask: bool, broadcastable to x's shape; True keeps a position. What x holds where it is hidden never matters, NaN included.
        causal: hide j > i + n − rows in the last two dimensions (rows, n), the bottom-right triangle; no mask tensor is read.
        backend: "triton" or "reference" (torch's own kernels), which then runs or raises with the reason why it cannot; "auto" takes
            Triton on a GPU, and the reference elsewhere and for float64.

    Returns:
        A contiguous tensor of x's shape.

    Rows follow torch: a NaN or +∞ makes its row NaN, and so does a row of −∞ only. With `mask` or `causal` a row whose scores are all −∞
    gives zeros and zero gradients instead, and a gradient that arrives where the result is exactly 0 is ignored.

    Arithmetic is float32 for 16-bit types. The subtraction comes before every rounding that could lose it, so a large common offset
    costs nothing. Differentiable twice and more; usable under torch.func, vmap, torch.compile, export and autocast; repeats bit for bit.

    Raises:
        IndexError: `dim` out of range.
        TypeError: an argument of a wrong type or dtype.
        InputError: any other value that is not accepted.

    Source: Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), for rows beyond the chip.
    """
    return _run(x, dim, dtype, scale, mask, causal, backend, log=False)


def log_softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, scale: float | None = None, mask: Tensor | None = None,
                causal: bool = False, backend: str = "auto") -> Tensor:
    """Logarithm of `softmax`: y = (s − m) − log l, with the same arguments, rules and errors.

    Hidden positions give −∞, and so does every position of a row whose scores are all −∞ when `mask` or `causal` is given: exp(y) is
    `softmax`. The gradient is that of s − logsumexp(s), dx = scale · (dy − exp(y) · Σ dy), and 0 where such a row or position gave −∞.
    """
    return _run(x, dim, dtype, scale, mask, causal, backend, log=True)


def _run(x: Tensor, dim: int, dtype: torch.dtype | None, scale: float | None, mask: Tensor | None, causal: bool, backend: str, *,
         log: bool) -> Tensor:
    x, mask, spec = contract.check(x, dim, dtype, scale, mask, causal, log)
    run = ops.softmax if dispatch.choose(x, backend) == "triton" else reference.forward
    if x.ndim:
        return run(x, mask, spec)
    return run(x[None], None if mask is None else mask[None], spec)[0]  # a scalar is a row of one
