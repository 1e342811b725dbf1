"""Attention's definition evaluated on the card, rows by the block, for problems too large for the CPU and its float64.

The problems, the library's call and what counts as agreement are those of `onchip.testing.attention`.
"""
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onchip.testing.attention import Case, Inputs, Results, build, compare, run

ON_HOPPER = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
BACKENDS = pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=ON_HOPPER)])
BLOCK = 1 << 25  # scores at a time: 0.25 GB in float64


def agree(case: Case, backend: str, inputs: Inputs | None = None) -> Results:
    """Run `case` twice on the card (a first call compiles) and hold both answers against the definition in float64."""
    inputs = build(case, "cuda") if inputs is None else inputs
    want, eager = (truth(case, inputs, dtype) for dtype in (torch.float64, inputs.q.dtype))
    for _ in range(2):
        got = run(case, inputs, backend)
        compare(case, inputs, got, want, [eager])
    return got


def truth(case: Case, inputs: Inputs, dtype: torch.dtype = torch.float64) -> Results:
    """out, lse and the gradients of q, k, v and bias for a case with neither slopes, sinks nor dropout.

    In 16 bits it is the yardstick: products rounded to `dtype`, softmax and the sums over blocks of rows in fp32.
    """
    return _dense(case, inputs, dtype) if case.lengths is None else _packed(case, inputs, dtype)


def _dense(case: Case, inputs: Inputs, dtype: torch.dtype) -> Results:
    q, k, v, dout = (x.detach().to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    k, v = k.requires_grad_(), v.requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    rows = max(1, BLOCK // max(1, case.batch * case.heads * case.seq_k))
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("out", "lse", "dq", "dbias")}
    for first in range(0, case.seq_q, rows):
        at = slice(first, first + rows)
        leaves = [q[:, :, at].requires_grad_(), k, v]
        if inputs.bias is not None:
            leaves.append(inputs.bias.detach()[:, :, at].to(dtype).requires_grad_())
        mask = None if inputs.mask is None else inputs.mask if inputs.mask.shape[2] == 1 else inputs.mask[:, :, at]
        out, lse = _rows(case, *leaves[:3], leaves[3] if len(leaves) > 3 else None, mask, first)
        dlse = torch.where(lse == -torch.inf, 0, inputs.dlse[:, :, at].to(wide))
        dq, one_dk, one_dv, *dbias = torch.autograd.grad((out, lse), leaves, (dout[:, :, at], dlse))
        dk, dv = dk + one_dk, dv + one_dv
        for name, part in zip(parts, (out.detach(), lse.detach(), dq, *dbias), strict=False):
            parts[name].append(part)
    return {name: torch.cat(part, 2) for name, part in parts.items() if part} | {"dk": dk, "dv": dv}


def _rows(case: Case, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of query rows `first` … of a problem."""
    group, wide = case.heads // case.kv_heads, torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.mT).to(wide) * (case.dim**-0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    if bias is not None:
        s = s + bias
    offset = 0 if case.causal == "top-left" else case.seq_k - case.seq_q
    away = torch.arange(case.seq_k, device=q.device) - (first + torch.arange(q.shape[2], device=q.device)[:, None] + offset)
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    visible = torch.ones_like(away, dtype=torch.bool)
    visible = visible if right is None else visible & (away <= right)
    visible = visible if left is None else visible & (away >= -left)
    visible = visible if mask is None else visible & mask
    sees = visible.any(-1, keepdim=True).expand(*s.shape[:3], 1)
    s = torch.where(sees, torch.where(visible, s, -torch.inf), 0)
    lse = torch.where(sees[..., 0], torch.logsumexp(s, -1), -torch.inf)
    return torch.where(sees, torch.softmax(s, -1), 0).to(v.dtype) @ v, lse


def _packed(case: Case, inputs: Inputs, dtype: torch.dtype) -> Results:
    """Each sequence as a dense problem of its own; 0 and −∞ where a sequence has no keys and past the last one."""
    assert case.lengths is not None
    wide = torch.promote_types(dtype, torch.float32)
    got = {name: torch.zeros_like(x, dtype=dtype) for name, x in
           (("out", inputs.dout), ("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v))}
    got["lse"] = torch.full_like(inputs.dlse, -torch.inf, dtype=wide)
    at_q = at_k = 0
    for len_q, len_k in case.lengths:
        rows, keys = slice(at_q, at_q + len_q), slice(at_k, at_k + len_k)
        at_q, at_k = at_q + len_q, at_k + len_k
        if 0 in (len_q, len_k):
            continue
        q, k, v, dout = (x.detach()[at].transpose(0, 1)[None] for x, at in
                         ((inputs.q, rows), (inputs.k, keys), (inputs.v, keys), (inputs.dout, rows)))
        alone = Inputs(q, k, v, None, None, None, None, dout, inputs.dlse[None, :, rows])
        part = _dense(replace(case, batch=1, lengths=None, seq_q=len_q, seq_k=len_k), alone, dtype)
        got["lse"][:, rows] = part.pop("lse")[0]
        for name, x in part.items():
            got[name][keys if name in ("dk", "dv") else rows] = x[0].transpose(0, 1).to(dtype)
    return got
