"""The operators inside torch: opcheck, fakes whose strides are the real ones, compiling with dynamic lengths, export, autocast, FLOPs."""
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from onchip.attention import attention, attention_varlen, derivatives
from onchip.attention.contract import Arguments, check_dense, check_packed
from onchip.testing.attention import Case, build

# torch's own inductor scripts a module when it is first imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

FORWARD, BACKWARD = torch.ops.onchip.attention_forward, torch.ops.onchip.attention_backward
CASES = {
    "plain": Case(batch=2, heads=4, kv_heads=2, seq_q=130, seq_k=130, dim=8, dim_v=12, layout="bshd", causal=True),
    "everything": Case(batch=2, heads=4, kv_heads=2, seq_q=5, seq_k=9, bias=(1, 4, 1, 9), mask=(2, 1, 5, 9), alibi=2, sinks=True,
                       dropout_p=0.2, window=(4, 1), softcap=2.0),
    "packed": Case(heads=2, kv_heads=1, lengths=((3, 5), (0, 2), (4, 4)), tail=1, causal=True),
}


def _arguments(case: Case, requires_grad: bool, backend: str = "reference") -> tuple[Any, ...]:
    inputs = build(case)
    for x in inputs.leaves:
        x.requires_grad_(requires_grad)
    common = {**case.arguments, "alibi_slopes": inputs.slopes, "sinks": inputs.sinks, "dropout_seed": 3, "deterministic": False,
              "backend": backend}
    if case.lengths is None:
        return tuple(check_dense(inputs.q, inputs.k, inputs.v, bias=inputs.bias, mask=inputs.mask, **common))
    cu_q, cu_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 5, 7, 11])
    return tuple(check_packed(inputs.q, inputs.k, inputs.v, cu_q, cu_k, max_seqlen_q=None, max_seqlen_k=None, **common))


def _backward_arguments(case: Case, needs: list[bool]) -> tuple[Any, ...]:
    args = _arguments(case, False)
    out, lse = FORWARD(*args)
    return (torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse, *args[3:10], needs, *args[10:])


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    case = CASES[name]
    opcheck(FORWARD.default, _arguments(case, True))
    full = [True, True, True, case.bias is not None, case.sinks]
    for needs in (full, [False, False, True, False, False]):
        opcheck(BACKWARD.default, _backward_arguments(case, needs))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_fakes_have_the_shapes_strides_and_dtypes_of_the_real(name: str, backend: str) -> None:
    case = CASES[name]
    every = [True, True, True, case.bias is not None, case.sinks]
    calls = [(FORWARD, _arguments(case, False, backend)), (BACKWARD, _backward_arguments(case, every)),
             (BACKWARD, _backward_arguments(case, [False, True, False, False, False]))]
    for op, args in calls:
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args))
        for ours, theirs in zip(real, fake, strict=True):
            assert ours.shape == theirs.shape
            assert ours.stride() == theirs.stride()
            assert ours.dtype == theirs.dtype


def test_outputs_are_tensors_of_their_own() -> None:
    """What is not needed comes back as an empty tensor, and never twice as the same one."""
    outputs = BACKWARD(*_backward_arguments(CASES["plain"], [True, False, False, False, False]))
    assert [x.numel() > 0 for x in outputs] == [True, False, False, False, False]
    assert len({id(x) for x in outputs}) == 5


