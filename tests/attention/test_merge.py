"""Partial attentions over disjoint keys, merged: safe at −∞, natural logarithms, no error that grows with the number of parts."""
import math
from itertools import pairwise

import pytest
import torch

from onchip.attention import attention, merge_attention
from onchip.errors import InputError
from onchip.testing.attention import Case, Target, build

INF = math.inf


@pytest.mark.parametrize(("parts", "right"), [
    ([(0.0, -INF), (0.0, -INF)], (0.0, -INF)), ([(0.0, -INF), (3.0, 1.0)], (3.0, 1.0)), ([(3.0, 1.0), (0.0, -INF)], (3.0, 1.0)),
    ([(0.0, -INF)] * 3 + [(2.0, -5.0)], (2.0, -5.0)), ([(math.nan, -INF), (3.0, 1.0)], (3.0, 1.0)),
    ([(1.0, 0.0), (3.0, 0.0)], (2.0, math.log(2))), ([(1.0, 1e4), (3.0, 1e4)], (2.0, 1e4 + math.log(2))),
    ([(1.0, -100.0), (4.0, -100 + math.log(2))], (3.0, -100 + math.log(3)))])
def test_small_merges_by_hand(parts: list[tuple[float, float]], right: tuple[float, float]) -> None:
    outs = [torch.full((1, 1, 64), out, requires_grad=True) for out, _ in parts]
    lses = [torch.full((1, 1), lse, requires_grad=True) for _, lse in parts]
    out, lse = merge_attention(outs, lses)
    assert torch.allclose(out, torch.full((1, 1, 64), right[0]))
    assert torch.allclose(lse, torch.full((1, 1), right[1]))
    (out.sum() + lse.masked_fill(lse == -INF, 0).sum()).backward()
    assert all(x.grad.isfinite().all() for x in (*outs, *lses))


@pytest.mark.parametrize("cuts", [[5], [3072], [1, 2, 3], [0, 16, 16, 32]])
def test_split_is_whole(target: Target, cuts: list[int]) -> None:
    seq_k = 33 if max(cuts) < 33 else 3136
    case = Case(heads=2, kv_heads=1, seq_q=4, seq_k=seq_k, sinks=False)
    if target == Target("triton", "cpu") and seq_k > 33:
        pytest.skip("too slow under the interpreter")
    inputs = build(case, target.device)
    whole, whole_lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, backend=target.backend)
    bounds = [0, *cuts, seq_k]
    parts = [attention(inputs.q, inputs.k[:, :, a:b], inputs.v[:, :, a:b], return_lse=True, backend=target.backend)
             for a, b in pairwise(bounds)]
    out, lse = merge_attention(*zip(*parts, strict=True))
    assert torch.allclose(out, whole, atol=2e-6)
    assert torch.allclose(lse, whole_lse, atol=2e-6)
    want = torch.autograd.grad((whole, whole_lse), inputs.leaves, (inputs.dout, inputs.dlse))
    got = torch.autograd.grad((out, lse), inputs.leaves, (inputs.dout, inputs.dlse))
    for grad, right in zip(got, want, strict=True):
        assert torch.allclose(grad, right, atol=1e-5)


def test_the_error_does_not_grow_with_the_number_of_chunks() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (16, 1024, 1024))
    p = torch.softmax(q.double() @ k.double().mT / 8, -1)
    right = p @ v.double()
    errors = []
    for chunks in (1, 2, 4, 8, 16):
        out, lse = torch.zeros(1, 1, 16, 64), torch.full((1, 1, 16), -INF)
        for part_k, part_v in zip(k.chunk(chunks, 2), v.chunk(chunks, 2), strict=True):
            part, part_lse = attention(q.float(), part_k.float(), part_v.float(), return_lse=True)
            out, lse = merge_attention([out, part], [lse, part_lse])
        errors.append((out.double() - right).abs().max().item())
    assert max(errors) < 2e-6
    assert right.abs().max() > 0.05


def test_the_dtype_of_the_parts_comes_back() -> None:
    for dtype, log in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        out, lse = merge_attention([torch.ones(2, 3, dtype=dtype)] * 2, [torch.zeros(2, dtype=log)] * 2)
        assert (out.dtype, lse.dtype) == (dtype, log)


def test_parts_that_do_not_fit_are_refused() -> None:
    out, lse = torch.zeros(2, 3), torch.zeros(2)
    for outs, lses in (([], []), ([out], [lse, lse]), ([out, torch.zeros(2, 4)], [lse, lse]), ([out], [torch.zeros(3)])):
        with pytest.raises(InputError, match="accepted"):
            merge_attention(outs, lses)
