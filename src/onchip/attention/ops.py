"""Attention as torch operators: `onchip::attention_forward` and `onchip::attention_backward`.

They are opaque to torch.compile and export. Inside, `dispatch` chooses the implementation, so a traced graph holds one node whatever runs.
Fakes make the outputs with the very function the implementations use: strides agree. `derivatives` differentiates them.
"""
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_deterministic_algorithms,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

from onchip.attention import vmap as rules
from onchip.attention.contract import Arguments, describe, empty_like_q, empty_lse
from onchip.attention.dispatch import choose, implementation
from onchip.attention.problem import Spec
from onchip.roofline.attention import useful_flops
from onchip.roofline.backward import backward_flops
from onchip.roofline.shape import AttentionShape

TENSORS = 10  # of `Arguments`; the rest are numbers
_OPTIONS = ("Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
            "Tensor? dropout_seed")
_NUMBERS = ("SymInt max_seqlen_q, SymInt max_seqlen_k, int causal, int window_left, int window_right, float? scale, float softcap, "
            "float dropout_p, bool deterministic, str backend")

library = torch.library.Library("onchip", "FRAGMENT")
library.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}, {_NUMBERS}) -> (Tensor out, Tensor lse)")
library.define("attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
                f"{_OPTIONS}, bool[] needs, {_NUMBERS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)")