def _loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    return out.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiling_whole_with_dynamic_lengths_recompiles_nothing(dynamic: bool | None) -> None:
    """At most one compilation for the first length and one for the rest; every length equals the eager run, forward and backward."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_loss, backend=counter, fullgraph=True, dynamic=dynamic)
    for seq in (7, 8, 9, 16, 17, 129):
        leaves = [torch.randn(2, seq, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
        got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, _loss))
        for grad, right in zip(got, want, strict=True):
            assert torch.allclose(grad, right, atol=1e-6)
    assert counter.frame_count <= 2
    assert sum("onchip.attention_forward" in str(node.target) for node in counter.graphs[-1].graph.nodes) == 1


def test_inductor_runs_the_same_tensor_thrice() -> None:
    torch._dynamo.reset()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).unflatten(-1, (2, 8)).transpose(1, 2)
        return attention(q, q, q, causal=True).transpose(1, 2).flatten(2).square().sum()

    compiled = torch.compile(layer, fullgraph=True)
    w = torch.randn(16, 16, requires_grad=True)
    for seq in (9, 12):
        x = torch.randn(2, seq, 16)
        (got,), (want,) = (torch.autograd.grad(f(x, w), w) for f in (compiled, layer))
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_compiled_packed_sequences_and_dropout() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(q: Tensor, cu: Tensor, seed: Tensor) -> Tensor:
        return attention_varlen(q, q, q, cu, cu, causal=True, dropout_p=0.3, dropout_seed=seed)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ((3, 5), (9, 2), (1, 30)):
        q = torch.randn(sum(lengths), 2, 8, requires_grad=True)
        cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        got, want = (f(q, cu, torch.tensor([4])) for f in (compiled, function))
        assert torch.allclose(got, want)
        assert torch.allclose(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (got, want)))
    assert counter.frame_count <= 2


def test_a_compiled_transform_is_refused_in_words() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(lambda q: attention(q, q, q).sum()), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch.func transform of onchip\.attention"):
        compiled(torch.randn(1, 1, 3, 4))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return attention(q, q, q, causal=True, softcap=5.0)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_sizes(strict: bool) -> None:
    layer = _Layer()
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq", min=2, max=1024)
    exported = torch.export.export(layer, (torch.randn(3, 9, 16),), dynamic_shapes=({0: batch, 1: seq},), strict=strict).module()
    for sizes in ((1, 2), (4, 33), (2, 300)):
        x = torch.randn(*sizes, 16)
        assert torch.equal(exported(x), layer(x))
    x = torch.randn(2, 5, 16)
    for got, want in zip(*(torch.autograd.grad(f(x).square().sum(), list(f.parameters())) for f in (exported, layer)), strict=True):
        assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("unknown", ["batch", "seq"])
def test_export_with_sizes_that_come_from_data(unknown: str) -> None:
    class Layer(nn.Module):
        def forward(self, n: Tensor, x: Tensor) -> Tensor:
            size = n.item()
            torch._check(size >= 2)
            q = x.new_ones(*((size, 2, 9, 8) if unknown == "batch" else (2, 2, size, 8)))
            return attention(q, q, q, causal=True)

    exported = torch.export.export(Layer(), (torch.tensor(3), torch.randn(2)))
    assert exported.module()(torch.tensor(5), torch.randn(2)).shape == ((5, 2, 9, 8) if unknown == "batch" else (2, 2, 5, 8))


def test_an_empty_batch_through_a_compiled_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (3, 0):
        leaves = [torch.randn(batch, 4, n, 8, requires_grad=True) for n in (5, 6, 6)]
        assert [x.shape for x in torch.autograd.grad(compiled(*leaves), leaves)] == [x.shape for x in leaves]


def test_autocast_lowers_attention_and_its_gradient_comes_back_in_fp32() -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, q, q.bfloat16())
        assert out.dtype == torch.bfloat16
        assert attention(q.double(), q.double(), q.double()).dtype == torch.float64
        exact = attention(q, q, q, backend="reference")
    assert torch.equal(out, attention(*(q.bfloat16(),) * 3))
    assert torch.equal(exact, attention(*(q.bfloat16(),) * 3, backend="reference"))  # fp32 inside, autocast or not
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: attention(q, q, q), backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(q), out)


def test_flops_are_counted_as_the_ledger_counts_them() -> None:
    """2(d + dv) a visible pair forward; backward those of four matmuls, and QKᵀ once more. 5 × 9, causal: 5 + … + 9 = 35 pairs."""
    q, k, v = (torch.randn(2, heads, n, d, requires_grad=True) for heads, n, d in ((4, 5, 8), (2, 9, 8), (2, 9, 12)))
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * 4 * 35 * 2 * (8 + 12)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * 35 * (4 * (8 + 12) + 2 * 8)
    packed, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7])
    with FlopCounterMode(display=False) as counter:
        attention_varlen(packed, packed, packed, cu, cu)
    assert counter.get_total_flops() == 2 * (3 * 3 + 4 * 4) * 2 * 16
    with FlopCounterMode(display=False) as counter:
        attention(packed[None, :0], packed[None, :0], packed[None, :0])
    assert counter.get_total_flops() == 0


def test_the_operator_itself_is_differentiable() -> None:
    args = _arguments(CASES["plain"], True)
    leaves = args[:3]
    got = torch.autograd.grad(FORWARD(*args)[0].square().sum(), leaves)
    want = torch.autograd.grad(derivatives.attention(Arguments(*args))[0].square().sum(), leaves)
    for grad, right in zip(got, want, strict=True):
        assert torch.equal(grad, right)


def test_a_module_can_be_copied_pickled_and_saved_after_a_forward() -> None:
    layer = _Layer()
    x = torch.randn(1, 3, 16)
    want = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), want)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert set(layer.state_dict()) == {"project.weight", "project.bias"}


def test_inference_mode_parameters_and_meta_tensors() -> None:
    q = torch.randn(1, 2, 5, 8)
    with torch.inference_mode():
        assert torch.equal(attention(q, q, q), attention(q.clone(), q, q))
    parameter = nn.Parameter(q)
    assert attention(parameter, parameter, parameter).requires_grad
    meta = torch.empty(1, 5, 2, 8, device="meta").transpose(1, 2)
    assert attention(meta, meta, meta[..., :4]).stride() == (40, 4, 8, 1)
