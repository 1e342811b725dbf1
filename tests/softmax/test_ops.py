"""The operators under everything torch can do to a function."""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from onchip.softmax.api import log_softmax, softmax
from onchip.testing.softmax import DEVICE

FUNCTIONS = pytest.mark.parametrize(("ours", "theirs"), [(softmax, torch.softmax), (log_softmax, torch.log_softmax)], ids=["plain", "log"])
OPS = torch.ops.onchip
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # torch's, when forward mode is first used
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),  # dynamo's own
]


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [
    (data(2, 3, 5), None, -1, 1.0, False, False, torch.float32),
    (data(2, 3, 5), data(2, 3, 5) > 0, -1, 0.5, True, True, torch.float32),
    (data(5, 3, 2).transpose(0, 2).half(), None, -2, 1.0, False, False, torch.float32),
    (data(3)[:, None].expand(3, 4).bfloat16(), data(4).gt(0).expand(3, 4), -2, -1.0, False, False, torch.bfloat16),
])
def test_forward_is_a_well_behaved_operator(arguments):
    torch.library.opcheck(OPS.softmax_forward.default, arguments)
    same_layout(OPS.softmax_forward, arguments)


@pytest.mark.parametrize("arguments", [
    (data(1).expand(3, 5), data(3, 5).softmax(-1), -1, 1.0, False, False, torch.float32),
    (data(5, 3).t(), data(3, 5).log_softmax(-2), -2, 0.5, True, True, torch.bfloat16),
])
def test_backward_is_a_well_behaved_operator(arguments):
    torch.library.opcheck(OPS.softmax_backward.default, arguments)
    same_layout(OPS.softmax_backward, arguments)


def test_in_place_is_a_well_behaved_operator():
    for x, mask, bias in ((data(2, 3, 5), None, None), (data(5, 3).t(), data(5) > 0, data(3, 1))):
        mask, bias = (None if t is None else t.expand(x.shape) for t in (mask, bias))
        arguments = (x, mask, -1, 0.5, False, False, bias)
        torch.library.opcheck(OPS.softmax_inplace.default, arguments)


def test_forward_with_a_bias_is_a_well_behaved_operator():
    x = data(2, 3, 5)
    torch.library.opcheck(OPS.softmax_forward.default, (x, None, -1, 0.5, False, True, torch.float32, data(3, 1).expand(x.shape)))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@FUNCTIONS
def test_a_bias_is_added_and_gets_its_gradient(ours, theirs, backend):
    for shape in ((), (6,), (4, 1), (3, 1, 6), (3, 4, 6)):
        inputs = [data(3, 4, 6).requires_grad_(), data(*shape, seed=1).requires_grad_()]
        copies = [t.detach().double().requires_grad_() for t in inputs]
        mine, right = ours(inputs[0], bias=inputs[1], scale=0.5, backend=backend), theirs(0.5 * copies[0] + copies[1], -1)
        for create_graph in (True, False):
            mine = torch.autograd.grad((mine ** 2).sum() if isinstance(mine, torch.Tensor) else sum((t ** 2).sum() for t in mine), inputs,
                                       create_graph=create_graph)
            right = torch.autograd.grad((right ** 2).sum() if isinstance(right, torch.Tensor) else sum((t ** 2).sum() for t in right),
                                        copies, create_graph=create_graph)
            terms = max(t.abs().max().item() for t in right)  # a bias of fewer dimensions gets their sum, which may cancel to nothing
            for a, b in zip(mine, right, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=4e-6 * max(5.0, terms))


@FUNCTIONS
def test_forward_mode_moves_with_x_and_with_the_bias(ours, theirs):
    x, bias, tx, tb = data(4, 5), data(5, seed=1), data(4, 5, seed=2), data(5, seed=3)
    mine = torch.func.jvp(lambda x, b: ours(x, bias=b, scale=0.5, backend="triton"), (x, bias), (tx, tb))[1]
    close(mine, torch.func.jvp(lambda x, b: theirs(0.5 * x + b, -1), (x, bias), (tx, tb))[1])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@FUNCTIONS
def test_in_place(ours, theirs, backend):
    for x, dim in ((data(3, 4, 6), -1), (data(3, 4, 6), 0), (data(4, 12)[:, ::2], 1), (data(6, 4).t(), -1), (data(), 0),
                   (data(6, 6, 6, 6, 4)[::2, ::2, ::2, ::2].transpose(0, 3), -1), (data(2, 0), 1)):
        right, whole = theirs(x, dim), x.untyped_storage().nbytes()
        assert ours(x, dim, inplace=True, backend=backend) is x
        close(x, right)
        assert x.untyped_storage().nbytes() == whole
    wide = data(4, 12)
    kept = wide[:, 1::2].clone()
    ours(wide[:, ::2], inplace=True, backend=backend)
    assert torch.equal(wide[:, 1::2], kept)


