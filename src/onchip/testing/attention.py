"""The truth about attention, written from the definition and from nothing else: dense, in float64, gradients by autograd.

A `Case` is a problem in plain numbers; `build` makes its tensors, `run` calls the library, `truth` says what is right, `check` holds one
against the other. The yardstick is `truth` once more in the dtype of the inputs, in several orders of summation: an implementation may err
twice as much as the worst of these eager runs, plus the rounding of its own results.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onchip.attention import attention, attention_varlen

Results = dict[str, Tensor]
LONG = 128  # terms from which on it matters to fp32 how a sum is ordered


class Target(NamedTuple):
    """Where a test runs."""

    backend: str
    device: str


@dataclass(frozen=True)
class Case:
    """One problem. `lengths` packs it: a (queries, keys) pair for each sequence, and `tail` tokens that belong to none."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    seq_q: int = 8
    seq_k: int = 8
    dim: int = 16
    dim_v: int = 16
    dtype: str = "float32"
    causal: Any = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: tuple[int, int, int, int] | None = None  # 1 where the bias is broadcast
    bias_dtype: str | None = None  # None: the dtype of q
    mask: tuple[int, int, int, int] | None = None
    alibi: int = 0  # dimensions of the slopes
    sinks: bool = False
    dropout_p: float = 0.0
    layout: str = "bhsd"
    lengths: tuple[tuple[int, int], ...] | None = None
    tail: int = 0
    size: float = 1.0  # standard deviation of q and k
    seed: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """What is passed to the library beside tensors."""
        return {"causal": self.causal, "window": self.window, "scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout_p}


@dataclass
class Inputs:
    """The tensors of a case: what has a gradient, what has none, and the gradients that come in."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    dout: Tensor
    dlse: Tensor
    names: list[str] = field(default_factory=list)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors whose gradients are compared, in the order of `names`."""
        return [getattr(self, name) for name in self.names]


def build(case: Case, device: str = "cpu") -> Inputs:
    """The tensors of `case`, the same on every device."""
    rng = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, size: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=rng) * size).to(device, kind)

    def operand(heads: int, seq: int, dim: int, size: float = 1.0) -> Tensor:
        if case.lengths is not None:
            return normal(seq, heads, dim, size=size)
        if case.layout == "bshd":
            return normal(case.batch, seq, heads, dim, size=size).transpose(1, 2)
        return normal(case.batch, heads, seq, dim, size=size)

    seq_q, seq_k, batch = case.seq_q, case.seq_k, case.batch
    if case.lengths is not None:
        seq_q, seq_k, batch = sum(a for a, _ in case.lengths) + case.tail, sum(b for _, b in case.lengths) + case.tail, len(case.lengths)
    q, k = operand(case.heads, seq_q, case.dim, case.size), operand(case.kv_heads, seq_k, case.dim, case.size)
    v, dout = operand(case.kv_heads, seq_k, case.dim_v), operand(case.heads, seq_q, case.dim_v)
    bias = mask = slopes = sinks = None
    if case.bias is not None:
        bias = normal(*case.bias, kind=getattr(torch, case.bias_dtype or case.dtype))
    if case.mask is not None:
        mask = (torch.rand(case.mask, generator=rng) < 0.6).to(device)
    if case.alibi:
        slopes = torch.rand((case.heads,) if case.alibi == 1 else (batch, case.heads), generator=rng).to(device)
    if case.sinks:
        sinks = normal(case.heads)
    rows = (case.heads, seq_q) if case.lengths is not None else (batch, case.heads, seq_q)
    dlse = normal(*rows, kind=torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = Inputs(q, k, v, bias, sinks, mask, slopes, dout, dlse)
    for name in ("q", "k", "v", "bias", "sinks"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).requires_grad_()
            inputs.names.append(name)
    return inputs


def offsets(case: Case, device: str = "cpu") -> list[Tensor]:
    """cu_seqlens of the queries and of the keys."""
    assert case.lengths is not None
    return [torch.tensor(np.cumsum([0, *(pair[side] for pair in case.lengths)]), dtype=torch.int32, device=device) for side in (0, 1)]


def run(case: Case, inputs: Inputs, backend: str, **more: Any) -> Results:
    """The library's answer: out, lse and the gradients of (out, lse) · (dout, dlse)."""
    arguments = {**case.arguments, "alibi_slopes": inputs.slopes, "sinks": inputs.sinks, "return_lse": True, "backend": backend, **more}
    if case.dropout_p:
        arguments["dropout_seed"] = case.seed
    if case.lengths is not None:
        cu = offsets(case, inputs.q.device.type)
        out, lse = attention_varlen(inputs.q, inputs.k, inputs.v, *cu, **arguments)
    else:
        out, lse = attention(inputs.q, inputs.k, inputs.v, bias=inputs.bias, mask=inputs.mask, **arguments)
    grads = torch.autograd.grad((out, lse), inputs.leaves, (inputs.dout, inputs.dlse))
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": grad for name, grad in zip(inputs.names, grads, strict=True)}}


def truth(case: Case, inputs: Inputs, dtype: torch.dtype = torch.float64, order: str = "written") -> Results:
    """What `run` should have returned, computed in `dtype` on the CPU; `order` is that of the sums, see `_product`."""
    leaves = [x.detach().cpu().to(dtype).requires_grad_() for x in inputs.leaves]
    given = dict(zip(inputs.names, leaves, strict=True))
    mask, slopes = (None if x is None else x.cpu() for x in (inputs.mask, inputs.slopes))
    out, lse = define(case, given, mask, slopes, order)
    dout, dlse = inputs.dout.cpu().to(dtype), inputs.dlse.cpu().to(dtype)
    roots = [(y, dy) for y, dy in ((out, dout), (lse, torch.where(lse == -torch.inf, 0, dlse))) if y.requires_grad]  # not without any key
    grads: Any = [None] * len(leaves)
    if roots:
        outs, incoming = zip(*roots, strict=True)
        grads = torch.autograd.grad(outs, leaves, incoming, allow_unused=True)
    named = zip(inputs.names, grads, leaves, strict=True)
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": torch.zeros_like(x) if g is None else g for name, g, x in named}}


def define(case: Case, given: dict[str, Tensor], mask: Tensor | None, slopes: Tensor | None,
           order: str = "written") -> tuple[Tensor, Tensor]:
    """(out, lse) of a case, dense or packed."""
    q, k, v = given["q"], given["k"], given["v"]
    if case.lengths is None:
        keep = dropout_mask(case, range(case.batch), case.seq_q, case.seq_k)
        return _dense(case, q, k, v, given.get("bias"), given.get("sinks"), mask, slopes, keep, order)
    outs, lses, at_q, at_k = [], [], 0, 0
    for n, (len_q, len_k) in enumerate(case.lengths):
        qs, ks, vs = (x.transpose(0, 1)[None] for x in (q[at_q : at_q + len_q], k[at_k : at_k + len_k], v[at_k : at_k + len_k]))
        own = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        out, lse = _dense(case, qs, ks, vs, None, given.get("sinks"), None, own, dropout_mask(case, [n], len_q, len_k), order)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
        at_q, at_k = at_q + len_q, at_k + len_k
    outs.append(q.new_zeros(case.tail, case.heads, case.dim_v))
    lses.append(q.new_full((case.heads, case.tail), -torch.inf))
    return torch.cat(outs), torch.cat(lses, -1)


@lru_cache(maxsize=256)
def seen(causal: Any, window: tuple[int | None, int | None] | None, seq_q: int, seq_k: int) -> Tensor:
    """True where causality and the window let query i see key j, asked pair by pair."""
    left, right = window or (None, None)
    offset = 0 if causal == "top-left" else seq_k - seq_q
    table = torch.ones(seq_q, seq_k, dtype=torch.bool)
    for i in range(seq_q):
        for j in range(seq_k):
            away = j - (i + offset)
            too_late = (bool(causal) and away > 0) or (right is not None and away > right)
            table[i, j] = not (too_late or (left is not None and away < -left))
    return table


def _product(a: Tensor, b: Tensor, order: str) -> Tensor:
    """a @ b, its terms summed as torch does it, as it does from the last to the first, or one after another ("chained")."""
    if order == "chained":
        terms = (x[..., None] * y[..., None, :] for x, y in zip(a.unbind(-1), b.unbind(-2), strict=True))
        return sum(terms, a.new_zeros(*a.shape[:-1], b.shape[-1]))
    return a.flip(-1) @ b.flip(-2) if order == "reversed" else a @ b


def _dense(case: Case, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, mask: Tensor | None,
           slopes: Tensor | None, keep: Tensor | None, order: str) -> tuple[Tensor, Tensor]:
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seq_q, seq_k = q.shape[2], k.shape[2]
    scale = case.scale if case.scale is not None else case.dim ** -0.5 if case.dim else 1.0
    s = scale * _product(q, k.mT, order)
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    if bias is not None:
        s = s + bias
    if slopes is not None:
        offset = 0 if case.causal == "top-left" else seq_k - seq_q
        away = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + offset)
        s = s - (slopes[:, None, None] if slopes.dim() == 1 else slopes[:, :, None, None]).to(s.dtype) * away.abs()
    visible = seen(case.causal, case.window, seq_q, seq_k)
    visible = visible if mask is None else visible & mask
    s = torch.where(visible, s, -torch.inf)
    if sinks is not None:  # one more key, of value 0
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    sees = (s > -torch.inf).any(-1, keepdim=True) | s.isnan().any(-1, keepdim=True)
    s = torch.where(sees, s, 0)
    lse = torch.where(sees[..., 0], torch.logsumexp(s, -1), -torch.inf) if s.shape[-1] else q.new_full(s.shape[:3], -torch.inf)
    p = torch.where(sees, torch.softmax(s, -1), 0)[..., :seq_k]
    if keep is not None:
        p = p * keep / (1 - case.dropout_p)
    if v.isfinite().all():
        return _product(p, v, order), lse
    return torch.where(visible[..., None], p[..., None] * v[:, :, None], 0).sum(-2), lse


