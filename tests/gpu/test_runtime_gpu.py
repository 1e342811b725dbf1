"""Attention inside CUDA's run time: streams, graphs, a second device, torch.compile, tf32, repeatability, memory."""
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onchip.attention import attention, attention_varlen
from onchip.bench.memory import peak_extra_bytes
from onchip.errors import InputError
from onchip.testing.attention import Case, build, run, truth
from tests.attention.conftest import _poison  # noqa: F401  used by every test here too
from tests.gpu.oracle import BACKENDS, agree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **arguments: object) -> tuple[Tensor, ...]:
    """out, lse and the gradients of q, k and v."""
    leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v)]
    function = attention if q.dim() == 4 else attention_varlen
    out, lse = function(*leaves, return_lse=True, causal=True, **arguments)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@BACKENDS
def test_the_current_stream_is_used_and_memory_stays_alive_for_it(backend: str) -> None:
    operands = [normal(2, 4, 500, 64, seed=n) for n in range(4)]
    right = results(*operands, backend=backend)
    stream, answers = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(stream):
            late = [torch.zeros_like(x) for x in operands]
            torch.cuda._sleep(1_000_000)  # about half a millisecond in which a launch on another stream would read zeros
            for x, data in zip(late, operands, strict=True):
                x.copy_(data)
            answers.append(results(*late, backend=backend))
        torch.full((2, 4, 500, 64), torch.nan, device="cuda")  # would overwrite a temporary freed for the wrong stream
    stream.synchronize()
    assert all(equal(again, right) for again in answers)


@BACKENDS
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_graph_replays_with_new_data(backend: str, packed: bool) -> None:
    """Forward and backward in one graph, replayed on the capturing stream and on another, each time equal to an eager run."""
    operands = [normal(*(400, 4, 64) if packed else (2, 4, 200, 64), seed=n).requires_grad_(n < 3) for n in range(4)]
    offsets = torch.tensor([0, 150, 150, 400], device="cuda", dtype=torch.int32)
    more = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 400, "max_seqlen_k": 400} if packed else {}
    results(*operands, backend=backend, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(*operands, backend=backend, **more)
    other = torch.cuda.Stream()
    for n in range(4):
        for seed, x in enumerate(operands, 10 * n + 10):
            x.detach().copy_(normal(*x.shape, seed=seed))
        if packed:
            offsets.copy_(torch.tensor([0, 100 * n, 100 * n + 50, 400]))
        with torch.cuda.stream(other if n % 2 else torch.cuda.current_stream()):
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
        assert equal(captured, results(*operands, backend=backend, **more))


def test_dropout_in_a_graph_draws_a_new_mask_each_time_and_the_same_in_both_passes() -> None:
    """With q = k = 0 and v the identity, out is the mask over 64 and dv for dout = 1 its column sums over 64."""
    zero, v = torch.zeros(1, 1, 64, 64, device="cuda"), torch.eye(64, device="cuda")[None, None].clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = attention(zero, zero, v, dropout_p=0.5)
        return out.detach(), torch.autograd.grad(out, v, torch.ones_like(out))[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    masks = []
    for _ in range(3):
        graph.replay()
        mask = (out[0, 0] * 32).round()
        torch.testing.assert_close(mask.sum(0), dv[0, 0, :, 0] * 32, rtol=1e-5, atol=1e-3)
        assert 0.4 < mask.mean().item() < 0.6
        masks.append(mask)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_tf32_only_where_torch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 is near float64 by default; torch's switch makes it tf32, visibly, and back."""
    case = Case(batch=2, heads=4, kv_heads=2, seq_q=300, seq_k=300, dim=64, dim_v=64, causal=True)
    inputs = build(case, "cuda")
    exact = agree(case, "triton", inputs)
    right = {name: x.to("cuda") for name, x in truth(case, inputs).items()}
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    rough = run(case, inputs, "triton")
    monkeypatch.undo()
    for name, want in right.items():
        size = want.abs().max().item()
        near, far = ((x[name] - want).abs().max().item() / size for x in (exact, rough))
        assert near < 1e-5, name
        assert (1e-5 if name == "lse" else 1e-4) < far < 5e-3, name
    assert all(torch.equal(x, exact[name]) for name, x in run(case, inputs, "triton").items())


@BACKENDS
@pytest.mark.parametrize("how", ["argument", "switch"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_thirty_runs_are_bitwise_equal(backend: str, how: str, kv_heads: int) -> None:
    q, dout = (normal(2, 1024, 8, 128, seed=n).transpose(1, 2) for n in range(2))
    k, v = (normal(2, 1024, kv_heads, 128, seed=n).transpose(1, 2) for n in (2, 3))
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, dout)]
    cu = torch.tensor([0, 700, 1400, 2048], device="cuda", dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 700, "max_seqlen_k": 700}
    asked = {"deterministic": True} if how == "argument" else {}
    torch.use_deterministic_algorithms(how == "switch")
    try:
        for operands, more in (((q, k, v, dout), {}), (flat, packed)):
            first = results(*operands, backend=backend, **asked, **more)
            assert all(equal(results(*operands, backend=backend, **asked, **more), first) for _ in range(30))
    finally:
        torch.use_deterministic_algorithms(False)


@BACKENDS
def test_fifty_backward_passes_on_one_graph(backend: str) -> None:
    """A race that hides behind timing moves a gradient now and then."""
    q, k, v = (3 * normal(300, seq, 1, 128, dtype=torch.float16, seed=n) for n, seq in enumerate((2048, 128, 128)))
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out, _ = attention(*leaves, return_lse=True, backend=backend)
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    for _ in range(49):
        again = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
        assert equal(again, first)
    case = Case(heads=1, kv_heads=1, seq_q=2048, seq_k=128, dim=128, dim_v=128, dtype="float16", size=3.0)
    inputs = build(case, "cuda")
    inputs.q, inputs.k, inputs.v = (x.detach()[299:].requires_grad_() for x in leaves)
    inputs.dout, inputs.dlse = torch.ones_like(inputs.dout), torch.zeros_like(inputs.dlse)
    alone = agree(case, backend, inputs)
    for grad, name in zip(first, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(grad[299:], alone[name], rtol=2**-9, atol=2**-9 * alone[name].abs().max().item())


@BACKENDS
def test_memory_grows_with_the_length_not_its_square(backend: str) -> None:
    """64 Ki tokens of one head: their scores would be 8.6 GB in bf16."""
    q, k, v, dout = (normal(1, 1, 1 << 16, 128, seed=n) for n in range(4))
    results(q, k, v, dout, backend=backend)
    extra, answer = peak_extra_bytes(lambda: results(q, k, v, dout, backend=backend), "cuda")
    assert extra <= sum(x.numel() * x.element_size() for x in answer) + 2**24


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # inductor's own
def test_compiled_with_inductor_for_all_lengths_and_no_batch() -> None:
    torch._dynamo.reset()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 4, 64)).transpose(1, 3).unbind(2)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.float().square().sum() + lse.sin().sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    w = normal(64, 768).div_(8).requires_grad_()
    for batch, seq in ((2, 100), (2, 101), (3, 257), (0, 50)):
        x = normal(batch, seq, 64)
        (got,), (want,) = (torch.autograd.grad(f(x, w), w) for f in (compiled, layer))
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02 * want.float().abs().max().item())


