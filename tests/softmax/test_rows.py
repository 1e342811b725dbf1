"""How shapes and strides fold into rows, and addresses beyond 32 bits."""
import pytest
import torch
import triton
import triton.language as tl

from onchip.launcher import divisor
from onchip.softmax import log_softmax, logsumexp, softmax
from onchip.softmax.triton import addresses, plan, rows
from onchip.testing.softmax import DEVICE, agree


def fold(x, dim=-1, mask=None, **options):
    tensors = {"x": x, "y": torch.empty(x.shape, device=x.device)}
    return rows.fold(tensors if mask is None else {**tensors, "mask": mask}, dim, **options)


def folded(*arguments, **options):
    f = fold(*arguments, **options)
    return (f.groups // f.n1, f.n1, f.n0, f.n), f.strides["x"]


def test_neighbours_in_memory_merge():
    assert folded(torch.empty(2, 3, 4, 5)) == ((1, 1, 24, 5), (0, 0, 5, 1))
    assert folded(torch.empty(2, 3, 4, 5), -3) == ((2, 1, 20, 3), (60, 0, 1, 20))
    assert folded(torch.empty(2, 3, 4, 5), -4) == ((1, 1, 60, 2), (0, 0, 1, 60))
    assert folded(torch.empty(2, 1, 4, 1, 5)) == ((1, 1, 8, 5), (0, 0, 5, 1))
    assert folded(torch.empty(7)) == ((1, 1, 1, 7), (0, 0, 0, 1))


def test_a_broadcast_mask_keeps_apart_only_what_it_must():
    x = torch.empty(2, 3, 4, 5)
    assert folded(x, -1, torch.empty(2, 1, 1, 5).expand(2, 3, 4, 5))[0] == (2, 1, 12, 5)
    assert folded(x, -1, torch.empty(2, 1, 4, 5).expand(2, 3, 4, 5))[0] == (2, 3, 4, 5)


@triton.jit
def quotients(x, out, d, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, addresses.over(tl.load(x + i), d))


@pytest.mark.parametrize("d", [1, 2, 3, 7, 64, 65, 1000, 65537, 1 << 30, (1 << 31) - 1])
def test_division_is_exact(d):
    near = {k * d + e for k in (1, 2, 3, (1 << 31) // d - 1, (1 << 31) // d) for e in (-1, 0, 1)} | {0, 1, (1 << 31) - 1, 123456789}
    x = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    some = torch.tensor([n for n in near if 0 <= n < 1 << 31])
    x[:len(some)] = some
    out = torch.full_like(x, -1)
    quotients[(1,)](x, out, divisor(d), 32)
    assert torch.equal(out, x // d)


def test_queries_stay_by_themselves():
    assert folded(torch.empty(2, 3, 4, 5), queries=True)[0] == (6, 1, 4, 5)
    assert folded(torch.empty(2, 3, 1, 5), queries=True)[0] == (6, 1, 1, 5)


def test_more_than_three_dimensions_that_do_not_merge_are_copied():
    x = torch.randn(6, 6, 6, 6, 10, device=DEVICE)[::2, ::2, ::2, ::2].transpose(0, 3)
    assert fold(x) is None
    agree(x)


def test_rows_made_of_vectors_are_accessed_by_vectors():
    x = torch.empty(40, 1000, dtype=torch.float16)
    f = fold(x)
    assert (f.vector, f.edges) == (8, False)
    assert fold(x.float()).vector == 4
    assert fold(x[:, :992]).vector == 8
    assert fold(x, -2).vector == 1  # across: the tile's rows are the neighbours
    assert fold(x[:, ::2]).vector == 1
    assert fold(torch.empty(40 * 1000 + 1, dtype=torch.float16)[1:].view(40, 1000)).vector == 1  # base inside 16 bytes


def test_rows_that_start_inside_vectors_have_edges_where_both_tensors_start_alike():
    x = torch.empty(40, 1001, dtype=torch.float16)
    f = fold(x)
    assert (f.vector, f.edges) == (8, True)
    wider = torch.empty(40, 1009, dtype=torch.float16)[:, :1001]  # 1009 and 1001 differ by a vector
    assert (fold(wider).vector, fold(wider).edges) == (8, True)
    assert fold(torch.empty(40, 1002, dtype=torch.float16)[:, :1001]).vector == 1
    assert fold(torch.empty(40, 101, dtype=torch.float16)).vector == 1  # too short to pay


@pytest.mark.parametrize("rows", [None, 3])
def test_a_mask_has_vectors_of_its_own(rows):
    x = torch.empty(4, 6, 1000, dtype=torch.float16)
    mask = torch.ones(4, 6, 1000, dtype=torch.uint8) if rows is None else torch.ones(1000, dtype=torch.uint8).expand(4, 6, 1000)
    assert fold(x, -1, mask).mask_vector == 8
    assert fold(x, -1, torch.ones(4, 6, 1, dtype=torch.uint8).expand(4, 6, 1000)).mask_vector == 1
    assert fold(x, -1, torch.ones(4, 6, 1001, dtype=torch.uint8)[..., :1000]).mask_vector == 1


def test_a_mask_of_rows_with_edges_has_vectors_where_it_lies_as_they_do():
    x = torch.empty(3, 8, 1001, dtype=torch.float16)
    shared, full, every = ((8, 1001), 8), ((3, 8, 1001), 8), ((1001,), 1)  # a row of 1001 after another, or the same one again
    for shape, vector in (shared, full, every):
        found = fold(x, -1, torch.ones(shape, dtype=torch.uint8).expand(x.shape))
        assert (found.edges, found.mask_vector, found.narrow) == (True, vector, vector == 8)
    y = torch.empty(3, 9, 1001, dtype=torch.float16)
    assert fold(y, -1, torch.ones(9, 1001, dtype=torch.uint8).expand(y.shape)).mask_vector == 1
    assert fold(x, -1, torch.ones(3, 8, 1002, dtype=torch.uint8)[..., :1001]).mask_vector == 1


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [513, 519, 520, 1023])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_way_a_row_starts_and_ends_inside_a_vector(dtype, n, log):
    x = (torch.randn(9, n, generator=torch.Generator().manual_seed(n)) * 3).to(DEVICE, dtype)
    assert fold(x).edges is (n % (16 // x.element_size()) != 0)
    agree(x, log=log)
    agree(x[None], log=log, causal=True, scale=-0.5, mask=torch.rand(9, n, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [600, 601, 1023])
def test_rows_that_wait_in_16_bits(force, n, dtype):
    force(plan.Plan(True, 1, 1024, 4, narrow=True))
    x = (torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * 3).to(DEVICE, dtype)
    agree(x[None], causal=True)
    x[1, 3:7], x[2], x[3, 5], x[4, 9] = -torch.inf, -torch.inf, torch.inf, torch.nan
    for log in (False, True):
        agree(x, log=log)
        agree(x, log=log, scale=-0.5)


def test_edges_in_two_passes(force):
    force(plan.Plan(False, 1, 64, 4, 1))
    for n in (300, 601):
        x = (torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * 3).to(DEVICE)
        assert fold(x).edges is (n % 4 != 0)
        agree(x)
        agree(x[None], log=True, causal=True)


def test_neighbours_of_a_row_with_edges_stay_out_of_it():
    """Its first and last 16 bytes hold elements of the rows beside it, and in place those are being written."""
    x = torch.full((7, 1001), float("nan"), device=DEVICE)
    x[::2] = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    agree(x)


@pytest.mark.parametrize("scale", [4.0, -4.0])
def test_scores_beyond_float32_of_rows_that_wait_in_16_bits(scale):
    """They are scaled where they are used, and m where it is found: what overflows is what does in the definition."""
    x = (torch.randn(4, 600, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE, torch.bfloat16)
    x[0, 7], x[1, 7], x[2] = 3e38, -3e38, -3e38
    x[3] = 3e38
    for features in ({}, {"mask": torch.ones_like(x, dtype=torch.bool)}):
        for function in (softmax, log_softmax, logsumexp):
            found, right = (function(x, scale=scale, backend=backend, **features) for backend in ("triton", "reference"))
            torch.testing.assert_close(found, right, equal_nan=True)


def across(x, dim=-1):
    return fold(x, dim).plan.block_m >= plan.ACROSS_LEAST


def test_tiles_follow_the_order_of_memory():
    x = torch.empty(100, 500)
    assert not across(x)
    assert across(x, -2)
    assert across(x.t(), -1)
    assert not across(x[:, ::2])
    assert not across(x[:1].expand(100, 500))
    assert not across(torch.empty(4000, 1), -2)


def test_tiles_cover_every_row_once():
    for n0, groups, packed in ((300, 4, False), (3, 1000, True), (64, 7, False), (1, 1, False)):
        f = fold(torch.empty(groups, 19, n0), -2)
        assert f.packed is packed
        assert f.tiles == (-(-groups * n0 // f.plan.block_m) if packed else groups * -(-n0 // f.plan.block_m))


@pytest.mark.parametrize("log", [False, True])
def test_short_inner_dimensions_share_tiles(log):
    x = torch.randn(70, 5, 3, device=DEVICE)
    agree(x, 1, log=log)
    agree(x, 1, log=log, mask=torch.rand(70, 1, 3, device=DEVICE) < 0.7)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dim", [-1, -2])
def test_wide_offsets_change_nothing(log, dim, monkeypatch, force):
    """Every column index in 64 bits, resident and streamed."""
    monkeypatch.setattr(rows, "INT32_MAX", 0)
    rows.layout.cache_clear()
    x = torch.randn(6, 70, device=DEVICE)
    assert fold(x).arguments["WIDE"]
    agree(x, dim, log=log)
    force(plan.Plan(False, 2, 32, 4, 1))
    agree(x, dim, log=log, causal=dim == -1)


def test_wide_exactly_where_32_bits_end():
    """The last block may look one block past the row: n + block_n = 16 strides away."""
    for step, wide in (((2**31 - 1) // 16, False), ((2**31 - 1) // 16 + 1, True)):
        f = fold(torch.empty_strided((2, 8), (1, step), device="meta"))
        assert (f.plan.block_n, f.arguments["WIDE"]) == (8, wide)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"scale": -0.5}, {"mask": True}], ids=str)
def test_streamed_rows(streamed, log, features):
    """Blocks of 32: below, at and past the end of a block; a first block of −∞; a maximum that grows late, and one that comes first."""
    for n in (64, 65):
        x = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n)) * 3
        x[0, 0, : n // 2] = -float("inf")
        x[0, 1, n - 1] = 60.0
        x[1, 0, 0] = 60.0
        arguments = dict(features)
        if arguments.get("mask"):
            arguments["mask"] = (torch.rand(2, 1, n, generator=torch.Generator().manual_seed(1)) < 0.5).to(DEVICE)
        if arguments and log:
            x = x.nan_to_num(neginf=-50.0)  # the gradient at a visible −∞ is the contract's, not torch's
        agree(x.to(DEVICE), log=log, **arguments)
        if not arguments:
            agree(x.to(DEVICE).transpose(1, 2), 1, log=log)
