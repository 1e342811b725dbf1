"""Derivatives of the attention operators, of every order and in both modes.

    of attention       onchip::attention_backward on the saved q, k, v, out and lse
    of its gradient    by `reference.explicit`, dense plain torch in O(N²) memory; so are all higher orders, and forward mode

Two `autograd.Function`s carry them where Python runs; in a traced graph the operator stands by itself and carries the first.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from onchip.attention import ops
from onchip.attention import vmap as rules
from onchip.attention.contract import Arguments, describe
from onchip.attention.ops import TENSORS
from onchip.attention.problem import Spec
from onchip.attention.reference import explicit


def attention(call: Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call, with derivatives; nothing is saved for a backward that cannot come."""
    if torch._C._are_functorch_transforms_active():  # a derivative may be asked of tensors that do not say so
        return _transformed(call)
    if torch.compiler.is_compiling():
        return ops.forward_op(*call)
    if forward_ad._current_level >= 0:
        return _Functional.apply(*call)
    q, k, v, bias, sinks = call.q, call.k, call.v, call.bias, call.sinks
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
                                    or (sinks is not None and sinks.requires_grad)):
        return _Eager.apply(*call)
    return _run(ops.forward, ops.forward_op, call)


def attention_again(route: ops.Route, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`attention` of a call whose route `ops.known` found."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _Known.apply(q, k, v, route)
    return route.again(q, k, v)


@torch.compiler.disable(reason="torch.compile of a torch.func transform of onchip.attention: that function runs uncompiled")
def _transformed(call: Arguments) -> tuple[Tensor, Tensor]:
    return _Functional.apply(*call)


def _run(implementation: Any, op: Any, args: tuple[Any, ...]) -> Any:
    """`op`, of which nothing is differentiated here, by the shortest way: the dispatcher takes 40 µs over its many arguments."""
    first = args[:5]  # q, k, v, and beside them bias and mask, or on the way back dout and dlse
    if (_PLAIN.issuperset(map(type, first)) and not any(x is not None and x.is_neg() for x in first) and not (
            args[0].is_meta or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())):
        return implementation(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


_PLAIN = {Tensor, Parameter, type(None)}


class _Eager(torch.autograd.Function):
    """The plain form, for plain tensors: with `setup_context` a call costs 70 µs, without 33."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        output = _run(ops.forward, ops.forward_op, args)
        _save(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _pull_back(ctx, *cotangents)


class _Known(torch.autograd.Function):
    """`_Eager` for a call whose route `ops.known` found: 4 arguments to carry, not 20."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: ops.Route) -> tuple[Tensor, Tensor]:
        output = route.again(q, k, v)
        ctx.save_for_backward(q, k, v, *output)
        ctx.numbers = route.numbers
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        tensors = (q, k, v, *(None,) * (TENSORS - 3))
        dq, dk, dv, _, _ = _gradients(dout, dlse, tensors, out, lse, [*ctx.needs_input_grad[:3], False, False], ctx.numbers)
        return dq, dk, dv, None


class _Functional(torch.autograd.Function):
    """The form torch.func's transforms and forward mode take."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> rules.Result:
        return rules.forward(_Functional.apply, info, in_dims, *args)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _run(ops.forward, ops.forward_op, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:TENSORS])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _pull_back(ctx, *cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        primals, constants, spec = _split(ctx.saved_tensors[:TENSORS], ctx.numbers)
        return _jvp(lambda *xs: explicit.forward(xs, constants, spec), primals, (*tangents[:4], tangents[6]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.numbers = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _pull_back(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    need_q, need_k, need_v, need_bias, _, _, need_sinks, *_ = ctx.needs_input_grad
    needs = [need_q, need_k, need_v, need_bias, need_sinks]
    dq, dk, dv, dbias, dsinks = _gradients(dout, dlse, tensors, out, lse, needs, ctx.numbers)
    return dq, dk, dv, dbias, None, None, dsinks, *(None,) * (len(ctx.needs_input_grad) - 7)


def _gradients(dout: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor | None], out: Tensor, lse: Tensor, needs: list[bool],
               numbers: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Those of q, k, v, bias and sinks that are needed."""
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    # differentiable where someone may differentiate it: autograd turns gradients off elsewhere
    args = (dout, dlse, *tensors[:3], out, lse, *tensors[3:], needs, *numbers)
    grads = _Gradient.apply(*args) if torch.is_grad_enabled() else _run(ops.backward, ops.backward_op, args)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


class _Gradient(torch.autograd.Function):
    """The gradient operator with its own derivatives; takes what the operator takes.

    A gradient is a function of dout, dlse and the inputs; out and lse are themselves functions of the inputs and get no gradient here.
    """

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> rules.Result:
        return rules.backward(_Gradient.apply, info, in_dims, *args)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _run(ops.backward, ops.backward_op, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors = inputs[:5] + inputs[7:14]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.needs, *ctx.numbers = inputs[14:]

    @staticmethod
    def _function(ctx: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
        """The gradient as a differentiable function of (dout, dlse, q, k, v, bias, sinks), and its arguments."""
        dout, dlse, *tensors = ctx.saved_tensors
        primals, constants, spec = _split(tensors, ctx.numbers)

        def function(dout: Tensor, dlse: Tensor | None, *primals: Any) -> tuple[Tensor, ...]:
            return tuple(explicit.backward(dout, dlse, primals, constants, spec, ctx.needs))

        return function, (dout, dlse, *primals)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        function, inputs = _Gradient._function(ctx)
        present = [n for n, x in enumerate(inputs) if x is not None]
        wanted = tuple(g for g, need in zip(cotangents, ctx.needs, strict=True) if need)
        with ops.exact(wanted[0]):
            pull = torch.func.vjp(_with_holes(function, inputs, present), *(inputs[n] for n in present))[1]
            pulled = dict(zip(present, pull(wanted), strict=True))
        ddout, ddlse, dq, dk, dv, dbias, dsinks = (pulled.get(n) for n in range(len(inputs)))
        return ddout, ddlse, dq, dk, dv, None, None, dbias, None, None, dsinks, *(None,) * (4 + len(ctx.numbers))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        function, inputs = _Gradient._function(ctx)
        grads = iter(_jvp(function, inputs, (*tangents[:5], tangents[7], tangents[10])))
        return tuple(next(grads) if need else ctx.saved_tensors[0].new_empty(0) for need in ctx.needs)


def _split(tensors: Any, numbers: tuple[Any, ...]) -> tuple[explicit.Primals, explicit.Constants, Spec]:
    """What has a derivative, what has none, and the spec."""
    call = Arguments(*tensors, *numbers)
    constants = (call.mask, call.alibi_slopes, call.cu_seqlens_q, call.cu_seqlens_k, call.dropout_seed)
    return (call.q, call.k, call.v, call.bias, call.sinks), constants, describe(call).spec


def _with_holes(function: Any, inputs: tuple[Tensor | None, ...], present: list[int]) -> Any:
    """`function` of only the `present` inputs: functional transforms take no None."""
    def inner(*chosen: Tensor) -> Any:
        whole = list(inputs)
        for n, x in zip(present, chosen, strict=True):
            whole[n] = x
        return function(*whole)

    return inner


def _jvp(function: Any, inputs: tuple[Tensor | None, ...], tangents: tuple[Tensor | None, ...]) -> Any:
    """J t by transposing twice, u ↦ Jᵀu being linear: forward mode does not nest, reverse mode does."""
    present = [n for n, t in enumerate(tangents) if t is not None]
    with ops.exact(next(t for t in tangents if t is not None)):
        out, pull = torch.func.vjp(_with_holes(function, inputs, present), *(inputs[n] for n in present))[:2]
        pull_back = torch.func.vjp(lambda *u: pull(u), *map(torch.zeros_like, out))[1]
        return pull_back(tuple(tangents[n] for n in present))


# The same derivatives for the operator itself, as it stands in a traced graph.
torch.library.register_autograd("onchip::attention_forward", _pull_back, setup_context=_save, lib=ops.library)
