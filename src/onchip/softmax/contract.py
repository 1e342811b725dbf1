"""Every check on the arguments, made once; what comes out is a `Spec`, a mask of x's shape, and an x of a type the kernels take."""
import math
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from onchip.errors import InputError, require

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NARROW = (torch.float16, torch.bfloat16)  # read as they are and computed in float32
MOST_K = 128  # elements that `softmax_topk` selects


@dataclass(frozen=True)
class Spec:
    """One softmax, apart from its tensors."""

    dim: int  # counted from the end, so that a batch dimension in front changes nothing
    log: bool  # log_softmax
    scale: float
    causal: bool  # bottom-right triangle over the last two dimensions
    hiding: bool  # a mask or causal was given: rows of −∞ give zeros and not NaN
    dtype: torch.dtype  # of the result
    summed: bool = False  # log Σ exp s instead of y

    def shape(self, x: Tensor) -> list[int]:
        """Of the result for x: size 1 along `dim` for sums."""
        sizes = list(x.shape)
        if self.summed:
            sizes[self.dim] = 1
        return sizes

    @property
    def plain(self) -> bool:
        """Nothing but torch's own softmax."""
        return self.scale == 1.0 and not self.hiding


def check(x: Tensor, dim: int, dtype: torch.dtype | None, scale: float | None, mask: Tensor | None, causal: bool,
          log: bool) -> tuple[Tensor, Tensor | None, Spec]:
    """Check everything, cast x where the cast cannot be part of a kernel, and expand the mask to x's shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, accepted: a torch.Tensor")
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim: got {dim!r}, accepted: an integer")
    dim = index(dim)
    ranks = max(x.ndim, 1)  # a scalar has the dimension 0 as well
    if not -ranks <= dim < ranks:
        raise IndexError(f"dim: got {dim}, accepted: {-ranks} … {ranks - 1} for a tensor of {x.ndim} dimensions")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}, accepted: True or False")
    dim = dim - ranks if dim >= 0 else dim
    require(not causal or x.ndim >= 2, "causal", f"an x of {x.ndim} dimensions", "two or more: queries and keys")
    require(not causal or dim == -1, "dim", dim, "-1 with causal=True")
    dtype = _result_dtype(x, dtype)
    if x.dtype != dtype and not (x.dtype in NARROW and dtype == torch.float32):
        x = x.to(dtype)
    return x, _mask(x, mask), Spec(dim, log, _scale(scale), causal, causal or mask is not None, dtype)


def _result_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        if x.dtype not in DTYPES:
            raise TypeError(f"x: got {x.dtype}, accepted: {', '.join(map(str, DTYPES))}; other types need dtype=")
        return torch.float32 if x.dtype in NARROW and _autocast(x.device.type) else x.dtype
    if dtype not in DTYPES:
        raise TypeError(f"dtype: got {dtype}, accepted: None, {', '.join(map(str, DTYPES))}")
    if x.dtype.is_complex:
        raise TypeError(f"x: got {x.dtype}, accepted: real types")
    return dtype


def _autocast(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # a meta tensor has no autocast to ask for


def _scale(scale: float | None) -> float:
    if scale is None:
        return 1.0
    try:
        value = scale if isinstance(scale, float) else float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"scale: got {scale!r}, accepted: None or a finite number") from None
    require(abs(value) < math.inf, "scale", value, "None or a finite number")
    return value


def check_bias(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Check an additive bias and expand it to x's shape."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in DTYPES:
        raise TypeError(f"bias: got {bias.dtype if isinstance(bias, Tensor) else type(bias).__name__}, accepted: a tensor of "
                        f"{', '.join(map(str, DTYPES))}")
    return _expand("bias", x, bias)


def check_inplace(x: Tensor, spec: Spec, bias: Tensor | None) -> None:
    """Check that the result may take x's place."""
    require(x.dtype == spec.dtype, "dtype", spec.dtype, f"x's own, {x.dtype}, with inplace=True")
    require(not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))), "inplace",
            "True where a gradient is asked for", "False, or torch.no_grad()")
    step = 1  # as long as every dimension reaches beyond all smaller strides' ones, no two indices share memory
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        require(stride >= step, "inplace", f"True for an x of strides {tuple(x.stride())}, elements of which share memory", "False")
        step = stride * (size - 1) + step


def check_k(x: Tensor, k: int, dim: int) -> int:
    """Check how many elements are wanted of each row."""
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TypeError(f"k: got {k!r}, accepted: an integer")
    n = x.shape[dim] if x.ndim else 1
    require(1 <= index(k) <= min(n, MOST_K), "k", k, f"1 … {min(n, MOST_K)} for rows of {n} elements")
    return index(k)


def _mask(x: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask: got {mask.dtype if isinstance(mask, Tensor) else type(mask).__name__}, accepted: a bool tensor, True keeps")
    return _expand("mask", x, mask)


def _expand(name: str, x: Tensor, t: Tensor) -> Tensor:
    require(t.device == x.device, name, f"a tensor on {t.device}", f"one on x's device, {x.device}")
    try:
        return t.expand(x.shape)
    except RuntimeError:
        raise InputError(f"{name}: got shape {tuple(t.shape)}, accepted: a shape that broadcasts to x's {tuple(x.shape)}") from None
