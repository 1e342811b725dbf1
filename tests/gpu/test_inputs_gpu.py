"""Attention in 16 bits on a real card, where others broke: the sizes, layouts and values the interpreter is too slow for."""
import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from onchip.attention import attention, attention_varlen
from onchip.testing.attention import Case, Target, build, check, run
from tests.attention.conftest import _poison  # noqa: F401  used by every test here too
from tests.gpu.oracle import BACKENDS, ON_HOPPER, agree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@BACKENDS
def test_a_thousand_rows_without_keys(backend: str) -> None:
    got = agree(Case(heads=2, kv_heads=1, seq_q=2048, seq_k=1024, dim=128, dim_v=128, dtype="bfloat16", causal=True), backend)
    assert (got["out"][:, :, :1024] == 0).all()
    assert (got["lse"][:, :, :1024] == -math.inf).all()
    assert (got["dq"][:, :, :1024] == 0).all()


@BACKENDS
def test_softcap_at_length(backend: str) -> None:
    wide = {"dim": 128, "dim_v": 128, "dtype": "bfloat16", "causal": True}
    agree(Case(batch=2, heads=8, kv_heads=8, seq_q=1024, seq_k=1024, softcap=10.0, **wide), backend)
    agree(Case(heads=2, kv_heads=2, lengths=((128, 217),), softcap=15.0, **wide), backend)


@BACKENDS
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_lengths_that_are_no_multiple_of_16_bytes_where_tma_serves(backend: str, packed: bool) -> None:
    """More than `launch.TMA_PAIRS` pairs; heads and sequences start anywhere in the row statistics."""
    more = {"lengths": ((4099, 4099), (333, 1001), (2050, 2050))} if packed else {"batch": 2, "seq_q": 3001, "seq_k": 3001}
    agree(Case(heads=8, kv_heads=4, dim=64, dim_v=64, dtype="bfloat16", causal=True, **more), backend)


@BACKENDS
@pytest.mark.parametrize("lengths", [
    ((0, 2538), (1208, 1742), (840, 840), (0, 3072)), ((150, 100), (0, 100), (150, 100)), ((3, 0), (2, 4))],
    ids=["keys of nobody", "no queries in the middle", "no keys"])
@pytest.mark.parametrize("causal", [False, True])
def test_members_of_length_zero(backend: str, lengths: tuple[tuple[int, int], ...], causal: bool) -> None:
    got, first = agree(Case(heads=4, kv_heads=1, dim=256, dim_v=256, dtype="bfloat16", lengths=lengths, causal=causal), backend), 0
    for len_q, len_k in lengths:
        if len_q == 0:
            assert all((got[name][first : first + len_k] == 0).all() for name in ("dk", "dv"))
        first += len_k


@BACKENDS
def test_tokens_that_belong_to_no_sequence(backend: str) -> None:
    case = Case(heads=4, kv_heads=2, dim=64, dim_v=64, dtype="bfloat16", causal=True, lengths=((144, 144), (288, 288), (512, 512)), tail=2)
    inputs = build(case, "cuda")
    clean = agree(case, backend, inputs)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x.data[-2:] = math.nan
    for name, right in run(case, inputs, backend).items():
        assert torch.equal(right, clean[name]), name
        assert (right[-2:] == 0).all() or name == "lse"


