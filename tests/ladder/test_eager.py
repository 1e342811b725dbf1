import numpy as np
import pytest
import torch

from onchip.bench.memory import peak_extra_bytes
from onchip.errors import InputError
from onchip.ladder import eager
from onchip.ladder.inputs import random_inputs
from onchip.roofline.shape import AttentionShape

SMALL = {"tiled": {"br": 5}, "online": {"br": 5, "bc": 3}}  # ragged everywhere
SHAPES = {
    "square": AttentionShape(37, 37, 16, 16, 2, 4, 4),
    "grouped": AttentionShape(23, 41, 8, 8, 2, 6, 2),
    "one key head, dv ≠ d": AttentionShape(19, 31, 8, 5, 1, 3, 1),
    "more queries than keys": AttentionShape(29, 11, 8, 12, 1, 2, 2),
    "one query": AttentionShape(1, 33, 16, 16, 1, 4, 2),
    "one of each": AttentionShape(1, 1, 1, 1),
}


def tensors(shape: AttentionShape, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    inputs = random_inputs(shape, seed)
    return [torch.from_numpy(x).to(dtype) for x in (inputs.q, inputs.k, inputs.v)]


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool | str) -> np.ndarray:
    """Row by row in float64: every query against the keys it sees, nothing else."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    offset = 0 if causal == "top-left" else seq_k - seq_q
    for b, h, i in np.ndindex(*q.shape[:3]):
        keys = min(seq_k, i + offset + 1) if causal else seq_k
        if keys > 0:
            s = k[b, h // group, :keys] @ q[b, h, i] / np.sqrt(q.shape[3])
            p = np.exp(s - s.max())
            out[b, h, i] = p @ v[b, h // group, :keys] / p.sum()
    return out


def error(out: torch.Tensor, want: np.ndarray) -> float:
    return float(np.abs(out.double().numpy() - want).max())


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rung", ["naive", "tiled", "online", "sdpa"])
def test_every_rung_against_float64(rung, shape, causal):
    run = getattr(eager, rung)
    q, k, v = tensors(shape, torch.float64)
    want = truth(q, k, v, causal)
    out = run(q, k, v, causal, **SMALL.get(rung, {}))
    assert out.shape == want.shape
    assert error(out, want) <= 1e-14
    assert np.abs(want).max() > 0.01  # zeros would fail


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rung", ["tiled", "online"])
def test_no_worse_than_twice_the_naive_run_of_the_same_dtype(rung, dtype, causal):
    q, k, v = tensors(AttentionShape(61, 83, 16, 16, 1, 4, 2), dtype)
    want = truth(q, k, v, causal)
    out = getattr(eager, rung)(q, k, v, causal, **SMALL[rung])
    assert out.dtype == dtype
    limit = 2 * error(eager.naive(q, k, v, causal), want)
    assert error(out, want) <= limit
    assert error(torch.zeros_like(out), want) > limit


@pytest.mark.parametrize("rung", ["naive", "tiled", "online", "sdpa"])
def test_queries_that_see_no_key_get_zero(rung):
    q, k, v = tensors(AttentionShape(9, 4, 8, 8), torch.float32)
    out = getattr(eager, rung)(q, k, v, True)
    assert (out[:, :, :5] == 0).all()
    assert (out[:, :, 5:] != 0).all()
    torch.testing.assert_close(out[:, :, 5], v[:, :, 0])  # the first that sees one sees key 0 alone


@pytest.mark.parametrize("rung", ["naive", "tiled", "online"])
def test_scores_far_beyond_exp_overflow(rung):
    q, k, v = tensors(AttentionShape.square(40, 16), torch.float32)
    q, k = 30 * q, 30 * k  # scores in the thousands: exp overflows float32 at 88.7
    out = getattr(eager, rung)(q, k, v, **SMALL.get(rung, {}))
    want = truth(q, k, v, False)
    assert np.abs((q @ k.mT).numpy()).max() / 4 > 1000
    assert error(out, want) <= 1e-3


def test_naive_keeps_two_score_matrices():
    shape = AttentionShape(64, 96, 8, 8, 2, 4, 2)
    q, k, v = tensors(shape, torch.float32)
    peak, out = peak_extra_bytes(lambda: eager.naive(q, k, v))
    assert peak == 2 * (2 * 4 * 64 * 96 * 4) + out.nbytes  # batch · heads · Sq · Sk · 4 bytes: s and p, when out is made


@pytest.mark.parametrize(("rung", "grows"), [("tiled", 2), ("online", 1)])
def test_scratch_of_a_block_and_of_a_tile(rung, grows):
    def scratch(seq: int) -> int:
        q, k, v = tensors(AttentionShape.square(seq, 8, heads=2), torch.float32)
        peak, out = peak_extra_bytes(lambda: getattr(eager, rung)(q, k, v, **{"tiled": {"br": 16}, "online": {"br": 16, "bc": 32}}[rung]))
        return peak - out.nbytes

    short, long = scratch(256), scratch(512)
    width = 256 if rung == "tiled" else 32
    assert short >= 2 * 16 * width * 4  # heads · br · keys · 4 bytes
    assert short <= 3.5 * 2 * 16 * width * 4
    assert 0.9 * grows <= long / short <= grows  # the small rest, q's block and m, l, o, does not grow


def test_grouped_heads_do_not_repeat_k_and_v():
    shape = AttentionShape(16, 4096, 8, 8, 1, 8, 1)
    q, k, v = tensors(shape, torch.float32)
    peak, _ = peak_extra_bytes(lambda: eager.online(q, k, v, br=16, bc=64))
    assert peak < 8 * k.nbytes  # eight repeated heads of k alone


@pytest.mark.parametrize(("q", "k", "v"), [
    ((2, 5, 4), (2, 5, 4), (2, 5, 4)), ((1, 2, 5, 4), (1, 2, 7, 3), (1, 2, 7, 4)), ((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 6, 4)),
    ((2, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)), ((1, 3, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)), ((1, 2, 5, 4), (1, 2, 7, 4), (1, 1, 7, 4)),
])
@pytest.mark.parametrize("rung", ["naive", "tiled", "online", "sdpa"])
def test_tensors_that_do_not_fit(rung, q, k, v):
    with pytest.raises(InputError):
        getattr(eager, rung)(torch.ones(q), torch.ones(k), torch.ones(v))
