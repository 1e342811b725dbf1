"""The Hopper forward with the keys cut in parts, on a Hopper card, against float64."""
import math

import pytest
import torch

from tests.gpu.hopper import DEVICE, TILES, check, error, inputs, launch, make_spec, randn, truth

pytestmark = [pytest.mark.gpu]

SPLIT = pytest.mark.parametrize("parts", [2, 5])


@SPLIT
@pytest.mark.parametrize("causal", [None, "bottom-right"])
@TILES
def test_split_keys_on_every_tile(tile, causal, parts):
    q, k, v = inputs(2, 4, 2, 321, 700, tile.dim, tile.dim_v)
    assert not check(q, k, v, make_spec(q, k, causal), tile=tile, parts=parts).any()


@SPLIT
@pytest.mark.parametrize("causal", [None, "bottom-right", "top-left"])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 129), (127, 1), (129, 257), (513, 100), (100, 513), (1000, 1000), (64, 2000)])
def test_split_keys_of_ragged_and_cross_lengths(sq, sk, causal, parts):
    """Parts without keys, rows without keys in a part, rows without any."""
    q, k, v = inputs(2, 3, 1, sq, sk, 128)
    assert not check(q, k, v, make_spec(q, k, causal), parts=parts).any()


@SPLIT
@pytest.mark.parametrize("window", [(0, 0), (5, 3), (127, 127), (300, 10), (-1, 70), (70, -1)])
def test_split_keys_of_windows(window, parts):
    for sq, sk, d in ((700, 700, 128), (333, 900, 64), (900, 333, 256)):
        q, k, v = inputs(1, 2, 2, sq, sk, d)
        check(q, k, v, make_spec(q, k, None, window), parts=parts)
        check(q, k, v, make_spec(q, k, "bottom-right", (window[0], 0)), parts=parts)


@SPLIT
def test_split_keys_with_other_features(parts):
    q, k, v = inputs(2, 4, 2, 400, 300, 64)  # causal: 100 rows see no key, and lse is the sink
    sinks = torch.tensor([-20.0, 0.0, 3.0, 90.0], device=DEVICE, dtype=torch.bfloat16)
    for causal in (None, "bottom-right"):
        check(q, k, v, make_spec(q, k, causal), sinks, parts=parts)
        check(q, k, v, make_spec(q, k, causal, scale=-0.5, softcap=5.0), parts=parts)
        check(q, k, v, make_spec(q, k, causal), online=True, parts=parts)
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(*inside, make_spec(q, k, "bottom-right"), parts=parts)
    for d, dv in ((8, 8), (72, 80), (136, 136), (192, 72), (248, 200)):
        q, k, v = inputs(1, 2, 2, 200, 333, d, dv)
        check(q, k, v, make_spec(q, k), parts=parts)
    q, k, v = inputs(1, 4, 1, 300, 500, 128, dtype=torch.float16)
    check(q * 8, k, v, make_spec(q, k), parts=parts)


def test_only_the_failing_part_is_repeated():
    q, k, v = inputs(1, 2, 2, 384, 1024, 128)
    k[:, 1, 100:110] *= 60  # in the lower block of the first of four parts, of 256 keys each; its shift comes from the upper one
    flags = check(q, k, v, make_spec(q, k), parts=4).view(2, 3, 4, 2)  # head, tile, part, consumer
    assert flags[1, :, 0].all()
    assert flags.sum() == 6
    assert check(q, k, v, make_spec(q, k, "bottom-right"), parts=4).any()


def test_nan_in_one_part_reaches_the_rows_that_see_it():
    q, k, v = inputs(1, 2, 2, 300, 600, 128)
    spec = make_spec(q, k, "bottom-right")
    reference, _, _ = launch.run(q, k, v, None, None, None, spec)
    k[0, 1, 400] = math.nan  # rows 100 … 299 see it
    v[0, 0, 500, 3] = math.inf  # rows 200 … 299 see it
    out, lse, _ = launch.run(q, k, v, None, None, None, spec, parts=3)
    assert out[0, 1, 100:].isnan().all()
    assert lse[0, 1, 100:].isnan().all()
    torch.testing.assert_close(out[0, 1, :100], reference[0, 1, :100], atol=0.02, rtol=0.02)
    assert (out[0, 0, 200:, 3] == math.inf).all()
    assert out[0, 0, :128].isfinite().all()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("b", "hq", "hkv", "sq", "sk"), [(1, 32, 8, 1, 20000), (3, 16, 2, 5, 4097), (1, 6, 1, 77, 3000), (2, 8, 8, 128, 8192)])
def test_few_tiles_are_split_by_themselves(b, hq, hkv, sq, sk, inside):
    q, k, v = inputs(b, hq, hkv, sq, sk, 128)
    if inside:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    spec, sinks = make_spec(q, k), randn(hq, dtype=torch.float32)
    _, _, plan = launch.run(q, k, v, None, None, None, spec)
    assert plan.parts > 1
    assert (plan.group > 1) == (hq > hkv)
    check(q, k, v, spec)
    check(q, k, v, spec, sinks)
    whole, lse, _ = launch.run(q, k, v, None, None, None, spec, parts=1)
    out, lse_split, _ = launch.run(q, k, v, None, None, None, spec)
    assert error(out, whole.double()) < 5e-3
    torch.testing.assert_close(lse, lse_split, atol=1e-4, rtol=1e-5)


def test_heads_taken_for_one_without_parts():
    """Decoding of many sequences: tiles enough, a head of k each."""
    q, k, v = inputs(40, 16, 4, 1, 300, 64)
    _, _, plan = launch.run(q, k, v, None, None, None, make_spec(q, k))
    assert (plan.group, plan.parts) == (4, 1)
    check(q, k, v, make_spec(q, k))
    check(q, k, v, make_spec(q, k), randn(16, dtype=torch.float32))


def test_split_keys_repeat_bit_for_bit_on_streams_and_in_graphs():
    q, k, v = inputs(1, 8, 2, 16, 5000, 128)
    k[:, :, 5] *= 60  # some parts repeated
    spec = make_spec(q, k)
    out, lse, plan = launch.run(q, k, v, None, None, None, spec)
    assert plan.parts > 1
    assert plan.repeated().any()
    for _ in range(5):
        again, lse_again, _ = launch.run(q, k, v, None, None, None, spec)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        others = [launch.run(q, k, v, None, None, None, spec)[0] for _ in range(10)]
    mine = [launch.run(q, k, v, None, None, None, spec)[0] for _ in range(10)]
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(out, other) for other in (*others, *mine))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_lse, _ = launch.run(q, k, v, None, None, None, spec)
    for x in (q, k, v):
        x.copy_(x.flip(2))
    for _ in range(2):
        graph.replay()
    expected, expected_lse, _ = launch.run(q, k, v, None, None, None, spec)
    assert torch.equal(captured, expected)
    assert torch.equal(captured_lse, expected_lse)
    assert error(captured, truth(q, k, v, spec)[0]) < 4e-3
