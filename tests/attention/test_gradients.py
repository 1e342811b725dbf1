"""Derivatives: of lse, of one input at a time, of derivatives, in forward mode, under torch.func."""
import math

import pytest
import torch
from torch import Tensor

from onchip.attention import attention, attention_varlen
from onchip.testing.attention import Case, Target, build, check, compare, run, truth

# torch's own forward mode scripts decompositions when it is first used
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SMALL = {"batch": 1, "heads": 2, "kv_heads": 1, "seq_q": 3, "seq_k": 4, "dim": 3, "dim_v": 2, "dtype": "float64"}


@pytest.mark.parametrize("wanted", [("bias",), ("q",), ("k",), ("v",), ("sinks",), ("q", "bias"), ("v", "sinks")], ids="+".join)
def test_only_what_is_asked_for(target: Target, wanted: tuple[str, ...]) -> None:
    case = Case(seq_q=4, seq_k=4, bias=(1, 2, 4, 4), sinks=True)
    inputs = build(case, target.device)
    want, eager = truth(case, inputs), truth(case, inputs, torch.float32)
    for name in set(inputs.names) - set(wanted):
        getattr(inputs, name).requires_grad_(False)
    inputs.names = [name for name in inputs.names if name in wanted]
    got = run(case, inputs, target.backend)
    assert set(got) == {"out", "lse", *(f"d{name}" for name in wanted)}
    compare(case, inputs, got, {name: want[name] for name in got}, [eager])


def test_rows_of_a_bias_gradient_sum_to_what_lse_brings(target: Target) -> None:
    """Shifting a row of scores moves lse by as much and out not at all."""
    case = Case(batch=2, seq_q=5, seq_k=7, bias=(2, 2, 5, 7))
    inputs = build(case, target.device)
    assert torch.allclose(run(case, inputs, target.backend)["dbias"].sum(-1), inputs.dlse, atol=1e-5)


@pytest.mark.parametrize("of", ["lse", "both"])
def test_lse_has_a_gradient(target: Target, of: str) -> None:
    """dq = scale · g (p k) and dv = 0 for a loss on lse alone."""
    case = Case(seq_q=5, seq_k=8, causal=True)
    inputs = build(case, target.device)
    if of == "lse":
        inputs.dout.zero_()
        want = truth(case, inputs)
        _, lse = attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend=target.backend)
        grads = torch.autograd.grad(lse, inputs.leaves, inputs.dlse)
        for name, grad in zip(inputs.names, grads, strict=True):
            assert torch.allclose(grad.double().cpu(), want[f"d{name}"], atol=1e-6), name
        assert (grads[2] == 0).all()
        assert grads[0].abs().max() > 0.01
    check(case, target, inputs)


def test_nothing_is_saved_when_nothing_can_be_asked() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.no_grad():
        assert attention(q, q, q).grad_fn is None
    assert attention(q.detach(), q.detach(), q.detach()).grad_fn is None
    assert attention(q, q.detach(), q.detach()).grad_fn is not None


FEATURES = {
    "plain": {}, "window": {"causal": "top-left", "window": (1, None)},
    "everything": {"causal": True, "softcap": 1.5, "bias": (1, 2, 1, 4), "mask": (1, 1, 3, 4), "alibi": 1, "sinks": True, "dropout_p": 0.2,
                   "seed": 3}}


def _function(case: Case, inputs, **more):
    """(out, lse) as a function of the leaves."""
    def function(*leaves: Tensor):
        given = dict(zip(inputs.names, leaves, strict=True))
        return attention(given["q"], given["k"], given["v"], bias=given.get("bias"), sinks=given.get("sinks"), mask=inputs.mask,
                         alibi_slopes=inputs.slopes, dropout_seed=3, return_lse=True, **case.arguments, **more)

    return function


@pytest.mark.parametrize("features", FEATURES)
def test_first_derivatives_against_finite_differences_in_both_modes(features: str) -> None:
    case = Case(**{**SMALL, **FEATURES[features]})
    inputs = build(case)
    if inputs.mask is not None:
        inputs.mask[..., 0] = True  # finite differences know no −∞
    assert torch.autograd.gradcheck(_function(case, inputs), inputs.leaves, check_forward_ad=True)


@pytest.mark.parametrize("features", FEATURES)
def test_second_derivatives_against_finite_differences(features: str) -> None:
    case = Case(**{**SMALL, **FEATURES[features]})
    inputs = build(case)
    if inputs.mask is not None:
        inputs.mask[..., 0] = True
    assert torch.autograd.gradgradcheck(_function(case, inputs), inputs.leaves)


def test_second_derivatives_of_packed_sequences() -> None:
    cu_q, cu_k = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 3, 5])
    q, k, v = (torch.randn(n, 1, 2, dtype=torch.float64, requires_grad=True) for n in (4, 6, 6))  # a token of each belongs to no sequence
    slopes = torch.rand(3, 1)

    def function(q: Tensor, k: Tensor, v: Tensor):
        return attention_varlen(q, k, v, cu_q, cu_k, causal=True, alibi_slopes=slopes, dropout_p=0.2, dropout_seed=1)

    assert torch.autograd.gradcheck(function, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v))


