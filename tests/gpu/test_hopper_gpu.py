"""The Hopper forward on a Hopper card, against float64 and against the error of the same arithmetic done eagerly in the same dtype."""
import math

import pytest
import torch

from onchip.attention.contract import Spec, empty_like_q
from tests.gpu.hopper import CAUSAL, DEVICE, TILES, check, error, inputs, launch, make_spec, randn, truth

pytestmark = [pytest.mark.gpu]


@pytest.mark.parametrize("causal", [None, "bottom-right"])
@TILES
def test_every_tile_of_the_table(tile, causal):
    q, k, v = inputs(2, 4, 2, 321, 700, tile.dim, tile.dim_v)
    assert not check(q, k, v, make_spec(q, k, causal), tile=tile).any()


@pytest.mark.parametrize("causal", [None, "bottom-right"])
@TILES
def test_many_tiles_a_thread_block(tile, causal):
    """Slots of q, rings of K and V and the turns go round many times, and one tile's last step is the next one's first."""
    q, k, v = inputs(5, 32, 8, 520, 520, tile.dim, tile.dim_v)
    assert not check(q, k, v, make_spec(q, k, causal), tile=tile).any()


@pytest.mark.parametrize("causal", [None, "bottom-right"])
@TILES
def test_every_tile_repeats_what_overflowed(tile, causal):
    q, k, v = inputs(2, 40, 40, 500, 700, tile.dim, tile.dim_v)
    k[:, ::3, 100:104] *= 60  # every third head
    flags = check(q, k, v, make_spec(q, k, causal), tile=tile)
    assert flags.any()
    assert not flags.all()


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 64), (72, 80), (80, 96), (120, 104), (136, 136), (192, 72), (104, 192), (248, 200)])
def test_other_head_dims_run_on_the_next_tile(d, dv):
    q, k, v = inputs(1, 2, 2, 200, 333, d, dv)
    check(q, k, v, make_spec(q, k))


@pytest.mark.parametrize("causal", [None, "bottom-right", "top-left"])
@pytest.mark.parametrize(
    ("sq", "sk"), [(1, 1), (1, 129), (127, 1), (128, 128), (129, 257), (513, 100), (100, 513), (1000, 1000), (64, 2000)])
def test_ragged_and_cross_lengths(sq, sk, causal):
    q, k, v = inputs(2, 3, 1, sq, sk, 128)
    check(q, k, v, make_spec(q, k, causal))


@pytest.mark.parametrize("causal", [None, "bottom-right", "top-left"])
@pytest.mark.parametrize("window", [(0, 0), (5, 3), (128, 0), (127, 127), (300, 10), (1024, 512), (-1, 70), (70, -1)])
def test_windows(window, causal):
    for sq, sk in ((700, 700), (333, 900), (900, 333)):
        q, k, v = inputs(1, 2, 2, sq, sk, 128)
        check(q, k, v, make_spec(q, k, causal, window))


@pytest.mark.parametrize("d", [64, 192, 256])
def test_windows_of_other_tiles(d):
    q, k, v = inputs(1, 2, 2, 450, 600, d)
    check(q, k, v, make_spec(q, k, "bottom-right", (200, 0)))


def test_strides_are_honoured_without_copies():
    qkv = randn(2, 300, 3, 4, 128)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    wide = randn(2, 6, 400, 160)[:, 1:5, 50:350, 16:144]
    expanded = randn(2, 1, 300, 128).expand(2, 4, 300, 128)
    for a, b, c in ((q, k, v), (wide, k, v), (q, wide, expanded), (q, expanded, expanded[:, :2].contiguous()[:, :1].expand(2, 4, 300, 128)),
                    (q[:1, :, :1], k[:1], v[:1])):
        spec = make_spec(a, b)
        check(a, b, c, spec)
        assert not any(launch.Plan(a, b, c, empty_like_q(a, 128), None, False, spec, None, None).copies)


