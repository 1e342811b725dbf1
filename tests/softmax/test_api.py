"""What softmax means, on every backend: features, special values, layouts."""
import pytest
import torch

from onchip.softmax.api import log_softmax, logsumexp, softmax, softmax_topk
from onchip.testing.softmax import DEVICE, NAMES, agree

INF, NAN = float("inf"), float("nan")
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
BOTH = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])


def data(*shape, dtype=torch.float32, seed=0, size=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(DEVICE, dtype)


def keep(*shape, seed=2, share=0.6):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(DEVICE)


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@BACKENDS
@BOTH
@DTYPES
@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000, 1025])
def test_widths(backend, log, dtype, n):
    agree(data(2, n, dtype=dtype), backend=backend, log=log)


@BOTH
def test_beyond_the_widest_row_on_chip(log):
    agree(data(1, 40_001, dtype=torch.float16), log=log)


@BOTH
def test_float64_is_for_the_reference(log):
    agree(data(4, 9).double(), backend="auto", log=log)


FEATURES = {
    "scale": {"scale": 0.37},
    "negative scale": {"scale": -2.0},
    "zero scale": {"scale": 0.0},
    "causal": {"causal": True},
    "mask": {"mask": keep(2, 3, 33)},
    "key padding": {"mask": keep(2, 1, 33)},
    "mask a row": {"mask": keep(3, 1)},
    "scalar mask": {"mask": tensor(True, torch.bool)},
    "everything": {"mask": keep(33), "causal": True, "scale": -0.5},
}


@BACKENDS
@BOTH
@DTYPES
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_features(backend, log, dtype, features):
    agree(data(2, 3, 33, dtype=dtype), backend=backend, log=log, **features)


@BACKENDS
@BOTH
@pytest.mark.parametrize(("rows", "n"), [(5, 5), (2, 5), (5, 2), (1, 6), (6, 1)])
def test_causal_is_bottom_right_and_leading_rows_may_be_empty(backend, log, rows, n):
    x = torch.zeros(3, rows, n, device=DEVICE)
    y, dx = agree(x, backend=backend, log=log, causal=True)
    seen = (y.exp() if log else y)[0].gt(0).sum(-1).tolist()
    assert seen == [max(0, i + n - rows + 1) for i in range(rows)]
    assert (dx[:, :max(0, rows - n)] == 0).all()


@BACKENDS
@BOTH
@pytest.mark.parametrize("dy", [0.0, 1e4, NAN, INF])
def test_an_empty_row_is_zero_and_no_gradient_passes(backend, log, dy):
    x, mask = data(4, 6), torch.ones(4, 6, dtype=torch.bool, device=DEVICE)
    mask[2] = False
    x[2, 3] = NAN  # hidden: never matters
    x[1, :] = -INF  # visible and still without weight
    g = data(4, 6, seed=5)
    g[1:3] = dy
    y, dx = (t.detach() for t in run(x, g, backend, log, mask=mask))
    assert (y[1:3] == (-INF if log else 0.0)).all()
    assert (dx[1:3] == 0).all()
    assert dx.isfinite().all()
    others, others_dx = run(x[::3], g[::3], backend, log, mask=mask[::3])
    torch.testing.assert_close((y[::3], dx[::3]), (others, others_dx), rtol=0, atol=0)


def run(x, dy, backend="triton", log=False, **features):
    x = x.detach().requires_grad_()
    y = NAMES[log](x, backend=backend, **features)
    return y, torch.autograd.grad(y, x, dy)[0]


@BACKENDS
@BOTH
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_a_mask_hides_never_matters(backend, log, poison):
    x, mask = data(3, 9), keep(3, 9)
    clean = run(x, data(3, 9, seed=5), backend, log, mask=mask)
    dirty = run(torch.where(mask, x, poison), data(3, 9, seed=5), backend, log, mask=mask)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


@BACKENDS
def test_gradients_at_hidden_positions_are_ignored_by_softmax(backend):
    x, mask, g = data(3, 9), keep(3, 9), data(3, 9, seed=5)
    _, dx = run(x, g, backend, mask=mask)
    _, dirty = run(x, torch.where(mask, g, NAN), backend, mask=mask)
    torch.testing.assert_close(dirty, dx, rtol=0, atol=0)


