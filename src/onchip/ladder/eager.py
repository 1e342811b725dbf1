"""The rungs in plain torch, on any device: what naive, tiled and online attention are, short enough to read in one sitting.

    s = q kᵀ / √d, −∞ selected where the mask hides a key;   p = softmax(s);   out = p v

Each is ``(q, k, v, causal) -> out`` on q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, dv) of one dtype, finite; out is (B, H, Sq, dv).
`causal` is False, True (bottom-right: query i sees keys up to i + Sk − Sq) or 'top-left' (up to i). A query that sees no key gets 0.

| rung   | scores alive            | passes over a row of scores                              |
|--------|-------------------------|----------------------------------------------------------|
| naive  | all: O(Sq · Sk)         | product; scale; mask; softmax: one after another         |
| tiled  | a block's: O(br · Sk)   | the same, but the block is still in the cache each time  |
| online | a tile's: O(br · bc)    | one: the maximum m and the sum l run along, out rescaled |

On a CPU the time goes with the bytes that leave the cache, and with the calls: each is a few big products over all heads at once.
Grouped heads never repeat k or v: the queries that share a key head are stacked as rows of one product.

Sources: Rabe and Staats, arXiv 2112.05682 (tiled); Milakov and Gimelshein, arXiv 1805.02867 (m and l); FlashAttention-2,
arXiv 2307.08691, Algorithm 1 (online, here over all heads at a time).
"""
from collections.abc import Iterator

import torch
from torch import Tensor

from onchip.errors import require
from onchip.roofline.shape import AttentionShape, blocks, parse_causal

# Rows and keys of a tile. 12 heads of 128 × 256 fp32 scores are 1.6 MB: they fit a cache, and are work enough for a call.
BR, BC = 128, 256


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool | str | None = False) -> Tensor:
    """Every step through memory, the scale by itself: two arrays of Sq · Sk are alive at once."""
    shape = attention_shape(q, k, v, causal)
    s = stack_group(q, shape) @ k.mT
    s = s * shape.head_dim ** -0.5
    if shape.masked:
        s = hide(s, shape, 0, shape.seq_q, 0, shape.seq_k)
    out = unstack_group(s.softmax(-1) @ v, shape)
    out[:, :, :empty_rows(shape)] = 0
    return out


def tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool | str | None = False, br: int = BR) -> Tensor:
    """`br` query rows at a time against all the keys they see: an ordinary softmax, on scores that stay in the cache."""
    shape = attention_shape(q, k, v, causal)
    out = q.new_zeros(*q.shape[:3], shape.head_dim_v)
    for row, rows, seen in query_blocks(shape, br):
        q_block = stack_group(q[:, :, row:row + rows], shape) * shape.head_dim ** -0.5
        s = hide(q_block @ k[:, :, :seen].mT, shape, row, rows, 0, seen)
        out[:, :, row:row + rows] = unstack_group(s.softmax(-1) @ v[:, :, :seen], shape)
    return out


def online(q: Tensor, k: Tensor, v: Tensor, causal: bool | str | None = False, br: int = BR, bc: int = BC) -> Tensor:
    """`br` rows against `bc` keys at a time; for the keys seen so far m = max s, l = Σ exp(s − m), o = Σ exp(s − m) v; out = o / l.

    m, l and o are at least float32.
    """
    shape = attention_shape(q, k, v, causal)
    out = q.new_zeros(*q.shape[:3], shape.head_dim_v)
    state = torch.promote_types(q.dtype, torch.float32)
    for row, rows, seen in query_blocks(shape, br):
        q_block = stack_group(q[:, :, row:row + rows], shape) * shape.head_dim ** -0.5
        o = q_block.new_zeros(*q_block.shape[:3], shape.head_dim_v, dtype=state)
        l = o.new_zeros(*o.shape[:3], 1)
        m = torch.full_like(l, -torch.inf)
        for key, keys in blocks(seen, bc):
            s = hide((q_block @ k[:, :, key:key + keys].mT).to(state), shape, row, rows, key, keys)
            # finite from the first tile on: key 0 is seen by every row that sees any, so m − m_new is never −∞ − −∞
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = s.sub_(m_new).exp_()
            rescale = m.sub_(m_new).exp_()
            l.mul_(rescale).add_(p.sum(-1, keepdim=True))
            o.mul_(rescale).add_(p.to(v.dtype) @ v[:, :, key:key + keys])
            m = m_new
        out[:, :, row:row + rows] = unstack_group(o.div_(l), shape)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool | str | None = False) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, for orientation. Its own causal flag is top-left; others get a boolean mask."""
    shape = attention_shape(q, k, v, causal)
    visible = None
    if shape.masked and shape.offset != 0:
        visible = ~torch.ones(shape.seq_q, shape.seq_k, dtype=torch.bool, device=q.device).triu_(shape.offset + 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=shape.masked and shape.offset == 0, enable_gqa=shape.group > 1)
    out[:, :, :empty_rows(shape)] = 0
    return out


def attention_shape(q: Tensor, k: Tensor, v: Tensor, causal: bool | str | None = False) -> AttentionShape:
    """The sizes of one call. Raises `InputError` for tensors that do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.ndim == 4, name, f"shape {tuple(x.shape)}", "(batch, heads, seq, dim)")
    require(k.shape == (q.shape[0], *v.shape[1:3], q.shape[3]) and v.shape[0] == q.shape[0], "q, k, v",
            f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}", "(B, H, Sq, d), (B, Hkv, Sk, d), (B, Hkv, Sk, dv)")
    return AttentionShape(q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[0], q.shape[1], k.shape[1], parse_causal(causal))


def empty_rows(shape: AttentionShape) -> int:
    """Leading queries that see no key: bottom-right causal with more queries than keys."""
    return max(0, -shape.offset) if shape.masked else 0


def query_blocks(shape: AttentionShape, br: int) -> Iterator[tuple[int, int, int]]:
    """(row, rows, seen) of each tile of query rows that see something; what they see lies in the first `seen` keys."""
    first = empty_rows(shape)
    for start, rows in blocks(shape.seq_q - first, br):
        yield first + start, rows, shape.key_range(first + start + rows - 1)[1]


def stack_group(q: Tensor, shape: AttentionShape) -> Tensor:
    """(B, H, rows, d) → (B, Hkv, group · rows, d)."""
    return q.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)


def unstack_group(out: Tensor, shape: AttentionShape) -> Tensor:
    """(B, Hkv, group · rows, dv) → (B, H, rows, dv)."""
    return out.reshape(shape.batch, shape.heads, -1, shape.head_dim_v)


def hide(s: Tensor, shape: AttentionShape, row: int, rows: int, key: int, keys: int) -> Tensor:
    """Select −∞ in the scores of queries row … and keys key … that the mask hides; `s` itself where it hides none. In place."""
    _, seen_by_first = shape.key_range(row)
    if key + keys > seen_by_first:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=s.device).triu_(row + shape.offset + 1 - key)
        s.view(shape.batch, shape.heads, rows, keys).masked_fill_(hidden, -torch.inf)
    return s
