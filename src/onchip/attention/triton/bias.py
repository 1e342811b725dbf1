"""Gradient of an additive bias: dbias = dS, summed over every dimension the bias was broadcast along, without atomics."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.attention.triton import launch
from onchip.attention.triton.common import dot, kept, load_rows, load_tile, scores, statistics, visible

PROGRAMS = 512  # a broadcast bias has few tiles: each one's sum is cut into parts until about this many programs run


@triton.jit(do_not_specialize=launch.RUNTIME)
def bias_kernel(
    q, k, v, do, lse2, delta, partial, bias, mask, slopes, seed,
    q_b: tl.int64, q_h: tl.int64, q_s: tl.int64, k_b: tl.int64, k_h: tl.int64, k_s: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_s: tl.int64, do_b: tl.int64, do_h: tl.int64, do_s: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_i: tl.int64, bias_j,
    mask_b: tl.int64, mask_h: tl.int64, mask_i: tl.int64, mask_j, slopes_b,
    len_q, len_k, pitch, heads, group, left, right, scale, softcap, threshold: tl.uint32, keep_scale,
    size_b, size_h, tiles_i, tiles_j, sum_b, sum_h, sum_i, sum_j, parts,
    TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, SUM_I: tl.constexpr, SUM_J: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """One part of one bias tile. Grid: parts · size_b · size_h · tiles_i · tiles_j (the bias' own sizes).

    The tile's sum runs over sum_b · sum_h · sum_i · sum_j tiles of dS (1 each where the bias has that dimension); a part takes an equal
    run of them, in order, and writes `partial` (parts, size_b, size_h, rows, keys), rows = 1 if SUM_I, keys = 1 if SUM_J.
    """
    pid = tl.program_id(0)
    tile_j, pid = pid % tiles_j, pid // tiles_j
    tile_i, pid = pid % tiles_i, pid // tiles_i
    own_h, pid = pid % size_h, pid // size_h
    own_b, part = pid % size_b, pid // size_b
    offset = 0 if TOP_LEFT else len_k - len_q
    key = None if seed is None else tl.load(seed)

    dbias = tl.zeros([BM, BN], tl.float32)
    count = sum_b * sum_h * sum_i * sum_j
    run = (count + parts - 1) // parts
    for t in tl.range(part * run, tl.minimum(count, part * run + run)):
        j0, t_i = (tile_j + t % sum_j) * BN, t // sum_j
        i0, t_h = (tile_i + t_i % sum_i) * BM, t_i // sum_i
        h, b = (own_h + t_h % sum_h).to(tl.int64), (own_b + t_h // sum_h).to(tl.int64)
        i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
        ok = (i < len_q)[:, None] & (j < len_k)[None, :]
        seen = visible(i[:, None], j[None, :], ok, offset, left, right, mask, (mask_b, mask_h, mask_i, mask_j), b, h)
        q_tile = load_tile(q, (q_b, q_h, q_s), None, b, h, i0, i < len_q, BM, BD, D, UNIT, True)
        k_tile = load_tile(k, (k_b, k_h, k_s), None, b, h // group, j0, j < len_k, BN, BD, D, UNIT, True)
        qk = dot(q_tile, tl.trans(k_tile), tl.zeros([BM, BN], tl.float32), PRECISION)
        x, _ = scores(qk, i[:, None], j[None, :], ok, offset, scale, softcap, slopes, slopes_b,
                      bias, (bias_b, bias_h, bias_i, bias_j), b, h, False)
        at = statistics(None, b, h, heads, pitch, 0, i0)
        p = tl.exp2(x - load_rows(lse2, None, at, BM)[:, None])
        do_tile = load_tile(do, (do_b, do_h, do_s), None, b, h, i0, i < len_q, BM, BDV, DV, UNIT, True)
        v_tile = load_tile(v, (v_b, v_h, v_s), None, b, h // group, j0, j < len_k, BN, BDV, DV, UNIT, True)
        dp = dot(do_tile, tl.trans(v_tile), tl.zeros([BM, BN], tl.float32), PRECISION)
        if seed is not None:
            dp = tl.where(kept(key, i[:, None], j[None, :], (b * heads + h).to(tl.int32), threshold), dp * keep_scale, 0.0)
        ds = p * (dp - load_rows(delta, None, at, BM)[:, None])
        dbias += tl.where(seen, ds, 0.0)

    rows, keys = 1 if SUM_I else len_q, 1 if SUM_J else len_k
    if SUM_I:
        dbias = tl.sum(dbias, 0, keep_dims=True)
    if SUM_J:
        dbias = tl.sum(dbias, 1, keep_dims=True)
    i = (tile_i * BM + tl.arange(0, 1 if SUM_I else BM))[:, None].to(tl.int64)
    j = (tile_j * BN + tl.arange(0, 1 if SUM_J else BN))[None, :]
    base = ((part * size_b + own_b).to(tl.int64) * size_h + own_h) * rows * keys
    tl.store(partial + base + i * keys + j, dbias, mask=(i < rows) & (j < keys))


def bias_gradient(call: launch.Call, lse2: Tensor, delta: Tensor) -> Tensor:
    """dbias of the call, fp32, in the bias' unexpanded shape. The cut into parts depends on the shapes alone, so results repeat."""
    bias = call.tensors["bias"]
    size_b, size_h, rows, keys = (n if stride else 1 for n, stride in zip(bias.shape, bias.stride(), strict=True))
    tile = call.tile("bias")
    blocks_i, blocks_j = -(-bias.shape[2] // tile.bm), -(-bias.shape[3] // tile.bn)
    sums = {"sum_b": bias.shape[0] // size_b, "sum_h": bias.shape[1] // size_h,
            "sum_i": blocks_i if rows == 1 else 1, "sum_j": blocks_j if keys == 1 else 1}
    tiles_i, tiles_j = (1 if rows == 1 else blocks_i), (1 if keys == 1 else blocks_j)
    own = size_b * size_h * tiles_i * tiles_j
    parts = max(1, min(PROGRAMS // max(own, 1), sums["sum_b"] * sums["sum_h"] * sums["sum_i"] * sums["sum_j"]))
    partial = torch.empty((parts, size_b, size_h, rows, keys), dtype=torch.float32, device=call.device)
    call(bias_kernel, tile, parts * own, lse2=lse2, delta=delta, partial=partial, size_b=size_b, size_h=size_h, tiles_i=tiles_i,
         tiles_j=tiles_j, parts=parts, SUM_I=rows == 1, SUM_J=keys == 1, **sums)
    return partial.sum(0) if parts > 1 else partial[0]
