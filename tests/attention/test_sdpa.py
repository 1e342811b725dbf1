"""`scaled_dot_product_attention` against torch's own (math backend, contiguous float64, finite inputs) and against its signature."""
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip.attention import scaled_dot_product_attention
from onchip.errors import InputError


def _both(shapes: tuple, mask: torch.Tensor | None = None, **arguments: object) -> None:
    """Values and gradients, ours in fp32 against torch's in float64."""
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    twins = [x.detach().double().requires_grad_() for x in leaves]
    twin_mask = mask if mask is None or mask.dtype == torch.bool else mask.detach().double().requires_grad_()
    ours = scaled_dot_product_attention(*leaves, attn_mask=mask, **arguments)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(*twins, attn_mask=twin_mask, **arguments)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours.double(), theirs, atol=1e-5)
    weights = torch.randn(ours.shape)
    if mask is not None and mask.requires_grad:
        leaves, twins = [*leaves, mask], [*twins, twin_mask]
    for grad, right in zip(torch.autograd.grad(ours, leaves, weights), torch.autograd.grad(theirs, twins, weights.double()), strict=True):
        assert torch.allclose(grad.double(), right, atol=1e-4)


def test_the_signature_is_torchs() -> None:
    said = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters) == said
    assert said in " ".join(F.scaled_dot_product_attention.__doc__.split())


@pytest.mark.parametrize("shapes", [
    ((5, 8), (7, 8), (7, 3)), ((2, 5, 8), (2, 7, 8), (2, 7, 3)), ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    ((3, 2, 4, 7, 16), (3, 2, 4, 5, 16), (3, 2, 4, 5, 32)), ((2, 4, 5, 8), (1, 4, 7, 8), (1, 1, 7, 3)),
    ((1, 1, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)), ((2, 5, 8), (7, 8), (7, 3))])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_number_of_leading_dimensions(shapes: tuple, is_causal: bool) -> None:
    _both(shapes, is_causal=is_causal)


@pytest.mark.parametrize(("q", "mask"), [
    ((4, 4, 32, 16), (4, 1, 1, 32)), ((3, 2, 4, 7, 16), (1, 1, 5)), ((3, 2, 4, 7, 16), (2, 1, 7, 5)), ((3, 2, 4, 7, 16), (3, 1, 4, 1, 5)),
    ((4, 7, 16), (4, 7, 5)), ((7, 16), (7, 5)), ((2, 4, 7, 16), (1, 1)), ((3, 2, 4, 7, 16), (1, 1, 1, 7, 5))])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_every_rank_broadcast(q: tuple, mask: tuple, kind: str) -> None:
    k = (*q[:-2], mask[-1] if mask[-1] > 1 else 5, 16)
    if kind == "bool":
        attn_mask = torch.rand(mask) < 0.7
        attn_mask[..., 0] = True
    else:
        attn_mask = torch.randn(mask, requires_grad=True)
    _both((q, k, k), attn_mask)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 2.0])
def test_scale(scale: float | None) -> None:
    _both(((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)), scale=scale, is_causal=True)


@pytest.mark.parametrize("kv", [(2, 2), (1, 1), (2, 1)])
def test_grouped_heads(kv: tuple[int, int]) -> None:
    _both(((3, 4, 5, 8), (3, kv[0], 7, 8), (3, kv[1], 7, 8)), enable_gqa=True)
    _both(((4, 5, 8), (kv[0], 7, 8), (kv[1], 7, 8)), enable_gqa=True)


def test_causal_is_top_left_and_acts_with_the_mask() -> None:
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8)
    v = torch.eye(5)[None, None]
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out[0, 0], torch.tensor([[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]))
    mask = torch.tensor([[True, True, True, True, True], [False, True, True, True, True]])
    both = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    assert torch.allclose(both[0, 0], torch.tensor([[1.0, 0, 0, 0, 0], [0, 1.0, 0, 0, 0]]))


@pytest.mark.parametrize("as_float", [False, True])
def test_a_row_that_may_attend_to_nothing_is_zero(as_float: bool) -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    attn_mask = torch.zeros(5, 7).masked_fill(~mask, -math.inf) if as_float else mask
    q = torch.randn(1, 4, 5, 8, requires_grad=True)
    k = torch.randn(1, 4, 7, 8)
    out = scaled_dot_product_attention(q, k, k, attn_mask=attn_mask)
    assert (out[:, :, 2] == 0).all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert (dq[:, :, 2] == 0).all()
    assert dq.isfinite().all()


def test_dropout_of_everything_and_of_half() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    nothing = scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    assert (nothing == 0).all()
    assert (torch.autograd.grad(nothing.sum(), q)[0] == 0).all()
    ones = torch.ones(1, 1, 64, 1)
    half = scaled_dot_product_attention(torch.zeros(1, 1, 512, 1), torch.zeros(1, 1, 64, 1), ones, dropout_p=0.5)
    assert half.mean().item() == pytest.approx(1, abs=0.05)
    assert half.std().item() == pytest.approx(1 / 8, rel=0.2)


@pytest.mark.parametrize(("change", "says"), [
    ({"query": torch.randn(8)}, "query: got 1 dimensions"), ({"key": torch.randn(4, 7, 8).int()}, "k: got torch.int32"),
    ({"key": [1, 2]}, "key: got list"), ({"value": torch.randn(3, 7, 8)}, "leading dimensions that broadcast"),
    ({"attn_mask": torch.ones(5, 7, dtype=torch.int32)}, "attn_mask: got torch.int32"),
    ({"attn_mask": torch.ones(7)}, "attn_mask: got shape"), ({"attn_mask": torch.ones(5, 6)}, "attn_mask: got shape"),
    ({"attn_mask": torch.ones(2, 1, 5, 7)}, "attn_mask: got shape"), ({"dropout_p": 1.5}, "dropout_p: got 1.5"),
    ({"query": torch.randn(5, 8), "enable_gqa": True}, "at least 3"), ({"key": torch.randn(3, 7, 8), "enable_gqa": True}, "divisor of")])
def test_what_does_not_fit_is_named(change: dict, says: str) -> None:
    arguments = {"query": torch.randn(4, 5, 8), "key": torch.randn(4, 7, 8), "value": torch.randn(4, 7, 8), **change}
    with pytest.raises((InputError, TypeError), match=says):
        scaled_dot_product_attention(**arguments)
