"""log Σ exp: what it means, its derivatives, and the operators under torch."""
import pytest
import torch

from onchip.softmax.api import logsumexp
from onchip.testing.softmax import DEVICE, hidden_positions

OPS = torch.ops.onchip
INF, NAN = float("inf"), float("nan")
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # torch's, when forward mode is first used
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),  # dynamo's own
]


def data(*shape, dtype=torch.float32, seed=0, size=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(DEVICE, dtype)


def right(x, dim=-1, keepdim=False, scale=1.0, mask=None, bias=None, causal=False):
    """In float64, by the formula: m + log Σ exp(s − m)."""
    s = x.double() * scale + (0.0 if bias is None else bias.double())
    hidden = hidden_positions(x, mask, causal)
    s = s if hidden is None else torch.where(hidden, -INF, s)
    m = s.amax(dim, keepdim=True).nan_to_num(neginf=0.0)
    y = m + (s - m).exp().sum(dim, keepdim=True).log()
    return y if keepdim else y.squeeze(dim)


def close(x, dim=-1, **arguments):
    """Value and gradient; returns the value."""
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    got = logsumexp(leaf, dim, **arguments)
    want = right(exact, dim, **{k: v for k, v in arguments.items() if k not in ("backend", "dtype")})
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=2 * eps)
    g = data(*got.shape, seed=7).to(got.dtype)
    gradient, = torch.autograd.grad(got, leaf, g)
    exact_gradient, = torch.autograd.grad(want, exact, g.double())
    assert gradient.dtype == x.dtype
    seen = exact_gradient.isfinite()
    torch.testing.assert_close(gradient.double()[seen], exact_gradient[seen], rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6)
    return got.detach()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((3, 1), -1), ((3, 7), -1), ((2, 1025), -1), ((2, 513), -1), ((4, 5, 6), 0), ((4, 5, 6), 1)])
def test_values_and_gradients(backend, dtype, shape, dim):
    close(data(*shape, dtype=dtype), dim, backend=backend)
    close(data(*shape, dtype=dtype), dim, backend=backend, keepdim=True, scale=-0.5)


@BACKENDS
def test_features(backend):
    x = data(2, 3, 33)
    close(x, backend=backend, causal=True)
    close(x, backend=backend, mask=torch.arange(33, device=DEVICE) % 3 > 0, scale=0.7)
    close(x, backend=backend, bias=data(3, 1, seed=3), causal=True)
    assert close(x.half(), backend=backend, dtype=torch.float32).dtype == torch.float32


@BACKENDS
def test_the_bias_gets_its_gradient(backend):
    x, bias, exact = data(4, 6), data(6, seed=1).requires_grad_(), data(6, seed=1).double().requires_grad_()
    got, = torch.autograd.grad(logsumexp(x, bias=bias, scale=0.5, backend=backend).square().sum(), bias)
    want, = torch.autograd.grad(torch.logsumexp(0.5 * x.double() + exact, -1).square().sum(), exact)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_infinities_follow_torch(backend):
    rows = torch.tensor([[0, INF, 0], [-INF, -INF, -INF], [-INF, 0, -INF], [NAN, 0, 0], [INF, INF, -INF], [3e38, 3e38, 0]], device=DEVICE)
    assert torch.equal(logsumexp(rows, backend=backend).nan_to_num(nan=-1.0), torch.logsumexp(rows, -1).nan_to_num(nan=-1.0))


@BACKENDS
def test_an_infinite_block_among_finite_ones(backend, streamed):
    x = data(6, 100)
    x[0, 50] = x[1, 0] = x[2, 99] = INF
    x[3, :64] = -INF
    x[4] = -INF
    torch.testing.assert_close(logsumexp(x, backend=backend), torch.logsumexp(x, -1))


@BACKENDS
def test_hidden_rows_are_empty_and_pass_no_gradient(backend):
    x = data(3, 4)
    x[1, 2] = NAN
    x.requires_grad_()
    mask = torch.tensor([[True], [False], [True]], device=DEVICE)
    y = logsumexp(x, mask=mask, backend=backend)
    assert y[1] == -INF
    gradient, = torch.autograd.grad(y, x, torch.ones_like(y))
    assert (gradient[1] == 0).all()
    torch.testing.assert_close(gradient[::2].sum(-1), torch.ones(2, device=DEVICE))


@BACKENDS
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_empty_tensors(backend, shape):
    for dim in range(len(shape)):
        y = logsumexp(torch.empty(shape, device=DEVICE), dim, backend=backend)
        assert torch.equal(y.cpu(), torch.logsumexp(torch.empty(shape), dim))


@BACKENDS
def test_a_scalar_is_a_row_of_one(backend):
    x = torch.tensor(3.0, device=DEVICE, requires_grad=True)
    y = logsumexp(x, 0, backend=backend)
    assert (y.shape, y.item(), torch.autograd.grad(y, x)[0].item()) == ((), 3.0, 1.0)


def test_derivatives_of_every_order():
    x = data(3, 4, size=1.0)

    def derivatives(function):
        leaf, out = x.clone().requires_grad_(), []
        value = (function(leaf) ** 3).sum()
        for _ in range(3):
            gradient, = torch.autograd.grad(value, leaf, create_graph=True)
            out.append(gradient)
            value = (gradient ** 2).sum()
        return out

    torch.testing.assert_close(derivatives(lambda t: logsumexp(t, scale=0.3, backend="triton")),
                               derivatives(lambda t: torch.logsumexp(0.3 * t, -1)), rtol=1e-4, atol=1e-5)


def test_torch_func():
    x, v = data(4, 5), data(4, 5, seed=1)
    for transform in (
        lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())(x),
        lambda f: torch.func.jvp(f, (x,), (v,))[1],
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
        lambda f: torch.func.jacfwd(f)(x[0]),
        lambda f: torch.func.hessian(f)(x[0]),
    ):
        torch.testing.assert_close(transform(lambda t: logsumexp(t, backend="triton")), transform(lambda t: torch.logsumexp(t, -1)),
                                   rtol=1e-4, atol=1e-5)


def test_well_behaved_operators():
    x, mask = data(2, 3, 5), data(5) > 0
    sums = torch.logsumexp(x, -1, keepdim=True)
    torch.library.opcheck(OPS.logsumexp_forward.default, (x, mask.expand(2, 3, 5), data(3, 1).expand(2, 3, 5), -1, 0.5, True))
    torch.library.opcheck(OPS.logsumexp_backward.default, (torch.ones_like(sums), sums, x, None, None, -1, 1.0, False, 1.0, torch.bfloat16))


def test_compiled_whole():
    torch._dynamo.reset()

    def function(x):
        return logsumexp(x, scale=0.5, causal=True, backend="triton")

    compiled, x = torch.compile(function, backend="aot_eager", fullgraph=True), data(2, 3, 7)
    results = []
    for f in (compiled, function):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        results.append((y, *torch.autograd.grad(y.sum(), leaf)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_nothing_of_the_size_of_x_is_saved_but_x():
    kept, x = [], data(3, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logsumexp(x, backend="triton")
    assert sum(t.numel() for t in kept if t is not None and t.data_ptr() != x.data_ptr()) == 3


@pytest.mark.parametrize("keepdim", [1, None])
def test_keepdim_is_a_truth_value(keepdim):
    with pytest.raises(TypeError, match="keepdim: got"):
        logsumexp(data(3), 0, keepdim)