def test_addresses_tma_cannot_take_are_copied():
    odd = randn(1, 2, 100, 136)[..., 4:132]  # 8 bytes past a multiple of 16
    steps = randn(1, 2, 100, 132)[..., :128]  # rows of 264 bytes
    q, k, v = inputs(1, 2, 2, 100, 100, 128)
    for a, b, c in ((odd, k, v), (q, steps, v), (q, k, odd)):
        assert any(launch.Plan(a, b, c, empty_like_q(a, 128), None, False, make_spec(a, b), None, None).copies)
        check(a, b, c, make_spec(a, b))
        check(a, b, c, make_spec(a, b))  # now from the remembered plan


@pytest.mark.parametrize("causal", [None, "bottom-right"])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_fp16_and_online(d, causal):
    q, k, v = inputs(1, 4, 1, 300, 500, d, dtype=torch.float16)
    check(q * 8, k, v, make_spec(q, k, causal))  # scores of ±100: a shift fixed too early would overflow fp16
    q, k, v = inputs(1, 2, 2, 300, 500, d)
    check(q, k, v, make_spec(q, k, causal), online=True)


def test_softcap_and_scale():
    q, k, v = inputs(1, 2, 2, 300, 400, 128)
    for softcap, scale in ((30.0, 1.0), (50.0, -0.5), (5.0, 3.0)):
        check(q, k, v, make_spec(q, k, scale=scale, softcap=softcap))
        check(q, k, v, make_spec(q, k, "bottom-right", scale=scale, softcap=softcap))


@pytest.mark.parametrize("causal", [None, "bottom-right"])
def test_sinks(causal):
    q, k, v = inputs(2, 4, 2, 400, 300, 64)  # causal: 100 rows see no key, and lse is the sink
    for dtype in (torch.float32, torch.bfloat16):
        sinks = torch.tensor([-20.0, 0.0, 3.0, 90.0], device=DEVICE, dtype=dtype)
        check(q, k, v, make_spec(q, k, causal), sinks)


def test_late_giants_are_repeated_exactly():
    """Scores that dwarf those of the first block visited (the last keys): p would overflow with the shift taken there."""
    q, k, v = inputs(1, 2, 2, 300, 1000, 128)
    k[:, :, 100:110] *= 60
    flags = check(q, k, v, make_spec(q, k)).view(2, 3, 2)  # head, tile, consumer: the last one has no rows
    assert flags.sum() == 10
    assert not flags[:, 2, 1].any()


def test_a_first_block_far_above_the_rest_needs_no_repeat_and_one_far_below_does():
    q, k, v = inputs(1, 1, 1, 128, 512, 128)
    direction = q[0, 0].float().mean(0) * 0 + 1
    q = (q.float() * 0.01 + direction).bfloat16()  # every q·k is close to the sum of k
    for shift, repeated in ((3.0, False), (-3.0, True)):
        moved = k.clone()
        moved[:, :, 384:] += shift  # by 3·128 units before scale: 34 in the exponent of e, 49 of 2
        moved[:, :, 384:] += shift if repeated else 0
        assert bool(check(q, moved, v, make_spec(q, k)).any()) == repeated


def test_only_the_failing_tile_is_repeated():
    q, k, v = inputs(1, 2, 2, 1280, 1024, 128)
    q[0, 1, 300] *= 300
    k[0, 1, :128] *= 3
    flags = check(q, k, v, make_spec(q, k)).view(2, 10, 2)
    assert flags.sum() == 1
    assert flags[1, 2, 0] == 1  # head 1, rows 256 … 319


def test_an_output_that_would_overflow_with_a_large_p_is_repeated():
    q, k, v = inputs(1, 1, 1, 64, 512, 128)
    k[:, :, :128] *= 12
    v = (v.float() * 2.0**100).bfloat16()
    assert check(q, k, v, make_spec(q, k)).any()


