"""The geometry of an attention problem: sizes, and which keys each query sees. No tensors, no dtypes."""
from collections.abc import Iterator
from dataclasses import dataclass, replace

from onchip.errors import InputError, require

CAUSAL_MODES = (None, "bottom-right", "top-left")


def parse_causal(value: "bool | str | None", argument: str = "causal") -> str | None:
    """``True`` → ``'bottom-right'`` (the library's meaning), ``False`` → ``None``, names pass through."""
    if value is True:
        return "bottom-right"
    if value is False or value is None or value == "none":
        return None
    if value in CAUSAL_MODES:
        return value
    raise InputError(f"{argument}: got {value!r}, accepted: True, False, 'bottom-right', 'top-left'")


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call.

    Query i (0 ≤ i < seq_q) stands at key position i + `offset`; it sees key j when i + offset − left ≤ j ≤ i + offset + right,
    where `causal` caps right at 0. ``'bottom-right'`` aligns the last query with the last key (offset = seq_k − seq_q),
    ``'top-left'`` the first with the first (offset = 0); without `causal` a window is bottom-right aligned.
    """

    seq_q: int
    seq_k: int
    head_dim: int  # of q and k
    head_dim_v: int
    batch: int = 1
    heads: int = 1  # query heads
    kv_heads: int = 1
    causal: str | None = None
    window: tuple[int | None, int | None] = (None, None)  # keys left and right of the query itself, inclusive; None = unbounded

    def __post_init__(self) -> None:
        for name in ("seq_q", "seq_k", "head_dim", "head_dim_v", "batch", "heads", "kv_heads"):
            value = getattr(self, name)
            require(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, repr(value), "an integer ≥ 1")
        require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        require(self.causal in CAUSAL_MODES, "causal", repr(self.causal), ", ".join(map(repr, CAUSAL_MODES)))
        for side, width in zip(("left", "right"), self.window, strict=True):
            require(width is None or width >= 0, f"window {side}", width, "an integer ≥ 0 or None (unbounded)")

    @classmethod
    def square(cls, seq: int, head_dim: int, **rest: object) -> "AttentionShape":
        """Self-attention: seq_q = seq_k = `seq`, head_dim_v = head_dim; kv_heads follows heads unless given."""
        rest.setdefault("kv_heads", rest.get("heads", 1))
        return cls(seq, seq, head_dim, head_dim, **rest)  # type: ignore[arg-type]

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    @property
    def query_heads(self) -> int:
        """(batch, query head) pairs: the independent problems."""
        return self.batch * self.heads

    @property
    def kv_pairs(self) -> int:
        """(batch, K/V head) pairs."""
        return self.batch * self.kv_heads

    @property
    def offset(self) -> int:
        """Key position of query 0."""
        return 0 if self.causal == "top-left" else self.seq_k - self.seq_q

    @property
    def masked(self) -> bool:
        """True when some query may be barred from some key."""
        return self.causal is not None or self.window != (None, None)

    def key_range(self, row: int) -> tuple[int, int]:
        """The half-open range [lo, hi) of keys query `row` sees; lo ≥ hi when it sees none (then both are clipped to [0, seq_k])."""
        left, right = self.window
        if self.causal is not None:
            right = 0 if right is None else min(right, 0)
        at = row + self.offset
        lo = 0 if left is None else at - left
        hi = self.seq_k if right is None else at + right + 1
        return min(max(lo, 0), self.seq_k), min(max(hi, 0), self.seq_k)

    def block_key_range(self, row: int, rows: int) -> tuple[int, int]:
        """[lo, hi) of the keys that some query in row … row + rows − 1 sees. Both ends grow with the row, so the hull has no gaps."""
        lo, _ = self.key_range(row)
        _, hi = self.key_range(row + rows - 1)
        # leading or trailing rows that see nothing do not widen the hull: key_range clips them to an empty range at an end
        return (lo, hi) if lo < hi else (lo, lo)

    def pairs(self) -> int:
        """Visible (query, key) pairs of one head: those at or left of the mask's right edge, less those left of its left edge."""
        left, right = self.window
        if self.causal is not None:
            right = 0 if right is None else min(right, 0)
        return (self.seq_q * self.seq_k if right is None else self._pairs_up_to(self.offset + right)) - (
            0 if left is None else self._pairs_up_to(self.offset - left - 1))

    def _pairs_up_to(self, c: int) -> int:
        """Pairs with j ≤ i + c: row i has clip(i + c + 1, 0, seq_k) of them, a ramp between two constants."""
        start = min(max(-c, 0), self.seq_q)  # first row with one
        full = min(max(self.seq_k - c - 1, start), self.seq_q)  # first row with all
        ramp = full - start
        return ramp * (start + c + 1) + ramp * (ramp - 1) // 2 + (self.seq_q - full) * self.seq_k

    @property
    def packable(self) -> bool:
        """True when every query sees every key, so that query heads may be stacked as rows."""
        return not self.masked or (self.seq_q == 1 and self.causal == "bottom-right" and self.window == (None, None))

    def packed(self) -> "AttentionShape":
        """The same work with each K/V head's query group stacked as rows (decode): heads = kv_heads, seq_q · group rows."""
        require(self.packable, "pack_gqa", "a masked shape", "an unmasked shape, or seq_q = 1 with causal='bottom-right'")
        return replace(self, seq_q=self.seq_q * self.group, heads=self.kv_heads, causal=None)


@dataclass(frozen=True)
class TileWalk:
    """Sums over the tiles a schedule visits in one head: every tile with at least one visible pair, and no other."""

    tiles: int  # visited (i, j) tile pairs
    all_tiles: int  # Tq · Tk
    rows: int  # Σ over query tiles that visit something: their rows
    keys: int  # Σ over key tiles that something visits: their keys
    row_visits: int  # Σ over visited pairs: rows of the query tile
    key_visits: int  # Σ over visited pairs: keys of the key tile
    area: int  # Σ over visited pairs: rows · keys


def visits(shape: AttentionShape, br: int, bc: int) -> Iterator[tuple[int, int, int, int]]:
    """For each query tile that sees anything: (rows, first key tile, last key tile + 1, keys in those tiles)."""
    for start, rows in blocks(shape.seq_q, br):
        lo, hi = shape.block_key_range(start, rows)
        if lo < hi:
            first, last = lo // bc, count_blocks(hi, bc)
            yield rows, first, last, min(last * bc, shape.seq_k) - first * bc


def walk(shape: AttentionShape, br: int, bc: int) -> TileWalk:
    """Closed form of a tiled walk over one head: O(Tq) arithmetic, no tile is touched."""
    tiles = all_rows = row_visits = key_visits = area = 0
    seen = bytearray(count_blocks(shape.seq_k, bc))
    for rows, first, last, keys in visits(shape, br, bc):
        tiles += last - first
        all_rows += rows
        row_visits += rows * (last - first)
        key_visits += keys
        area += rows * keys
        seen[first:last] = b"\1" * (last - first)
    touched = sum(min(bc, shape.seq_k - j * bc) for j, hit in enumerate(seen) if hit)
    return TileWalk(tiles, count_blocks(shape.seq_q, br) * len(seen), all_rows, touched, row_visits, key_visits, area)


def blocks(length: int, block: int) -> Iterator[tuple[int, int]]:
    """(start, rows) of each tile of `length`; the last one may be ragged."""
    for start in range(0, length, block):
        yield start, min(block, length - start)


def count_blocks(length: int, block: int) -> int:
    """⌈length / block⌉."""
    return -(-length // block)