@TWO
@BACKENDS
def test_a_device_that_is_not_current(backend: str) -> None:
    operands = [normal(2, 8, 300, 128, seed=n) for n in range(4)]
    right = results(*operands, backend=backend)
    for packed in (False, True):
        more, here = {}, right
        away = [x.to("cuda:1") for x in operands]
        if packed:  # with offsets on the CPU
            cu = torch.tensor([0, 100, 300])
            more = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            away = [x[0].transpose(0, 1) for x in away]
            here = results(*(x[0].transpose(0, 1) for x in operands), backend=backend, **more)
        for _ in range(2):  # the second time from what is remembered
            with torch.cuda.device(0):
                there = results(*away, backend=backend, **more)
                assert torch.cuda.current_device() == 0
            assert all(x.device == torch.device("cuda:1") for x in there)
            assert equal(tuple(x.to("cuda:0") for x in there), here)


@TWO
@BACKENDS
def test_a_graph_on_a_device_that_is_not_the_first(backend: str) -> None:
    with torch.cuda.device(1):
        operands = [normal(2, 4, 200, 64, device="cuda:1", seed=n).requires_grad_(n < 3) for n in range(4)]
        right = results(*operands, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(*operands, backend=backend)
        graph.replay()
        assert equal(captured, right)


@TWO
@pytest.mark.parametrize("which", ["k", "v", "mask", "bias", "sinks", "alibi_slopes"])
def test_operands_on_two_devices_are_refused(which: str) -> None:
    q = normal(1, 2, 8, 16)
    arguments: dict[str, Tensor] = {"k": q, "v": q}
    make: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: torch.ones(8, 8, dtype=torch.bool), "bias": lambda: torch.zeros(8, 8), "sinks": lambda: torch.zeros(2),
        "alibi_slopes": lambda: torch.zeros(2)}
    arguments[which] = (make[which]() if which in make else q).to("cuda:1")
    with pytest.raises(InputError, match=f"{which}: got a tensor on cuda:1, accepted: the device of q, cuda:0"):
        attention(q, arguments.pop("k"), arguments.pop("v"), **arguments)
