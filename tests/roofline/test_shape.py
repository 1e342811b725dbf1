"""Mask geometry against brute force over every pair."""
import random

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.roofline.shape import AttentionShape, parse_causal, walk


def visible(shape: AttentionShape) -> np.ndarray:
    """The mask, straight from the definition: (seq_q, seq_k) booleans."""
    i, j = np.arange(shape.seq_q)[:, None] + shape.offset, np.arange(shape.seq_k)[None, :]
    left, right = shape.window
    mask = np.ones((shape.seq_q, shape.seq_k), bool)
    if shape.causal:
        mask &= j <= i
    if left is not None:
        mask &= j >= i - left
    if right is not None:
        mask &= j <= i + right
    return mask


def random_shape(rng: random.Random, limit: int = 40) -> AttentionShape:
    kv = rng.choice([1, 2])
    left, right = rng.randint(0, 12), rng.randint(0, 9)
    return AttentionShape(
        rng.randint(1, limit), rng.randint(1, limit), rng.randint(1, 9), rng.randint(1, 9), batch=rng.randint(1, 2),
        heads=kv * rng.choice([1, 3]), kv_heads=kv, causal=rng.choice([None, "bottom-right", "top-left"]),
        window=rng.choice([(None, None), (None, None), (left, None), (None, right), (left, right)]))


@pytest.mark.parametrize("seed", range(200))
def test_ranges_and_walk_match_the_mask(seed):
    rng = random.Random(seed)
    shape, br, bc = random_shape(rng), rng.randint(1, 17), rng.randint(1, 17)
    mask = visible(shape)
    assert shape.pairs() == mask.sum()
    for row in range(shape.seq_q):
        lo, hi = shape.key_range(row)
        assert np.flatnonzero(mask[row]).tolist() == list(range(lo, hi))
    tiles = rows = row_visits = key_visits = area = 0
    key_tiles = set()
    for i in range(0, shape.seq_q, br):
        seen = [j for j in range(0, shape.seq_k, bc) if mask[i:i + br, j:j + bc].any()]
        height = min(br, shape.seq_q - i)
        rows += height if seen else 0
        for j in seen:
            width = min(bc, shape.seq_k - j)
            tiles, row_visits, key_visits, area = tiles + 1, row_visits + height, key_visits + width, area + height * width
            key_tiles.add((j, width))
    w = walk(shape, br, bc)
    assert (w.tiles, w.rows, w.row_visits, w.key_visits, w.area) == (tiles, rows, row_visits, key_visits, area)
    assert w.keys == sum(width for _, width in key_tiles)
    assert w.all_tiles == -(-shape.seq_q // br) * -(-shape.seq_k // bc)


@pytest.mark.parametrize(("n", "block", "percent"), [(1024, 64, 53.1), (4096, 64, 50.8), (1024, 128, 56.3)])
def test_causal_tiles_are_half_and_half_a_diagonal(n, block, percent):
    w = walk(AttentionShape.square(n, 64, causal="bottom-right"), block, block)
    t = n // block
    assert w.tiles * 2 == t * (t + 1)
    assert 100 * w.tiles / w.all_tiles == pytest.approx(percent, abs=0.0501)


def test_alignments_count_the_known_pairs():
    def pairs(sq, sk, causal):
        return AttentionShape(sq, sk, 8, 8, causal=causal).pairs()

    assert (pairs(2, 5, "top-left"), pairs(2, 5, "bottom-right")) == (3, 9)
    assert (pairs(5, 2, "top-left"), pairs(5, 2, "bottom-right")) == (9, 3)


def test_packing_keeps_the_work():
    decode = AttentionShape(1, 100, 16, 16, 2, 8, 2, causal="bottom-right")
    packed = decode.packed()
    assert (packed.seq_q, packed.heads, packed.kv_heads) == (4, 2, 2)
    assert packed.pairs() * packed.query_heads == decode.pairs() * decode.query_heads
    for causal in ("top-left", None):
        with pytest.raises(InputError, match="pack_gqa"):
            AttentionShape(1, 100, 16, 16, 1, 8, 2, causal=causal, window=(3, None)).packed()


@pytest.mark.parametrize(("change", "name"), [
    ({"seq_q": 0}, "seq_q"), ({"head_dim": -1}, "head_dim"), ({"heads": 5, "kv_heads": 2}, "kv_heads"),
    ({"causal": "left"}, "causal"), ({"window": (-1, None)}, "window left"), ({"batch": True}, "batch")])
def test_bad_sizes_name_the_argument(change, name):
    with pytest.raises(InputError, match=name):
        AttentionShape(**{"seq_q": 4, "seq_k": 4, "head_dim": 4, "head_dim_v": 4, **change})


def test_parse_causal():
    assert [parse_causal(x) for x in (True, False, None, "top-left")] == ["bottom-right", None, None, "top-left"]
    with pytest.raises(InputError, match="causal"):
        parse_causal("diagonal")
