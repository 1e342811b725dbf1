"""Dropout acts on normalised probabilities, and one seed is one mask: in both passes, on every backend, in any tiling."""
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onchip.attention import attention
from onchip.errors import InputError
from onchip.testing.attention import Case, Target, build, check, dropout_mask, run


def _mask_of(seed: int | torch.Tensor, target: Target, p: float = 0.5, size: int = 64):
    """With q = k = 0 and v the identity the output is the mask over size, and dv for dout = 1 its column sums over size."""
    zero = torch.zeros(1, 1, size, size, device=target.device)
    v = torch.eye(size, device=target.device)[None, None].clone().requires_grad_()
    out = attention(zero, zero, v, dropout_p=p, dropout_seed=seed, backend=target.backend)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    return out.detach()[0, 0] * size * (1 - p), dv[0, 0, :, 0] * size * (1 - p)


def test_the_mask_is_philox_at_key_row_and_head_in_both_passes(target: Target) -> None:
    for seed in (7, 2**40 + 3, 2**63 + 11):
        mask, column_sums = _mask_of(seed, target)
        want = dropout_mask(Case(heads=1, dropout_p=0.5, seed=seed), [0], 64, 64)[0, 0].float()
        assert torch.allclose(mask.cpu(), want, atol=1e-5)
        assert torch.allclose(column_sums.cpu(), want.sum(0), atol=1e-3)


def test_keep_rate_and_independence_of_neighbours() -> None:
    p, size = 0.3, 256
    mask, _ = _mask_of(11, Target("reference", "cpu"), p, size)
    kept = mask.round()
    n = size * size
    assert abs(kept.mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)
    centred = kept - kept.mean()
    for step in ((0, 1), (1, 0), (0, 4), (1, 1)):
        moved = centred.roll(step, (0, 1))
        assert abs((centred * moved).mean().item() / centred.square().mean().item()) < 4 / math.sqrt(n)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_values_and_gradients_under_dropout(target: Target, p: float) -> None:
    check(Case(batch=2, heads=2, kv_heads=1, seq_q=17, seq_k=33, causal=True, dropout_p=p, seed=5), target)


def test_the_sum_is_taken_before_dropping(target: Target) -> None:
    """Row 0 sees one key: it is 0 or 2 v₀, never NaN; lse does not know of dropout."""
    case = Case(heads=1, kv_heads=1, seq_q=4, seq_k=4, causal=True)
    inputs = build(case, target.device)
    _, lse = attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend=target.backend)
    first = set()
    for seed in range(8):
        out, same = attention(inputs.q, inputs.k, inputs.v, causal=True, dropout_p=0.5, dropout_seed=seed, return_lse=True,
                              backend=target.backend)
        assert torch.allclose(same, lse, atol=1e-6)
        dropped = bool((out[0, 0, 0] == 0).all())
        assert dropped or torch.allclose(out[0, 0, 0], 2 * inputs.v[0, 0, 0], atol=1e-6)
        first.add(dropped)
    assert first == {True, False}


def test_an_empty_row_stays_zero_under_dropout(target: Target) -> None:
    got = check(Case(heads=1, kv_heads=1, seq_q=6, seq_k=4, causal=True, dropout_p=0.4, seed=2), target)
    assert (got["out"][:, :, :2] == 0).all()
    assert (got["dq"][:, :, :2] == 0).all()


def test_same_seed_same_answer_and_another_seed_another(target: Target) -> None:
    case = Case(heads=2, seq_q=16, seq_k=16, dropout_p=0.5, seed=3)
    inputs = build(case, target.device)
    one, two = (run(case, inputs, target.backend) for _ in range(2))
    for name in one:
        assert torch.equal(one[name], two[name])
    for seed, same in ((torch.tensor([3], device=target.device), True), (4, False)):
        out = attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, dropout_seed=seed, backend=target.backend)
        assert torch.equal(out, one["out"]) == same


def test_without_a_seed_torch_draws_it(target: Target) -> None:
    """`torch.manual_seed` repeats it, a second call does not, and recomputation under checkpointing draws the same mask."""
    q = torch.randn(1, 2, 16, 16, device=target.device, requires_grad=True)
    torch.manual_seed(0)
    one = attention(q, q, q, dropout_p=0.5, backend=target.backend)
    assert not torch.equal(one, attention(q, q, q, dropout_p=0.5, backend=target.backend))
    torch.manual_seed(0)
    assert torch.equal(one, attention(q, q, q, dropout_p=0.5, backend=target.backend))
    (want,) = torch.autograd.grad(one.square().sum(), q)
    for reentrant in (False, True):
        torch.manual_seed(0)
        again = checkpoint(lambda q: attention(q, q, q, dropout_p=0.5, backend=target.backend), q, use_reentrant=reentrant)
        again.square().sum().backward()
        assert torch.equal(q.grad, want)
        q.grad = None


@pytest.mark.parametrize(("argument", "value", "says"), [
    ("dropout_p", 1.0, "0 ≤ p < 1"), ("dropout_p", -0.1, "0 ≤ p < 1"), ("dropout_p", math.nan, "0 ≤ p < 1"),
    ("dropout_seed", 2**64, "64 bits"), ("dropout_seed", torch.tensor([1, 2]), "one torch.int64"),
    ("dropout_seed", torch.tensor([1.0]), "one torch.int64")])
def test_bad_dropout_arguments(argument: str, value: object, says: str) -> None:
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(InputError, match=says):
        attention(q, q, q, **{"dropout_p": 0.5, argument: value})