@BACKENDS
@pytest.mark.parametrize("lie", [[0, 20, 40], [0, 35, 12], [-7, 10, 30], [0, 2**31 - 1, 30], [0, 10, -(2**31)]])
def test_offsets_on_the_card_that_lie_touch_nothing_outside(backend: str, lie: list[int]) -> None:
    """They are cut off at the data's end: 30 tokens between guards. Rows may be wrong, memory may not."""
    wide = torch.full((4, 128, 2, 64), math.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, 50:80] = torch.randn(4, 30, 2, 64, device="cuda")
    q, k, v, dout = (x[50:80].requires_grad_(n < 3) for n, x in enumerate(wide.unbind()))
    cut = list(accumulate((min(max(at, 0), 30) for at in lie), max))
    both = []
    for offsets in (lie, cut):
        cu = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        out, lse = attention_varlen(q, k, v, cu, cu, max_seqlen_q=30, max_seqlen_k=30, return_lse=True, backend=backend)
        both.append((out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(x.isfinite().all() or x.dim() == 2 for x in both[0])
    for x, right in zip(*both, strict=True):
        torch.testing.assert_close(x, right, rtol=0.02, atol=0.02)
    guards = torch.cat([wide[:, :50], wide[:, 80:]], 1)
    assert guards.isnan().all()


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_a_very_negative_lse_under_an_all_true_mask(dim: int) -> None:
    """lse is about −95: a padded column of score 0 would be exp(95) in the backward, infinite in fp32."""
    for seq in (64, 192, 320, 640, 704, 832):
        case = Case(batch=1, heads=2, kv_heads=2, seq_q=seq, seq_k=seq, dim=dim, dim_v=dim, dtype="bfloat16", scale=1 / 8 * 64 / dim)
        inputs = build(case, "cuda")
        for x, centre in ((inputs.q, -1.25), (inputs.k, 10.0)):
            x.data.mul_(0.1).add_(centre)
        inputs.mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device="cuda")
        got = agree(case, "triton", inputs)
        assert -97 < got["lse"].mean().item() < -92


@BACKENDS
@pytest.mark.parametrize("dim", [64, 128])
def test_a_very_negative_lse(backend: str, dim: int) -> None:
    for seq in (64, 192, 704):
        case = Case(batch=1, heads=2, kv_heads=2, seq_q=seq, seq_k=seq, dim=dim, dim_v=dim, dtype="bfloat16", scale=1 / 8 * 64 / dim)
        inputs = build(case, "cuda")
        for x, centre in ((inputs.q, -1.25), (inputs.k, 10.0)):
            x.data.mul_(0.1).add_(centre)
        assert -97 < agree(case, backend, inputs)["lse"].mean().item() < -92


@BACKENDS
def test_scores_of_a_million_in_fp16(backend: str) -> None:
    """q kᵀ near 1.3e7, beyond fp16 by far; rows are nearly one-hot. The eager run overflows, so the truth alone is the judge."""
    case = Case(batch=8, heads=8, kv_heads=8, seq_q=128, seq_k=128, dim=64, dim_v=64, dtype="float16")
    inputs = build(case, "cuda")
    rng = torch.Generator().manual_seed(1)
    for x in (inputs.q, inputs.k):
        x.data.copy_(-900 * torch.rand(x.shape, generator=rng))
    got = run(case, inputs, backend)
    s = inputs.q.detach().double() @ inputs.k.detach().double().mT / 8
    assert s.max() > 1e6
    torch.testing.assert_close(got["out"].double(), torch.softmax(s, -1) @ inputs.v.detach().double(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got["lse"].double(), s.logsumexp(-1), rtol=1e-6, atol=0)
    assert all(x.isfinite().all() for x in got.values())


@BACKENDS
def test_a_window_as_wide_as_the_sequence_is_plain_causal(backend: str) -> None:
    seq = 16384
    q, k, v = (torch.randn(1, seq, 8, 128, device="cuda", dtype=torch.float16).transpose(1, 2) for _ in range(3))
    plain = attention(q, k, v, causal=True, backend=backend)
    for window in ((None, 0), (seq, 0), (seq - 1, 0)):
        windowed = attention(q, k, v, causal=True, window=window, backend=backend)
        torch.testing.assert_close(windowed, plain, rtol=2**-9, atol=2**-12)  # two roundings of fp16
    assert plain.float().std() > 0.01


@BACKENDS
def test_192_dims_of_q_and_128_of_v(backend: str) -> None:
    agree(Case(heads=4, kv_heads=2, seq_q=300, seq_k=500, dim=192, dim_v=128, dtype="bfloat16", causal=True), backend)


def test_other_dims_of_q_and_v() -> None:
    agree(Case(heads=4, kv_heads=2, seq_q=10_000, seq_k=10_000, dim=64, dim_v=128), "triton")
    agree(Case(heads=2, kv_heads=1, seq_q=9, seq_k=70, dim=576, dim_v=512, dtype="bfloat16"), "auto")


@BACKENDS
def test_each_operand_in_an_order_of_its_own(backend: str) -> None:
    """q and v transposed, k contiguous, the gradient permuted, 513 rows: every tensor is indexed by its own strides."""
    case = Case(batch=2, heads=16, kv_heads=16, seq_q=513, seq_k=513, dim=64, dim_v=64, dtype="float16")
    inputs = build(case, "cuda")
    for name in ("q", "v", "dout"):
        x = getattr(inputs, name).detach().transpose(1, 2).contiguous().transpose(1, 2)
        setattr(inputs, name, x.requires_grad_(name != "dout"))
    agree(case, backend, inputs)
    inputs.dout = torch.randn(64, 2, 513, 16, device="cuda", dtype=torch.float16).permute(1, 3, 2, 0)
    agree(case, backend, inputs)


@pytest.mark.parametrize("dim", [64, 512])
def test_expanded_heads_of_33_keys_under_a_mask(dim: int) -> None:
    case = Case(heads=8, kv_heads=8, seq_q=40, seq_k=33, dim=dim, dim_v=dim, dtype="bfloat16", mask=(1, 1, 40, 33))
    inputs = build(case, "cuda")
    for name in ("k", "v"):
        one = getattr(inputs, name).detach()[:, :1]
        setattr(inputs, name, one.expand(-1, 8, -1, -1).requires_grad_())
    agree(case, "triton", inputs)


def _shifted(x: Tensor, elements: int) -> Tensor:
    """`x` some elements past an aligned address."""
    storage = torch.zeros(x.numel() + elements, device=x.device, dtype=x.dtype)
    storage[elements:] = x.reshape(-1)
    return storage[elements:].view(x.shape)


@pytest.mark.parametrize(("backend", "dtype"), [("triton", "float32"), ("triton", "bfloat16"),
                                                pytest.param("hopper", "bfloat16", marks=ON_HOPPER)])
def test_addresses_that_are_not_aligned(backend: str, dtype: str) -> None:
    case = Case(batch=6, heads=4, kv_heads=4, seq_q=64, seq_k=64, dim=64, dim_v=64, dtype=dtype)
    inputs = build(case, "cuda")
    want = run(case, inputs, backend)
    for n, name in enumerate(("q", "k", "v", "dout"), 1):
        setattr(inputs, name, _shifted(getattr(inputs, name).detach(), n).requires_grad_(name != "dout"))
    got = agree(case, backend, inputs)
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-2, atol=1e-5 if dtype == "float32" else 1e-2)


@BACKENDS
def test_the_last_tile_of_a_head_and_its_neighbour(backend: str) -> None:
    for batch, heads, kv_heads, seq, dim in ((2, 4, 4, 65, 64), (2, 4, 2, 65, 64), (2, 4, 4, 127, 32), (2, 4, 2, 127, 32),
                                             (1, 6, 2, 33, 40), (1, 8, 1, 33, 40)):
        agree(Case(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq, seq_k=seq, dim=dim, dim_v=dim, dtype="bfloat16"), backend)


@pytest.mark.parametrize(("dim", "dtype", "more"), [
    (256, "float32", {}), (512, "bfloat16", {"bias": (1, 2, 70, 80), "dropout_p": 0.25}), (512, "float32", {"causal": True}),
    (128, "bfloat16", {"bias": (1, 2, 70, 80), "dropout_p": 0.25, "mask": (1, 1, 70, 80)})], ids=str)
def test_tiles_of_wide_heads_fit_the_card(dim: int, dtype: str, more: dict) -> None:
    check(Case(heads=2, kv_heads=1, seq_q=70, seq_k=80, dim=dim, dim_v=dim, dtype=dtype, **more), Target("triton", "cuda"))


@pytest.mark.parametrize(("shape_q", "shape_k"), [
    ((0, 10, 3952, 64), (0, 10, 16, 64)), ((2, 0, 5, 64), (2, 0, 6, 64)), ((2, 4, 0, 64), (2, 4, 6, 64)), ((2, 4, 5, 64), (2, 4, 0, 64)),
    ((2, 4, 5, 0), (2, 4, 6, 0))], ids=["batch", "heads", "queries", "keys", "dim"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_sizes_of_zero(shape_q: tuple[int, ...], shape_k: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in (shape_q, shape_k))
    v = torch.randn(*shape_k[:3], 64, device="cuda", dtype=dtype, requires_grad=True)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (*shape_q[:3], 64)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]
    if q.shape[-1] == 0:  # every score is 0: the mean of v, whose gradient is spread evenly over the keys
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(grads[2].float(), torch.full(v.shape, 5 / 6, device="cuda"), rtol=1e-2, atol=0)
    else:
        assert not out.any()
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("more", [{"mask": (4, 1, 1, 128)}, {"bias": (1, 4, 128, 128), "bias_dtype": "float32"}], ids=["mask", "fp32 bias"])
def test_masks_and_biases_that_are_broadcast(more: dict) -> None:
    case = Case(batch=4, heads=4, kv_heads=4, seq_q=128, seq_k=128, dim=32, dim_v=32, dtype="bfloat16", **more)
    got = check(case, Target("auto", "cuda"))
    assert "bias" not in more or got["dbias"].dtype == torch.float32