@pytest.mark.parametrize("online", [False, True])
def test_nan_and_infinity_in_visible_inputs_reach_the_rows_that_see_them(online):
    q, k, v = inputs(1, 2, 2, 300, 600, 128)
    spec = make_spec(q, k, "bottom-right")
    reference, _, _ = launch.run(q, k, v, None, None, None, spec, online=True)

    poisoned = q.clone()
    poisoned[0, 0, 77, 5] = math.nan
    out, lse, _ = launch.run(poisoned, k, v, None, None, None, spec, online=online)
    assert out[0, 0, 77].isnan().all()
    assert lse[0, 0, 77].isnan()
    others = torch.arange(300, device=DEVICE) != 77
    torch.testing.assert_close(out[0, 0, others], reference[0, 0, others], atol=0.02, rtol=0.02)
    torch.testing.assert_close(out[0, 1], reference[0, 1], atol=0.02, rtol=0.02)

    poisoned = k.clone()
    poisoned[0, 1, 400] = math.nan  # rows 100 … 299 see it, the tile of rows 0 … 127 holds both kinds
    out, lse, _ = launch.run(q, poisoned, v, None, None, None, spec, online=online)
    assert out[0, 1, 100:].isnan().all()
    torch.testing.assert_close(out[0, 1, :100], reference[0, 1, :100], atol=0.02, rtol=0.02)
    assert out[0, 0].isfinite().all()

    poisoned = v.clone()
    poisoned[0, 0, 500, 3] = math.inf  # rows 200 … 299 see it
    out, _, _ = launch.run(q, k, poisoned, None, None, None, spec, online=online)
    assert (out[0, 0, 200:, 3] == math.inf).all()
    assert out[0, 0, :128].isfinite().all()  # no row of that tile sees it


@pytest.mark.parametrize("online", [False, True])
def test_what_lies_outside_is_never_read(online):
    """NaN behind the lengths, beyond the causal end, and before the window."""
    big = [torch.full((2, 2, 800, 128), math.nan, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    for x in big:
        x[:, :, 200:500] = randn(2, 2, 300, 128, seed=int(x is big[0]))
    q, k, v = (x[:, :, 200:500] for x in big)
    assert not check(q, k, v, make_spec(q, k), online=online).any() or online

    q, k, v = inputs(1, 2, 2, 200, 500, 128)
    k[:, :, 200:], v[:, :, 200:] = math.nan, math.nan
    spec = make_spec(q, k, "top-left")
    out, _, plan = launch.run(q, k, v, None, None, None, spec, online=online)
    exact, _ = truth(q, k[:, :, :200], v[:, :, :200], make_spec(q, k[:, :, :200], "top-left"))
    assert error(out, exact) < 4e-3
    assert online or not plan.repeated().any()

    q, k, v = inputs(1, 2, 2, 128, 512, 128)
    k[:, :, :320], v[:, :, :320] = math.nan, math.nan  # window 64: row 0 stands at key 384
    out, _, plan = launch.run(q, k, v, None, None, None, make_spec(q, k, "bottom-right", (64, 0)), online=online)
    exact, _ = truth(q, k[:, :, 320:], v[:, :, 320:], make_spec(q, k[:, :, 320:], "bottom-right", (64, 0)))
    assert error(out, exact) < 4e-3
    assert online or not plan.repeated().any()


@pytest.mark.parametrize("causal", [None, "bottom-right", "top-left"])
@pytest.mark.parametrize("d", [64, 128])
def test_packed_sequences_equal_separate_ones(d, causal):
    lengths_q, lengths_k = [0, 1, 100, 257, 700, 64, 5], [3, 1, 300, 257, 512, 0, 1000]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0)], device=DEVICE, dtype=torch.int32) for x in (lengths_q, lengths_k))
    spare = 9  # rows of the tensors that belong to no sequence
    q, k, v = randn(sum(lengths_q) + spare, 4, d), randn(sum(lengths_k) + spare, 2, d, seed=1), randn(sum(lengths_k) + spare, 2, d, seed=2)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[cu[-1]:] = math.nan
    spec = Spec(CAUSAL[causal], -1, 0 if causal else -1, d**-0.5, 0.0, 0.0, max(lengths_q), max(lengths_k), False, False)
    for _ in range(2):
        out, lse, _ = launch.run(q, k, v, None, cu_q, cu_k, spec)
        assert out.shape == q.shape
        assert (out[cu_q[-1]:] == 0).all()
        assert (lse[:, cu_q[-1]:] == -math.inf).all()
        for i in range(len(lengths_q)):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
            exact, exact_lse = truth(*one, make_spec(one[0], one[1], causal))
            assert error(out[rows].transpose(0, 1)[None], exact) < 4e-3 or lengths_q[i] == 0 or lengths_k[i] == 0
            torch.testing.assert_close(lse[:, rows][None].double(), exact_lse, atol=2e-4, rtol=2e-5)
            if lengths_k[i] == 0:
                assert (out[rows] == 0).all()


