"""Which tile goes where and which keys it meets, by the very functions of the Hopper kernel, run as plain Python."""
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.hopper import schedule

# What these functions use of the dialect, on Python's integers.
GL = SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), load=lambda p: p.values[p.at])


class Pointer:
    """A place in a tensor."""

    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, steps: int) -> "Pointer":
        return Pointer(self.values, self.at + steps)


class Call:
    """`schedule.Call` with its device functions as methods."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update({"NC": 2, "BN": 128, "PACKED": False, "TOP_LEFT": False, "LEFT": False, "RIGHT": False, "behind": 0,
                              "ahead": 0, "len_q": 0, "len_k": 0, **fields})

    def __getattr__(self, name: str) -> Any:
        source = getattr(schedule.Call, name).fn
        plain = FunctionType(source.__code__, {**source.__globals__, "gl": GL, "BM": 64})
        return lambda *args: plain(self, *args)


def sections(all_heads: int, tiles: int, section: int, last_section: int) -> dict[str, int]:
    return {"tiles": tiles, "section": section, "section_tiles": section * tiles, "last_section": last_section,
            "last_heads": all_heads - last_section * section}


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "tiles", "section", "last"),
    [(2, 3, 5, 1, 5), (2, 3, 5, 2, 1), (3, 4, 7, 5, 1), (1, 1, 1, 1, 0), (4, 8, 2, 3, 9)])
def test_every_tile_is_taken_once_and_the_heaviest_of_a_section_first(batch, heads, tiles, section, last, right):
    call = Call(heads=heads, RIGHT=right, **sections(batch * heads, tiles, section, last))
    places = [call.place(tile) for tile in range(batch * heads * tiles)]
    assert sorted(places) == [(b, h, r * 128) for b in range(batch) for h in range(heads) for r in range(tiles)]
    for start in range(0, last * section * tiles, section * tiles):
        rows = [first for _, _, first in places[start : start + section * tiles]]
        assert rows == sorted(rows, reverse=right)


def test_packed_offsets_are_clamped_to_the_tensors():
    call = Call(PACKED=True, cu_q=Pointer([0, 5, 3, 900]), cu_k=Pointer([-4, 7, 7, 50]), len_q=20, len_k=30)
    assert [call.lengths(b) for b in range(3)] == [(5, 7, 0, 0), (0, 0, 5, 7), (17, 23, 3, 7)]


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
        lo, hi, top, right_edge, left_edge = call.blocks(first, rows, keys)
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
