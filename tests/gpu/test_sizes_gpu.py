"""Attention beyond 32 bits: axes of more than 65 535 blocks, strides, tensors and masks of more than 2³¹ elements."""
import pytest
import torch
from torch import Tensor

from onchip.attention import attention, attention_varlen
from onchip.testing.attention import Case, Inputs
from tests.gpu.oracle import BACKENDS, agree

pytestmark = [pytest.mark.gpu, pytest.mark.big, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)


def inputs_of(case: Case) -> Inputs:
    """A dense case's tensors, drawn on the card."""
    q, dout = (normal(case.batch, case.heads, case.seq_q, dim, seed=dim + n) for n, dim in enumerate((case.dim, case.dim_v)))
    k, v = (normal(case.batch, case.kv_heads, case.seq_k, dim, seed=dim + n) for n, dim in enumerate((case.dim, case.dim_v), 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return Inputs(*leaves, None, None, None, None, dout, torch.randn(q.shape[:3], device="cuda"), ["q", "k", "v"])


def results(leaves: tuple[Tensor, ...], dout: Tensor, backend: str, cu: Tensor | None = None, longest: int = 0,
            mask: Tensor | None = None) -> dict[str, Tensor]:
    """out, lse and the gradients of `leaves`: q, k, v, and the bias if there is one."""
    q, k, v, *bias = leaves = tuple(x.detach().requires_grad_() for x in leaves)
    if cu is None:
        out, lse = attention(q, k, v, bias=bias[0] if bias else None, mask=mask, return_lse=True, backend=backend)
    else:
        out, lse = attention_varlen(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), grads, strict=False))}


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Equal but for two roundings of the largest value (lse: of fp32 sums)."""
    for name, right in want.items():
        step = 1e-5 if name == "lse" else 2 * torch.finfo(right.dtype).eps
        error = (got[name].float() - right.float()).abs().max().item()
        assert error <= step * right.float().abs().max().item(), f"{name}: {error:.3g}"


def as_alone(got: dict[str, Tensor], rows: slice, leaves: tuple[Tensor, ...], dout: Tensor, backend: str) -> None:
    """The sequence at `rows` of a packed answer is what it is by itself, as a dense batch of one."""
    q, k, v, dout = (x[rows].transpose(0, 1)[None] for x in (*leaves, dout))
    mine = {name: got[name][rows].transpose(0, 1)[None] for name in ("out", "dq", "dk", "dv")}
    same({**mine, "lse": got["lse"][None, :, rows]}, results((q, k, v), dout, backend))


@BACKENDS
@pytest.mark.parametrize(("batch", "heads", "seq_q", "seq_k"), [(65_537, 2, 4, 4), (1, 65_536, 10, 10), (1, 1, 128 * 65_535 + 1, 8)],
                         ids=["batches", "heads", "query blocks"])
def test_more_than_65535_of_an_axis(batch: int, heads: int, seq_q: int, seq_k: int, backend: str) -> None:
    case = Case(batch=batch, heads=heads, kv_heads=heads, seq_q=seq_q, seq_k=seq_k, dim=8, dim_v=8, dtype="bfloat16")
    agree(case, backend, inputs_of(case))


@BACKENDS
def test_rows_of_a_wide_matrix(backend: str) -> None:
    """q, k, v and dout as columns of one matrix with rows of 9728: from row 220 753 on, row · stride passes 2³¹."""
    tokens, heads, dim, row = 225_304, 16, 96, 9728
    wide = normal(tokens, row)
    q, k, v, dout = (wide[:, n * heads * dim : (n + 1) * heads * dim].unflatten(1, (heads, dim)) for n in range(4))
    assert (tokens - 1) * q.stride(0) > 2**31
    cu = torch.tensor([*range(0, tokens, 64), tokens], device="cuda", dtype=torch.int32)
    got = results((q, k, v), dout, backend, cu, 64)
    want = results(tuple(x.contiguous() for x in (q, k, v)), dout.contiguous(), backend, cu, 64)
    assert all(torch.equal(got[name], right) for name, right in want.items())
    last = tokens // 64 * 64
    for rows in (slice(last - 64, last), slice(last, tokens)):
        as_alone(got, rows, (q, k, v), dout, backend)


@BACKENDS
def test_batches_2_to_30_elements_apart(backend: str) -> None:
    step, batch, size = 2**30, 5, 2 * 64 * 64
    storage = torch.empty((batch - 1) * step + 4 * size, device="cuda", dtype=torch.bfloat16)
    views = [storage.as_strided((batch, 2, 64, 64), (step, 64 * 64, 64, 1), n * size) for n in range(4)]
    for n, view in enumerate(views):
        view.copy_(normal(batch, 2, 64, 64, seed=n))
    got = results(tuple(views[:3]), views[3], backend)
    want = results(tuple(x.contiguous() for x in views[:3]), views[3].contiguous(), backend)
    assert all(torch.equal(got[name], right) for name, right in want.items())
    assert got["out"][4].float().std() > 0.01


@BACKENDS
def test_two_million_queries(backend: str) -> None:
    """q, out and their gradients of a little over 2³¹ elements; the keys' gradients are sums over all queries."""
    seq, half = 2**21 + 1, 2**20
    q, dout = (normal(1, 16, seq, 64, seed=n) for n in range(2))
    k, v = (normal(1, 16, 64, 64, seed=n) for n in (2, 3))
    got = results((q, k, v), dout, backend)
    for rows in (slice(0, 100), slice(seq - 300, seq)):
        want = results((q[:, :, rows], k, v), dout[:, :, rows], backend)
        same({name: got[name][:, :, rows] for name in ("out", "lse", "dq")}, {name: want[name] for name in ("out", "lse", "dq")})
    parts = [results((q[:, :, rows], k, v), dout[:, :, rows], backend) for rows in (slice(0, half), slice(half, seq))]
    for name in ("dk", "dv"):
        total = sum(part[name].float() for part in parts)
        torch.testing.assert_close(got[name].float(), total, rtol=2**-6, atol=2**-7 * total.abs().max().item())