def test_a_gradient_penalty_knows_empty_rows_and_every_backend(target: Target) -> None:
    """‖dq‖² differentiated again, against the definition differentiated twice."""
    from onchip.testing.attention import define

    case = Case(heads=2, kv_heads=1, seq_q=6, seq_k=4, causal=True)
    inputs = build(case, target.device)

    def penalty(out: Tensor, leaves: list[Tensor], weight: Tensor) -> tuple[Tensor, ...]:
        (dq,) = torch.autograd.grad(out, leaves[0], weight, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), leaves)

    out = attention(*inputs.leaves, causal=True, backend=target.backend)
    got = penalty(out, inputs.leaves, inputs.dout)
    leaves = [x.detach().double().cpu().requires_grad_() for x in inputs.leaves]
    want = penalty(define(case, dict(zip("qkv", leaves, strict=True)), None, None)[0], leaves, inputs.dout.double().cpu())
    for grad, right in zip(got, want, strict=True):
        assert right.abs().max() > 0.1
        assert torch.allclose(grad.double().cpu(), right, atol=1e-4)


def test_reverse_forward_and_mixed_hessians_agree() -> None:
    q, k, v = (torch.randn(1, 1, n, 2, dtype=torch.float64) for n in (2, 3, 3))

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, causal=True).square().sum()

    mixed, twice = torch.func.hessian(loss)(q), torch.func.jacrev(torch.func.jacrev(loss))(q)
    by_autograd = torch.autograd.functional.hessian(loss, q)
    assert mixed.abs().max() > 0.01
    assert torch.allclose(mixed, twice)
    assert torch.allclose(mixed, by_autograd)


def test_a_tangent_is_never_lost() -> None:
    """A dual tensor need not require grad: forward mode must notice it by itself."""
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64) for _ in range(3))
    _, tangent = torch.func.jvp(lambda q: attention(q, k, v).sum(), (q,), (torch.ones_like(q),))
    want = torch.func.grad(lambda q: attention(q, k, v).sum())(q).sum()
    assert tangent.item() == pytest.approx(want.item(), abs=1e-12)
    assert abs(want.item()) > 1e-3


@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, None), (1, None, 2, -1), (None, None, None, 0)])
@pytest.mark.parametrize("bias_batch", [1, 2])
def test_vmap_is_a_loop(mapped: tuple[int | None, ...], bias_batch: int) -> None:
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3), (bias_batch, 1, 5, 7))
    operands = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    mask = torch.rand(1, 1, 5, 7) < 0.8
    stacked = [torch.stack([x, 2 * x, x.flip(0)], at if at >= 0 else x.dim()) if at is not None else x
               for x, at in zip(operands, mapped, strict=True)]

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out, lse = attention(q, k, v, bias=bias, mask=mask, causal=True, return_lse=True)
        return out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sin().sum()

    gradient = torch.func.grad_and_value(loss, (0, 1, 2, 3))
    grads, values = torch.vmap(gradient, mapped)(*stacked)
    summed = torch.func.grad(lambda *xs: torch.vmap(loss, mapped)(*xs).sum(), (0, 1, 2, 3))(*stacked)
    for i in range(3):
        one = [x if at is None else x.select(at, i) for x, at in zip(stacked, mapped, strict=True)]
        right, value = gradient(*one)
        assert torch.allclose(values[i], value)
        for grad, want in zip(grads, right, strict=True):
            assert torch.allclose(grad[i], want)
        for total, at, want in zip(summed, mapped, right, strict=True):
            if at is not None:
                assert torch.allclose(total.select(at, i), want)


@pytest.mark.parametrize("what", ["sinks", "dropout", "packed"])
def test_vmap_loops_over_what_cannot_join_the_batch(what: str) -> None:
    q = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    sinks, cu = torch.randn(3, 2, dtype=torch.float64), torch.tensor([0, 2, 5])

    def function(q: Tensor, sinks: Tensor) -> Tensor:
        if what == "packed":
            return attention_varlen(q[0].transpose(0, 1), q[0].transpose(0, 1), q[0].transpose(0, 1), cu, cu)
        more = {"sinks": sinks} if what == "sinks" else {"dropout_p": 0.5, "dropout_seed": 5}
        return attention(q, q, q, **more)

    got = torch.vmap(function)(q, sinks)
    grads = torch.vmap(torch.func.grad(lambda q, s: function(q, s).square().sum()))(q, sinks)
    for i in range(3):
        assert torch.allclose(got[i], function(q[i], sinks[i]))
        assert torch.allclose(grads[i], torch.func.grad(lambda q, s: function(q, s).square().sum())(q[i], sinks[i]))
