"""Who sees whom: rows without keys, hidden NaN, alignment, windows, biases. Every right value is the definition's, in float64."""
import math
from dataclasses import replace

import pytest
import torch

from onchip.attention import attention
from onchip.testing.attention import Case, Target, build, check, run

NAN = math.nan


def _with_mask(case: Case, target: Target, mask: torch.Tensor):
    """The inputs of `case` under this very mask."""
    inputs = build(case, target.device)
    inputs.mask = mask.to(target.device)
    return inputs


@pytest.mark.parametrize("as_bias", [False, True], ids=["mask", "float bias"])
@pytest.mark.parametrize("rows", [[5], [4, 5, 6, 7], [0]])
def test_a_row_that_may_see_nothing_is_zero_with_lse_minus_infinity(target: Target, rows: list[int], as_bias: bool) -> None:
    case = Case(heads=2, seq_q=8, seq_k=10, scale=0.125, bias=(1, 1, 8, 10) if as_bias else None)
    mask = torch.tril(torch.ones(8, 10, dtype=torch.bool), 2)
    mask[rows] = False
    inputs = build(case, target.device)
    if as_bias:
        inputs.bias.data.copy_(torch.zeros(8, 10).masked_fill(~mask, -math.inf))
    else:
        inputs.mask = mask.to(target.device)
    got = check(case, target, inputs)
    assert (got["out"][:, :, rows] == 0).all()
    assert (got["lse"][:, :, rows] == -math.inf).all()
    assert (got["dq"][:, :, rows] == 0).all()


@pytest.mark.parametrize("incoming", [0.0, 1e4, NAN])
def test_what_comes_into_an_empty_row_backwards_never_matters(target: Target, incoming: float) -> None:
    case = Case(seq_q=6, seq_k=10)
    mask = torch.tril(torch.ones(6, 10, dtype=torch.bool))
    mask[5] = False
    inputs = _with_mask(case, target, mask)
    inputs.dout[:, :, 5] = 0
    inputs.dlse[:, :, 5] = 0
    clean = check(case, target, inputs)
    inputs.dout[:, :, 5] = incoming
    inputs.dlse[:, :, 5] = incoming
    dirty = run(case, inputs, target.backend)
    for name, grad in clean.items():
        assert torch.equal(grad, dirty[name]), name


def test_a_first_key_tile_of_minus_infinity_rescales_to_nothing(target: Target) -> None:
    case = Case(heads=1, kv_heads=1, seq_q=3, seq_k=300, bias=(1, 1, 1, 300))
    inputs = build(case, target.device)
    inputs.bias.data[..., :128] = -math.inf
    got = check(case, target, inputs)
    alone = attention(inputs.q, inputs.k[:, :, 128:], inputs.v[:, :, 128:], bias=inputs.bias[..., 128:], backend=target.backend)
    assert torch.allclose(got["out"], alone, atol=1e-6)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 2), (129, 32), (65, 64)])
def test_causal_with_more_queries_than_keys_leaves_the_leading_rows_empty(target: Target, seq_q: int, seq_k: int) -> None:
    got = check(Case(heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k, causal=True), target)
    empty = seq_q - seq_k
    assert (got["out"][:, :, :empty] == 0).all()
    assert (got["lse"][:, :, :empty] == -math.inf).all()
    assert (got["dq"][:, :, :empty] == 0).all()
    assert got["lse"][:, :, empty:].isfinite().all()


@pytest.mark.parametrize("which", ["k", "v", "both"])
@pytest.mark.parametrize("poison", [NAN, math.inf])
@pytest.mark.parametrize("hide", ["mask", "causal", "window"])
def test_a_hidden_key_or_value_never_reaches_a_result(target: Target, which: str, poison: float, hide: str) -> None:
    """The last three keys are hidden from every row: the answer is the one with zeros there."""
    geometry = {"mask": {}, "causal": {"causal": "top-left"}, "window": {"causal": "top-left", "window": (2, None)}}[hide]
    case = Case(heads=2, seq_q=5, seq_k=8, **geometry)
    inputs = build(case, target.device)
    if hide == "mask":
        inputs.mask = (torch.arange(8) < 5).expand(1, 1, 5, 8).to(target.device)
    for name in ("k", "v"):
        getattr(inputs, name).data[:, :, 5:] = 0
    want = run(case, inputs, target.backend)
    for name in ("k", "v") if which == "both" else (which,):
        getattr(inputs, name).data[:, :, 5:] = poison
    got = run(case, inputs, target.backend)
    for name, right in want.items():
        assert right.isfinite().all(), name
        assert torch.equal(got[name], right), name


