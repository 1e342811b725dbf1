"""Softmax on a real card: sizes, streams, graphs and compilers the interpreter cannot show."""
from threading import Barrier, Thread

import pytest
import torch

from onchip.bench.memory import peak_extra_bytes
from onchip.launcher import Launcher
from onchip.softmax.api import log_softmax, logsumexp, softmax, softmax_topk
from onchip.softmax.triton import launch, plan
from onchip.testing.softmax import agree, judge
from tests.softmax.conftest import _poison  # noqa: F401  used by every test here too

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BOTH = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
FUNCTIONS = {False: softmax, True: log_softmax}
BIG = pytest.mark.big


@pytest.fixture(autouse=True)
def _give_back_memory():
    yield
    torch.cuda.empty_cache()


def data(*shape, dtype=torch.float32, size=3.0):
    return torch.empty(shape, device="cuda", dtype=dtype).normal_(0, size, generator=torch.Generator("cuda").manual_seed(0))


def run(x, dy, log=False, **arguments):
    x = x.detach().requires_grad_()
    y = FUNCTIONS[log](x, backend="triton", **arguments)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("n", [1, 3, 100, 256, 1000, 2048, 4095, 8192, 16384, 16385, 32768, 33000, 50257, 131072, 151936, 262144,
                               1_000_003])
def test_every_width(n, dtype, log):
    agree(data(3, n, dtype=dtype), log=log)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("rows", "n"), [(1, 1_048_576), (4, 262_144), (700, 33_001), (700, 65_536), (300, 151_936), (61, 1_000_003),
                                         (40, 262_144), (37, 200_003)])
def test_long_rows_in_parts(rows, n, dtype, log):
    """Clusters, and groups of one block and of many, whole rounds and ragged ones; twice, since the second launch goes another way."""
    x, dy = data(rows, n, dtype=dtype), data(rows, n, dtype=dtype)
    first = run(x, dy, log)
    assert any(getattr(made, "rounds", 0) or getattr(made, "cluster", 1) > 1 for made in launch._LAUNCHES.values())
    again = run(x, dy, log)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for some in (slice(0, 1), slice(rows - 1, rows)):
        judge(*(result[some] for result in (*first, x, dy)), log=log)


def test_clusters_and_parts_are_taken_where_the_plan_says():
    """(blocks of a cluster, whether groups exchange through memory) by width and number of rows."""
    launch._LAUNCHES.clear()
    for rows, n in ((200, 8192), (200, 16_384), (200, 32_768), (200, 33_001), (200, 131_072), (200, 262_144), (200, 270_000), (4, 65_536)):
        softmax(data(rows, n, dtype=torch.bfloat16))
    found = [(made.cluster, made.rounds > 0) for made in launch._LAUNCHES.values()]
    assert found == [(1, False), (3, False), (6, False), (5, False), (16, False), (16, False), (1, True), (1, True)]
    masked = data(200, 40_000, dtype=torch.bfloat16)
    softmax(masked, mask=masked > 0)
    assert list(launch._LAUNCHES.values())[-1].cluster == 7


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("n", "side"), [(33, 64), (100, 24), (300, 33), (512, 1000), (1000, 64), (4096, 200), (5000, 72), (8192, 40),
                                         (16_384, 16), (30_720, 32)])
def test_neighbouring_rows(n, side, dtype, log):
    """In stripes: of one part and of as many as a cluster has, the last stripe not full; in the place of x too, and again."""
    launch._LAUNCHES.clear()
    x, chosen = data(3, n, side, dtype=dtype), None if side == 33 else plan.choose_stripe(n, side, False, dtype == torch.bfloat16)
    y = FUNCTIONS[log](x, -2)
    assert [made.cluster for made in launch._LAUNCHES.values()] == [chosen.parts if chosen else 1]
    agree(x, -2, log=log)
    assert torch.equal(FUNCTIONS[log](x, -2), y)
    torch.testing.assert_close(logsumexp(x, -2, dtype=torch.float32), torch.logsumexp(x.double(), -2).float())
    assert torch.equal(FUNCTIONS[log](x, -2, inplace=True), y)


