"""How the reference walks a problem: chunks of heads, blocks of query rows, the scores of one block and who sees what in it."""
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.attention.problem import CAUSAL_NAMES, Spec
from onchip.attention.reference.philox import keep_mask
from onchip.roofline.shape import AttentionShape, blocks

# Scores in flight: 16 MB in fp32 on a CPU, more on a GPU, which has more to keep busy. Measured on one core: (1, 8, 4096, 64) in fp32
# takes 0.90 s, eager attention 2.0 s.
_SCORES = {"cpu": 1 << 22}
_SCORES_ELSEWHERE = 1 << 24
_ROWS = range(16, 129)  # rows of a block: fewer re-read k and v for too little work, more see too much beyond a causal diagonal


@dataclass(frozen=True)
class Call:
    """Dense operands: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); bias and mask as 4-D broadcast views."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    alibi_slopes: Tensor | None  # (B, Hq) or (Hq,)
    sinks: Tensor | None  # (Hq,)
    sequence: Tensor  # (B,) int64: the batch index dropout counts with
    dropout_seed: Tensor | None
    spec: Spec

    @property
    def group(self) -> int:
        """Query heads a kv head serves."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def accumulate(self) -> torch.dtype:
        """The format everything between the inputs and the outputs is in."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def empty(self) -> bool:
        """No score exists."""
        return 0 in (*self.q.shape[:3], self.k.shape[2])

    def chunks(self) -> "Iterator[Chunk]":
        """Chunks of as many heads, and then batches, as the budget of scores allows."""
        batch, kv_heads, seq_k, _ = self.k.shape
        budget = _SCORES.get(self.q.device.type, _SCORES_ELSEWHERE)
        height = min(max(budget // seq_k, _ROWS.start), _ROWS.stop - 1)
        rows = min(self.q.shape[2], -(-height // self.group))
        pairs = max(1, budget // (rows * self.group * seq_k))
        heads = min(kv_heads, pairs)
        for b, batches in blocks(batch, max(1, pairs // kv_heads)):
            for h, count in blocks(kv_heads, heads):
                yield Chunk(self, slice(b, b + batches), slice(h, h + count), rows)


@dataclass(frozen=True)
class Block:
    """Query rows start … stop − 1 of a chunk and the keys lo … hi − 1 that at least one of them sees (none when lo = hi)."""

    start: int
    stop: int
    lo: int
    hi: int


class Chunk:
    """A few (batch, kv head) pairs with all their query heads. Products are 3-D: (pairs, group · rows, keys)."""

    def __init__(self, call: Call, batch: slice, kv_head: slice, height: int) -> None:
        self.call, self.batch, self.kv_head, self.height = call, batch, kv_head, height
        self.head = slice(kv_head.start * call.group, kv_head.stop * call.group)
        self.grid = (batch.stop - batch.start, kv_head.stop - kv_head.start, call.group)
        self.pairs = self.grid[0] * self.grid[1]
        self.k, self.v = (x[batch, kv_head].to(call.accumulate).reshape(self.pairs, *x.shape[2:]) for x in (call.k, call.v))
        spec = call.spec
        left, right = (None if width < 0 else width for width in (spec.window_left, spec.window_right))
        self.shape = AttentionShape(call.q.shape[2], call.k.shape[2], 1, 1, causal=CAUSAL_NAMES[spec.causal], window=(left, right))

    def blocks(self) -> Iterator[Block]:
        """The blocks of rows, in order."""
        for start, rows in blocks(self.shape.seq_q, self.height):
            yield Block(start, start + rows, *self.shape.block_key_range(start, rows))

    def rows(self, x: Tensor, block: Block) -> Tensor:
        """A block's rows of a (B, Hq, Sq, …) tensor as (pairs, group · rows, …), in the accumulation format."""
        x = x[self.batch, self.head, block.start : block.stop].to(self.call.accumulate)
        return x.unflatten(1, self.grid[1:]).flatten(2, 3).flatten(0, 1)

    def put(self, into: Tensor, block: Block, value: Tensor) -> None:
        """The inverse of `rows`: write a block's result where it belongs."""
        there = into[self.batch, self.head, block.start : block.stop]
        there.copy_(value.view(there.shape))

    def by_head(self, scores: Tensor, block: Block) -> Tensor:
        """Scores as (batches, query heads, rows, keys)."""
        return scores.view(self.grid[0], -1, block.stop - block.start, block.hi - block.lo)

    def per_head(self, x: Tensor) -> Tensor:
        """A (B, Hq) or (Hq,) tensor as (batches, kv heads, group, 1, 1)."""
        x = x[self.head] if x.dim() == 1 else x[self.batch, self.head]
        return x.to(self.call.accumulate).unflatten(-1, self.grid[1:]).expand(self.grid)[..., None, None]

    def distance(self, block: Block) -> Tensor:
        """j − (i + offset), (rows, keys): how far right of the query each key lies."""
        device = self.call.q.device
        at = torch.arange(block.start, block.stop, device=device) + self.shape.offset
        return torch.arange(block.lo, block.hi, device=device) - at[:, None]

    def outside(self, block: Block) -> Tensor:
        """True where the causal mask or the window hides a key, (rows, keys)."""
        distance, spec = self.distance(block), self.call.spec
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if spec.window_left >= 0:
            hidden |= distance < -spec.window_left
        if spec.window_right >= 0:
            hidden |= distance > spec.window_right
        return hidden

    def hidden(self, block: Block) -> Tensor:
        """True where a query does not see a key, whatever hides it, as (pairs, group · rows, keys)."""
        hidden = self.outside(block)
        if self.call.mask is not None:
            hidden = hidden | ~self._here(self.call.mask, block)
        return hidden.expand(*self.grid, *hidden.shape[-2:]).reshape(self.pairs, -1, hidden.shape[-1])

    def hides_what_is_not_finite(self, *operands: Tensor) -> bool:
        """True when a NaN or Inf that some row must not see could leak through a product as 0 · NaN.

        A finite sum proves finite terms; the reverse fails only by overflow, which costs time, not truth.
        """
        masked = self.shape.masked or self.call.mask is not None
        return masked and not all(x.sum(dtype=self.call.accumulate).isfinite() for x in operands)

    def scores(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Scores, −∞ where hidden, and the softcap's derivative (None without one); both (pairs, group · rows, keys)."""
        call, spec, slope = self.call, self.call.spec, None
        s = torch.bmm(self.rows(call.q, block) * spec.scale, self.k[:, block.lo : block.hi].mT)
        if spec.softcap:
            s.div_(spec.softcap).tanh_()
            slope = 1 - s * s
            s.mul_(spec.softcap)
        grid = s.view(*self.grid, block.stop - block.start, block.hi - block.lo)
        if call.bias is not None:
            grid += self._here(call.bias, block)
        if call.alibi_slopes is not None:
            grid -= self.per_head(call.alibi_slopes) * self.distance(block).abs()
        # every row sees the keys from the last row's first to the first row's last; only what lies beside them needs the mask
        first, last = self.shape.key_range(block.stop - 1)[0], self.shape.key_range(block.start)[1]
        for lo, hi in ((block.lo, min(first, block.hi)), (max(last, block.lo), block.hi)):
            if lo < hi:
                outside = self.outside(Block(block.start, block.stop, lo, hi))
                grid[..., lo - block.lo : hi - block.lo].masked_fill_(outside, -math.inf)
        if call.mask is not None:
            grid.masked_fill_(~self._here(call.mask, block), -math.inf)
        return s, slope

    def keep(self, block: Block) -> Tensor | None:
        """Dropout's factor, 0 or 1/(1 − p), shaped as the scores; None without dropout."""
        call, p, device = self.call, self.call.spec.dropout_p, self.call.q.device
        if call.dropout_seed is None:
            return None
        heads = torch.arange(self.head.start, self.head.stop, device=device)
        counter = call.sequence[self.batch, None] * call.q.shape[1] + heads
        rows = torch.arange(block.start, block.stop, device=device)[:, None]
        kept = keep_mask(call.dropout_seed, p, torch.arange(block.lo, block.hi, device=device), rows, counter.view(*self.grid, 1, 1))
        return kept.reshape(self.pairs, -1, block.hi - block.lo).to(call.accumulate) / (1 - p)

    def _here(self, x: Tensor, block: Block) -> Tensor:
        """The part of a bias or mask this block meets, (batches, kv heads, group, rows, keys)."""
        return x[self.batch, self.head, block.start : block.stop, block.lo : block.hi].unflatten(1, self.grid[1:])


def visible_product(weights: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """weights @ x, 3-D. With `hidden` (shaped as weights), what is not finite in x meets only the pairs that are not hidden."""
    if hidden is None:
        return torch.bmm(weights, x)
    bad = ~x.isfinite()
    total = torch.bmm(weights, x.masked_fill(bad, 0))
    for j in bad.any(-1).any(0).nonzero().flatten().tolist():
        terms = weights[:, :, j, None] * torch.where(bad[:, j], x[:, j], 0)[:, None]
        total += terms.masked_fill(hidden[:, :, j, None], 0)
    return total
