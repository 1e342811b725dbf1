"""Sizes at the edges: empty dimensions, odd head dims, grouped heads, many batches, scores and scales beyond the ordinary."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from onchip.attention import attention, attention_varlen
from onchip.attention.contract import check_dense, describe
from onchip.testing.attention import Case, Target, build, check, run


@pytest.mark.parametrize("empty", ["batch", "seq_q", "seq_k", "heads"])
def test_an_empty_dimension_gives_empty_or_zero_answers(target: Target, empty: str) -> None:
    case = replace(Case(batch=2, seq_q=5, seq_k=6, causal=True, bias=(1, 1, 1, 1)), **{empty: 0})
    case = replace(case, kv_heads=min(case.kv_heads, case.heads))
    inputs = build(case, target.device)
    got = run(case, inputs, target.backend)
    assert got["out"].shape == (case.batch, case.heads, case.seq_q, 16)
    assert got["lse"].shape == (case.batch, case.heads, case.seq_q)
    for name, x in got.items():
        expected = -math.inf if name == "lse" else 0
        assert (x == expected).all(), name


def test_no_keys_but_sinks(target: Target) -> None:
    """Every row sees only the sink: lse is its logit, whose gradient is the sum of what comes into lse."""
    case = Case(batch=2, seq_q=3, seq_k=0, sinks=True)
    inputs = build(case, target.device)
    got = run(case, inputs, target.backend)
    assert (got["out"] == 0).all()
    assert torch.allclose(got["lse"], inputs.sinks.detach()[:, None].expand(2, 2, 3))
    assert torch.allclose(got["dsinks"], inputs.dlse.sum((0, 2)), atol=1e-6)


def test_head_dim_zero_of_q_and_k_averages_v() -> None:
    q, k, v = torch.empty(1, 16, 16, 0), torch.empty(1, 16, 16, 0), torch.randn(1, 16, 16, 1, requires_grad=True)
    for scale in (None, 0.0, 3.0):
        out, lse = attention(q, k, v, scale=scale, return_lse=True)
        assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-6)
        assert torch.allclose(lse, torch.full_like(lse, math.log(16)))
        assert torch.allclose(torch.autograd.grad(out.sum(), v)[0], torch.ones_like(v), atol=1e-6)


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (8, 16), (32, 8), (40, 40), (192, 128)])
def test_head_dims_of_q_and_v_may_differ(target: Target, dim: int, dim_v: int) -> None:
    got = check(Case(heads=2, kv_heads=1, seq_q=17, seq_k=17, dim=dim, dim_v=dim_v, causal=True), target)
    assert got["out"].shape[-1] == dim_v
    assert got["dq"].shape[-1] == got["dk"].shape[-1] == dim
    assert got["dv"].shape[-1] == dim_v


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])])
def test_head_dims_beyond_every_kernel_go_to_the_reference(device: str) -> None:
    case = Case(heads=2, kv_heads=1, seq_q=9, seq_k=9, dim=576, dim_v=512)
    got, same = check(case, Target("auto", device)), run(case, build(case, device), "reference")
    assert all(torch.equal(x, same[name]) for name, x in got.items())


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 1)])
def test_query_head_h_reads_kv_head_h_over_group_and_gradients_are_summed(target: Target, heads: int, kv_heads: int) -> None:
    case = Case(batch=2, heads=heads, kv_heads=kv_heads, seq_q=17, seq_k=33, dim=40, dim_v=40)
    got = check(case, target)
    assert got["dk"].shape[1] == kv_heads


@pytest.mark.parametrize("seq", [15, 16, 17, 31, 33, 63, 64, 65])
def test_lengths_around_a_block(target: Target, seq: int) -> None:
    """Two heads: a last tile that wrote too far would spoil the next head's first rows."""
    check(Case(batch=1, heads=2, kv_heads=2, seq_q=seq, seq_k=seq, dim=16, dim_v=16, causal=True), target)


