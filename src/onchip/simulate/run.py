"""The frame of a schedule: its grid, its mask, and which of its thread blocks are executed and which only counted."""
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from onchip.errors import require
from onchip.roofline.attention import Tile
from onchip.roofline.shape import AttentionShape, blocks
from onchip.simulate.arithmetic import DRY, Arithmetic
from onchip.simulate.formats import Array, Mask, parse_format
from onchip.simulate.meter import Chip, Tensor
from onchip.simulate.problem import Problem, Result

Tiles = list[tuple[slice, Mask | None]]  # query or key tiles with their masks; None: every pair visible


def spans(length: int, block: int) -> list[slice]:
    """The tiles of `length`: slices of `block`, the last one ragged."""
    return [slice(start, start + size) for start, size in blocks(length, block)]


class TileMask:
    """Which pairs of a tile are visible, told from the pairs' own positions."""

    def __init__(self, shape: AttentionShape) -> None:
        left, right = shape.window
        self._left, self._right, self._offset = left, right if shape.causal is None else 0, shape.offset
        # A tile's pattern depends on its sizes and on the distance of its corner from the diagonal alone.
        self._pattern = lru_cache(4096)(self._compute)

    def __call__(self, rows: slice, keys: slice) -> tuple[str, Mask | None]:
        """("full", None), ("masked", the boolean mask) or ("skipped", None)."""
        return self._pattern(rows.stop - rows.start, keys.stop - keys.start, keys.start - rows.start - self._offset)

    def array(self, rows: slice, keys: slice) -> Mask:
        """The boolean mask of any rectangle of S."""
        # how far right of its query each key stands
        beyond = np.arange(keys.start, keys.stop) - np.arange(rows.start, rows.stop)[:, None] - self._offset
        mask = np.ones(beyond.shape, bool)
        if self._left is not None:
            mask &= beyond >= -self._left
        if self._right is not None:
            mask &= beyond <= self._right
        return mask

    def _compute(self, rows: int, keys: int, corner: int) -> tuple[str, Mask | None]:
        mask = self.array(slice(0, rows), slice(corner + self._offset, corner + self._offset + keys))
        if mask.all():
            return "full", None
        return ("masked", mask) if mask.any() else ("skipped", None)


