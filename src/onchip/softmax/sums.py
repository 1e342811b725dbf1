"""log Σ exp and the selection of the largest as torch operators, and their derivatives.

    of log Σ exp s     ds = g · exp(s − log Σ exp s), elementwise: x is read again, nothing but the sums is saved beside it
    of that            by the reference, in plain torch, so every higher order follows
    of a selection     that of torch's gather, softmax and exp, and of log Σ exp: `select` composes them
"""
import inspect
from typing import Any

import torch
from torch import Tensor

from onchip.softmax import reference
from onchip.softmax.contract import Spec
from onchip.softmax.ops import alone, batched, differentiated, library

library.define("logsumexp_forward(Tensor x, Tensor? mask, Tensor? bias, int dim, float scale, bool causal) -> Tensor")
library.define("logsumexp_backward(Tensor g, Tensor sums, Tensor x, Tensor? mask, Tensor? bias, int dim, float scale, bool causal, "
               "float factor, ScalarType dtype) -> Tensor")
library.define("softmax_topk(Tensor x, int k, int dim, bool renormalize, ScalarType dtype) -> (Tensor values, Tensor indices, Tensor sums)")


def _spec(mask: Tensor | None, dim: int, scale: float, causal: bool) -> Spec:
    return Spec(dim, False, scale, causal, causal or mask is not None, torch.float32, True)


def _forward(x: Tensor, mask: Tensor | None, bias: Tensor | None, dim: int, scale: float, causal: bool) -> Tensor:
    from onchip.softmax.triton import launch

    return launch.forward(x, mask, _spec(mask, dim, scale, causal), bias)


def _backward(g: Tensor, sums: Tensor, x: Tensor, mask: Tensor | None, bias: Tensor | None, dim: int, scale: float, causal: bool,
              factor: float, dtype: torch.dtype) -> Tensor:
    from onchip.softmax.triton import tile_sums

    return tile_sums.backward(g, sums, x, mask, bias, _spec(mask, dim, scale, causal), factor, dtype)