@pytest.mark.parametrize("lengths", [[1, 3], [3, 2]])
def test_slots_beyond_each_length_are_never_read_into_a_result(target: Target, lengths: list[int]) -> None:
    case = Case(batch=2, heads=1, kv_heads=1, seq_q=1, seq_k=3, dim=64, dim_v=64, dtype="float16")
    inputs = build(case, target.device)
    valid = torch.arange(3)[None] < torch.tensor(lengths)[:, None]
    inputs.mask = valid[:, None, None].to(target.device)
    unused = ~valid[:, None, :, None].to(target.device)
    answers = []
    for filling in (0.0, NAN, math.inf):
        for name in ("k", "v"):
            getattr(inputs, name).data.masked_fill_(unused, filling)
        answers.append(run(case, inputs, target.backend))
    for other in answers[1:]:
        for name, right in answers[0].items():
            assert torch.equal(other[name], right), name


def test_a_nan_reaches_exactly_the_rows_that_see_it() -> None:
    """Per element, which the reference promises: later rows of the same block see the key, earlier ones do not."""
    case = Case(seq_q=8, seq_k=8, causal=True)
    for name in ("k", "v"):
        inputs = build(case)
        clean = run(case, inputs, "reference")
        getattr(inputs, name).data[:, :, 5] = NAN
        for backend in ("reference", "auto"):
            got = run(case, inputs, backend)
            assert torch.equal(got["out"][:, :, :5], clean["out"][:, :, :5])
            assert got["out"][:, :, 5:].isnan().all()


@pytest.mark.parametrize("where", ["query row", "visible key", "everywhere", "infinite query"])
def test_what_is_not_finite_and_visible_stays_so(target: Target, where: str) -> None:
    case = Case(batch=2, heads=2, seq_q=16, seq_k=16, dim=8, dim_v=8)
    inputs = build(case, target.device)
    spoiled = torch.zeros(2, 2, 16, dtype=torch.bool)
    if where == "query row":
        inputs.q.data[1, 0, 3, 2] = NAN
        spoiled[1, 0, 3] = True
    elif where == "visible key":
        inputs.k.data[0, 1, 7, 0] = NAN
        spoiled[0, 1] = True
    elif where == "infinite query":
        inputs.q.data[1, 0, 3, 2] = math.inf
        spoiled[1, 0, 3] = True
    else:
        inputs.q.data[:] = NAN
        spoiled[:] = True
    got = run(case, inputs, target.backend)
    assert torch.equal(got["out"].isnan().all(-1).cpu(), spoiled)
    assert torch.equal(got["out"].isnan().any(-1).cpu(), spoiled)


def test_a_mask_and_causal_act_together(target: Target) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1:, 0] = False
    for causal in (True, "top-left"):
        case = Case(seq_q=4, seq_k=4, causal=causal)
        check(case, target, _with_mask(case, target, mask.expand(1, 1, 4, 4)))


@pytest.mark.parametrize(("seq_q", "seq_k", "causal", "sees"), [
    (2, 5, "top-left", [1, 2]), (2, 5, True, [4, 5]), (5, 2, "top-left", [1, 2, 2, 2, 2]), (5, 2, True, [0, 0, 0, 1, 2]),
    (1, 16, True, [16])])
def test_causal_is_anchored_where_it_says(target: Target, seq_q: int, seq_k: int, causal: bool | str, sees: list[int]) -> None:
    """With equal scores lse is the logarithm of the number of keys a row sees."""
    q, k = torch.zeros(1, 1, seq_q, 16, device=target.device), torch.zeros(1, 1, seq_k, 16, device=target.device)
    _, lse = attention(q, k, k, causal=causal, return_lse=True, backend=target.backend)
    assert torch.allclose(lse.exp().cpu(), torch.tensor(sees, dtype=torch.float32)[None, None])


def test_window_end_points_are_inclusive(target: Target) -> None:
    case = Case(heads=1, kv_heads=1, seq_q=8, seq_k=8, causal=True, window=(3, 0))
    inputs = build(case, target.device)
    got = check(case, target, inputs)
    last = attention(inputs.q[:, :, 7:], inputs.k[:, :, 4:], inputs.v[:, :, 4:], backend=target.backend)
    assert torch.allclose(got["out"][:, :, 7:], last, atol=1e-6)
    only_itself = run(replace(case, window=(0, 0)), inputs, target.backend)
    assert torch.allclose(only_itself["out"], inputs.v, atol=1e-6)


