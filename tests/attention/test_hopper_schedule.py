"""Which tile goes where and which keys it meets, by the very functions of the Hopper kernel, run as plain Python."""
import heapq
from collections import OrderedDict
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.hopper import schedule, tiles
from onchip.attention.hopper.split import tile_blocks
from onchip.attention.problem import Spec
from onchip.launcher import divisor


class Number(int):
    """An integer with the dialect's conversions."""

    def to(self, dtype: str) -> "Number":
        low = int(self) % 2**32
        return Number(low - 2**32 if dtype == "int32" and low >= 2**31 else low)

    def __rmul__(self, other: int) -> "Number":
        return Number(other * int(self))

    def __rshift__(self, steps: int) -> "Number":
        return Number(int(self) >> int(steps))


# What these functions use of the dialect, on Python's integers.
GL = SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), load=lambda p: p.values[p.at], int32="int32", uint32="uint32",
                     umulhi=lambda a, b: Number(int(a) * int(b) >> 32))


class Pointer:
    """A place in a tensor."""

    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, steps: int) -> "Pointer":
        return Pointer(self.values, self.at + steps)


def plain(function: Any) -> Any:
    """A device function as a Python one."""
    return FunctionType(function.fn.__code__, {**function.fn.__globals__, "gl": GL, "BM": 64, "here": lambda x: x})


class Divisor:
    """`schedule.Divisor` with its device function as a method."""

    def __init__(self, d: int) -> None:
        self.d, self.m, self.s = map(Number, divisor(d))

    def into(self, x: int) -> int:
        return int(plain(schedule.Divisor.into)(self, Number(x)))


