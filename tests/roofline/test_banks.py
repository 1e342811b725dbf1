"""Bank conflicts against the published table, closed forms, and a byte-by-byte recount that shares no code with the model."""
from collections import defaultdict
from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.roofline.banks import PATTERNS, Layout, best_padding, conflicts, parse_pattern, request, table

# leading dimension in halves: (cols, pad, swizzle), scalar column of 32 rows, ldmatrix
TABLE = [
    ((64, 0, "none"), "32-way", "8-way"),
    ((64, 1, "none"), "2-way", "misaligned"),
    ((64, 2, "none"), "conflict-free", "misaligned"),
    ((64, 4, "none"), "2-way", "misaligned"),
    ((64, 8, "none"), "4-way", "conflict-free"),
    ((64, 16, "none"), "8-way", "2-way"),
    ((128, 0, "none"), "32-way", "8-way"),
    ((128, 8, "none"), "4-way", "conflict-free"),
    ((64, 0, "xor"), "4-way", "conflict-free"),
]


def test_table_is_the_known_one_cell_by_cell():
    assert [((at.cols, at.pad, at.swizzle), column.verdict, matrix.verdict) for at, column, matrix in table()] == TABLE


@pytest.mark.parametrize(("where", "column", "matrix"), TABLE)
@pytest.mark.parametrize("size", ["ldmatrix.x1", "ldmatrix.x2", "ldmatrix.x4", "stmatrix.x4.trans"])
def test_every_matrix_count_conflicts_alike(where, column, matrix, size):
    assert conflicts(Layout(64, where[0], 2, *where[1:]), size).verdict == matrix


# --- an independent recount: lists of bytes, one loop a rule -------------------------------------------------------------------------