def test_in_place_under_compile_and_vmap_or_a_reason_why_not():
    torch._dynamo.reset()
    x = data(3, 7)
    right = torch.softmax(x, -1)
    compiled = torch.compile(lambda x: softmax(x, inplace=True, backend="triton") * 2, backend="aot_eager", fullgraph=True)
    close(compiled(x), 2 * right)
    close(x, right)


def same_layout(op, arguments):
    """opcheck does not compare every stride on a CPU."""
    real = op(*arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)


@FUNCTIONS
def test_grad_of_grad_of_grad(ours, theirs):
    def derivatives(function):
        x, out = data(3, 4).requires_grad_(), []
        value = (function(x) ** 3).sum()
        for _ in range(3):
            gradient, = torch.autograd.grad(value, x, create_graph=True)
            out.append(gradient)
            value = (gradient ** 2).sum()
        return out

    close(derivatives(lambda x: ours(x, scale=0.3, backend="triton")), derivatives(lambda x: theirs(0.3 * x, -1)))


@FUNCTIONS
def test_torch_func(ours, theirs):
    x, v = data(4, 5), data(4, 5, seed=1)

    def mine(x):
        return ours(x, scale=0.5, backend="triton")

    def right(x):
        return theirs(0.5 * x, -1)

    for transform in (
        lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())(x),
        lambda f: torch.func.vjp(f, x)[1](v)[0],
        lambda f: torch.func.jvp(f, (x,), (v,))[1],
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: (f(x) ** 2).sum()))(x),
        lambda f: torch.func.grad(lambda x: (torch.func.vmap(f)(x) ** 2).sum())(x),
        lambda f: torch.func.jacrev(f)(x[0]),
        lambda f: torch.func.jacfwd(f)(x[0]),
        lambda f: torch.func.hessian(lambda x: (f(x) ** 2).sum())(x[0]),
    ):
        close(transform(mine), transform(right))


@FUNCTIONS
def test_forward_mode(ours, theirs):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(data(4, 5), data(4, 5, seed=1))
        mine, right = ours(dual, backend="triton"), theirs(dual, -1)
        close(torch.autograd.forward_ad.unpack_dual(mine).tangent, torch.autograd.forward_ad.unpack_dual(right).tangent)


def test_vmap_batches_x_or_the_mask_or_both():
    x, mask = data(3, 4, 5), data(3, 5, seed=1) > 0

    def masked(x, mask):
        return softmax(x, 0, mask=mask[None], backend="triton")

    def loop(xs, masks):
        return torch.stack([masked(a, m) for a, m in zip(xs, masks, strict=True)])

    close(torch.func.vmap(masked)(x, mask), loop(x, mask))
    close(torch.func.vmap(masked, in_dims=(None, 0))(x[0], mask), loop([x[0]] * 3, mask))
    close(torch.func.vmap(masked, in_dims=(1, None))(x.transpose(0, 1), mask[0]), loop(x, [mask[0]] * 3))
    close(torch.func.vmap(lambda a: softmax(a, backend="triton"))(x[0, 0]), torch.ones(5, device=DEVICE))
    y, dy = masked(x[0], mask[0]), data(3, 4, 5, seed=2)
    batched = torch.func.vmap(lambda g: OPS.softmax_backward(g, y, -2, 1.0, True, False, torch.float32))(dy)
    close(batched, torch.stack([OPS.softmax_backward(g, y, -2, 1.0, True, False, torch.float32) for g in dy]))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@FUNCTIONS
def test_compile_traces_once_for_all_lengths(ours, theirs, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, mask):
        return ours(x, mask=mask, scale=0.5, causal=True, backend=backend)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for n in (7, 8, 16, 17, 33):
        x, mask = data(2, 3, n).half(), data(n, seed=1) > -1
        results = []
        for f in (compiled, function):
            leaf = x.clone().requires_grad_()
            y = f(leaf, mask)
            results.append((y, *torch.autograd.grad(y, leaf, data(2, 3, n, seed=3).half())))
        torch.testing.assert_close(*results, rtol=0, atol=0)
    assert counter.frame_count == 1


@FUNCTIONS
def test_export(ours, theirs):
    class Module(torch.nn.Module):
        def forward(self, x):
            return ours(x, scale=0.5, backend="triton")

    program = torch.export.export(Module(), (data(2, 6),), dynamic_shapes={"x": {1: torch.export.Dim("n", min=2, max=1024)}})
    assert "onchip.softmax_forward" in program.graph_module.code
    close(program.module()(data(2, 19)), theirs(0.5 * data(2, 19), -1))


def test_only_the_result_is_saved_for_the_backward():
    kept = []
    x = data(3, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = softmax(x, mask=data(8) > 0, backend="triton")
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_no_graph_without_a_gradient():
    assert not softmax(data(3, 8), backend="triton").requires_grad
    with torch.no_grad():
        assert not softmax(data(3, 8).requires_grad_(), backend="triton").requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    def block(x):
        return softmax(x * x, backend="triton")

    x, again = data(3, 8).requires_grad_(), data(3, 8).requires_grad_()
    block(x).square().sum().backward()
    torch.utils.checkpoint.checkpoint(block, again, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(again.grad, x.grad)