def test_packed_neighbours_do_not_leak():
    """A NaN in one sequence stays there, in whatever tile tail it lies."""
    cu = torch.tensor([0, 100, 230, 400], device=DEVICE, dtype=torch.int32)
    q, k, v = randn(400, 2, 128), randn(400, 2, 128, seed=1), randn(400, 2, 128, seed=2)
    k[100:230], v[100:230] = math.nan, math.nan
    out, _, plan = launch.run(q, k, v, None, cu, cu, Spec(0, -1, -1, 128**-0.5, 0.0, 0.0, 170, 170, False, False))
    assert out[:100].isfinite().all()
    assert out[230:].isfinite().all()
    assert out[100:230].isnan().all()
    flags = plan.repeated().view(3, 2, 2, 2)  # sequence, head, tile, consumer
    assert flags[1, :, :, 0].all()
    assert not flags[[0, 2], :, 0].any()


def test_repeats_bit_for_bit_and_sees_no_batch():
    q, k, v = inputs(3, 4, 4, 777, 777, 128)
    k[:, :, 5] *= 40  # some tiles repeated
    spec = make_spec(q, k)
    out, lse, _ = launch.run(q, k, v, None, None, None, spec)
    for _ in range(5):
        again, lse_again, _ = launch.run(q, k, v, None, None, None, spec)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
    alone, _, _ = launch.run(q[1:2], k[1:2], v[1:2], None, None, None, spec)
    assert torch.equal(out[1:2], alone)


def test_graphs_streams_and_the_remembered_launch():
    q, k, v = inputs(2, 4, 4, 500, 500, 128)
    spec = make_spec(q, k)
    out, _, _ = launch.run(q, k, v, None, None, None, spec)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other, _, _ = launch.run(q, k, v, None, None, None, spec)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _, _ = launch.run(q, k, v, None, None, None, spec)
    for x in (q, k, v):
        x.copy_(x.flip(2))
    graph.replay()
    torch.testing.assert_close(captured, launch.run(q, k, v, None, None, None, spec)[0], rtol=0, atol=0)
    assert error(captured, truth(q, k, v, spec)[0]) < 4e-3


@pytest.mark.big
def test_more_than_two_to_the_31_elements():
    q, k, v = (randn(70, 32, 8, 128, seed=i).repeat(1, 1, 1024, 1) for i in range(3))  # 2.3e9 elements each
    q.mul_(torch.linspace(0.5, 1.5, 8192, device=DEVICE, dtype=q.dtype)[:, None])
    spec = make_spec(q, k)
    out, lse, _ = launch.run(q, k, v, None, None, None, spec)
    for b, h in ((0, 0), (69, 31), (64, 0)):
        exact, exact_lse = truth(*(x[b : b + 1, h : h + 1] for x in (q, k, v)), spec)
        assert error(out[b : b + 1, h : h + 1], exact) < 4e-3
        torch.testing.assert_close(lse[b : b + 1, h : h + 1].double(), exact_lse, atol=2e-4, rtol=2e-5)