@BACKENDS
@DTYPES
def test_rows_with_infinities(backend, dtype):
    rows = tensor([[0, INF, 0], [-INF, -INF, -INF], [-INF, 0, -INF], [NAN, 0, 0], [-INF, NAN, -INF], [1, 2, 3]], dtype)
    nan = [NAN] * 3
    y, dx = run(rows, torch.ones_like(rows), backend)
    right = [nan, nan, [0, 1, 0], nan, nan, [0.09003057, 0.24472847, 0.66524096]]
    torch.testing.assert_close(y, tensor(right, dtype), equal_nan=True, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert dx[[0, 1, 3, 4]].isnan().all()
    assert dx[[2, 5]].isfinite().all()
    y, dx = run(rows, torch.ones_like(rows), backend, log=True)
    right = [nan, nan, [-INF, 0, -INF], nan, nan, [-2.40760596, -1.40760596, -0.40760596]]
    torch.testing.assert_close(y, tensor(right, dtype), equal_nan=True, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert dx[5].isfinite().all()


@BACKENDS
def test_extremes_do_not_overflow(backend):
    y = log_softmax(tensor([[3e38, -3e38]]), backend=backend)
    assert y.tolist() == [[0.0, -INF]]
    assert softmax(tensor([[3e38, -3e38], [-3e38, -3e38]]), backend=backend).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert softmax(tensor([[60000.0, -60000.0, 60000.0]], torch.float16), backend=backend).tolist() == [[0.5, 0.0, 0.5]]
    assert softmax(tensor([[1e30, 1e30]], torch.bfloat16), backend=backend).tolist() == [[0.5, 0.5]]


@BACKENDS
def test_a_large_common_offset_costs_nothing(backend):
    x = tensor([[0.0, 1.0, 0.0]]) - 1e7  # exact in float32
    y = log_softmax(x, backend=backend)
    torch.testing.assert_close(y, tensor([[-1.5514447, -0.5514447, -1.5514447]]), rtol=2e-7, atol=0)
    torch.testing.assert_close(softmax(x, backend=backend), y.exp(), rtol=3e-7, atol=0)


@BACKENDS
@pytest.mark.parametrize("plan", [None, "streamed"])
def test_a_nan_stays_in_its_row(backend, plan, request):
    if plan:
        request.getfixturevalue("streamed")
    x = data(6, 300)
    x[2, 150] = NAN
    y, dx = run(x, torch.ones_like(x), backend)
    assert y.isnan().all(1).tolist() == [r == 2 for r in range(6)]
    assert dx.isnan().any(1).tolist() == [r == 2 for r in range(6)]


@BACKENDS
@BOTH
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_every_dimension(backend, log, dim):
    agree(data(4, 5, 6), dim, backend=backend, log=log)


def layouts():
    wide = data(2, 7, 6, 20)
    yield "transposed", wide.transpose(1, 3)
    yield "channels last", wide.contiguous(memory_format=torch.channels_last)
    yield "every second", wide[..., ::2]
    yield "one of a dimension", wide[:, -1]
    yield "expanded", wide[:1].expand(3, 7, 6, 20)
    yield "expanded along the row", wide[..., :1].expand(2, 7, 6, 9)
    yield "reversed order", wide.permute(3, 2, 1, 0)
    yield "six dimensions that do not merge", data(3, 2, 3, 2, 3, 4).permute(4, 1, 2, 5, 0, 3)[:, :, ::2]
    yield "misaligned by one element", data(2 * 7 * 20 + 1, dtype=torch.float16)[1:].view(2, 7, 20)
    yield "a slice of a wider output", data(3, 10, 3)[:, :3]


@BACKENDS
@pytest.mark.parametrize("x", [pytest.param(x, id=name) for name, x in layouts()])
def test_layouts_in_every_dimension(backend, x):
    for dim in range(x.ndim):
        agree(x, dim, backend=backend)


@BACKENDS
def test_logical_not_storage_order(backend):
    y = softmax(torch.arange(1.0, 13.0, device=DEVICE).view(3, 4).t(), 1, backend=backend)
    torch.testing.assert_close(y[0], torch.softmax(tensor([1.0, 5.0, 9.0]), 0))


FUNCTIONS = pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp], ids=lambda f: f.__name__)


def negative(*shape, seed=0):
    """A view whose memory holds the opposite of what it stands for: kernels that read memory need it worked out first."""
    x = torch._neg_view(data(*shape, seed=seed))
    assert x.is_neg()
    return x


@BACKENDS
@FUNCTIONS
@pytest.mark.parametrize("shape", [None, (4, 6), (6,)], ids=["alone", "bias", "broadcast bias"])
def test_a_negative_view_is_what_it_stands_for(backend, function, shape):
    x, bias = negative(4, 6), None if shape is None else negative(*shape, seed=1)
    plain = function(x.resolve_neg(), bias=None if bias is None else bias.resolve_neg(), backend=backend)
    # torch writes a broadcast one out in full; the kernel for other strides may add up a row in another order
    tolerance = 1e-6 if shape == (6,) else 0
    for same in (x, x.clone()):
        torch.testing.assert_close(function(same, bias=bias, backend=backend), plain, rtol=tolerance, atol=tolerance)


@BACKENDS
@FUNCTIONS
def test_so_is_a_gradient_that_comes_in_as_one(backend, function):
    leaf = data(4, 6, seed=3).requires_grad_()
    y = function(leaf, backend=backend)
    dy = negative(*y.shape, seed=2)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for g in (dy, dy.resolve_neg())), rtol=0, atol=0)


