"""What torch.vmap does with the operators: the mapped dimension joins the batch where it can, and is looped over where it cannot.

It joins when sequences are dense, sinks are neither mapped nor in want of a gradient for each example, and nothing is dropped: dropout
counts batches, and every example must draw the mask it would draw alone.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., tuple[Tensor, ...]]
Dims = tuple[Any, ...]
Result = tuple[tuple[Tensor, ...], tuple[int, ...]]


def forward(op: Op, info: Any, in_dims: Dims, *args: Any) -> Result:
    """The rule of `attention_forward`: q, k, v, bias, mask, slopes, sinks, offsets, seed, numbers."""
    n = info.batch_size
    if not _joins(in_dims[3:10], args[3:10]):
        return _loop(op, n, in_dims, args)
    q, k, v = (_join(x, at, n) for x, at in zip(args[:3], in_dims[:3], strict=True))
    batch = q.shape[0] // max(n, 1)
    shared = (_join_shared(x, at, n, batch) for x, at in zip(args[3:6], in_dims[3:6], strict=True))
    return tuple(x.unflatten(0, (n, batch)) for x in op(q, k, v, *shared, *args[6:])), (0, 0)


def backward(op: Op, info: Any, in_dims: Dims, *args: Any) -> Result:
    """The rule of `attention_backward`: dout, dlse, q, k, v, out, lse, bias, mask, slopes, sinks, offsets, seed, needs, numbers."""
    n, needs = info.batch_size, args[14]
    if not _joins(in_dims[7:14], args[7:14]) or needs[4]:
        return _loop(op, n, in_dims, args)
    rows = [_join(x, at, n) for x, at in zip(args[:7], in_dims[:7], strict=True)]
    batch = rows[2].shape[0] // max(n, 1)
    bias = _join_shared(args[7], in_dims[7], n, batch, always=needs[3])
    mask, slopes = (_join_shared(x, at, n, batch) for x, at in zip(args[8:10], in_dims[8:10], strict=True))
    grads = [x.unflatten(0, (n, batch)) if need else x.expand(n, 0)
             for x, need in zip(op(*rows, bias, mask, slopes, *args[10:]), needs, strict=True)]
    if needs[3] and _front(args[7], in_dims[7], n).shape[1] == 1:
        grads[3] = grads[3].sum(1, keepdim=True)
    return tuple(grads), (0,) * 5


def _joins(in_dims: Dims, args: tuple[Tensor | None, ...]) -> bool:
    """Whether (bias, mask, slopes, sinks, cu_q, cu_k, seed) let the mapped dimension join the batch."""
    *_, cu_q, _, seed = args
    return cu_q is None and seed is None and in_dims[3] is None


def _front(x: Tensor, at: int | None, n: int) -> Tensor:
    """`x` as (n, …): mapped dimension in front, or repeated."""
    return x.expand(n, *x.shape) if at is None else x.movedim(at, 0)


def _join(x: Tensor | None, at: int | None, n: int) -> Any:
    return None if x is None else _front(x, at, n).flatten(0, 1)


def _join_shared(x: Tensor | None, at: int | None, n: int, batch: int, always: bool = False) -> Any:
    """A bias, mask or slopes: what all examples and batches share stays shared, unless each must have its own gradient (`always`)."""
    if x is None or (at is None and not always and (x.dim() == 1 or x.shape[0] == 1)):
        return x
    x = _front(x, at, n)
    if x.dim() == 2:  # slopes (n, Hq): one set for all batches of an example
        x = x[:, None]
    return x.expand(n, batch, *x.shape[2:]).flatten(0, 1)


def _loop(op: Op, n: int, in_dims: Dims, args: tuple[Any, ...]) -> Result:
    def one(i: int) -> tuple[Tensor, ...]:
        return op(*(x.select(at, i) if isinstance(at, int) else x for x, at in zip(args, in_dims, strict=True)))

    columns = zip(*map(one, range(n)), strict=True)
    outs = tuple(map(torch.stack, columns))
    return outs, (0,) * len(outs)