class Run:
    """One execution of a schedule on one problem.

    `sample` query tiles, spread evenly over all heads from the first to the last, are executed with all their keys; the other thread
    blocks are walked without arithmetic, so the counts are those of the whole schedule. 0: a dry run. None: everything is executed if the
    problem has tensors, nothing otherwise. Heads do the same, so those without a sampled tile are walked once and counted for each.
    """

    def __init__(self, name: str, problem: Problem, tile: Tile, sram: int | None, sample: int | None, *, grad: bool = False,
                 shape: AttentionShape | None = None) -> None:
        self.name, self.problem, self.shape = name, problem, shape or problem.shape
        shape, precision = self.shape, problem.precision
        self.row_tiles, self.key_tiles = spans(shape.seq_q, tile.br), spans(shape.seq_k, tile.bc)
        self.all_rows: Tiles = [(rows, None) for rows in self.row_tiles]
        self.widest = min(tile.bc, shape.seq_k)
        self.tile, self.mask = tile, TileMask(shape)
        self.chip = Chip(precision, sram)
        self.math = Arithmetic(precision, problem.factor)
        self.inputs, self.scores, self.state, self.accumulation = (
            parse_format(f) for f in (precision.inputs, precision.scores, precision.state, precision.accumulation))
        self.heads, self.kv_heads = shape.query_heads, shape.kv_pairs
        self._picked = self._pick(sample, grad)
        self._lse = Tensor("lse", self.state, self.heads, shape.seq_q, 1)
        given = {"Q": ("q", self.heads, shape.seq_q, shape.head_dim), "K": ("k", self.kv_heads, shape.seq_k, shape.head_dim),
                 "V": ("v", self.kv_heads, shape.seq_k, shape.head_dim_v)}
        if grad:
            given["dO"] = ("dout", self.heads, shape.seq_q, shape.head_dim_v)
        for tensor, (source, heads, rows, cols) in given.items():
            memory = self.chip.malloc(tensor, self.inputs, heads, rows, cols)
            if self._picked:
                memory.fill(problem.flat(source, heads))

    def _pick(self, sample: int | None, grad: bool) -> dict[int, set[int]]:
        """Executed query tiles: head → starts of the tiles."""
        problem, per_head = self.problem, len(self.row_tiles)
        ready = problem.q is not None and (problem.dout is not None or not grad)
        count = self.heads * per_head
        sample = (count if ready else 0) if sample is None else min(sample, count)
        accepted = "an integer ≥ 0" if ready else f"0 or None: the problem has no {'q, k, v' if problem.q is None else 'dout'}"
        require(sample >= 0 and (ready or sample == 0), "sample", sample, accepted)
        picked: dict[int, set[int]] = {}
        for index in np.linspace(count - 1, 0, sample).round().astype(int).tolist():
            picked.setdefault(index // per_head, set()).add(self.row_tiles[index % per_head].start)
        return picked

    # --- the grid: each generator's turn is one thread block, whose buffers are gone at its end

    def query_tiles(self) -> Iterator[tuple[int, slice, Any]]:
        """(head, rows, arithmetic) of each query tile of each head."""
        for rows in self.row_tiles:
            live = [head for head, starts in self._picked.items() if rows.start in starts]
            yield from ((head, rows, math) for head, math in self._blocks(live, self.heads))

    def head_blocks(self) -> Iterator[tuple[int, Any]]:
        """(head, arithmetic) of each query head; `turns` says which of its query tiles are executed."""
        yield from self._blocks(list(self._picked), self.heads)

    def key_blocks(self) -> Iterator[tuple[int, range, slice, Any]]:
        """(K/V head, its query heads, keys, arithmetic) of each key tile of each K/V head."""
        group = self.shape.group
        live = list(dict.fromkeys(head // group for head in self._picked))
        for keys in self.key_tiles:
            for kv, math in self._blocks(live, self.kv_heads):
                yield kv, range(kv * group, (kv + 1) * group), keys, math

    def turns(self, head: int, tiles: Tiles) -> Iterator[tuple[slice, Mask | None, Any]]:
        """(rows, mask, arithmetic) of query tiles inside a block that owns many: executed or only counted, each for itself."""
        chip, outer = self.chip, self.chip.live
        starts = self._picked.get(head, set()) if outer else set()
        for rows, mask in tiles:
            chip.live = rows.start in starts
            yield rows, mask, self.math if chip.live else DRY
        chip.live = outer

    def _blocks(self, live: list[int], owners: int) -> Iterator[tuple[int, Any]]:
        """The `live` owners one by one, then one dry walk for all the others."""
        chip = self.chip
        for owner in live:
            yield owner, self.math
            chip.clear()
        if len(live) < owners:
            chip.live, chip.times = False, owners - len(live)
            yield 0, DRY
            chip.clear()
            chip.live, chip.times = True, 1

    def kv(self, head: int) -> int:
        """The K/V head that a query head uses."""
        return head // self.shape.group

    # --- memory every schedule asks for

    def malloc_output(self) -> None:
        """O in device memory."""
        self.chip.malloc("O", self.inputs, self.heads, self.shape.seq_q, self.shape.head_dim_v)

    def alloc_scores(self, rows: slice, *names: str) -> None:
        """Room for a matmul's tile of S (which P then overwrites) or of dP."""
        for name in names:
            self.chip.alloc(name, rows.stop - rows.start, self.widest, self.accumulation, None)

    def alloc_statistics(self, rows: slice) -> tuple[Any, Any]:
        """m = −∞ and l = 0 for a query tile."""
        height = rows.stop - rows.start
        return self.chip.alloc("m", height, 1, fill=-np.inf), self.chip.alloc("l", height, 1)

    def alloc_state(self, rows: slice) -> tuple[Any, Any, Any]:
        """o = 0, m = −∞, l = 0 for a query tile."""
        return self.chip.alloc("O", rows.stop - rows.start, self.shape.head_dim_v), *self.alloc_statistics(rows)

    def malloc_gradients(self) -> None:
        """dQ, dK and dV in device memory."""
        for name in ("Q", "K", "V"):
            like = self.chip.memory[name]
            self.chip.malloc("d" + name, self.inputs, like.heads, like.rows, like.cols)

    # --- the mask: tiles worth visiting

    def visible_keys(self, rows: slice) -> Tiles:
        """Key tiles of which some pair with `rows` is visible, with their masks (None: all visible)."""
        return self._visible((keys, *self.mask(rows, keys)) for keys in self.key_tiles)

    def visible_rows(self, keys: slice, heads: int = 1) -> Tiles:
        """Query tiles of which some pair with `keys` is visible, with their masks; counted for each of `heads` query heads."""
        return self._visible(((rows, *self.mask(rows, keys)) for rows in self.row_tiles), heads)

    def mask_array(self, rows: slice, keys: slice) -> Mask | None:
        """The mask of any rectangle of S; None in a block that is only counted."""
        return self.mask.array(rows, keys) if self.chip.live else None

    def _visible(self, tiles: Iterator[tuple[slice, str, Mask | None]], heads: int = 1) -> Tiles:
        visible: Tiles = []
        counts, times = self.chip.count.tiles, self.chip.times * heads
        for tile, kind, mask in tiles:
            counts[kind] += times
            if kind != "skipped":
                visible.append((tile, mask))
        return visible

    # --- the end

    def keep_lse(self, head: int, rows: slice, lse: Array | None) -> None:
        """Note the lse of rows that the schedule itself does not store, so that the result can be checked. Moves no counted byte."""
        if lse is not None:
            self._lse.at(head, rows)[...] = self.state.cast(lse)

    def result(self, **sources: str) -> Result:
        """Gather counts and tensors: ``out="O"`` makes tensor O of device memory the result's "out"."""
        chip, shape = self.chip, self.problem.shape
        made = {name: chip.memory[source] for name, source in sources.items()}
        if "out" in made:
            made["lse"] = chip.memory.get("lse", self._lse)
        sizes = {"lse": (shape.heads, shape.seq_q), "dk": (shape.kv_heads, shape.seq_k, -1), "dv": (shape.kv_heads, shape.seq_k, -1)}
        tensors = {}
        if self._picked:
            for name, tensor in made.items():
                size = sizes.get(name, (shape.heads, shape.seq_q, -1))
                tensors[name] = tensor.dense().astype(chip.carrier).reshape(shape.batch, *size)
        rows = np.zeros((self.heads, self.shape.seq_q), bool)
        for head, starts in self._picked.items():
            for tile in self.row_tiles:
                rows[head, tile] = tile.start in starts
        return Result(self.name, self.problem, tuple(chip.kernels), tensors, chip.peak, chip.peak_buffers,
                      {name: tensor.nbytes for name, tensor in chip.memory.items()}, rows.reshape(shape.query_heads, -1))
