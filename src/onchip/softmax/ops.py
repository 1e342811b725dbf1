"""The kernels as torch operators and their derivatives: what softmax and its logarithm share. `sums` holds the others.

The operators are opaque to torch.compile and export and know nothing of autograd; the two `autograd.Function`s carry the derivatives:

    of softmax        dx = onchip::softmax_backward(dy, y); y is saved, x is not
    of its gradient   by the reference, in plain torch, so every higher order follows
"""
import inspect
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from onchip.softmax import reference
from onchip.softmax.contract import Spec

library = torch.library.Library("onchip", "FRAGMENT")
library.define("softmax_forward(Tensor x, Tensor? mask, int dim, float scale, bool causal, bool log, ScalarType dtype, "
               "Tensor? bias=None) -> Tensor")
library.define("softmax_backward(Tensor dy, Tensor y, int dim, float scale, bool hiding, bool log, ScalarType dtype) -> Tensor")
library.define("softmax_inplace(Tensor(a!) x, Tensor? mask, int dim, float scale, bool causal, bool log, Tensor? bias=None) -> ()")


def _forward(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype,
             bias: Tensor | None = None) -> Tensor:
    from onchip.softmax.triton import launch  # Triton is imported when a kernel first runs

    return launch.forward(x, mask, Spec(dim, log, scale, causal, causal or mask is not None, dtype), bias)


def _backward(dy: Tensor, y: Tensor, dim: int, scale: float, hiding: bool, log: bool, dtype: torch.dtype) -> Tensor:
    from onchip.softmax.triton import launch

    return launch.backward(dy, y, Spec(dim, log, scale, False, hiding, y.dtype), dtype)


def _inplace(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, bias: Tensor | None = None) -> None:
    from onchip.softmax.triton import launch

    launch.forward(x, mask, Spec(dim, log, scale, causal, causal or mask is not None, x.dtype), bias, out=x)


library.impl("softmax_forward", _forward, "CompositeExplicitAutograd")
library.impl("softmax_backward", _backward, "CompositeExplicitAutograd")
library.impl("softmax_inplace", _inplace, "CompositeExplicitAutograd")


@torch.library.register_fake("onchip::softmax_forward", lib=library)
def _(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype,
      bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.register_fake("onchip::softmax_backward", lib=library)
def _(dy: Tensor, y: Tensor, dim: int, scale: float, hiding: bool, log: bool, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


@torch.library.register_fake("onchip::softmax_inplace", lib=library)
def _(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, bias: Tensor | None = None) -> None:
    return None


def batched(info: Any, args: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> list[Any]:
    """Arguments with the batch in front of every tensor, where `dim`, counted from the end, does not see it."""
    def one(value: Any, at: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.movedim(at, 0) if at is not None else value.expand(info.batch_size, *value.shape)

    return [one(value, at) for value, at in zip(args, in_dims, strict=True)]


forward_op, backward_op = torch.ops.onchip.softmax_forward.default, torch.ops.onchip.softmax_backward.default
inplace_op = torch.ops.onchip.softmax_inplace.default


@torch.library.register_vmap("onchip::softmax_forward", lib=library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return forward_op(*batched(info, args, in_dims)), 0


@torch.library.register_vmap("onchip::softmax_backward", lib=library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return backward_op(*batched(info, args, in_dims)), 0


def alone(*tensors: Tensor | None) -> bool:
    """Nobody watches or changes what torch functions do, apart from reverse mode, and the tensors hold what they say: an operator's
    implementation may be called without the dispatcher, which takes some 10 µs for operators in Python. (It makes tensors that are the
    negative of their memory, such as ``z.conj().imag``, positive.)"""
    if (is_dynamo_compiling() or _are_functorch_transforms_active() or _len_torch_dispatch_stack() or _len_torch_function_stack()
            or forward_ad._current_level >= 0):
        return False
    for t in tensors:  # noqa: SIM110 a generator takes as long as all the rest
        if t is not None and t.is_neg():
            return False
    return True


class _Softmax(torch.autograd.Function):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _SoftmaxBothModes.apply(*batched(info, args, in_dims)), 0

    @staticmethod
    def forward(x: Tensor, mask: Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype,
                bias: Tensor | None) -> Tensor:
        return (_forward if alone(x, bias) else forward_op)(x, mask, dim, scale, causal, log, dtype, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, dim, scale, causal, log, _, bias = inputs
        ctx.save_for_backward(output)
        ctx.options = (dim, scale, causal or mask is not None, log, x.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        gradient = backward_op if torch.compiler.is_compiling() else _SoftmaxGradient.apply
        dim, scale, hiding, log, dtype = ctx.options
        dbias = None
        if ctx.needs_input_grad[7]:  # of s, before the scale, in float32: both gradients come from it
            ds = gradient(dy, y, dim, 1.0, hiding, log, torch.float32)
            dx, dbias = (scale * ds).to(dtype), ds.to(ctx.bias_dtype)
        else:
            dx = gradient(dy, y, dim, scale, hiding, log, dtype)
        return dx, None, None, None, None, None, None, dbias


class _SoftmaxBothModes(_Softmax):
    """With the forward mode, which torch.compile cannot trace through an `autograd.Function`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Softmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, *others: Tensor | None) -> Tensor:
        dim, scale, hiding, log, _ = ctx.options
        (y,) = ctx.saved_tensors
        moves = [reference.tangent(t, y, Spec(dim, log, factor, False, hiding, y.dtype))
                 for t, factor in ((tx, scale), (others[-1], 1.0)) if t is not None]
        return sum(moves[1:], moves[0]).to(y.dtype)


class _SoftmaxGradient(torch.autograd.Function):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _SoftmaxGradient.apply(*batched(info, args, in_dims)), 0

    @staticmethod
    def forward(dy: Tensor, y: Tensor, dim: int, scale: float, hiding: bool, log: bool, dtype: torch.dtype) -> Tensor:
        return (_backward if alone(dy) else backward_op)(dy, y, dim, scale, hiding, log, dtype)

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


def softmax(x: Tensor, mask: Tensor | None, spec: Spec, bias: Tensor | None = None) -> Tensor:
    """`reference.forward` by the kernels, with derivatives of every order."""
    arguments = (x, mask, spec.dim, spec.scale, spec.causal, spec.log, spec.dtype, bias)
    if torch.compiler.is_compiling():
        return _Softmax.apply(*arguments)
    if differentiated(x, bias):
        return _SoftmaxBothModes.apply(*arguments)
    return (_forward if alone(x, bias) else forward_op)(*arguments)


def softmax_inplace(x: Tensor, mask: Tensor | None, spec: Spec, bias: Tensor | None) -> Tensor:
    """The same in x's place; nothing can be differentiated."""
    if not is_dynamo_compiling() and x.is_neg():  # what its memory must hold is the opposite of the result
        return x.copy_(softmax(x, mask, spec, bias))
    inplace_op(x, mask, spec.dim, spec.scale, spec.causal, spec.log, None if bias is None else bias.resolve_neg())
    return x


def differentiated(*inputs: Tensor | None) -> bool:
    """Some derivative may be asked for: reverse mode, a torch.func transform, or forward mode."""
    return ((torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs))
            or _are_functorch_transforms_active() or forward_ad._current_level >= 0)