def dropout_mask(case: Case, sequences: Any, seq_q: int, seq_k: int) -> Tensor | None:
    """Philox-4x32-10 in numpy's unsigned arithmetic: True where word 0 at counter (j, i, sequence · heads + head, 0) reaches p · 2³²."""
    if not case.dropout_p:
        return None
    head = np.array([[n * case.heads + h for h in range(case.heads)] for n in sequences], np.uint64)[..., None, None]
    c = [np.arange(seq_k, dtype=np.uint64), np.arange(seq_q, dtype=np.uint64)[:, None], head, np.uint64(0)]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = [np.uint64(case.seed) & low, np.uint64(case.seed) >> shift]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ key[0], b & low, (a >> shift) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return torch.from_numpy(np.asarray(c[0] >= np.uint64(round(case.dropout_p * 2**32))))


def compare(case: Case, inputs: Inputs, got: Results, want: Results, eager: Sequence[Results]) -> None:
    """Every result within 2 × the worst eager error, the rounding of its own format, and what a backward inherits from saved roundings."""
    inherited = _inherited(case, inputs, want)
    for name, right in want.items():
        ours = got[name].detach().to(right.device, torch.float64)
        assert ours.shape == right.shape, f"{name}: shape {tuple(ours.shape)}, right is {tuple(right.shape)}"
        finite = right.isfinite()
        assert torch.equal(ours.nan_to_num(nan=1e300)[~finite], right.nan_to_num(nan=1e300)[~finite]), f"{name}: NaN or ±∞ in other places"
        assert ours[finite].isfinite().all(), f"{name}: not finite where it should be"
        if not finite.any():
            continue
        biggest = right[finite].abs().max().item()
        dtype = got[name].dtype
        rounding = torch.finfo(dtype).eps * biggest * (8 if dtype == torch.float64 else 1)  # in float64 the truth is rounded as much
        allowed = 2 * max(_worst(run[name].double()[finite], right[finite]) for run in eager) + rounding + inherited(name, biggest)
        error = _worst(ours[finite], right[finite])
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}, largest value {biggest:.3g}"


