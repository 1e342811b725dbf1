"""The table of tiles: every width served, nothing a card cannot hold, compiled without spills."""
import pytest

from onchip.roofline.hardware import ARCHITECTURES
from onchip.softmax.triton import plan
from tests import fresh
from tests.softmax import compile_parts, compile_plans


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 255, 256, 257, 1024, 1025, 32768, 32769, 10**6, 2**31 + 7])
def test_a_resident_tile_holds_the_row_and_a_streamed_one_has_full_blocks(n, across):
    chosen = plan.choose(n, across)
    assert chosen.block_n & (chosen.block_n - 1) == 0
    assert chosen.block_m & (chosen.block_m - 1) == 0
    assert not chosen.resident or n <= chosen.block_n < 2 * n
    assert chosen.resident or chosen.programs_per_sm > 0


def test_which_plan_serves_which_width():
    def widest(across):
        return max(2**k for k in range(32) if plan.choose(2**k, across).resident)

    assert (widest(False), widest(True)) == (32768, 512)
    assert not plan.choose(32769, False).resident


def test_rows_with_edges_give_every_thread_32_elements():
    for n in (513, 1023, 2047, 4095, 8191):
        chosen = plan.choose(n, False, True)
        assert chosen.block_n // (32 * chosen.warps) == plan.EDGES_EACH
    assert plan.choose(100, False, True) == plan.choose(100, False)


def test_short_rows_fill_4_kb():
    for n in (33, 200, 256):
        plain = plan.choose(n, False, narrow=True)
        assert (plain.block_m * plain.block_n, plain.warps) == (2048, 4)
        for other in ({}, {"triangle": True}, {"masked": True}, {"summed": True}):
            apart = plan.choose(n, False, narrow=bool(other), **other)
            assert apart.block_m * apart.block_n == 1024
            assert apart.warps == 1


@pytest.mark.parametrize("kind", [{}, {"edges": True}, {"masked": True}, {"summed": True}, {"forward": False}])
def test_rows_of_16_bits_are_held_in_pieces_with_no_lane_empty_but_in_the_last(kind):
    for n in (257, 300, 512, 513, 600, 1000, 1024, 1025, 1500, 2048, 3000, 4096, 4097, 5000, 7168, 7169, 8192):
        chosen, width = plan.choose(n, False, narrow=True, **kind), 1 << (n - 1).bit_length()
        if chosen.pieces == 1:  # a tile is as good where it is full
            assert chosen.block_n == width
            assert n > width - plan.PIECES[width][1]
            assert not {"masked", "summed"} & set(kind)
            assert "forward" in kind or width == 8192
            continue
        assert chosen.narrow
        assert chosen.block_m * chosen.block_n == 8 * 32 * chosen.warps  # a vector a thread
        assert (chosen.pieces - 1) * chosen.block_n < n <= chosen.pieces * chosen.block_n
        assert chosen.block_m == 1 or not kind.get("edges")
        assert (chosen.registers or 0) in (0, plan.PIECES_MASKED if "masked" in kind else 48)
    assert not plan.choose(1000, False, **kind).narrow
    for n in (3001, 5001):
        assert plan.choose(n, False, edges=True, forward=False, narrow=True).pieces == 1


def test_rows_of_32_bits_are_held_in_pieces_where_a_tile_is_not_full():
    for n in (1025, 1500, 2048, 2049, 2500, 3000, 3328, 3329, 4096, 4097, 5000, 7168, 7169, 8192):
        kinds = {"plain": plan.choose(n, False), "mask": plan.choose(n, False, masked=True), "sum": plan.choose(n, False, summed=True),
                 "gradient": plan.choose(n, False, forward=False)}
        held = {kind for kind, chosen in kinds.items() if chosen.pieces > 1}
        short = {"gradient"} if n <= 2048 else {"plain", "mask", "sum"} if n <= 3328 else {"sum"} if n <= 7168 else set()
        assert held == short, n
        for chosen in kinds.values():
            assert chosen.pieces * chosen.block_n >= n > (chosen.pieces - 1) * chosen.block_n
            assert chosen.pieces == 1 or chosen.block_m * chosen.block_n == 4 * 32 * chosen.warps  # a vector a thread
        for other in ({"edges": True}, {"triangle": True}):
            assert plan.choose(n, False, **other).pieces == 1


def test_long_rows_of_16_bits_wait_as_they_came():
    for n in (8193, 16384, 32768):
        for kind in ({}, {"masked": True}, {"edges": True}, {"summed": True}):
            chosen = plan.choose(n, False, narrow=True, **kind)
            assert chosen.narrow
            assert chosen.block_n // 2 // (32 * chosen.warps) == (32 if n > 16384 else 16)  # registers a thread for the row
        assert not plan.choose(n, False).narrow
        assert not plan.choose(n, False, forward=False, narrow=True).narrow
    assert not plan.choose(8192, False, narrow=True).narrow
    assert not plan.choose(32769, False, narrow=True).resident


