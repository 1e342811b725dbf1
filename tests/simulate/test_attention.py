import tracemalloc

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.attention import split_kv as split_ledger
from onchip.roofline.shape import AttentionShape
from onchip.simulate.attention import fa1, fa2, online, split_kv, tiled
from onchip.simulate.formats import Precision
from onchip.simulate.meter import OutOfSram
from onchip.simulate.problem import Problem

FLOAT64 = Precision.uniform("float64")
FUSED = [tiled, online, fa1, fa2, lambda p, t, **o: split_kv(p, t, 3, **o)]


@pytest.mark.parametrize("schedule", FUSED)
def test_empty_rows_are_zero_and_minus_infinity(schedule):
    shape = AttentionShape(20, 6, 8, 8, causal="bottom-right")  # the first 14 queries see nothing, 14 is no multiple of a tile
    result = schedule(Problem.random(shape, Precision("float16")), Tile(8, 4))
    assert (result.out[0, 0, :14] == 0).all()
    assert np.isneginf(result.lse[0, 0, :14]).all()
    assert np.isfinite(result.out).all()
    assert np.isfinite(result.lse[0, 0, 14:]).all()


@pytest.mark.parametrize("schedule", FUSED)
def test_a_row_may_be_masked_in_every_key_of_its_first_tile(schedule):
    # window of two keys: a tile of 16 queries visits tiles in which its last rows see nothing, then theirs
    shape = AttentionShape.square(48, 8, window=(1, 0))
    result = schedule(Problem.random(shape, FLOAT64), Tile(16, 8))
    assert result.errors["out"].relative < 1e-14
    assert result.tiles["skipped"] > 0


def test_on_chip_peak_is_the_tiles():
    # Br = Bc = 64, d = 128 in 16 bits: Q, K, V 48 KiB; O 32 KiB and S 16 KiB in fp32; m and l
    problem = Problem(AttentionShape.square(256, 128), Precision("float16"))
    result = fa2(problem, Tile(64, 64))
    assert result.peak_buffers == {"Q": 16384, "K": 16384, "V": 16384, "O": 32768, "S": 16384, "m": 256, "l": 256}
    assert result.peak == sum(result.peak_buffers.values()) == 98816
    assert fa2(problem, Tile(64, 64), sram=98816).peak == 98816
    with pytest.raises(OutOfSram, match=r"got 98,815 B, .* the 98,816 B alive in 'FlashAttention-2': .* \+ K 16,384 \+ V 16,384"):
        fa2(problem, Tile(64, 64), sram=98815)


def test_ragged_tiles_hold_no_more_than_their_rows():
    result = fa2(Problem(AttentionShape.square(10, 128), Precision("float16")), Tile(64, 64))
    assert result.peak_buffers["Q"] == 10 * 128 * 2
    assert result.peak_buffers["S"] == 10 * 10 * 4


@pytest.mark.parametrize("splits", [1, 2, 5, 64])
@pytest.mark.parametrize("pack", [False, True])
def test_decode(splits, pack):
    shape, tile = AttentionShape(1, 333, 16, 8, batch=2, heads=6, kv_heads=2, causal="bottom-right"), Tile(16, 32)
    exact = split_kv(Problem.random(shape, FLOAT64), tile, splits, pack_gqa=pack)
    assert exact.out.shape == (2, 6, 1, 8)
    assert exact.lse.shape == (2, 6, 1)
    for error in exact.errors.values():
        assert error.relative < 1e-14
    counted, ledger = split_kv(Problem(shape), tile, splits, pack_gqa=pack), split_ledger(shape, tile, splits, Formats(), pack_gqa=pack)
    assert [k.issued for k in counted.kernels] == [k.issued for k in ledger.kernels]
    assert counted.kernels[0].read("K") == 2 * 2 * 333 * 16 * 2 * (1 if pack else 3)  # once a group, or once a query head
    sampled = split_kv(Problem.random(shape, FLOAT64), tile, splits, pack_gqa=pack, sample=2)
    assert sampled.executed == pytest.approx(2 / (4 if pack else 12))
    assert sampled.errors["out"].relative < 1e-14
    assert sampled.issued == exact.issued


def test_splits_without_keys_merge_as_nothing():
    # 2 key tiles, 7 splits: five see no tile; causal rows at the top see nothing at all
    shape = AttentionShape(9, 8, 4, 4, causal="bottom-right")
    result = split_kv(Problem.random(shape, FLOAT64), Tile(4, 4), 7)
    assert result.errors["out"].relative < 1e-14
    assert np.isneginf(result.lse[0, 0, 0])
    with pytest.raises(InputError, match="splits: got 0"):
        split_kv(Problem(shape), Tile(4, 4), 0)
    with pytest.raises(InputError, match="pack_gqa"):
        split_kv(Problem(shape), Tile(4, 4), 2, pack_gqa=True)


def test_large_head_executes_in_full():
    shape = AttentionShape.square(4096, 128)
    problem = Problem.random(shape, Precision("bfloat16"))
    result = fa2(problem, Tile(64, 64))
    assert result.executed == 1
    assert result.issued == 2 * 4096 * 128 * 2 + 2 * 4096**2 * 128 * 2 // 64 + 4096 * 4
    q, k, v = (x[0, 0].astype(float) for x in (problem.q, problem.k, problem.v))
    p = np.exp(q[::500] @ k.T / 128**0.5)
    truth = p @ v / p.sum(axis=1, keepdims=True)
    error = np.linalg.norm(result.out[0, 0, ::500] - truth) / np.linalg.norm(truth)
    assert 5e-4 < error < 4e-3  # two roundings to bfloat16, 8.3e-4 rms each, and not none


@pytest.mark.parametrize("schedule", FUSED)
def test_memory_grows_with_n_not_n_squared(schedule):
    def peak(seq):
        problem = Problem.random(AttentionShape.square(seq, 16), Precision("float32"))
        tracemalloc.start()
        schedule(problem, Tile(64, 64))
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(512), peak(1024)
    assert large < 2.2 * small
    assert large < 1024 * 1024  # a quarter of S in fp32