def _inherited(case: Case, inputs: Inputs, want: Results) -> Callable[[str, float], float]:
    """The error a recomputing backward takes over from what the forward saved, for a result whose largest value is `biggest`.

    lse in fp32 is off by eps |s|, and so is every p relatively; out in the dtype of q is off by eps |out|, and rowsum(do ∘ o) with it,
    which each score's gradient subtracts.
    """
    eps, eps_lse = (torch.finfo(t).eps for t in (inputs.q.dtype, inputs.dlse.dtype))
    scale = abs(case.scale) if case.scale is not None else case.dim ** -0.5 if case.dim else 1.0
    norms = {"q": inputs.q.detach().double().norm(dim=-1), "k": inputs.k.detach().double().norm(dim=-1)}
    largest = {name: norm.max().item() if norm.numel() else 0.0 for name, norm in norms.items()}
    score = scale * largest["q"] * largest["k"]
    if inputs.bias is not None and inputs.bias.numel():
        score += inputs.bias.detach().double().masked_fill(inputs.bias == -torch.inf, 0).abs().max().item()
    rowsum = (inputs.dout.to(want["out"]) * want["out"]).abs().nan_to_num(0).sum(-1)
    per_score = eps * rowsum.max().item() if rowsum.numel() else 0.0
    factor = {"dq": scale * largest["k"], "dk": scale * largest["q"], "dv": 0.0, "dbias": 1.0, "dsinks": 1.0}
    return lambda name, biggest: 4 * eps_lse * (score + 4) * (biggest + 1) + factor[name] * per_score if name in factor else 0.0


def _worst(a: Tensor, b: Tensor) -> float:
    error = (a - b).abs()
    return error[error.isfinite()].max().item() if error.isfinite().any() else 0.0


def check(case: Case, target: Target, inputs: Inputs | None = None, **more: Any) -> Results:
    """Run `case` on `target` and hold the answer against the truth; on a GPU twice, because a first call may tune or compile."""
    inputs = build(case, target.device) if inputs is None else inputs
    # One order of summation may be lucky. A kernel on a GPU makes a long sum in fp32 by one chain of FMAs, and so may the BLAS of a CPU
    # where the eager runs' is made in lanes: at 576 terms (16 lanes) out then errs more than the other two orders allow in 9 of 12 seeds.
    orders = ["written", "reversed"] + ["chained"] * (case.dtype == "float32" and case.dim > LONG)
    want, eager = truth(case, inputs), [truth(case, inputs, getattr(torch, case.dtype), order) for order in orders]
    for _ in range(2 if target.device == "cuda" else 1):
        got = run(case, inputs, target.backend, **more)
        compare(case, inputs, got, want, eager)
    return got
