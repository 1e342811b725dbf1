"""The Hopper forward on a Hopper card, against float64 and against the error of the same arithmetic done eagerly in the same dtype."""
import math

import pytest
import torch
from torch import Tensor

from onchip.attention.contract import Spec, empty_like_q

pytestmark = [pytest.mark.gpu]
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from onchip.attention.hopper import launch, tiles  # noqa: E402  Gluon's Hopper dialect, not importable everywhere

DEVICE = "cuda"
CAUSAL = {None: 0, "bottom-right": 1, "top-left": 2}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32, generator=generator).to(dtype)


def inputs(b: int, hq: int, hkv: int, sq: int, sk: int, d: int, dv: int | None = None,
           dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return randn(b, hq, sq, d, dtype=dtype), randn(b, hkv, sk, d, dtype=dtype, seed=1), randn(b, hkv, sk, dv or d, dtype=dtype, seed=2)


def make_spec(q: Tensor, k: Tensor, causal: str | None = None, window: tuple[int, int] = (-1, -1), scale: float | None = None,
              softcap: float = 0.0) -> Spec:
    return Spec(CAUSAL[causal], window[0], 0 if causal else window[1], scale or q.shape[-1] ** -0.5, softcap, 0.0, q.shape[-2], k.shape[-2],
                False, False)


def visible(sq: int, sk: int, spec: Spec) -> Tensor:
    offset = 0 if spec.causal == 2 else sk - sq
    distance = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] - offset
    seen = torch.ones(sq, sk, dtype=torch.bool, device=DEVICE)
    if spec.window_left >= 0:
        seen &= distance >= -spec.window_left
    if spec.window_right >= 0:
        seen &= distance <= spec.window_right
    return seen


def truth(q: Tensor, k: Tensor, v: Tensor, spec: Spec, sinks: Tensor | None = None,
          dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition; with a 16-bit `dtype` the yardstick: products rounded to it, softmax in fp32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    s = (q @ k.mT).to(wide) * spec.scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    s = s.masked_fill(~visible(q.shape[2], k.shape[2], spec), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None])[..., : k.shape[2]]
    return p.to(dtype) @ v, lse


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check(q: Tensor, k: Tensor, v: Tensor, spec: Spec, sinks: Tensor | None = None, **options: object) -> Tensor:
    """Run, compare, return the flags of repeated tiles. Outputs are poisoned by what the allocator last held there."""
    torch.full((q.numel() * 2,), math.nan, device=DEVICE)
    out, lse, plan = launch.run(q, k, v, sinks, None, None, spec, **options)
    exact, exact_lse = truth(q, k, v, spec, sinks)
    yardstick, _ = truth(q, k, v, spec, sinks, q.dtype)
    assert out.shape == exact.shape
    assert out.dtype == q.dtype
    assert out.stride() == empty_like_q(q, v.shape[-1]).stride()
    assert torch.isfinite(out).all()
    step = torch.finfo(q.dtype).eps / 2
    assert error(out, exact) <= 1.5 * error(yardstick, exact) + step
    blind = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert (out[~visible(q.shape[2], k.shape[2], spec).any(-1).expand(q.shape[:3])] == 0).all()
    torch.testing.assert_close(lse[~blind].double(), exact_lse[~blind], atol=2e-4, rtol=2e-5)
    return plan.repeated()


TILES = pytest.mark.parametrize("tile", tiles.FORWARD, ids=lambda tile: f"{tile.dim}-{tile.dim_v}-{tile.rows}")


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