def place(layout, row, col):
    """Byte of an element: chunks permuted by the row, as the swizzles' documentation draws them."""
    byte = col * layout.element_bytes
    rows_of_8 = (layout.rows + 7) // 8 * 8
    for mode, span, turn in (("128B", 128, row % 8), ("64B", 64, row // 2 % 4), ("32B", 32, row // 4 % 2)):
        if layout.swizzle == mode:
            return byte // span * rows_of_8 * span + row * span + (byte % span // 16 ^ turn) * 16 + byte % 16
    pitch = (layout.cols + layout.pad) * layout.element_bytes
    if layout.swizzle == "xor":
        chunks, share = pitch // 16, 1
        while share < 8 and chunks % (2 * share) == 0:
            share *= 2
        return row * pitch + (byte // 16 ^ row // (8 // share) % share) * 16 + byte % 16
    return row * pitch + byte


def recount(layout, pattern):
    """(banks of each lane, wavefronts of each phase), or None where some row's access is misaligned."""
    kind, _, size = pattern.partition("-" if "-" in pattern else ".")
    width = {"4B": 4, "8B": 8, "16B": 16, "x1": 16, "x2": 16, "x4": 16, "": layout.element_bytes}[size]
    step = width // layout.element_bytes
    starts = range(0, layout.cols - step + 1, step)
    if kind == "row":
        spots = [(row, col) for row in range(layout.rows) for col in starts][:32]
    elif kind == "column":
        spots = [(row, col) for col in starts for row in range(layout.rows)][:32]
    else:  # matrices 0 and 1 one above the other, 2 and 3 to their right
        spots = [(8 * (m % 2) + row, step * (m // 2)) for m in range(int(size[1:])) for row in range(8)]
    if any(place(layout, row, 0) % width for row in range(layout.rows)):
        return None
    together = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[width]
    lanes, waits = [], []
    for first in range(0, len(spots), together):
        held = defaultdict(set)
        for spot in spots[first : first + together]:
            touched = [place(layout, *spot) + byte for byte in range(width)]
            lanes.append(sorted({byte % 128 // 4 for byte in touched}))
            for byte in touched:
                held[byte % 128 // 4].add(byte // 4)
        waits.append(max(len(words) for words in held.values()))
    return lanes, waits


@st.composite
def layouts(draw):
    swizzle = draw(st.sampled_from(["none", "none", "xor", "32B", "64B", "128B"]))
    element, rows = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(16, 80))
    cols = draw(st.integers(32, 150))
    if swizzle == "xor":
        cols -= cols % (16 // element)
        return Layout(rows, cols, element, draw(st.integers(0, 8)) * 16 // element, swizzle)
    return Layout(rows, cols, element, draw(st.integers(0, 40)) if swizzle == "none" else 0, swizzle)


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from(sorted(PATTERNS)))
def test_model_agrees_with_the_recount(layout, pattern):
    if 0 < PATTERNS[pattern].width < layout.element_bytes:
        return
    count, expected = conflicts(layout, pattern), recount(layout, pattern)
    if expected is None:
        assert count.misaligned
        assert (count.verdict, count.degree, count.wavefronts, count.ideal, count.bandwidth_left) == ("misaligned", *[None] * 4)
        return
    lanes, waits = expected
    assert [sorted(lane) for phase in count.phases for lane in phase.banks] == lanes
    assert [phase.wavefronts for phase in count.phases] == waits
    assert (count.wavefronts, count.ideal, count.degree) == (sum(waits), len(waits), max(waits))
    assert count.bandwidth_left == len(waits) / sum(waits)


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_layouts_place_every_element_apart_and_inside(layout):
    e = layout.element_bytes
    places = [layout.address(row, col) for row in range(layout.rows) for col in range(layout.cols)]
    assert len(set(places)) == layout.rows * layout.cols
    assert all(place % e == 0 and 0 <= place <= layout.nbytes - e for place in places)
    assert layout.nbytes - len(places) * e == layout.extra_bytes


# --- closed forms --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ld", range(1, 131))
def test_strided_columns_conflict_by_the_common_divisor(ld):
    assert conflicts(Layout(32, ld, 4), "column").degree == gcd(ld, 32)  # words: odd leading dimensions are free
    assert conflicts(Layout(32, ld, 8), "column").degree == gcd(ld, 16)  # 8-byte elements, 16 lanes a phase
    chunks = Layout(32, 8 * ld, 2)
    assert conflicts(chunks, "ldmatrix.x2").degree == conflicts(chunks, "column-16B").degree == gcd(ld, 8)
    assert conflicts(replace(chunks, swizzle="xor"), "ldmatrix.x2").degree == 1


@pytest.mark.parametrize("swizzle", ["none", "xor", "32B", "64B", "128B"])
def test_sixteen_byte_rows_hold_a_scalar_column_at_four_ways_or_more(swizzle):
    for chunks in range(1, 33):
        for element in (1, 2, 4):
            assert conflicts(Layout(32, 16 * chunks // element, element, swizzle=swizzle), "column").degree >= 4


@pytest.mark.parametrize(("swizzle", "cols"), [("32B", 16), ("64B", 32), ("128B", 64)])
def test_xor_is_the_tma_swizzle_on_rows_of_one_span(swizzle, cols):
    spots = [(row, col) for row in range(32) for col in range(cols)]
    assert [Layout(32, cols, 2, 0, "xor").address(*s) for s in spots] == [Layout(32, cols, 2, 0, swizzle).address(*s) for s in spots]


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=32), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 50), st.randoms())
@settings(max_examples=40, deadline=None)
def test_whole_lines_and_the_order_within_a_phase_do_not_matter(units, width, lines, random):
    addresses = [width * unit for unit in units]
    together = min(32, 128 // width)
    moved = [address + 128 * lines for address in addresses]
    phases = [moved[i : i + together] for i in range(0, len(units), together)]
    shuffled = [address for phase in phases for address in random.sample(phase, len(phase))]
    waits = [phase.wavefronts for phase in request(addresses, width).phases]
    assert [phase.wavefronts for phase in request(shuffled, width).phases] == waits


def test_same_word_is_broadcast_and_other_words_of_its_bank_queue():
    assert request([40] * 32, 4).wavefronts == 1
    assert request([0, 1, 2, 3] * 8, 1).wavefronts == 1
    phase, = request([0, 128, 0, 256, 4], 4).phases
    assert phase.queues[0] == (0, 32, 64)
    assert phase.queues[1] == (1,)
    assert phase.banks == ((0,), (0,), (0,), (0,), (1,))
    assert phase.wavefronts == 3


def test_unequal_phases_report_the_worst_and_the_mean():
    count = request([128 * lane for lane in range(16)] + [8 * lane for lane in range(16)], 8)
    assert [phase.first_lane for phase in count.phases] == [0, 16]
    assert (count.degree, count.wavefronts, count.ideal, count.bandwidth_left) == (16, 17, 2, 2 / 17)


def test_a_row_that_fits_one_warp_is_still_misaligned_on_the_next_row():
    assert conflicts(Layout(2, 256, 2, pad=1), "row-16B").misaligned
    assert conflicts(Layout(1, 256, 2, pad=1), "row-16B").verdict == "conflict-free"
    assert request([0, 8, 20], 8).misaligned


# --- what an H200 counted: conflicts a request ------------------------------------------------------------------------------------------

# benchmarks/results/h200/lab.json, `tiles`: (pad, swizzle) of a [64][64] tile, access, conflicts, requests that the machine code made for
# them. A read of the tile is 128 scalar columns, 16 ldmatrix.x4, 32 .x2 or 64 .x1; of its 16 reads ptxas had merged those by ldmatrix to
# 8, 4 and 4. `layout` read [64][64] by .x4 only in the orders of K and V, whose loops repeat no read: 28 conflicts each as well.
COUNTED = [
    ((0, "none"), "column", 63488, 2048), ((1, "none"), "column", 2048, 2048), ((2, "none"), "column", 0, 2048),
    ((8, "none"), "column", 6144, 2048), ((16, "none"), "column", 14336, 2048), ((0, "xor"), "column", 6144, 2048),
    ((0, "none"), "ldmatrix", 3584, 128), ((0, "none"), "ldmatrix across", 3584, 128), ((8, "none"), "ldmatrix", 0, 128),
    ((16, "none"), "ldmatrix", 512, 128), ((16, "none"), "ldmatrix across", 512, 128), ((0, "xor"), "ldmatrix", 0, 128),
    ((0, "none"), "ldmatrix.x2", 1792, 128), ((0, "none"), "ldmatrix.x1", 1792, 256),
]
ORDERS = {  # first row and column of each matrix: down the columns or across the rows of a 16 × 16 part
    "ldmatrix": [(0, 0), (8, 0), (0, 8), (8, 8)], "ldmatrix across": [(0, 0), (0, 8), (8, 0), (8, 8)],
    "ldmatrix.x2": [(0, 0), (8, 0)], "ldmatrix.x1": [(0, 0)],
}


@pytest.mark.parametrize(("where", "access", "counted", "requests"), COUNTED)
def test_the_rule_gives_what_was_counted(where, access, counted, requests):
    layout = Layout(64, 64, 2, *where)
    if access == "column":
        made = request([layout.address(row, 0) for row in range(32)], 2)
    else:
        made = request([layout.address(top + row, left) for top, left in ORDERS[access] for row in range(8)], 16)
    assert made.wavefronts - made.ideal == counted / requests


# --- remedies ------------------------------------------------------------------------------------------------------------------------


def test_best_padding_of_the_known_tile():
    tile = Layout(64, 64, 2, pad=3)
    matrix = best_padding(tile, ["ldmatrix"])
    assert (matrix.padded, matrix.padded.extra_bytes) == (Layout(64, 64, 2, pad=8), 1024)
    assert (matrix.swizzled, matrix.swizzled.extra_bytes) == (Layout(64, 64, 2, swizzle="xor"), 0)
    column = best_padding(tile, ["column"])
    assert (column.padded, column.swizzled) == (Layout(64, 64, 2, pad=2), None)
    both = best_padding(tile, ["column", "ldmatrix"])
    assert (both.padded, both.swizzled) == (None, None)
    assert best_padding(Layout(64, 64, 4), ["column"]).padded.pad == 1


def test_rows_that_are_no_whole_chunks_are_swizzled_in_boxes_at_a_price():
    remedy = best_padding(Layout(64, 60, 2), ["ldmatrix"])  # 120 B a row: 4 boxes of 32 B
    assert (remedy.swizzled.swizzle, remedy.swizzled.extra_bytes) == ("32B", 64 * (128 - 120))
    assert remedy.padded.pad == 12  # 144 B


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(16, 100), st.sampled_from(["column", "column-8B", "row-16B", "ldmatrix.x2"]))
def test_best_padding_is_the_smallest_of_all(element, cols, pattern):
    def free(pad):
        waits = recount(Layout(32, cols, element, pad), pattern)
        return waits is not None and max(waits[1]) == 1

    cols += -cols % (16 // element)
    padded = best_padding(Layout(32, cols, element), [pattern]).padded
    assert (padded and padded.pad) == next((pad for pad in range(256) if free(pad)), None)


# --- what is refused -----------------------------------------------------------------------------------------------------------------


def test_names_of_patterns():
    assert parse_pattern("ldmatrix") == parse_pattern("stmatrix") == parse_pattern("stmatrix.x4.trans") == "ldmatrix.x4"
    assert parse_pattern("ldmatrix.x1.trans") == "ldmatrix.x1"
    for name in ("diagonal", "row.trans", "ldmatrix.x3"):
        with pytest.raises(InputError, match=rf"--pattern: got '{name}', accepted: column, row"):
            parse_pattern(name, "--pattern")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rows": 0}, "rows: got 0"),
    ({"cols": -3}, "cols: got -3"),
    ({"rows": 8.0}, "rows: got 8.0"),
    ({"pad": -1}, "pad: got -1"),
    ({"element_bytes": 3}, "element_bytes: got 3"),
    ({"swizzle": "256B"}, "swizzle: got '256B', accepted: none, xor, 32B"),
    ({"swizzle": "128B", "pad": 8}, "pad: got 8, accepted: 0 with swizzle 128B"),
    ({"swizzle": "xor", "pad": 1}, "swizzle: got 'xor' on rows of 130 B"),
])
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(InputError, match=message):
        Layout(**{"rows": 64, "cols": 64, **arguments})


@pytest.mark.parametrize(("layout", "pattern", "message"), [
    (Layout(8, 64), "ldmatrix.x2", "ldmatrix.x2 on a 8×64 tile, accepted: a tile of at least 16×8"),
    (Layout(16, 8), "ldmatrix.x4", "at least 16×16"),
    (Layout(16, 4), "row-16B", "at least 1×8"),
    (Layout(16, 16, 8), "column-4B", "column-4B on elements of 8 B"),
])
def test_patterns_a_tile_cannot_serve(layout, pattern, message):
    with pytest.raises(InputError, match=message):
        conflicts(layout, pattern)


@pytest.mark.parametrize(("addresses", "width", "message"), [
    ([], 4, "addresses: got 0 of them"),
    ([0] * 33, 4, "addresses: got 33 of them"),
    ([0, -4], 4, "addresses: got -4"),
    ([0], 12, "width: got 12, accepted: 1, 2, 4, 8, 16"),
])
def test_requests_no_warp_makes(addresses, width, message):
    with pytest.raises(InputError, match=message):
        request(addresses, width)