def test_more_than_65535_batches(target: Target) -> None:
    if target == Target("triton", "cpu"):
        pytest.skip("the interpreter runs one program at a time: the card's run covers this")
    q, k, v = (torch.randn(65537, 1, 2, 4, device=target.device) for _ in range(3))
    out = attention(q, k, v, backend=target.backend)
    alone = attention(q[-1:], k[-1:], v[-1:], backend=target.backend)
    assert torch.allclose(out[-1:], alone, atol=1e-6)
    assert out.isfinite().all()
    cu = torch.arange(65538, dtype=torch.int32, device=target.device)
    packed = attention_varlen(q[:, :, 0], k[:, :, 0], v[:, :, 0], cu, cu, backend=target.backend)
    assert torch.allclose(packed, v[:, :, 0], atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1, np.float32(0.5), np.float64(0.5), np.int64(2), torch.tensor(0.25)])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_is_what_was_given(target: Target, scale: object, causal: bool) -> None:
    case = Case(heads=1, kv_heads=1, seq_q=9, seq_k=9, causal=causal, scale=float(scale))
    inputs = build(case, target.device)
    got = check(case, target, inputs)
    given = attention(inputs.q, inputs.k, inputs.v, causal=causal, scale=scale, backend=target.backend)
    assert torch.equal(given, got["out"])
    if scale == 0.0 and not causal:
        assert torch.allclose(given, inputs.v.mean(2, keepdim=True).expand_as(given), atol=1e-6)


def test_no_scale_is_one_over_the_root_of_the_dim_of_q(target: Target) -> None:
    case = Case(heads=1, kv_heads=1, seq_q=9, seq_k=9, dim=24, dim_v=40)
    inputs = build(case, target.device)
    named = attention(inputs.q, inputs.k, inputs.v, scale=24**-0.5, backend=target.backend)
    assert torch.equal(attention(inputs.q, inputs.k, inputs.v, backend=target.backend), named)


@pytest.mark.parametrize("size", [576.0, 900.0])
def test_scores_beyond_the_range_of_fp16(target: Target, size: float) -> None:
    """q kᵀ reaches 1e7: rows are nearly one-hot, and everything stays finite. The eager run overflows, so the truth alone is the judge."""
    case = Case(heads=1, kv_heads=1, seq_q=16, seq_k=16, dim=64, dim_v=64, dtype="float16")
    inputs = build(case, target.device)
    for x in (inputs.q, inputs.k):
        x.data.copy_(-size * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
    got = run(case, inputs, target.backend)
    s = (inputs.q.detach().double() @ inputs.k.detach().double().mT).cpu() / 8
    assert s.abs().max() > 65504 / 8
    assert torch.allclose(got["out"].double().cpu(), torch.softmax(s, -1) @ inputs.v.detach().double().cpu(), atol=2e-3)
    assert torch.allclose(got["lse"].double().cpu(), s.logsumexp(-1), rtol=1e-6)
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("seq", [64, 96])
@pytest.mark.parametrize("masked", [False, True])
def test_a_very_negative_lse_overflows_nothing_in_the_backward(target: Target, seq: int, masked: bool) -> None:
    """lse near −95.8: exp(0 − lse) would be infinite in fp32 for any padded column left at score 0."""
    case = Case(heads=1, kv_heads=1, seq_q=seq, seq_k=seq, dim=64, dim_v=64)
    inputs = build(case, target.device)
    for x, centre in ((inputs.q, -1.25), (inputs.k, 10.0)):
        x.data.mul_(0.01).add_(centre)
    if masked:
        inputs.mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=target.device)
    got = check(case, target, inputs)
    assert -97 < got["lse"].mean().item() < -95


@pytest.mark.parametrize("size", [1.0, 10.0])
def test_fp32_is_computed_in_fp32(target: Target, size: float) -> None:
    """About 1e-5 relative; tf32 would be off by 1e-3."""
    case = Case(heads=1, kv_heads=1, seq_q=48, seq_k=48, dim=64, dim_v=64, causal=True, size=math.sqrt(size))
    check(case, target)


def test_one_query_that_sees_all_keys_is_no_causal_problem() -> None:
    """Decoding: a causal mask, bottom-right, hides nothing from a last query, so every backend may take it."""
    nothing = {"window": None, "scale": None, "softcap": None, "bias": None, "mask": None, "alibi_slopes": None, "sinks": None,
               "dropout_p": 0.0, "dropout_seed": None, "deterministic": False, "backend": "auto"}
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 9, 8)
    assert describe(check_dense(q, k, k, causal=True, **nothing)).causal is None
    assert describe(check_dense(q, k, k, causal="top-left", **nothing)).causal == "top-left"
    check(Case(seq_q=1, seq_k=9, causal=True), Target("auto", "cpu"))


def test_fp32_does_not_drift_over_many_blocks_of_keys(target: Target) -> None:
    """A rescaling that misses 1 by a rounding is the same in every block: over 64 blocks it was five times the error of an eager run."""
    check(Case(heads=1, kv_heads=1, seq_q=16, seq_k=4096, dim=64, dim_v=64), target)