@pytest.mark.parametrize("offset", [-200.0, 200.0])
@pytest.mark.parametrize("rows", [3, 200])
def test_a_part_that_is_hidden_altogether_has_no_say(rows, offset):
    """In groups, and in clusters: its m is −∞ and its l 0."""
    x = data(rows, 70_000) + offset
    x[:, :20_000], x[1, 9_000:] = -torch.inf, -torch.inf
    x[1, 5] = offset
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(logsumexp(x), torch.logsumexp(x, -1))


def test_groups_of_concurrent_streams_do_not_disturb_each_other():
    xs, streams = [data(3, 500_000), data(40, 70_000), data(1, 1_048_576)], [torch.cuda.Stream() for _ in range(3)]
    right = [softmax(x) for x in xs]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(softmax(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, right[i % 3]) for i, y in enumerate(found))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [33_001, 131_072])
def test_what_is_special_stays_in_its_row_of_parts(n, poison):
    x = data(5, n)
    x[2, n // 2], x[3], x[4, n - 2] = poison, -float("inf"), poison
    y = softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(logsumexp(x), torch.logsumexp(x, -1), equal_nan=True)
    mask = torch.ones(5, n, dtype=torch.bool, device="cuda")
    mask[2, n // 2] = mask[3, 0] = mask[4, n - 2] = False
    masked = softmax(x, mask=mask)
    assert masked.isfinite().all()
    assert (masked[3] == 0).all()


@pytest.mark.parametrize("n", [1, 100, 4095, 8192, 33_001, 65_536, 300_000])
def test_sums(n):
    for dtype in (torch.bfloat16, torch.float32):
        x, exact = data(70, n, dtype=dtype).requires_grad_(), data(70, n, dtype=dtype).double().requires_grad_()
        y, right = logsumexp(x, dtype=torch.float32), torch.logsumexp(exact, -1)
        torch.testing.assert_close(y.double(), right, rtol=1e-6, atol=1e-6)
        g = data(70)
        dx, right_dx = torch.autograd.grad(y, x, g)[0], torch.autograd.grad(right, exact, g.double())[0]
        assert (dx.double() - right_dx).abs().max() <= 4 * torch.finfo(dtype).eps * right_dx.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("n", "k"), [(8, 2), (256, 8), (1024, 128), (5001, 8), (25_000, 5), (50_257, 64), (131_072, 16), (131_072, 128),
                                      (1_048_576, 8)])
def test_topk(n, k, dtype):
    x = data(40, n, dtype=dtype)
    for renormalize in (False, True):
        values, indices = softmax_topk(x, k, dtype=torch.float32, renormalize=renormalize)
        p = torch.softmax(x.double(), -1)
        right = torch.sort(p, dim=-1, descending=True).values[:, :k]
        assert torch.equal(p.gather(-1, indices), right)
        assert (indices.sort(-1).values.diff() > 0).all()
        right = right / right.sum(-1, keepdim=True) if renormalize else right
        assert (values.double() - right).abs().max() <= 4 * torch.finfo(torch.float32).eps * right.max()


@pytest.mark.parametrize("n", [100, 4095, 8192, 33_001, 65_536, 300_000])
@pytest.mark.parametrize("log", [False, True])
def test_in_place_equals_out_of_place(n, log):
    x = data(50, n, dtype=torch.bfloat16)
    right = FUNCTIONS[log](x)
    assert FUNCTIONS[log](x, inplace=True) is x
    assert torch.equal(x, right)


def test_the_short_way_gives_what_the_long_way_gives():
    for shape in ((8, 128), (3, 1000), (200, 50_257), (7, 65_536)):
        x = data(*shape, dtype=torch.bfloat16)
        ways = [softmax(x) for _ in range(3)]  # compiled, learnt, known
        assert all(torch.equal(y, ways[0]) for y in ways)
        assert len({y.data_ptr() for y in ways}) == 3
    x = data(9, 128)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            assert softmax(x.half()).dtype == torch.float32
        assert softmax(x.half()).dtype == torch.float16
    assert softmax(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("n", [100, 20_000, 100_000])
def test_features_at_every_kind_of_plan(n):
    mask = torch.rand(5, n, device="cuda") < 0.5
    mask[1] = False
    agree(data(2, 5, n, dtype=torch.bfloat16), mask=mask, scale=-0.5)
    agree(data(2, 5, n, dtype=torch.float16), causal=True, log=True)
    agree(data(2, 5, n, dtype=torch.float16), dtype=torch.float32, mask=mask[:, :1])


@pytest.mark.parametrize(("shape", "dim"), [((1, 2, 65536, 1), 1), ((2, 10, 256, 256), 1), ((8192, 8192), 0), ((3, 40_000, 17), 1),
                                            ((100_000, 7, 3), 1), ((2, 19, 65), 0)])
def test_reductions_over_other_dimensions(shape, dim):
    agree(data(*shape, dtype=torch.bfloat16), dim)
    agree(data(*shape), dim, log=True)
    agree(data(*reversed(shape)).permute(*reversed(range(len(shape)))), dim)


def test_more_rows_than_a_grid_dimension_of_65535():
    agree(data(70_001, 1024, dtype=torch.float16))
    agree(data(1_000_003, 5))


@BIG
@BOTH
@pytest.mark.parametrize(("shape", "dtype"), [((2_100_000, 1024), torch.float16), ((4, 4096, 133_120), torch.bfloat16),
                                              ((669, 128, 50_259), torch.float32)], ids=str)
def test_more_than_2_to_31_elements(shape, dtype, log):
    n = shape[-1]
    x, dy = data(*shape, dtype=dtype).view(-1, n), data(*shape, dtype=dtype).view(-1, n)
    y, dx = run(x, dy, log)
    for first in (0, 2**31 // n - 1, len(x) - 2):  # two rows by themselves, the first and last ones and those where 32 bits end
        some = slice(first, first + 2)
        judge(*(t[some] for t in (y, dx, x, dy)), log=log)


@BIG
def test_2_to_31_rows_of_one():
    x = data(2_200_000_000, 1, dtype=torch.float16)
    y, dx = run(x, x)
    assert (y == 1).all()
    assert not dx.any()


@BIG
def test_one_row_beyond_2_to_31():
    x = torch.zeros(2**31 + 1000, device="cuda", dtype=torch.bfloat16)
    x[-3] = x[5] = 20.0
    y = softmax(x, backend="triton")
    right = 1 / (x.numel() - 2 + 2 * torch.tensor(20.0, dtype=torch.float64).exp())
    for at, weight in ((0, 0), (5, 20), (2**31 - 1, 0), (2**31, 0), (-3, 20), (-1, 0)):
        assert y[at].item() == pytest.approx((right * torch.tensor(float(weight), dtype=torch.float64).exp()).item(), rel=2**-7)


@BIG
@pytest.mark.parametrize(("strides", "dim"), [((2**30 + 8, 1), 1), ((2**30 + 8, 1), 0), ((1, 2**30 + 8), 1)])
def test_strides_beyond_32_bits(strides, dim):
    shape = (3, 3)
    x = torch.empty(2**31 + 100, device="cuda", dtype=torch.float16).as_strided(shape, strides)
    x.copy_(data(*shape, dtype=torch.float16))
    agree(x, dim)


@pytest.mark.parametrize("n", [50_000, 300_000])  # groups of one block, and of many
def test_a_cuda_graph_replays_with_new_data(n):
    x, dy = data(64, n), data(64, n)
    run(x, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, dy)
    x.copy_(data(64, n, size=1.0))
    graph.replay()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(x, dy), strict=True))


def test_the_current_stream_is_used():
    x, late, stream = data(512, 512), torch.zeros(512, 512, device="cuda"), torch.cuda.Stream()
    right = run(x, x)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(10_000_000)  # some milliseconds in which a launch on another stream would read zeros
        late.copy_(x)
        again = run(late, late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(again, right, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_current():
    x = data(64, 1000).to("cuda:1")
    with torch.cuda.device(0):
        y, dx = run(x, torch.ones_like(x))
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(y, torch.softmax(x, -1))
    assert dx.device == x.device


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # inductor's own
@BOTH
def test_compiled_with_inductor_for_all_lengths(log):
    torch._dynamo.reset()

    def function(x, mask):
        return FUNCTIONS[log](x * 2, mask=mask, causal=True) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for n in (16, 17, 1000):
        x, mask = data(2, 16, n, dtype=torch.bfloat16), torch.arange(n, device="cuda") % 7 != 3
        results = []
        for f in (compiled, function):
            leaf = x.clone().requires_grad_()
            y = f(leaf, mask)
            results.append((y, *torch.autograd.grad(y, leaf, data(2, 16, n, dtype=torch.bfloat16))))
        torch.testing.assert_close(*results)


def test_nothing_is_allocated_but_the_results():
    x = data(256, 50_000).requires_grad_()
    dy = torch.ones(1, device="cuda").expand_as(x)
    extra, _ = peak_extra_bytes(lambda: torch.autograd.grad(softmax(x, causal=True, scale=0.5), x, dy), "cuda")
    assert extra <= 2 * x.numel() * x.element_size() + 2**20


def test_thirty_runs_are_bitwise_equal():
    x, dy = data(300, 40_000, dtype=torch.bfloat16), data(300, 40_000, dtype=torch.bfloat16)
    first = run(x, dy)
    assert all(torch.equal(a, b) for _ in range(30) for a, b in zip(first, run(x, dy), strict=True))


def test_auto_takes_triton_here():
    assert softmax(data(3, 8).requires_grad_()).grad_fn.name() == "_SoftmaxBothModesBackward"
    assert softmax(data(3, 8).double().requires_grad_()).grad_fn.name() == "SoftmaxBackward0"


@pytest.mark.parametrize("shape", [(8, 128), (512, 128), (64, 4096), (7, 1001), (200, 270_000)])
def test_the_second_call_goes_straight_to_the_driver(shape, monkeypatch):
    """And gives the same bits, on the current stream, in a graph and for another tensor of the kind."""
    xs = [data(*shape, dtype=torch.bfloat16), data(*shape, dtype=torch.bfloat16, size=1.0)]
    right = [softmax(x.clone(), scale=0.3) for x in xs]  # the first one by Triton's path
    reference = [torch.softmax(x.float() * 0.3, -1) for x in xs]
    if shape[1] < 200_000:  # groups of thread blocks start together, by Triton's launcher

        def refuse(*_):
            raise AssertionError("by Triton's launcher")

        monkeypatch.setattr(Launcher, "__call__", refuse)
    for x, y, exact in zip(xs, right, reference, strict=True):
        torch.testing.assert_close(y.float(), exact, rtol=1e-2, atol=1e-6)
        assert torch.equal(softmax(x, scale=0.3), y)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        there = xs[0] + 0  # not yet there, elsewhere
        found = softmax(there, scale=0.3)
    torch.cuda.synchronize()
    assert torch.equal(found, right[0])
    still = xs[0].clone()
    with torch.cuda.graph(graph):
        captured = softmax(still, scale=0.3)
    still.copy_(xs[1])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, right[1])


def test_threads_call_at_once_with_tensors_of_their_own():
    xs = [data(64, 128, size=1.0 + i) for i in range(4)]
    right, found, barrier = [softmax(x) for x in xs], [[] for _ in xs], Barrier(4)

    def many(i):
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            found[i] = [softmax(xs[i]) for _ in range(500)]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [Thread(target=many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y, all_of in zip(right, found, strict=True):
        assert len(all_of) == 500
        assert all(torch.equal(y, one) for one in all_of)
