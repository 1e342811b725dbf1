"""Ledgers of the softmax schedules against counts made by hand."""
import pytest

from onchip.errors import InputError
from onchip.roofline import softmax
from onchip.roofline.dram import dram_bytes
from onchip.roofline.softmax import Rows

X = Rows(3, 4096, "bf16")
ELEMENTS = 3 * 4096


@pytest.mark.parametrize(("pipeline", "accesses"), [
    (softmax.naive(X), 3), (softmax.safe(X), 4), (softmax.online(X), 3), (softmax.resident(X), 2),
    (softmax.backward_two_pass(X), 5), (softmax.backward_resident(X), 3)])
def test_accesses_an_element(pipeline, accesses):
    assert pipeline.issued == accesses * ELEMENTS * 2


def test_online_gains_four_thirds_over_safe_at_most():
    assert softmax.safe(X).issued / softmax.online(X).issued == pytest.approx(4 / 3)


@pytest.mark.parametrize(("intermediates", "kept"), [(None, 2), ("fp32", 4)])
def test_eager_moves_every_intermediate(intermediates, kept):
    pipeline = softmax.eager(X, intermediates)
    # x read twice and y written once; s and p: 2 writes, 3 reads; m and l a row: written once, read once
    assert pipeline.issued == 3 * ELEMENTS * 2 + 5 * ELEMENTS * kept + 4 * 3 * kept
    assert [k.name for k in pipeline.kernels] == ["max", "subtract", "exp", "sum", "divide"]
    assert pipeline.textbook == pipeline.issued
    assert pipeline.compulsory == 2 * ELEMENTS * 2
    assert pipeline.exps == ELEMENTS


def test_eager_intermediates_that_fit_in_l2_cost_no_dram():
    divide = softmax.eager(X).kernels[-1]
    assert dram_bytes(divide, l2_bytes=60 << 20, wave=132) == ELEMENTS * 2  # y alone
    assert dram_bytes(divide, l2_bytes=0, wave=132) == divide.issued


def test_second_pass_comes_from_l2_only_while_the_running_rows_fit():
    kernel = softmax.online(Rows(1000, 1 << 20, "bf16")).kernels[0]
    array = 1000 * (1 << 21)
    assert dram_bytes(kernel, l2_bytes=3 * 10 * (1 << 21), wave=10) == pytest.approx(2 * array, rel=1e-3)  # ten rows stay: read, written
    assert dram_bytes(kernel, l2_bytes=5 * (1 << 21), wave=10) == 3 * array


@pytest.mark.parametrize(("n", "block", "sram", "kept"), [
    (100, 10, 2 * 100 + 8, 100),    # fits to the byte
    (100, 10, 2 * 100 + 7, 90),     # a byte short: nine slots, the ragged rest with them
    (95, 10, 2 * 95 + 8, 95),
    (95, 10, 2 * 95 + 7, 85),       # 8 full slots kept and the last 5 in the ninth
    (100, 10, 2 * 30 + 8, 30),
    (100, 10, 2 * 10 + 8, 10),      # one slot: the final block alone is still there
    (100, 10, 2 * 39 + 8, 30),
    (7, 10, 2 * 7 + 8, 7)])
def test_partial_keeps_what_fits_and_reads_the_rest_again(n, block, sram, kept):
    pipeline = softmax.partial(Rows(3, n, "fp16"), block, sram)
    assert pipeline.issued == 3 * 2 * (2 * n + (n - kept))
    assert pipeline.compulsory == pipeline.textbook == 3 * 2 * 2 * n


def test_a_row_of_32768_halves_fits_in_64_kib_and_its_statistics():
    row = Rows(1, 32768, "fp16")
    assert row.row_bytes == 65536
    assert softmax.slots(row, 8192, 65536 + 8) == 4
    assert softmax.slots(row, 8192, 65536) == 3


def test_statistics_in_float64_take_twice_the_room():
    row = Rows(1, 100, "float64")
    assert softmax.slots(row, 10, 816, "float64") == 10
    assert softmax.slots(row, 10, 815, "float64") == 9


@pytest.mark.parametrize("n", [8, 7])
def test_split_merges_through_memory(n):
    statistics, normalise = softmax.split(Rows(5, n, "bf16"), splits=4, block=1).kernels  # n = 7: 2 + 2 + 2 + 1
    assert statistics.blocks == normalise.blocks == 20
    assert statistics.read("x") == normalise.read("x") == normalise.written("y") == 5 * n * 2
    assert statistics.written("m") == statistics.written("l") == 20 * 4
    assert normalise.read("m") == normalise.read("l") == 20 * 4 * 4  # each of the four reads all four
    assert statistics.exps == 5 * n * 2  # block = 1: a rescale with each element
    assert normalise.exps == 5 * n + 20 * 4


def test_split_launches_nothing_without_work():
    assert softmax.split(Rows(1, 5), splits=4).kernels[0].blocks == 3  # ⌈5/4⌉ = 2: 2 + 2 + 1


def test_a_split_of_one_is_online_and_its_statistics():
    assert softmax.split(X, 1).issued == softmax.online(X).issued + 3 * 4 * 4


@pytest.mark.parametrize(("block", "rescales"), [(4096, 1), (1000, 5), (1, 4096)])
def test_online_pays_a_rescale_a_block(block, rescales):
    assert softmax.online(X, block).exps == 2 * ELEMENTS + 3 * rescales
    assert softmax.online(X, block).kernels[0].vector_ops == 5 * ELEMENTS + 3 * ELEMENTS // 2 + 3 * rescales


def test_conversions_are_packed_by_two_and_free_in_fp32():
    wide, narrow = (softmax.resident(Rows(2, 101, dtype)).kernels[0].vector_ops for dtype in ("fp32", "bf16"))
    assert wide == 5 * 202  # max, shift, add, shift, scale
    assert narrow - wide == 404  # four passes at half an instruction


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Rows(0, 4), "rows: got 0"),
    (lambda: Rows(1, 2.5), "n: got 2.5"),
    (lambda: Rows(1, 4, "int8"), "dtype: got 'int8'"),
    (lambda: softmax.online(X, 0), "block: got 0"),
    (lambda: softmax.split(X, 0), "splits: got 0"),
    (lambda: softmax.split(X, 4097), "splits: got 4097"),
    (lambda: softmax.split(X, 2, 0), "block: got 0"),
    (lambda: softmax.eager(X, "fp6"), "intermediates: got 'fp6'"),
    (lambda: softmax.partial(X, 64, 135), "sram: got 135, accepted: at least 136 bytes"),
    (lambda: softmax.partial(Rows(1, 10), 64, 27), "sram: got 27, accepted: at least 28 bytes")])
def test_bad_input(make, message):
    with pytest.raises(InputError, match=f"^{message}"):
        make()