class Route(NamedTuple):
    """How calls of one kind run. They share shapes, strides, dtypes, device, numbers, and the alignment of their tensors: everything but
    the data. So what depends on nothing else is worked out at the first of them."""

    backend: str
    spec: Spec
    numbers: tuple[Any, ...]  # of `Arguments`
    as_given: bool  # the backend takes the tensors as they come
    memo: dict[str, Any]  # the implementation's own

    def again(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of a call whose route `known` found. An implementation may have left the shortest way in its memo: a function `again`
        of q, k and v that does for calls of this kind what it did for the first."""
        again = self.memo.get("again")
        if again is not None:
            return again(q, k, v)
        return implementation(self.backend, "forward")(q, k, v, None, None, None, None, None, None, None, self.spec, self.memo)


_ROUTES: dict[tuple[Any, ...], Route] = {}  # by what checked calls have in common, and by `plain`
_MOST_ROUTES = 4096
known = _ROUTES.get


def _kind(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def _switches(q: Tensor) -> tuple[Any, ...]:
    """Those of torch that decide how a call runs."""
    return (_get_deterministic_algorithms(),
            q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.fp32_precision)


def _route(call: tuple[Any, ...], *more: Any) -> Route:
    """The route of calls like `call`, the fields of `Arguments`; `more` is what else they have in common."""
    q = call[0]
    kind = (*map(_kind, call[:TENSORS]), call[TENSORS:], q.device, _switches(q), more)
    route = _ROUTES.get(kind)
    return _remember(kind, _make_route(Arguments(*call))) if route is None else route


def _remember(kind: tuple[Any, ...], route: Route) -> Route:
    if len(_ROUTES) >= _MOST_ROUTES:
        _ROUTES.clear()
    _ROUTES[kind] = route
    return route


def _make_route(call: Arguments) -> Route:
    problem = describe(call)
    backend = choose(problem, call.backend)
    if 0 in (problem.batch, problem.heads, problem.seq_q, problem.seq_k):  # no score, no kernel
        backend = "reference"
    as_given = call.bias is None and call.mask is None and all(_unit_last(x) is x for x in call[:3])
    return Route(backend, problem.spec, call[TENSORS:], as_given, {})


_SIMPLE = {type(None), bool, int, float, str}
_WIDTHS = {type(None), int}


def plain(q: Tensor, k: Tensor, v: Tensor, causal: Any, window: Any, scale: Any, softcap: Any, deterministic: Any,
          backend: Any) -> tuple[Any, ...] | None:
    """All that decides a dense call with these arguments and no others, as one key: the way past checks and `_route`, which look at a call
    field by field (10 µs, and 20 where the host has just waited for the device).

    None where more takes part than memory and switches (compiling, a transform, a mode, autocast, a subclass, a tensor that is the negative
    of its memory), or an argument that has no fixed value: the long way then serves or refuses.
    """
    types = (type(causal), type(scale), type(softcap), type(deterministic), type(backend))  # to a dictionary True, 1 and 1.0 are one
    if (is_dynamo_compiling() or not type(q) is type(k) is type(v) is Tensor or _are_functorch_transforms_active()
            or _len_torch_dispatch_stack() or _len_torch_function_stack() or _is_any_autocast_enabled() or forward_ad._current_level >= 0
            or q.is_neg() or k.is_neg() or v.is_neg() or not _SIMPLE.issuperset(types)
            or not (window is None or (type(window) is tuple and _WIDTHS.issuperset(map(type, window))))):
        return None
    dtype = q.dtype
    try:
        return (q.shape, q.stride(), q.data_ptr() % 16, k.shape, k.stride(), k.data_ptr() % 16, v.shape, v.stride(), v.data_ptr() % 16,
                dtype, k.dtype, v.dtype, q.device, k.device, v.device, types, causal, window, scale, softcap, deterministic, backend,
                _get_deterministic_algorithms(), dtype is torch.float32 and _switches(q))
    except RuntimeError:  # a sparse or nested tensor
        return None


def learn(key: tuple[Any, ...], call: Arguments) -> None:
    """Let `known` find the route of `call`, which the checks made of the arguments of `key`."""
    route = _route(call)
    if route.as_given and not call.q.is_meta:
        _remember(key, route)


def _operands(call: Arguments) -> tuple[Any, ...]:
    """The tensors as implementations take them: unit last stride in q, k, v; bias and mask as full-size views."""
    bias, mask = call.bias, call.mask
    if bias is not None or mask is not None:
        full = (*call.q.shape[:3], call.k.shape[2])
        bias, mask = (None if x is None else x.expand(full) for x in (bias, mask))
    return *map(_unit_last, call[:3]), bias, mask, *call[5:TENSORS]


def _unit_last(x: Tensor) -> Tensor:
    """`x`, copied (in the same memory order) if its last stride is not 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else empty_like_q(x, x.shape[-1]).copy_(x)


_AS_IT_IS = nullcontext()


def exact(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast has done its part in the contract; inside, it would round what implementations compute in fp32."""
    return torch.autocast(x.device.type, enabled=False) if _is_any_autocast_enabled() else _AS_IT_IS


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """What `onchip::attention_forward` does, on tensors that hold data."""
    route = _route(args)
    operands = args[:TENSORS] if route.as_given else _operands(Arguments(*args))
    with exact(args[0]):
        return implementation(route.backend, "forward")(*operands, route.spec, route.memo)


def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             *rest: Any) -> tuple[Tensor, ...]:
    """What `onchip::attention_backward` does: a gradient for each True in needs, an empty tensor for each False."""
    options, needs, numbers = rest[:7], tuple(rest[7]), rest[8:]
    call = Arguments(q, k, v, *options, *numbers)
    if needs[3] and call.bias is not None and 0 in call.bias.stride():
        call = call._replace(bias=call.bias.contiguous())  # every element of an expanded bias has a gradient of its own
    dout, dlse = _unit_last(dout), None if dlse is None else dlse.contiguous()
    route = _route(call, needs, *map(_kind, (dout, dlse, out, lse)))
    operands = call[:TENSORS] if route.as_given else _operands(call)
    with exact(q):
        grads = implementation(route.backend, "backward")(dout, dlse, *operands[:3], out, lse, *operands[3:], route.spec, needs, route.memo)
    dtypes = (q.dtype, k.dtype, v.dtype, *(q.dtype if x is None else x.dtype for x in (call.bias, call.sinks)))
    return tuple(q.new_empty(0) if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True))


library.impl("attention_forward", forward, "CompositeExplicitAutograd")
library.impl("attention_backward", backward, "CompositeExplicitAutograd")


@torch.library.register_fake("onchip::attention_forward", lib=library)
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = empty_lse(q, dtype) if q.dim() == 4 else q.new_empty((q.shape[1], q.shape[0]), dtype=dtype)
    return empty_like_q(q, v.shape[-1]), lse


@torch.library.register_fake("onchip::attention_backward", lib=library)
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bias, sinks, needs = rest[0], rest[3], rest[7]
    grads = [empty_like_q(x, x.shape[-1]) if need else q.new_empty(0) for x, need in zip((q, k, v), needs, strict=False)]
    return *grads, *(x.new_empty(x.shape) if need else q.new_empty(0) for x, need in zip((bias, sinks), needs[3:], strict=True))


forward_op, backward_op = torch.ops.onchip.attention_forward.default, torch.ops.onchip.attention_backward.default


@torch.library.register_vmap("onchip::attention_forward", lib=library)
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> rules.Result:
    return rules.forward(forward_op, info, in_dims, *args)


@torch.library.register_vmap("onchip::attention_backward", lib=library)
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> rules.Result:
    return rules.backward(backward_op, info, in_dims, *args)


def _shapes(call: Arguments) -> list[AttentionShape]:
    """The dense problems of a call, for counting; packed offsets that cannot be read (fake tensors) count as longest sequences."""
    problem = describe(call)
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        lengths = [(problem.seq_q, problem.seq_k)]
    elif type(call.cu_seqlens_q) is Tensor:
        lengths = list(zip(torch.diff(call.cu_seqlens_q).tolist(), torch.diff(call.cu_seqlens_k).tolist(), strict=True))
    else:
        lengths = [(problem.seq_q, problem.seq_k)] * problem.batch
    batch = 1 if problem.varlen else problem.batch
    sizes = ((seq_q, seq_k, problem.head_dim, problem.head_dim_v, batch, problem.heads, problem.kv_heads) for seq_q, seq_k in lengths)
    return [AttentionShape(*size, problem.causal, problem.window) for size in sizes if 0 not in size]


@register_flop_formula([torch.ops.onchip.attention_forward], get_raw=True)
def _(*args: Any, out_val: Any = None, **_: Any) -> int:
    return sum(map(useful_flops, _shapes(Arguments(*args))))


@register_flop_formula([torch.ops.onchip.attention_backward], get_raw=True)
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, out_val: Any = None,
      **_: Any) -> int:
    """The gradients' four matmuls, and the scores once more."""
    shapes = _shapes(Arguments(q, k, v, *rest[:7], *rest[8:]))
    return sum(backward_flops(shape) + useful_flops(shape) * shape.head_dim // (shape.head_dim + shape.head_dim_v) for shape in shapes)