@BACKENDS
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_largest_of_a_negative_view_are_those_it_stands_for(backend, renormalize):
    x = negative(4, 6)
    got, want = (softmax_topk(z, 2, renormalize=renormalize, backend=backend) for z in (x, x.resolve_neg()))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@BACKENDS
@BOTH
def test_a_negative_view_takes_the_result_in_place(backend, log):
    x = negative(4, 6)
    want = NAMES[log](x.resolve_neg(), backend=backend)
    got = NAMES[log](x, inplace=True, backend=backend)
    assert got is x
    torch.testing.assert_close(x.resolve_neg(), want, rtol=0, atol=0)


@BACKENDS
@BOTH
@pytest.mark.parametrize("gradient", ["expanded", "transposed", "sliced", "misaligned"])
def test_layouts_of_the_gradient(backend, log, gradient):
    dy = {"expanded": data(1).expand(4, 6), "transposed": data(6, 4).t(), "sliced": data(4, 12)[:, ::2],
          "misaligned": data(25)[1:].view(4, 6)}[gradient]
    agree(data(4, 6), backend=backend, log=log, dy=dy)
    agree(data(4, 6), 0, backend=backend, log=log, dy=dy)


@BACKENDS
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_empty_tensors(backend, shape):
    for dim in range(len(shape)):
        agree(torch.empty(shape, device=DEVICE), dim, backend=backend)
        agree(torch.empty(shape, device=DEVICE), dim, backend=backend, mask=torch.ones(shape, dtype=torch.bool, device=DEVICE))


@BACKENDS
@pytest.mark.parametrize("dim", [0, -1])
def test_a_scalar_is_a_row_of_one(backend, dim):
    y, dx = agree(tensor(3.0), dim, backend=backend)
    assert (y.item(), dx.item()) == (1.0, 0.0)
    assert log_softmax(tensor(3.0), dim, backend=backend).item() == 0.0
    assert softmax(tensor(INF), dim, backend=backend).isnan()
    assert softmax(tensor(3.0), dim, mask=tensor(False, torch.bool), backend=backend).item() == 0.0


@BACKENDS
@BOTH
@pytest.mark.parametrize("dim", [1, -1])
def test_dtype_casts_first_and_the_gradient_comes_back(backend, log, dim):
    x = data(2, 2, 2, 2, dtype=torch.float16)
    y, dx = agree(x, dim, backend=backend, log=log, dtype=torch.float32)
    same, same_dx = agree(x.float(), dim, backend=backend, log=log, dy=None)
    assert torch.equal(y, same)
    assert torch.equal(dx, same_dx.half())


@BACKENDS
def test_dtype_that_narrows_rounds_the_input(backend):
    x = tensor([[0.0, 1e-4, 70000.0], [1.0, 1.0001, 2.0]])
    assert torch.equal(softmax(x, dtype=torch.float16, backend=backend).isnan(), tensor([[True] * 3, [False] * 3], torch.bool))
    x = x[1:].requires_grad_()
    y = softmax(x, dtype=torch.float16, backend=backend)
    assert torch.equal(y, softmax(x.half(), backend=backend))
    assert torch.autograd.grad(y[0, 0], x)[0].dtype == torch.float32


@BACKENDS
@pytest.mark.parametrize("source", [torch.int64, torch.uint8, torch.bool])
def test_integers_with_a_dtype(backend, source):
    x = tensor([[0, 1, 1]], source)
    torch.testing.assert_close(softmax(x, dtype=torch.float32, backend=backend), torch.softmax(x.float(), -1))


@BACKENDS
@DTYPES
def test_autocast_computes_and_returns_float32(backend, dtype):
    x = data(3, 8, dtype=dtype).requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = softmax(x, backend=backend)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, torch.softmax(x.float(), -1))
    assert torch.autograd.grad(y[0, 0], x)[0].dtype == dtype


@BOTH
def test_results_repeat_bit_for_bit(log):
    x, dy = data(7, 144), data(7, 144, seed=5)
    first = run(x, dy, log=log)
    run(data(3, 144), data(3, 144, seed=5), log=log, causal=True)
    again = run(x, dy, log=log)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    some = run(x[3:5].clone(), dy[3:5].clone(), log=log)  # a row's bits do not depend on how many others there are
    assert all(torch.equal(a[3:5], b) for a, b in zip(first, some, strict=True))


def test_a_shift_changes_nothing_and_rows_sum_to_one():
    x = data(5, 77).round()
    assert torch.equal(softmax(x, backend="triton"), softmax(x + 4096, backend="triton"))
    torch.testing.assert_close(softmax(x, backend="triton").sum(-1), torch.ones(5, device=DEVICE))
