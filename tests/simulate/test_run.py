import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.attention import Tile
from onchip.roofline.shape import AttentionShape
from onchip.simulate.attention import fa2
from onchip.simulate.problem import Problem
from onchip.simulate.run import Run


def test_bad_sample():
    shape = AttentionShape.square(8, 4)
    with pytest.raises(InputError, match="sample: got -1, accepted: an integer ≥ 0"):
        fa2(Problem.random(shape), Tile(4, 4), sample=-1)
    with pytest.raises(InputError, match="sample: got 1, accepted: 0 or None: the problem has no q, k, v"):
        fa2(Problem(shape), Tile(4, 4), sample=1)


@pytest.mark.parametrize("sample", [1, 2, 7, 8, 100])
def test_sampled_tiles_are_spread_from_the_last_to_the_first(sample):
    shape = AttentionShape.square(20, 4, heads=2)
    rows = fa2(Problem.random(shape), Tile(5, 5), sample=sample).rows
    tiles = rows.reshape(8, 5)
    assert (tiles.all(axis=1) == tiles.any(axis=1)).all()
    assert tiles.any(axis=1).sum() == min(sample, 8)
    assert tiles[7].all()
    assert tiles[0].all() == (sample > 1)


@pytest.mark.parametrize("shape", [
    AttentionShape(13, 29, 1, 1, causal="bottom-right"), AttentionShape(29, 13, 1, 1, causal="bottom-right", window=(4, None)),
    AttentionShape(17, 11, 1, 1, window=(2, 6)), AttentionShape(9, 20, 1, 1, causal="top-left", window=(3, 2))])
def test_tile_masks_cover_exactly_the_visible_pairs(shape):
    run = Run("x", Problem(shape), Tile(4, 3), None, None)
    seen = np.zeros((shape.seq_q, shape.seq_k), bool)
    for rows in run.row_tiles:
        for keys in run.key_tiles:
            kind, mask = run.mask(rows, keys)
            seen[rows, keys] = kind == "full" if mask is None else mask
            np.testing.assert_array_equal(run.mask.array(rows, keys), seen[rows, keys])
    by_row = [range(*shape.key_range(row)) for row in range(shape.seq_q)]
    np.testing.assert_array_equal(seen, [[j in keys for j in range(shape.seq_k)] for keys in by_row])