@BACKENDS
def test_packed_tensors_of_2_to_31_elements(backend: str) -> None:
    """512 sequences of 512 tokens, 32 heads of 256: the last sequence is what it is alone."""
    n, heads, dim = 512, 32, 256
    q, k, v, dout = (normal(n * n, heads, dim, seed=seed) for seed in range(4))
    cu = torch.arange(0, n * n + 1, n, device="cuda", dtype=torch.int32)
    got = results((q, k, v), dout, backend, cu, n)
    for rows in (slice(0, n), slice(n * n - n, n * n)):
        as_alone(got, rows, (q, k, v), dout, backend)


def test_a_mask_of_54_thousand_rows_and_columns() -> None:
    """2.9e9 elements, more than 2³¹, shared by three heads; every row, forward and backward, against float64."""
    seq = 53_936
    case = Case(heads=3, kv_heads=3, seq_q=seq, seq_k=seq, dim=128, dim_v=128, dtype="bfloat16")
    inputs = inputs_of(case)
    inputs.mask = torch.randint(0, 2, (1, 1, seq, seq), device="cuda", dtype=torch.uint8).view(torch.bool)
    agree(case, "triton", inputs)


@pytest.mark.parametrize("what", ["mask", "bias"])
@pytest.mark.parametrize(("batch", "heads", "seq"), [(8, 28, 4096), (64, 16, 2048)])
def test_masks_and_biases_of_more_than_2_to_31_elements(batch: int, heads: int, seq: int, what: str) -> None:
    """One for every batch and head. The last head is what it is alone, and alone it is right."""
    leaves = [normal(batch, heads, seq, 64, seed=n) for n in range(3)]
    dout, mask = normal(batch, heads, seq, 64, seed=3), None
    if what == "bias":
        leaves.append(normal(batch, heads, seq, seq, seed=4))
    else:
        mask = torch.randint(0, 2, (batch, heads, seq, seq), device="cuda", dtype=torch.uint8).view(torch.bool)
    got = {name: x[-1:, -1:].clone() for name, x in results(tuple(leaves), dout, "triton", mask=mask).items()}
    last = [x[-1:, -1:].clone().requires_grad_() for x in leaves]
    mask, dout = None if mask is None else mask[-1:, -1:], dout[-1:, -1:]
    same(got, results(tuple(last), dout, "triton", mask=mask))
    case = Case(heads=1, kv_heads=1, seq_q=seq, seq_k=seq, dim=64, dim_v=64, dtype="bfloat16")
    bias, names = (last[3], ["q", "k", "v", "bias"]) if what == "bias" else (None, ["q", "k", "v"])
    agree(case, "triton", Inputs(*last[:3], bias, None, mask, None, dout, torch.zeros(1, 1, seq, device="cuda"), names))
