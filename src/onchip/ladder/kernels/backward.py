"""The naive backward: P as the forward left it, dP and dS through memory, one kernel each.

    dV = PᵀdO    dP = dO Vᵀ    dS = P ∘ (dP − D), D = rowsum(P ∘ dP) = rowsum(dO ∘ O)    dQ = scale · dS K    dK = scale · dSᵀ Q

Ledger and schedule: `naive_backward` of `onchip.roofline.backward` and `onchip.simulate.unfused`. dP and dQ are the forward's products
over other operands, and dS takes the place of dP. P is 0 where the mask hides a key, so nothing here knows of the mask.
"""
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from onchip.errors import require
from onchip.ladder.kernels.common import Launch, block, cast, dot, load_rows, sizes, start, store_rows, zeros
from onchip.ladder.kernels.unfused import INNER, ROW, products, row_launch, weighted

KEYS = Launch(128, 128, 8, 3)  # bc keys a program of dK and dV owns


@triton.jit
def gradient_row_kernel(p, dp, seq_k, BN: tl.constexpr):
    """dP ← dS = P ∘ (dP − rowsum(P ∘ dP)), a row a program: two reads, one write."""
    at, j = tl.program_id(0).to(tl.int64) * seq_k, tl.arange(0, BN)
    p_row = tl.load(p + at + j, mask=j < seq_k, other=0.0).to(tl.float32)  # (BN,)
    dp_row = tl.load(dp + at + j, mask=j < seq_k, other=0.0).to(tl.float32)
    ds_row = p_row * (dp_row - tl.sum(p_row * dp_row, 0))
    tl.store(dp + at + j, cast(ds_row, dp.dtype.element_ty), mask=j < seq_k)


@triton.jit
def transposed_kernel(p, x, y, seq_q, seq_k, group, scale, DV: tl.constexpr, BDV: tl.constexpr, WGMMA: tl.constexpr, BN: tl.constexpr,
                      BK: tl.constexpr):
    """One tile of BN rows of Y = scale · Pᵀ X, summed over the query heads that share a key head. Grid: key tiles · key heads."""
    tiles, steps = tl.cdiv(seq_k, BN), tl.cdiv(seq_q, BK)
    kv, j0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BN
    j = j0 + tl.arange(0, BN)
    y_tile = zeros(BN, BDV, x.dtype.element_ty, WGMMA)
    for step in tl.range(0, group * steps):
        head, i0 = kv * group + step // steps, step % steps * BK
        i = i0 + tl.arange(0, BK)
        at = (head.to(tl.int64) * seq_q + i[:, None]) * seq_k + j[None, :]
        p_tile = tl.load(p + at, mask=(i[:, None] < seq_q) & (j[None, :] < seq_k), other=0.0)  # (BK, BN)
        y_tile = dot(tl.trans(p_tile), load_rows(x, head, i0, seq_q, DV, BDV, BK), y_tile, "ieee")
    store_rows(y, kv, j0, seq_k, y_tile * scale, DV, BDV, BN)


def naive_backward(p: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from `p` of `unfused.probabilities`, q (B, H, Sq, D), k and v (B, Hkv, Sk, ·) and dout (B, H, Sq, Dv), contiguous.

    Memory: dP, B · H · Sq · Sk elements, beside P. Raises `InputError` for rows that a program cannot hold.
    """
    more, scale, seq_k = sizes(q, k, v), q.shape[-1] ** -0.5, k.shape[2]
    require(dout.is_contiguous(), "dout", f"strides {dout.stride()}", "a contiguous tensor: the rungs have one layout")
    require(seq_k <= ROW, "k", f"{seq_k} keys", f"at most {ROW}: a row of P and one of dP stay on the chip")
    dv = transposed(p, dout, k.shape[1], more)
    ds = products(dout, v, more, 1.0)  # dP
    launch = row_launch(seq_k)
    start(gradient_row_kernel, p.shape[:3].numel(), launch, p, ds, BN=launch.bc, **more)
    return weighted(ds, k, more, scale), transposed(ds, q, k.shape[1], more, scale), dv


def transposed(p: Tensor, x: Tensor, kv_heads: int, more: dict[str, Any], scale: float = 1.0) -> Tensor:
    """scale · pᵀ x, (B, Hkv, Sk, ·) of p (B, H, Sq, Sk) and x (B, H, Sq, ·), summed over the heads of a group."""
    batch, _, _, seq_k = p.shape
    d = x.shape[-1]
    y = p.new_empty(batch, kv_heads, seq_k, d)
    start(transposed_kernel, batch * kv_heads * triton.cdiv(seq_k, KEYS.bc), KEYS, p, x, y, scale=scale, BN=KEYS.bc, BK=INNER,
          **{**more, "DV": d, "BDV": block(d)})
    return y