def test_rows_of_a_triangle_and_of_a_mask_wait_in_16_bits_from_a_thousand_elements_on():
    for n in (1024, 2048, 4096, 8192, 16384, 32768):
        for kind in ({"triangle": True}, {"masked": True}, {"triangle": True, "masked": True}):
            chosen = plan.choose(n, False, narrow=True, **kind)
            assert chosen.narrow
            assert not plan.choose(n, False, **kind).narrow
            assert chosen.block_m * chosen.block_n * chosen.pieces // (32 * chosen.warps) <= 64
            assert (chosen.registers or 128) * 32 * chosen.warps * (1 + (n == 32768)) <= 65536
        edges = plan.choose(n, False, edges=True, narrow=True, triangle=True)  # these take registers
        assert edges.block_m == 1
        assert edges.registers is None or edges.registers >= 40


H200 = {"processors": 132, "shared_memory": 227 * 1024}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("vector", [4, 8])
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 131, 132, 5000, 2**31 - 1])
def test_parts_hold_the_row_and_all_of_a_group_run_at_once(rows, edges, vector, backward):
    for n in (16_384, 32_769, 50_257, 65_536, 131_072, 151_936, 262_144, 1_000_003, 2**20):
        parts = plan.choose_parts(rows, n, vector, edges, **H200, backward=backward)
        if n <= plan.PARTS_BEYOND[vector, backward]:
            assert parts is None
            continue
        window = n + (vector - 1) * edges
        assert (parts.group - 1) * parts.columns(vector) < window <= parts.group * parts.columns(vector)
        taken = (1 + backward) * parts.columns(vector) // vector * 16 + plan.BESIDE_SLOTS
        assert parts.blocks_per_sm * taken <= 228 * 1024
        assert parts.blocks_per_sm * parts.registers * 32 * plan.PARTS_WARPS <= 65_536
        groups = parts.groups(rows, 132)
        assert 1 <= groups * parts.group <= parts.blocks_per_sm * 132
        most = parts.blocks_per_sm * 132 // parts.group
        assert -(-rows // groups) == -(-rows // most)  # as many rounds as with all groups that fit, shared evenly
        assert groups == rows or groups * (-(-rows // groups)) - rows < -(-rows // groups) + groups


def test_few_long_rows_are_cut_for_every_sm():
    for rows, n in ((1, 2**20), (4, 2**18), (2, 300_000)):
        parts = plan.choose_parts(rows, n, 8, False, **H200, backward=False)
        assert 132 / 2 <= rows * parts.group <= 132  # a slot more or less for each part
    many = plan.choose_parts(5000, 2**18, 8, False, **H200, backward=False)
    assert many.slots == plan.PARTS_SLOTS[False]


def test_what_no_group_holds_is_streamed():
    assert plan.choose_parts(1, 2**30, 8, False, **H200, backward=False) is None
    assert plan.choose_parts(2**31, 65_536, 8, False, **H200, backward=False) is None
    assert plan.choose_parts(8, 2**25, 8, False, **H200, backward=False) is None
    assert plan.choose_parts(8, 65_536, 8, False, processors=1, shared_memory=48 * 1024, backward=False) is None
    assert plan.choose_parts(8, 12_000_000, 8, False, **H200, backward=False) is not None


def test_neighbouring_rows_fill_whole_sectors():
    for n in (1, 19, 64, 512, 513, 10**6):
        assert plan.choose(n, True).block_m * 2 >= 32


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
def test_registers_hold_every_tile(capability):
    """A row lives in registers as float32; a quarter at least is left for addresses and temporaries."""
    card = ARCHITECTURES[capability]
    for across in (False, True):
        for n in [2**k for k in range(17)]:
            chosen = plan.choose(n, across)
            per_thread = chosen.block_m * chosen.block_n / (32 * chosen.warps)
            assert per_thread / 0.75 <= min(card.max_registers_per_thread, card.registers_per_sm / (32 * chosen.warps))


def test_plans_compile_for_hopper_and_move_16_bytes_at_a_time():
    cases = [((8, 32768), -1), ((8, 65536), -1), ((2, 32, 256), -2), ((9, 256), -1), ((9, 512), -1), ((9, 5000), -1)]  # heavy and short
    kernels = fresh.call(compile_plans.main, cases)
    assert len(kernels) == 2 * 2 * len(cases)
    late = {("forward", 256): 4, ("forward", 512): 4, ("backward", 32768): 27}  # of float32: at a copy's rate; for few rows alone on Hopper
    for at, kernel in enumerate(kernels):
        assert kernel["stack"] <= (96 if kernel["name"] == "backward" else 0), kernel  # the widest backward spills a little
        assert kernel["accesses"] == kernel["wide"] > 0, kernel
        if kernel["kernel"] == "_resident":  # an exponential an element where rows wait in float32; where they are widened anew, two
            assert kernel["late"] <= (late.get((kernel["name"], kernel["columns"]), 0) if at % 2 else 0), kernel
            assert kernel["exponentials"] <= kernel["terms"] + 2, kernel


def test_triangles_and_masks_compile_for_hopper_as_the_plan_says():
    """Without spills; x and y by 16 bytes, a mask by as many bytes as these are elements, none moved between threads, all loads first."""
    cases = {(1024, "bfloat16", True): 32, (4096, "bfloat16", True): 12, (8192, "bfloat16", True): 8, (16384, "float32", True): 2,
             (1024, "float16", False): 25, (8192, "bfloat16", False): 8, (16384, "float16", False): 4, (16384, "float32", False): 2}
    for case, programs, kernel in zip(cases, cases.values(), fresh.call(compile_plans.hidden, list(cases)), strict=True):
        assert (kernel["stack"], kernel["bytes"], kernel["late"]) == (0, 0, 0), (case, kernel)
        assert kernel["programs"] >= programs, (case, kernel)
        assert kernel["wide"] == kernel["accesses"] * (1 if case[2] else 2) // (1 if case[2] else 3), (case, kernel)
        assert kernel["barriers"] <= 10, (case, kernel)


def test_masks_of_rows_with_ends_compile_for_hopper_to_vectors():
    """Bytes are read of the ends alone: a forward before its pieces, and again where it is a cluster's; all loads first."""
    for kernel, pieces in zip(fresh.call(compile_plans.hidden, [(5001, "bfloat16", False), (9001, "float16", False)]), (5, 5), strict=True):
        assert (kernel["stack"], kernel["late"]) == (0, 0), kernel
        assert kernel["bytes"] <= 2, kernel
        assert kernel["wide"] == 2 * pieces, kernel  # x and y


def test_late_loads_are_found():
    load, use, end = "/*0000*/ @P0 LDG.E.128 R{}, desc[UR4][R2.64] ;", "/*0010*/ FADD R40, R{}, R9 ;", "/*0020*/ EXIT ;"
    for lines, found in (((load.format(4), load.format(8), use.format(4)), 0), ((load.format(4), use.format(7), load.format(8)), 1),
                         ((load.format(4), use.format(8), load.format(8)), 0), ((load.format(4), use.format(4), end, load.format(8)), 0)):
        assert compile_plans.late("\n".join(lines)) == found


def test_parts_compile_for_hopper_as_the_plan_says():
    """Without spills; loads of 16 bytes only, straight to shared memory; as many blocks on an SM as are counted on."""
    cases = [[270_000, "bfloat16"], [300_007, "bfloat16"], [270_000, "float32"], [2**20, "bfloat16", 1], [2**18, "float32", 4]]
    for kernel in fresh.call(compile_parts.main, cases):
        assert kernel["spills"] == 0, kernel
        assert kernel["copies"] == kernel["wide_copies"] > 0, kernel
        assert kernel["stores"] == kernel["wide_stores"] or kernel["edges"], kernel
        assert kernel["wide_stores"] > 0, kernel
        assert kernel["blocks"] >= kernel["blocks_per_sm"], kernel
        assert kernel["shared"] <= kernel["planned"], kernel


def test_clusters_compile_for_hopper_without_spills():
    cases = [[16_384, "bfloat16"], [50_257, "bfloat16"], [151_936, "bfloat16"], [262_144, "float16"], [151_936, "float32"],
             [262_144, "float32"]]
    kernels = fresh.call(compile_parts.main, cases)
    assert len(kernels) == 2 * len(cases)
    for kernel in kernels:
        assert kernel["spills"] <= 8, kernel  # bytes, stored and loaded
        assert kernel["wide"] > 0, kernel
        assert kernel["parts"] > 1, kernel
        assert kernel["cluster_waits"] == kernel["sends"] == 1, kernel
        assert 144 <= kernel["beside"] <= 1024, kernel  # mail, and what reductions take
    assert [kernel["held"] for kernel in kernels] == [0] * 11 + [8 * 4096]  # of 262144 columns of float32, backward


def test_two_passes_compile_with_edges_and_without():
    """Which the interpreter does not show: there a name may hold one shape before a loop and another in it."""
    assert fresh.call(compile_plans.streamed, [600, 601]) == [False] * 4 + [True] * 4


def test_topk_and_odd_rows_compile_for_hopper_without_spills():
    for kernel in fresh.call(compile_parts.main, [[4095, "bfloat16"], "topk"]):
        assert kernel["spills"] == 0, kernel
        assert kernel["wide"] > 0, kernel