class Call:
    """`schedule.Call` with its device functions as methods."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update({"NC": 2, "BN": 128, "QUERIES": 2, "PACKED": False, "TOP_LEFT": False, "LEFT": False, "RIGHT": False,
                              "SPLIT": False, "behind": 0, "ahead": 0, "len_q": 0, "len_k": 0, **fields})

    def __getattr__(self, name: str) -> Any:
        function = plain(getattr(schedule.Call, name))
        return lambda *args: function(self, *args)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 7, 64, 65, 96, 1000, 4095, 65537, 1 << 30, (1 << 31) - 1])
def test_division_is_exact(d):
    by = Divisor(d)
    near = {k * d + e for k in (1, 2, 3, (1 << 31) // d - 1, (1 << 31) // d) for e in (-1, 0, 1)}
    for x in sorted({0, 1, (1 << 31) - 1, 1 << 30, 123456789} | near):
        if 0 <= x < 1 << 31:
            assert by.into(x) == x // d


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(("batch", "heads", "tiles", "last"), [(2, 3, 5, 1), (2, 3, 5, 4), (3, 4, 7, 12), (1, 1, 1, 1), (4, 8, 2, 5)])
def test_every_tile_is_taken_once_and_the_heaviest_of_a_head_first(batch, heads, tiles, last, right):
    early = batch * heads - last
    call = Call(heads=Divisor(heads), tiles=Divisor(tiles), early_heads=early, early_tiles=early * tiles, last_heads=Divisor(last),
                RIGHT=right)
    places = [call.place(tile) for tile in range(batch * heads * tiles)]
    assert sorted(places) == [(b, h, r * 128) for b in range(batch) for h in range(heads) for r in range(tiles)]
    early_tiles = places[: early * tiles]
    for start in range(0, early * tiles, tiles):  # a head after the other
        assert len({(b, h) for b, h, _ in early_tiles[start : start + tiles]}) == 1
        assert [first for _, _, first in early_tiles[start : start + tiles]] == sorted(range(0, tiles * 128, 128), reverse=right)
    rows = [first for _, _, first in places[early * tiles :]]  # the rest together
    assert rows == sorted(rows, reverse=right)


def blocks_from_memory(tiles: int, heads: int, thread_blocks: int, held: int, speeds: list[float], causal: bool) -> int:
    """Blocks of K and V that come from memory when an L2, evicting what was used longest ago, holds `held` of them. Each thread block takes
    its speed's time for a block of keys; whoever is free takes the next tile, as `place` orders them."""
    last = min(heads, -(-2 * thread_blocks // tiles)) if causal else 1  # as in `launch.Plan`
    early = heads - last
    call = Call(heads=Divisor(heads), tiles=Divisor(tiles), early_heads=early, early_tiles=early * tiles, last_heads=Divisor(last),
                RIGHT=causal, len_q=128 * tiles, len_k=128 * tiles)
    places = (call.place(tile) for tile in range(heads * tiles))
    walks = ((h, iter(range(call.blocks(first, 128 * tiles, 128 * tiles, 0)[2] // 128, -1, -1))) for _, h, first in places)
    free = [(float(i) / thread_blocks, i) for i in range(thread_blocks)]
    walking: dict[int, tuple[int, Any]] = {}
    l2: OrderedDict[tuple[int, int], None] = OrderedDict()
    missed = 0
    while free:
        now, i = heapq.heappop(free)
        walking[i] = walking.get(i) or next(walks, None)
        if walking[i] is None:
            continue  # no more tiles
        head, walk = walking[i]
        block = next(walk, None)
        if block is None:
            walking[i] = None
        else:
            missed += (head, block) not in l2
            l2[head, block] = None
            l2.move_to_end((head, block))
            if len(l2) > held:
                l2.popitem(last=False)
        heapq.heappush(free, (now + speeds[i] * (block is not None), i))
    return missed


@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_causal_tiles_stay_in_step_where_a_heads_keys_do_not_fit_the_l2(spread):
    # 8 rounds of 33 thread blocks a head; the L2 holds two fifths of a head's K and V, as 25 MB do at 128K keys of d 128
    tiles, heads, thread_blocks = 264, 3, 33
    speeds = [1 + spread * (i * 7 % 11 - 5) / 5 for i in range(thread_blocks)]
    missed = blocks_from_memory(tiles, heads, thread_blocks, 2 * tiles // 5, speeds, causal=True)
    a_pass_a_round = sum(range(thread_blocks, tiles + 1, thread_blocks))  # the keys of each round's longest tile, once
    assert heads * tiles <= missed <= heads * a_pass_a_round
    full = blocks_from_memory(tiles, heads, thread_blocks, 2 * tiles // 5, speeds, causal=False)
    rounds = heads * tiles // thread_blocks
    assert (full == rounds * tiles) == (spread == 0)  # full tiles drift apart where thread blocks differ: nothing brings them together


def test_slots_of_q_alternate_and_their_barriers_turn_over():
    assert [Call(NC=3).slot(told) for told in range(5)] == [(0, 0), (3, 0), (0, 1), (3, 1), (0, 0)]
    assert [Call(QUERIES=1).slot(told) for told in range(3)] == [(0, 0), (0, 1), (0, 0)]


def test_packed_offsets_are_clamped_to_the_tensors():
    call = Call(PACKED=True, cu_q=Pointer([0, 5, 3, 900]), cu_k=Pointer([-4, 7, 7, 50]), len_q=20, len_k=30)
    assert [call.lengths(b, 0) for b in range(3)] == [(5, 7, 0, 0), (0, 0, 5, 7), (17, 23, 3, 7)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (0, 0), (100, 0), (200, 30), (None, 70), (500, None), (20, None)])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (300, 300), (128, 513), (700, 100), (65, 1000), (256, 0)])
def test_a_tile_meets_its_keys_and_no_others_and_edges_are_where_masks_or_shifts_change(rows, keys, left, right, top_left, packed):
    offset = 0 if top_left else keys - rows
    dense = 0 if packed else offset  # packed, the kernel adds the sequence's own offset
    call = Call(PACKED=packed, TOP_LEFT=top_left, LEFT=left is not None, RIGHT=right is not None, behind=dense - (left or 0),
                ahead=dense + (right or 0))
    for first in range(0, rows, 128):
        lo, hi, top, right_edge, left_edge = call.blocks(first, rows, keys, 0)
        seen = []
        for i in range(first, min(first + 128, rows)):
            lowest = 0 if left is None else max(0, i + offset - left)
            highest = keys - 1 if right is None else min(keys - 1, i + offset + right)
            seen.append(set(range(lowest, highest + 1)))
            assert tuple(call.sight(i, rows, keys)) == (lowest, highest)
        union = set().union(*seen)
        assert union == set(range(lo, hi)) or (not union and lo == hi)
        starts = list(range(top, lo - 1, -128))
        assert starts[-1] == lo
        assert top < max(hi, lo + 1) <= top + 128
        for row in starts:
            block = {j for j in range(row, row + 128) if j < keys}
            if left_edge <= row < right_edge:
                assert len(block) == 128
                assert all(block <= s for s in seen)
        # before the first block without a maximum, every row must have met a key: its shift stays as it is
        inner = [row for row in starts if left_edge <= row < right_edge and row != top]
        if inner:
            assert all(any(j >= inner[0] + 128 for j in s) for s in seen)


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (0, 0), (100, 0), (200, 30), (None, 70), (500, None)])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (300, 300), (128, 513), (700, 100), (65, 1000), (500, 2000), (256, 0)])
def test_the_parts_of_a_tile_meet_its_keys_once_and_know_their_edges(rows, keys, left, right, top_left, parts):
    offset = 0 if top_left else keys - rows
    geometry = {"TOP_LEFT": top_left, "LEFT": left is not None, "RIGHT": right is not None, "behind": offset - (left or 0),
                "ahead": offset + (right or 0)}
    whole, split = Call(**geometry), Call(**geometry, SPLIT=True, parts=Divisor(parts))
    spec = Spec(2 if top_left else 0, -1 if left is None else left, -1 if right is None else right, 1.0, 0.0, 0.0, rows, keys, False, False)
    counted = tile_blocks(tiles.forward(128, 128), rows, keys, spec)
    for first, count in zip(range(0, rows, 128), counted, strict=True):
        lo, hi, top, _, _ = whole.blocks(first, rows, keys, 0)
        assert count == len(range(top, lo - 1, -128))
        lengths, end = [], lo
        for part in range(parts):
            lo_p, hi_p, top_p, right_edge, left_edge = split.blocks(first, rows, keys, part)
            assert (lo_p, (lo_p - lo) % 128) == (end, 0)
            assert lo_p <= hi_p <= hi
            assert top_p < max(hi_p, lo_p + 1) <= top_p + 128
            lengths.append(-(-(hi_p - lo_p) // 128))
            end = lo_p + 128 * lengths[-1]
            # what `attend` relies on: blocks between the edges are seen whole by every row, and when they begin every row has met a key
            starts = list(range(top_p, lo_p - 1, -128))
            inner = [row for row in starts if left_edge <= row < max(right_edge, lo_p) and row != top_p]
            for i in {first, (first + min(first + 128, rows)) // 2, min(first + 128, rows) - 1}:
                lowest, highest = split.sight(i, rows, hi_p)
                seen = set(range(max(lowest, lo_p), highest + 1))
                assert all(set(range(row, row + 128)) <= seen for row in inner)
                assert not inner or any(j >= inner[0] + 128 for j in seen)
        assert (sum(lengths), hi) == (-(-(hi - lo) // 128), min(end, hi))
        assert max(lengths) - min(lengths) <= 1


def test_tasks_name_every_part_of_every_tile():
    call = Call(SPLIT=True, parts=Divisor(3))
    assert [call.tile_of(task) for task in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert Call().tile_of(7) == (7, 0)
