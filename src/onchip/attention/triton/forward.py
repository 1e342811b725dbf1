"""Forward: one program per query tile and head walks the keys it may see; O and the softmax statistics stay in registers.

The schedule is FlashAttention-2's (arXiv 2307.08691, Alg. 1): query tiles outside, keys inside, O unnormalised until the end.
"""
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from onchip.attention.contract import Spec
from onchip.attention.triton import launch
from onchip.attention.triton.common import (
    LN2,
    LOG2E,
    cast,
    dot,
    kept,
    load_tile,
    lse_index,
    scores,
    segment,
    span,
    store_tile,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=launch.RUNTIME)
def forward_kernel(
    q, k, v, k_tma, v_tma, o, lse, bias, mask, slopes, sinks, cu_q, cu_k, seed,
    q_b: tl.int64, q_h: tl.int64, q_s: tl.int64, k_b: tl.int64, k_h: tl.int64, k_s: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_s: tl.int64, o_b: tl.int64, o_h: tl.int64, o_s: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_i: tl.int64, bias_j,
    mask_b: tl.int64, mask_h: tl.int64, mask_i: tl.int64, mask_j, slopes_b,
    len_q, len_k, heads, group, tile_count, left, right, scale, softcap, threshold: tl.uint32, keep_scale,
    TOP_LEFT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WGMMA: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """softmax(scores) V of one query tile, and its lse. Grid: tile_count · heads · sequences, the tiles of one head together."""
    tile, bh = tl.program_id(0) % tile_count, tl.program_id(0) // tile_count
    if right is not None:
        tile = tile_count - 1 - tile  # the tiles with the most keys first, so that the last wave is made of short ones
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    q_begin, rows = segment(cu_q, b, len_q)
    k_begin, keys = segment(cu_k, b, len_k)
    i0 = tile * BM
    if i0 >= rows:
        return
    offset = 0 if TOP_LEFT else keys - rows
    i = i0 + tl.arange(0, BM)
    q_tile = load_tile(q, (q_b, q_h, q_s), None, b, h, q_begin + i0, i < rows, BM, BD, D, UNIT, True)
    key = None if seed is None else tl.load(seed)
    factor = scale * LOG2E if FOLD else 1.0

    # Row maximum of x · factor, carried as it was rounded. Were it multiplied anew, the FMA of m · factor − shift would not round, and
    # alpha would miss 1 by some 2⁻²³ in every block, all one way: in fp32 five times the error of the rest after 64 blocks.
    m = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)  # Σ p, which dropout does not touch
    acc = zeros(BM, BDV, v.dtype.element_ty, WGMMA)
    WHOLE: tl.constexpr = 1 if mask is None else -1  # the phase that needs no masking
    # Masked tiles come by descriptors too where they would make registers spill otherwise. At 64 dims nothing does, and it is 2 % slower.
    # Without diagonal, window or mask the keys to hide are those past the tensor's end, where a descriptor reads zeros.
    DESCRIBED: tl.constexpr = k_tma is not None and v_tma is not None and BD + BDV > 128
    PAST: tl.constexpr = DESCRIBED and left is None and right is None and mask is None and cu_k is None
    lo, edges = span(i0 + offset, tl.minimum(i0 + BM, rows) - 1 + offset, left, right, keys, BN)
    for phase in tl.static_range(0, 3):
        if phase != 0 or left is not None:  # without a left bound no masked keys precede the unmasked ones
            for j0 in tl.range(edges[phase], edges[phase + 1], BN):
                j = j0 + tl.arange(0, BN)
                near = (j >= lo) & (j < edges[3])  # keys that some row of this tile sees; the others' values are never read
                ok = (i < rows)[:, None] if phase == 1 else (i < rows)[:, None] & (j < keys)[None, :]
                if phase != WHOLE:
                    seen = visible(i[:, None], j[None, :], ok, offset, left, right, mask, (mask_b, mask_h, mask_i, mask_j), b, h)
                    if mask is not None:
                        near = near & (tl.max(seen.to(tl.int32), 0) > 0)
                # What hidden keys make of their scores is masked below: only pointers need to be checked.
                k_tile = load_tile(k, (k_b, k_h, k_s), k_tma if phase == WHOLE or DESCRIBED else None, b, h // group, k_begin + j0, near,
                                   BN, BD, D, UNIT, phase != WHOLE and not DESCRIBED)
                EARLY: tl.constexpr = phase != WHOLE and DESCRIBED and not PAST
                if EARLY:  # before the scores take the registers that selecting zeros needs
                    v_tile = load_tile(v, (v_b, v_h, v_s), v_tma, b, h // group, k_begin + j0, near, BN, BDV, DV, UNIT, True)
                qk = dot(q_tile, tl.trans(k_tile), tl.zeros([BM, BN], tl.float32), PRECISION)
                x, _ = scores(qk, i[:, None], j[None, :], ok, offset, scale, softcap, slopes, slopes_b,
                              bias, (bias_b, bias_h, bias_i, bias_j), b, h, FOLD)
                if phase != WHOLE:
                    x = tl.where(seen, x, float("-inf"))
                m_new = tl.maximum(m, tl.max(x, 1) * factor)
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: no −∞ − (−∞)
                p = tl.exp2(x * factor - shift[:, None])
                alpha = tl.exp2(m - shift)
                norm = norm * alpha + tl.sum(p, 1)
                m = m_new
                if seed is not None:
                    p = tl.where(kept(key, i[:, None], j[None, :], bh, threshold), p, 0.0)
                if not EARLY:
                    v_tile = load_tile(v, (v_b, v_h, v_s), v_tma if phase == WHOLE or DESCRIBED else None, b, h // group, k_begin + j0,
                                       near, BN, BDV, DV, UNIT, phase != WHOLE and not DESCRIBED)
                acc = dot(cast(p, v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)

    if sinks is not None:  # one more key, with this logit and value 0
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shift = tl.where(top == float("-inf"), 0.0, top)
        alpha = tl.exp2(m - shift)
        norm = norm * alpha + tl.exp2(sink - shift)
        acc *= alpha[:, None]
        m = top
    empty = norm == 0.0  # not "norm > 0": a NaN must reach the output
    norm = tl.where(empty, 1.0, norm)
    inverse = 1.0 / norm
    if seed is not None:
        inverse *= keep_scale
    lse_i = tl.where(empty, float("-inf"), (m + tl.log2(norm)) * LN2)
    tl.store(lse + lse_index(cu_q, b, h, heads, len_q, q_begin) + i, lse_i, mask=i < rows)
    store_tile(o, (o_b, o_h, o_s), b, h, q_begin + i0, acc * inverse[:, None], i < rows, BM, BDV, DV, UNIT)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
            cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, dropout_seed: Tensor | None, spec: Spec,
            memo: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of the checked call `spec`: out in q's dtype and memory order, lse fp32, (B, Hq, Sq) or packed (Hq, total).

    A value row is read only by query tiles with a row that sees it; within such a tile it is multiplied by p = 0 for the other rows, so a
    NaN or infinity there reaches them too. NaN in K reaches exactly the rows that see it.
    """
    out, lse = launch.outputs(q, v.shape[-1], cu_seqlens_q is not None)
    call = launch.Call(memo, q, k, v, bias, mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k, dropout_seed, spec, o=out)
    tile = call.tile("forward", call.describable("k", "v"))
    tile_count = -(-spec.max_seqlen_q // tile.bm)
    call(forward_kernel, tile, tile_count * call.heads * call.sequences, tile_count=tile_count, lse=lse, sinks=sinks,
         k_tma=call.tma("k", tile.bn), v_tma=call.tma("v", tile.bn))
    return out, lse
