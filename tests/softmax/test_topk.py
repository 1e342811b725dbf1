"""The k largest of a softmax: right values and places, from one read, and differentiable."""
import pytest
import torch

from onchip.softmax.api import softmax_topk
from onchip.softmax.triton import launch, topk
from onchip.testing.softmax import DEVICE
from tests.softmax.conftest import forget

NAN, INF = float("nan"), float("inf")
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
]


def data(*shape, dtype=torch.float32, seed=0, size=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(DEVICE, dtype)


def check(x, k, dim=-1, **arguments):
    """Against a sort in float64: the values, and that the places hold them, once each."""
    values, indices = softmax_topk(x, k, dim, **arguments)
    p = torch.softmax(x.double(), dim)
    right = torch.sort(p, dim=dim, descending=True).values.narrow(dim, 0, k)
    picked = p.gather(dim, indices)
    assert torch.equal(picked, right)
    assert all(len(set(row.tolist())) == k for row in indices.movedim(dim, -1).reshape(-1, k))
    if arguments.get("renormalize"):
        right = right / right.sum(dim, keepdim=True)
    assert values.shape == indices.shape == right.shape
    assert values.dtype == arguments.get("dtype", x.dtype)
    eager = torch.softmax(x, dim, dtype=values.dtype).gather(dim, indices)
    eager = eager / eager.sum(dim, keepdim=True) if arguments.get("renormalize") else eager
    if right.numel():
        allowed = 2 * (eager.double() - right).abs().max() + 2 * torch.finfo(values.dtype).eps * right.max()
        assert (values.double() - right).abs().max() <= allowed
    return values, indices


@BACKENDS
@DTYPES
@pytest.mark.parametrize(("shape", "k"), [((5, 1), 1), ((40, 8), 2), ((6, 100), 5), ((2, 1024), 4), ((2, 1025), 3), ((2, 3000), 13),
                                          ((2, 9001), 8)])
def test_values_and_places(backend, dtype, shape, k):
    check(data(*shape, dtype=dtype), k, backend=backend)
    check(data(*shape, dtype=dtype), k, backend=backend, renormalize=True, dtype=torch.float32)


def launches():
    """Of the only call since `forget`."""
    found, = launch._LAUNCHES.values()
    return len(found)


@DTYPES
@pytest.mark.parametrize(("rows", "k", "parts"), [(3, 1, True), (3, 3, True), (11, 3, False)])
def test_rows_of_several_chunks_that_start_inside_vectors(rows, k, parts, dtype):
    """Whole rows, one to a program, and rows in parts; on a GPU it has more SMs than that."""
    x = data(rows, 16_391, dtype=dtype)
    x[0, :9000] -= 100.0  # everything in the last chunks
    x[1, 16_390] = x[1, 0] = 50.0  # the very ends
    forget()
    _, indices = check(x, k, backend="triton")
    assert indices[0].min() >= 9000
    assert launches() == 1 + (parts or DEVICE == "cuda")


@DTYPES
@pytest.mark.parametrize("rows", [3, 11])
def test_the_ends_of_rows_that_start_inside_vectors(rows, dtype):
    """Elements of the vectors that a row shares with its neighbours are among its largest, its neighbours' never; rows are in parts, or
    whole and start at every place of a vector. And where everything is hidden but an end, every place is of the row, once."""
    x = data(rows, 16_391, dtype=dtype)
    largest = [0, 3, 7, 16_383, 16_388, 16_390]
    x[:, largest] += torch.arange(50, 56, device=DEVICE).to(dtype)
    _, indices = check(x, 6, backend="triton")
    assert torch.equal(indices.sort(-1).values, torch.tensor(largest, device=DEVICE).expand(rows, 6))
    x[:] = -INF
    x[:, 16_390] = 1.0
    x[0] = 2.0  # what the second row's first vector holds of the first
    values, indices = softmax_topk(x, 5, backend="triton")
    assert values[1:, 0].tolist() == [1.0] * (rows - 1)
    assert (indices[1:, 0] == 16_390).all()
    assert ((indices >= 0) & (indices < 16_391)).all()
    assert all(len(set(row.tolist())) == 5 for row in indices)


@pytest.mark.parametrize(("dtype", "k"), [(torch.bfloat16, 17), (torch.float32, 40)], ids=str)
def test_many(dtype, k):
    """More than are put in order by counting. Groups full of the largest, which one warp may hold alone, and none at all."""
    x = data(3, 5000, dtype=dtype)
    x[0, 800:] -= 100.0
    x[1, 3:11], x[1, 1027:1035], x[1, 2051:2059] = 50.0, 60.0, 70.0
    x[2] = 0.0
    check(x, k, backend="triton")


@DTYPES
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # by the interpreter
def test_many_of_a_row_with_nan_are_places_of_it(dtype):
    x = data(3, 2000, dtype=dtype)
    x[0, 5], x[1], x[2] = NAN, -INF, NAN
    values, indices = softmax_topk(x, 17, backend="triton")
    assert values.isnan().all()
    assert ((indices >= 0) & (indices < 2000)).all()
    assert all(len(set(row.tolist())) == 17 for row in indices)


@pytest.mark.parametrize("rows", [1, 7, 131, 1024, 1100, 5368, 10**6])
@pytest.mark.parametrize("runs", [2, 9, 25, 50, 128, 1024])
@pytest.mark.parametrize("most", [4, 5, 8, 10])
def test_parts_and_chunks_hold_the_row_and_leave_little_empty(rows, runs, most):
    vectors, chunks = topk.chunks_of(runs, most)
    assert vectors <= most
    assert runs <= vectors * chunks <= 1.15 * runs + 1
    parts = topk.parts_of(rows, chunks, 16, 132 * 8)
    each = -(-chunks // parts)
    assert each <= 16
    assert (parts - 1) * each < chunks <= parts * each
    assert rows * parts >= min(rows * chunks, 0.5 * 132 * 8)
    assert rows < 5000 or parts == -(-chunks // 16)


def test_rows_of_50257_are_read_whole_in_rounds_that_leave_few_programs_to_the_last():
    """2670 of them (2²⁷ elements) on 132 SMs: not in two parts, which a second kernel would have to merge."""
    plan = topk.plan_of(2670, 50_257, True, False, 8, 132)
    assert plan.parts == 1
    assert plan.vectors * plan.chunks == 50
    assert plan.chunks <= plan.groups == 7  # one is for the ends
    assert 2670 / plan.at_once(132) % 1 >= 0.5
    assert topk.plan_of(5368, 25_000, False, False, 8, 132) == (5, 5, 1, 8, 48)
    assert topk.plan_of(1024, 131_072, False, False, 8, 132) == (8, 16, 1, 8, 64)
    assert topk.plan_of(1, 50_257, True, False, 8, 132).parts == 10


def test_programs_start_apart_where_they_nearly_fill_an_sm(monkeypatch):
    """Ten of them: where there are fewer, one that waits is a loss."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def first_round(rows):
        part, *_ = topk._launches(torch.empty((rows, 25_000), dtype=torch.bfloat16, device="meta"), 8, -1, False)
        return dict(zip(part.kernel.arg_names[part.tensors:], part.rest, strict=True))["first_round"]

    assert [first_round(rows) for rows in (1, 7, 8, 100)] == [0, 0, 10, 10]


def test_a_row_may_end_in_the_last_but_one_chunk(monkeypatch):
    """Its whole vectors, that is: of the second row's 8193 elements, 7 lie before them, 2 behind, and 8184 in eight chunks of nine."""
    monkeypatch.setattr(topk, "chunks_of", lambda *_: (1, 9))
    x = data(3, 8193, dtype=torch.bfloat16)
    x[2, :8] = 100.0  # what follows the second row
    x[1, [0, 6, 8190, 8191, 8192]] = 50.0
    forget()
    check(x, 5, backend="triton")
    forget()


def test_a_group_may_reach_beyond_its_part():
    """26 chunks of 8192 elements are two parts of 13 here, and groups of two chunks: the last of a part has one."""
    x = data(1, 212_000, dtype=torch.bfloat16)
    x[0, 12 * 8192:14 * 8192] += 50.0
    check(x, 8, backend="triton")


def test_distances_beyond_32_bits_are_counted_in_64():
    def wide(stride):
        x = torch.empty((1 << 20, stride), dtype=torch.bfloat16, device="meta")
        made = topk._launches(x[:, :3], 2, -2, False)[0]
        return dict(zip(made.kernel.arg_names[made.tensors:], made.rest, strict=True))["WIDE"]

    assert [wide(2000), wide(2048)] == [False, True]


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_any_dimension_and_stride(dim):
    for x in (data(5, 6, 7), data(5, 6, 14)[..., ::2], data(7, 6, 5).permute(2, 1, 0), data(1, 6, 7).expand(5, 6, 7)):
        check(x, 3, dim, backend="triton")
    x = data(6, 6, 6, 6, 5)[::2, ::2, ::2, ::2].transpose(0, 3)
    check(x, 2, backend="triton")


@BACKENDS
def test_equal_elements_are_chosen_once_and_always_alike(backend):
    x = torch.zeros(3, 1500, device=DEVICE)
    x[1, 700:703] = 1.0
    first = check(x, 5, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(first, check(x, 5, backend=backend), strict=True))
    assert set(range(700, 703)) <= set(first[1][1].tolist())
    assert softmax_topk(x[:, :60], 5, backend="triton")[1][0].tolist() == [0, 1, 2, 3, 4]


@BACKENDS
@pytest.mark.parametrize("n", [9, 1500])
def test_special_values(backend, n):
    x = data(5, n)
    x[0, 3], x[1, 4], x[2], x[3, 1:] = NAN, INF, -INF, -INF
    values, indices = softmax_topk(x, 2, backend=backend)
    assert indices[1, 0] == 4
    assert values[:3].isnan().all()
    assert values[3].tolist() == [1.0, 0.0]
    check(x[4:], 2, backend=backend)
    assert (indices >= 0).all()
    assert (indices < n).all()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [9, 1500, 9001])
def test_the_least_and_the_largest_finite_numbers(backend, n, dtype):
    limits = torch.finfo(dtype)
    x = torch.full((3, n), limits.min, device=DEVICE, dtype=dtype)  # what masks are filled with
    x[1, n // 2], x[2, n - 3:] = limits.max, 0.0
    _, indices = check(x, 3, backend=backend)
    assert indices[1, 0] == n // 2
    assert sorted(indices[2].tolist()) == [n - 3, n - 2, n - 1]


@BACKENDS
def test_negative_zero_and_extremes(backend):
    x = torch.tensor([[-0.0, 0.0, -65504.0, 65504.0], [-1.0, -2.0, -3.0, -4.0]], device=DEVICE, dtype=torch.float16)
    _, indices = check(x, 3, backend=backend)
    assert indices[1].tolist() == [0, 1, 2]


@BACKENDS
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(backend, shape):
    values, indices = softmax_topk(torch.empty(shape, device=DEVICE), 2, backend=backend)
    assert values.shape == indices.shape == (*shape[:-1], 2)


@BACKENDS
def test_a_scalar_is_a_row_of_one(backend):
    values, indices = softmax_topk(torch.tensor(3.0, device=DEVICE), 1, 0, backend=backend)
    assert (values.item(), indices.item()) == (1.0, 0)


def plain(x, k, dim, renormalize):
    values, _ = torch.topk(torch.softmax(x, dim), k, dim)
    return values / values.sum(dim, keepdim=True) if renormalize else values


@BACKENDS
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_derivatives(backend, renormalize, dim):
    x, exact = data(6, 9).requires_grad_(), data(6, 9).double().requires_grad_()
    mine, right = softmax_topk(x, 3, dim, renormalize=renormalize, backend=backend)[0], plain(exact, 3, dim, renormalize)
    for t, u in ((x, exact),):
        g, = torch.autograd.grad((mine ** 3).sum(), t, create_graph=True)
        h, = torch.autograd.grad((right ** 3).sum(), u, create_graph=True)
        torch.testing.assert_close(g.double(), h, rtol=1e-4, atol=1e-5)
        gg, = torch.autograd.grad((g ** 2).sum(), t)
        hh, = torch.autograd.grad((h ** 2).sum(), u)
        torch.testing.assert_close(gg.double(), hh, rtol=1e-4, atol=1e-5)


def test_torch_func_and_compile():
    def mine(x):
        return softmax_topk(x, 2, renormalize=True, backend="triton")[0]

    def right(x):
        return plain(x, 2, -1, True)

    x = data(3, 5)
    for transform in (lambda f: torch.func.vmap(f)(x), lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())(x),
                      lambda f: torch.func.vmap(torch.func.grad(lambda x: (f(x) ** 2).sum()))(x)):
        torch.testing.assert_close(transform(mine), transform(right), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), right(x))


def test_a_well_behaved_operator():
    for x, dim in ((data(4, 9), -1), (data(9, 4, dtype=torch.bfloat16), -2)):
        torch.library.opcheck(torch.ops.onchip.softmax_topk.default, (x, 2, dim, False, torch.float32))


@pytest.mark.parametrize("rows", [2, 11])
def test_the_zeros_mutant_and_a_lost_chunk_are_noticed(rows, monkeypatch):
    x = data(rows, 9001)
    original = topk.chunks_of

    def lost(*arguments):
        vectors, chunks = original(*arguments)
        return vectors, chunks - 1

    monkeypatch.setattr(topk, "chunks_of", lost)
    forget()
    with pytest.raises(AssertionError):
        check(x, 3, backend="triton")
    monkeypatch.undo()
    forget()
    check(x, 3, backend="triton")
    monkeypatch.setattr(topk, "topk", lambda *a, right=topk.topk: tuple(torch.zeros_like(t) for t in right(*a)))
    with pytest.raises(AssertionError):
        check(x, 3, backend="triton")
