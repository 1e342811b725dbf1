"""Memory in every order: outputs follow q's, and gradients may come in expanded, sliced or permuted."""
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onchip.attention import attention, attention_varlen
from onchip.attention.contract import empty_like_q
from onchip.testing.attention import Case, Inputs, Target, build, check, offsets, run

CASE = Case(batch=2, heads=2, kv_heads=2, seq_q=9, seq_k=9)


def _offset(x: Tensor) -> Tensor:
    """One element past an aligned start."""
    storage = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    storage[1:] = x.reshape(-1)
    return storage[1:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other element": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "dim before seq": lambda x: x.mT.contiguous().mT,
    "heads inside the sequence": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch innermost": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "rows of a wider matrix": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "not aligned": _offset,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [("q", "k", "v"), ("dout",)], ids="+".join)
def test_any_layout_gives_what_contiguous_memory_gives(target: Target, layout: str, which: tuple[str, ...]) -> None:
    plain = build(CASE, target.device)
    want = run(CASE, plain, target.backend)
    inputs = build(CASE, target.device)
    for name in which:
        x = LAYOUTS[layout](getattr(inputs, name).detach())
        assert torch.equal(x, getattr(plain, name))
        setattr(inputs, name, x.requires_grad_(name != "dout"))
    got = run(CASE, inputs, target.backend)
    for name, right in want.items():
        assert torch.allclose(got[name], right, atol=1e-6), name


@pytest.mark.parametrize("case", [Case(heads=4, seq_q=9, seq_k=11, sinks=True, alibi=1), Case(batch=2, heads=4, seq_q=9, seq_k=9, alibi=2),
                                  Case(heads=4, lengths=((5, 7), (0, 3), (9, 9)), sinks=True, alibi=2)], ids=str)
def test_what_has_a_value_for_each_head_or_sequence_may_have_strides(target: Target, case: Case) -> None:
    plain, inputs = build(case, target.device), build(case, target.device)
    want = run(case, plain, target.backend)
    for name in {"sinks", "slopes"}:
        if getattr(inputs, name) is not None:
            x = LAYOUTS["every other element"](getattr(inputs, name).detach())
            assert x.stride(-1) == 2
            setattr(inputs, name, x.requires_grad_(name == "sinks"))
    got = run(case, inputs, target.backend)
    if case.lengths:
        cu = [torch.stack([x, x + 1], -1)[..., 0] for x in offsets(case, target.device)]
        more = {**case.arguments, "sinks": inputs.sinks, "alibi_slopes": inputs.slopes, "backend": target.backend}
        assert torch.equal(attention_varlen(inputs.q, inputs.k, inputs.v, *cu, **more), got["out"])
    for name, right in want.items():
        assert torch.allclose(got[name], right, atol=1e-6), name


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_outputs_follow_the_memory_order_of_their_inputs(target: Target, layout: str) -> None:
    case = Case(batch=2, heads=4, kv_heads=2, seq_q=13, seq_k=10, dim=16, dim_v=24, layout=layout)
    inputs = build(case, target.device)
    got = run(case, inputs, target.backend)
    for name, like, dim in (("out", inputs.q, 24), ("dq", inputs.q, 16), ("dk", inputs.k, 16), ("dv", inputs.v, 24)):
        assert got[name].stride() == empty_like_q(like, dim).stride(), name
    assert got["out"].transpose(1, 2).is_contiguous() == (layout == "bshd")


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda out: out[..., :1].sum()], ids=["sum", "mean", "slice"])
def test_a_gradient_that_comes_in_expanded(target: Target, reduce: Callable[[Tensor], Tensor]) -> None:
    inputs = build(CASE, target.device)
    out = attention(inputs.q, inputs.k, inputs.v, backend=target.backend)
    leaf = out.detach().requires_grad_()
    dense = torch.autograd.grad(reduce(leaf), leaf)[0].contiguous()
    want = torch.autograd.grad(out, inputs.leaves, dense, retain_graph=True)
    for grad, right in zip(torch.autograd.grad(reduce(out), inputs.leaves), want, strict=True):
        assert torch.allclose(grad, right, atol=1e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_gradient_sliced_from_a_concatenation(target: Target, layout: str) -> None:
    case = Case(batch=2, heads=4, kv_heads=1, seq_q=8, seq_k=8, layout=layout)
    inputs = build(case, target.device)
    out = attention(inputs.q, inputs.k, inputs.v, backend=target.backend).transpose(1, 2).flatten(2)
    other = torch.randn(2, 8, 7, device=target.device)
    weights = torch.randn(2, 8, out.shape[-1] + 7, device=target.device)
    got = torch.autograd.grad((torch.cat([out, other], -1) * weights).sum(), inputs.leaves, retain_graph=True)
    want = torch.autograd.grad(out, inputs.leaves, weights[..., : out.shape[-1]].contiguous())
    for grad, right in zip(got, want, strict=True):
        assert torch.allclose(grad, right, atol=1e-6)


@pytest.mark.parametrize("expanded", ["heads", "batch"])
def test_expanded_keys_and_values(target: Target, expanded: str) -> None:
    """Stride 0: the same as contiguous, and the gradient arrives summed at the one real head."""
    seq_k = 33
    case = Case(batch=2, heads=2, kv_heads=2, seq_q=5, seq_k=seq_k, dim=64, dim_v=64, mask=(1, 1, 5, seq_k))
    full = build(case, target.device)
    shape = (2, 1, seq_k, 64) if expanded == "heads" else (1, 2, seq_k, 64)
    one = [torch.randn(shape, device=target.device, requires_grad=True) for _ in range(2)]
    dense = Inputs(full.q, *(x.detach().expand(2, 2, seq_k, 64).contiguous().requires_grad_() for x in one), None, None, full.mask, None,
                   full.dout, full.dlse, full.names)
    want = run(case, dense, target.backend)
    out, lse = attention(full.q, *(x.expand(2, 2, seq_k, 64) for x in one), mask=full.mask, return_lse=True, backend=target.backend)
    assert torch.allclose(out, want["out"], atol=1e-6)
    for x, name in zip(one, ("dk", "dv"), strict=True):
        grad = torch.autograd.grad((out, lse), x, (full.dout, full.dlse), retain_graph=True)[0]
        assert torch.allclose(grad, want[name].sum(1 if expanded == "heads" else 0, keepdim=True), atol=1e-5)


def test_layouts_one_by_one_for_each_operand(target: Target) -> None:
    """q, k and v each in an order of its own: every gradient is indexed by its own strides."""
    case = Case(batch=2, heads=2, kv_heads=2, seq_q=17, seq_k=17, dim=16, dim_v=16)
    inputs = build(case, target.device)
    for name, layout in (("q", "heads inside the sequence"), ("v", "batch innermost"), ("dout", "heads inside the sequence")):
        setattr(inputs, name, LAYOUTS[layout](getattr(inputs, name).detach()).requires_grad_(name != "dout"))
    check(case, target, inputs)
