import numpy as np
import pytest

from onchip.errors import InputError
from onchip.simulate.formats import Precision, parse_format
from onchip.simulate.meter import Chip, OutOfSram, Tensor

BF16 = parse_format("bfloat16")


def chip_with_x(sram=None):
    chip = Chip(Precision(), sram)
    chip.malloc("X", BF16, 2, 10, 4).fill(np.arange(80.0).reshape(2, 10, 4))
    chip.malloc("Y", parse_format("float32"), 2, 10, 4, page=5)
    return chip


def test_counts_bytes_of_the_stored_format():
    chip = chip_with_x()
    with chip.kernel("copy") as count:
        x = chip.load("X", 1, slice(3, 6))
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, np.arange(80.0).reshape(2, 10, 4)[1, 3:6])
        chip.store("Y", 1, slice(5, 8), x)
        chip.load("X", 0, slice(0, 2), slice(1, 4))
    assert (count.read("X"), count.written("X")) == (3 * 4 * 2 + 2 * 3 * 2, 0)
    assert (count.read("Y"), count.written("Y")) == (0, 3 * 4 * 4)
    assert count.issued == 36 + 48
    np.testing.assert_array_equal(chip.memory["Y"].dense()[1, 5:8], x)


def test_store_rounds_to_the_format():
    chip = chip_with_x()
    with chip.kernel("store"):
        chip.store("X", 0, slice(0, 1), np.full((1, 4), 1 + 2.0**-8, np.float32))
        assert chip.load("X", 0, slice(0, 1))[0, 0] == 1.0


def test_dry_counts_the_same_and_moves_nothing():
    chip = chip_with_x()
    chip.live, chip.times = False, 3
    with chip.kernel("copy") as count:
        assert chip.load("X", 0, slice(0, 2)) is None
        assert chip.alloc("T", 2, 4) is None
        chip.store("Y", 0, slice(0, 2), None)
    assert (count.read("X"), count.written("Y")) == (3 * 16, 3 * 32)
    assert chip.peak == 16 + 32  # a block's bytes, not three blocks'
    assert np.isnan(chip.memory["Y"].dense()).all()


def test_peak_and_what_it_was():
    chip = chip_with_x()
    with chip.kernel("k"):
        chip.load("X", 0, slice(0, 4))
        chip.load("X", 1, slice(0, 4))  # the same buffer again
        assert chip.peak == 32
        chip.alloc("m", 4, 1)
        assert chip.peak == 48
        chip.load("X", 0, slice(0, 1))  # a ragged tile needs less
        chip.alloc("l", 1, 1)
        assert chip.peak == 48
        chip.clear()
        chip.load("X", 0, slice(0, 4))
    assert chip.peak_buffers == {"X": 32, "m": 16}


def test_sram_bound_names_what_was_alive():
    assert issubclass(OutOfSram, InputError)
    for sram in (48, 47):
        chip = chip_with_x(sram)
        with chip.kernel("k"):
            chip.load("X", 0, slice(0, 4))
            if sram == 48:
                chip.alloc("m", 4, 1)
                continue
            with pytest.raises(OutOfSram, match=r"^sram: got 47 B, accepted: room for the 48 B alive in 'k': X 32 \+ m 16$"):
                chip.alloc("m", 4, 1)


def test_untouched_memory_is_nan_and_pages_appear_when_touched():
    tensor = Tensor("S", BF16, 4, 1 << 20, 1 << 20, page=8)  # 8 TiB, were it all there
    tensor.at(3, slice(16, 20), slice(5, 7))[...] = 1
    assert tensor.nbytes == 4 << 41
    assert np.isnan(tensor.at(3, slice(20, 24)).astype(np.float32)).all()
    assert tensor.at(3, slice(18, 19), slice(4, 8)).astype(np.float32)[0, 1:3].tolist() == [1, 1]


def test_forget_starts_counting_afresh():
    chip = chip_with_x()
    with chip.kernel("a"):
        chip.load("X", 0, slice(0, 4))
        chip.clear()
    chip.forget()
    with chip.kernel("b"):
        chip.load("X", 0, slice(0, 1))
    assert ([k.name for k in chip.kernels], chip.peak) == (["b"], 8)