@pytest.mark.parametrize("seq", [64, 65, 127, 129])
def test_a_window_as_wide_as_the_sequence_is_plain_causal(target: Target, seq: int) -> None:
    case = Case(heads=1, kv_heads=1, seq_q=seq, seq_k=seq, causal=True)
    inputs = build(case, target.device)
    plain = attention(inputs.q, inputs.k, inputs.v, causal=True, backend=target.backend)
    for window in ((None, 0), (seq - 1, 0), (seq, None), (2**40, 2**40)):
        windowed = attention(inputs.q, inputs.k, inputs.v, causal=True, window=window, backend=target.backend)
        assert torch.allclose(windowed, plain, atol=1e-6)


@pytest.mark.parametrize("window", [(3, 0), (5, 2), (None, 1), (2, None), (0, 0)])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_windows_of_every_form(target: Target, window: tuple[int | None, int | None], causal: bool | str) -> None:
    for seq_q, seq_k in ((33, 33), (17, 40), (40, 17)):
        check(Case(heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k, causal=causal, window=window), target)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scale_leaves_the_bias_alone(target: Target, scale: float) -> None:
    case = Case(heads=1, kv_heads=1, seq_q=4, seq_k=4, dim=64, dim_v=64, scale=scale, bias=(1, 1, 1, 4))
    inputs = build(case, target.device)
    inputs.bias.data[:] = torch.arange(4.0)
    check(case, target, inputs)


@pytest.mark.parametrize("shape", [(2, 1, 1, 20), (1, 4, 1, 20), (1, 1, 9, 1), (1, 1, 1, 1), (2, 4, 9, 20)])
def test_biases_and_masks_broadcast_and_their_gradients_are_summed(target: Target, shape: tuple[int, int, int, int]) -> None:
    case = Case(batch=2, heads=4, kv_heads=2, seq_q=9, seq_k=20, bias=shape)
    got = check(case, target)
    assert got["dbias"].shape == shape
    if shape != (1, 1, 1, 1):
        check(replace(case, bias=None, mask=shape), target)


def test_an_expanded_bias_has_a_gradient_an_element(target: Target) -> None:
    case = Case(batch=2, heads=2, seq_q=4, seq_k=5, bias=(1, 1, 1, 5))
    inputs = build(case, target.device)
    inputs.bias = inputs.bias.detach().expand(2, 2, 4, 5).requires_grad_()
    got = check(replace(case, bias=(2, 2, 4, 5)), target, inputs)
    assert got["dbias"].shape == (2, 2, 4, 5)


@pytest.mark.parametrize(("dtype", "bias_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_a_bias_of_another_dtype_keeps_its_own(target: Target, dtype: str, bias_dtype: str) -> None:
    got = check(Case(heads=4, kv_heads=4, seq_q=32, seq_k=32, dtype=dtype, bias=(1, 4, 32, 32), bias_dtype=bias_dtype), target)
    assert got["dbias"].dtype == getattr(torch, bias_dtype)
    assert got["dbias"].isfinite().all()


def test_softcap_bounds_scores_before_the_bias_and_flattens_their_gradient(target: Target) -> None:
    """Logits 100, −100 and 0.5 under a cap of 15 are 14.99995, −14.99995, 0.499815; the gradient's factors 6.48e-6, 6.48e-6, 0.99889."""
    q = torch.tensor([[[[1.0]]]], device=target.device, requires_grad=True)
    for logit, capped, factor in ((100.0, 14.99995, 6.48e-6), (-100.0, -14.99995, 6.48e-6), (0.5, 0.499815, 0.99889)):
        k = torch.tensor([[[[logit]]]], device=target.device, requires_grad=True)
        _, lse = attention(q, k, torch.ones_like(k), scale=1.0, softcap=15.0, return_lse=True, backend=target.backend)
        assert lse.item() == pytest.approx(capped, rel=1e-6)
        assert torch.autograd.grad(lse.sum(), k)[0].item() == pytest.approx(factor, abs=5e-7)  # ulps of tanh near 1
    check(Case(heads=2, kv_heads=2, seq_q=33, seq_k=47, causal=True, softcap=5.0, size=3.0, bias=(1, 2, 33, 47)), target)
