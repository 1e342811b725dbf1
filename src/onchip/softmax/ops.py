"""The kernels as torch operators, `onchip::softmax_forward` and `onchip::softmax_backward`, and their derivatives.

The operators are opaque to torch.compile and export and know nothing of autograd; the two `autograd.Function`s carry the derivatives:

    of softmax        dx = onchip::softmax_backward(dy, y); y is saved, x is not
    of its gradient   by the reference, in plain torch, so every higher order follows
"""
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.softmax import reference
from onchip.softmax.contract import Spec

_library = torch.library.Library("onchip", "FRAGMENT")
_library.define("softmax_forward(Tensor x, Tensor? mask, int dim, float scale, bool causal, bool log, ScalarType dtype) -> Tensor")
_library.define("softmax_backward(Tensor dy, Tensor y, int dim, float scale, bool hiding, bool log, ScalarType dtype) -> Tensor")


def _forward(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype) -> Tensor:
    from onchip.softmax.triton import forward  # Triton is imported when a kernel first runs

    return forward(x, mask, Spec(dim, log, scale, causal, causal or mask is not None, dtype))


def _backward(dy: Tensor, y: Tensor, dim: int, scale: float, hiding: bool, log: bool, dtype: torch.dtype) -> Tensor:
    from onchip.softmax.triton import backward

    return backward(dy, y, Spec(dim, log, scale, False, hiding, y.dtype), dtype)


_library.impl("softmax_forward", _forward, "CompositeExplicitAutograd")
_library.impl("softmax_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("onchip::softmax_forward", lib=_library)
def _(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.register_fake("onchip::softmax_backward", lib=_library)
def _(dy: Tensor, y: Tensor, dim: int, scale: float, hiding: bool, log: bool, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _vmap(op: Any, info: Any, in_dims: tuple[int | None, ...], first: Tensor, second: Tensor | None, *rest: Any) -> tuple[Tensor, int]:
    """The batch goes in front of both tensors, where `dim`, counted from the end, does not see it."""
    def batched(t: Tensor | None, at: int | None) -> Tensor | None:
        if t is None:
            return None
        return t.movedim(at, 0) if at is not None else t.expand(info.batch_size, *t.shape)

    return op(batched(first, in_dims[0]), batched(second, in_dims[1]), *rest), 0


_softmax_forward, _softmax_backward = torch.ops.onchip.softmax_forward.default, torch.ops.onchip.softmax_backward.default


@torch.library.register_vmap("onchip::softmax_forward", lib=_library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return _vmap(_softmax_forward, info, in_dims, *args)


@torch.library.register_vmap("onchip::softmax_backward", lib=_library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return _vmap(_softmax_backward, info, in_dims, *args)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _vmap(_SoftmaxBothModes.apply, info, in_dims, *args)

    @staticmethod
    def forward(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype) -> Tensor:
        return _softmax_forward(x, mask, dim, scale, causal, log, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, dim, scale, causal, log, _ = inputs
        ctx.save_for_backward(output)
        ctx.options = (dim, scale, causal or mask is not None, log, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        gradient = _softmax_backward if torch.compiler.is_compiling() else _SoftmaxGradient.apply
        return gradient(dy, y, *ctx.options), None, None, None, None, None, None


class _SoftmaxBothModes(_Softmax):
    """With the forward mode, which torch.compile cannot trace through an `autograd.Function`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Softmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tx: Tensor, *_: None) -> Tensor:
        dim, scale, hiding, log, _ = ctx.options
        (y,) = ctx.saved_tensors
        return reference.tangent(tx, y, Spec(dim, log, scale, False, hiding, y.dtype)).to(y.dtype)


class _SoftmaxGradient(torch.autograd.Function):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _vmap(_SoftmaxGradient.apply, info, in_dims, *args)

    @staticmethod
    def forward(dy: Tensor, y: Tensor, dim: int, scale: float, hiding: bool, log: bool, dtype: torch.dtype) -> Tensor:
        return _softmax_backward(dy, y, dim, scale, hiding, log, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, y, dim, scale, hiding, log, dtype = inputs
        ctx.save_for_backward(dy, y)
        ctx.save_for_forward(dy, y)
        spec = Spec(dim, log, scale, False, hiding, y.dtype)
        ctx.function = lambda dy, y: reference.backward(dy, y, spec).to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.func.vjp(ctx.function, *ctx.saved_tensors)[1](g), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        known = tuple(torch.zeros_like(t) if dt is None else dt for t, dt in zip(ctx.saved_tensors, tangents[:2], strict=True))
        return torch.func.jvp(ctx.function, ctx.saved_tensors, known)[1]


# `apply` asks for the signature at every call; to have it ready saves it some 20 µs.
for _function in (_Softmax.forward, _SoftmaxGradient.forward):
    setattr(_function, "__signature__", inspect.signature(_function))  # noqa: B010  functions have no such attribute to a type checker


def softmax(x: Tensor, mask: Tensor | None, spec: Spec) -> Tensor:
    """`reference.forward` by the kernels, with derivatives of every order."""
    arguments = (x, mask, spec.dim, spec.scale, spec.causal, spec.log, spec.dtype)
    if torch.compiler.is_compiling():
        return _Softmax.apply(*arguments)
    return _SoftmaxBothModes.apply(*arguments) if _differentiated(x) else _softmax_forward(*arguments)


def _differentiated(x: Tensor) -> bool:
    """Some derivative may be asked for: reverse mode, a torch.func transform, or forward mode."""
    return (x.requires_grad and torch.is_grad_enabled()) or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