def _topk(x: Tensor, k: int, dim: int, renormalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    from onchip.softmax.triton.topk import topk

    return topk(x, k, dim, renormalize, dtype)


for _name, _function in (("logsumexp_forward", _forward), ("logsumexp_backward", _backward), ("softmax_topk", _topk)):
    library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("onchip::logsumexp_forward", lib=library)
def _(x: Tensor, mask: Tensor | None, bias: Tensor | None, dim: int, scale: float, causal: bool) -> Tensor:
    return x.new_empty(_spec(mask, dim, scale, causal).shape(x), dtype=torch.float32)


@torch.library.register_fake("onchip::logsumexp_backward", lib=library)
def _(g: Tensor, sums: Tensor, x: Tensor, mask: Tensor | None, bias: Tensor | None, dim: int, scale: float, causal: bool, factor: float,
      dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.register_fake("onchip::softmax_topk", lib=library)
def _(x: Tensor, k: int, dim: int, renormalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    leading = x.movedim(dim, -1).shape[:-1]
    return (x.new_empty((*leading, k), dtype=dtype), x.new_empty((*leading, k), dtype=torch.int64),
            x.new_empty((*leading, 1), dtype=torch.float32))


forward_op, backward_op = torch.ops.onchip.logsumexp_forward.default, torch.ops.onchip.logsumexp_backward.default
topk_op = torch.ops.onchip.softmax_topk.default


@torch.library.register_vmap("onchip::logsumexp_forward", lib=library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return forward_op(*batched(info, args, in_dims)), 0


@torch.library.register_vmap("onchip::logsumexp_backward", lib=library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return backward_op(*batched(info, args, in_dims)), 0


@torch.library.register_vmap("onchip::softmax_topk", lib=library)
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return topk_op(*batched(info, args, in_dims)), (0, 0, 0)


class _Sums(torch.autograd.Function):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _SumsBothModes.apply(*batched(info, args, in_dims)), 0

    @staticmethod
    def forward(x: Tensor, known: Tensor | None, mask: Tensor | None, bias: Tensor | None, dim: int, scale: float,
                causal: bool) -> Tensor:
        """`known`: the sums, where another kernel has them already."""
        return (_forward if alone(x, bias) else forward_op)(x, mask, bias, dim, scale, causal) if known is None else known.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, mask, bias, *ctx.options = inputs
        ctx.save_for_backward(output, x, mask, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        sums, x, mask, bias = ctx.saved_tensors
        gradient = backward_op if torch.compiler.is_compiling() else _SumsGradient.apply
        dbias = gradient(g, sums, x, mask, bias, *ctx.options, 1.0, bias.dtype) if ctx.needs_input_grad[3] else None
        dx = gradient(g, sums, x, mask, bias, *ctx.options, ctx.options[1], x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, dbias, None, None, None


class _SumsBothModes(_Sums):
    """With the forward mode, which torch.compile cannot trace through an `autograd.Function`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Sums.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output, inputs[0], inputs[2], inputs[3])

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, known: None, tmask: None, tbias: Tensor | None, *_: None) -> Tensor:
        sums, x, mask, bias = ctx.saved_tensors
        dim, scale, causal = ctx.options
        ones = torch.ones_like(sums)
        p = reference.spread(ones, sums, x, mask, bias, _spec(mask, dim, scale, causal), 1.0)
        moves = [factor * (p * t).sum(dim, keepdim=True) for t, factor in ((tx, scale), (tbias, 1.0)) if t is not None]
        return sum(moves[1:], moves[0])


class _SumsGradient(torch.autograd.Function):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _SumsGradient.apply(*batched(info, args, in_dims)), 0

    @staticmethod
    def forward(g: Tensor, sums: Tensor, x: Tensor, mask: Tensor | None, bias: Tensor | None, dim: int, scale: float, causal: bool,
                factor: float, dtype: torch.dtype) -> Tensor:
        return (_backward if alone(g, x, bias) else backward_op)(g, sums, x, mask, bias, dim, scale, causal, factor, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, sums, x, mask, bias, dim, scale, causal, factor, dtype = inputs
        ctx.save_for_backward(g, sums, x, mask, bias)
        ctx.save_for_forward(g, sums, x, mask, bias)
        ctx.function = lambda g, sums, x, mask, bias: reference.spread(
            g, sums, x, mask, bias, _spec(mask, dim, scale, causal), factor).to(dtype)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mask, bias = ctx.saved_tensors
        if bias is None:
            return *torch.func.vjp(lambda *t: ctx.function(*t, mask, None), *inputs)[1](h), *[None] * 7
        *gradients, dbias = torch.func.vjp(lambda *t: ctx.function(*t[:3], mask, t[3]), *inputs, bias)[1](h)
        return *gradients, None, dbias, *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        tensors = ctx.saved_tensors
        moving = [at for at, t in enumerate(tangents[:5]) if t is not None]

        def function(*moved: Tensor) -> Tensor:
            inputs = list(tensors)
            for at, t in zip(moving, moved, strict=True):
                inputs[at] = t
            return ctx.function(*inputs)

        return torch.func.jvp(function, tuple(tensors[at] for at in moving), tuple(tangents[at] for at in moving))[1]


for _method in (_Sums.forward, _SumsGradient.forward):
    setattr(_method, "__signature__", inspect.signature(_method))  # noqa: B010  as in `ops`


def logsumexp(x: Tensor, mask: Tensor | None, spec: Spec, bias: Tensor | None = None, known: Tensor | None = None) -> Tensor:
    """`reference.forward` of a spec of sums by the kernels, in float32, with derivatives of every order."""
    options = (spec.dim, spec.scale, spec.causal)
    if torch.compiler.is_compiling():
        return _Sums.apply(x, known, mask, bias, *options)
    if differentiated(x, bias):
        return _SumsBothModes.apply(x, known, mask, bias, *options)
    return (_forward if alone(x, bias) else forward_op)(x, mask, bias, *options)


def select(x: Tensor, k: int, dim: int, renormalise: bool, dtype: torch.dtype, kernels: bool) -> tuple[Tensor, Tensor]:
    """Values of softmax in `dtype` and indices of the k largest along `dim` < 0, moved last; by the kernels or by torch's own."""
    if kernels and not torch.compiler.is_compiling() and not differentiated(x):
        values, indices, _ = (_topk if alone(x) else topk_op)(x, k, dim, renormalise, dtype)
        return values, indices
    moved = x.movedim(dim, -1)
    with torch.no_grad():
        indices, sums = topk_op(x.detach(), k, dim, renormalise, dtype)[1:] if kernels else (torch.topk(moved, k).indices, None)
    if renormalise:
        return torch.softmax(reference.wide(moved.gather(-1, indices)), -1).to(dtype), indices
    if sums is None:
        return torch.softmax(reference.wide(moved), -1).gather(-1, indices).to(dtype), indices
    total = logsumexp(moved, None, Spec(-1, False, 1.0, False, False, torch.float32, True), known=sums)
    return (reference.wide(moved.gather(-1, indices)) - total).exp().to(dtype), indices
