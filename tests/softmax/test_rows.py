"""How shapes and strides fold into rows, and addresses beyond 32 bits."""
import pytest
import torch

from onchip.softmax.triton import plan, rows
from onchip.testing.softmax import DEVICE, agree


def fold(x, dim=-1, *others, **options):
    return rows.fold((x, torch.empty(x.shape, device=x.device), *others), dim, **options)


def folded(*arguments, **options):
    f, _ = fold(*arguments, **options)
    return (f.groups // f.n1, f.n1, f.n0, f.n), f.strides[0]


def test_neighbours_in_memory_merge():
    assert folded(torch.empty(2, 3, 4, 5)) == ((1, 1, 24, 5), (0, 0, 5, 1))
    assert folded(torch.empty(2, 3, 4, 5), -3) == ((1, 2, 20, 3), (0, 60, 1, 20))
    assert folded(torch.empty(2, 3, 4, 5), -4) == ((1, 1, 60, 2), (0, 0, 1, 60))
    assert folded(torch.empty(2, 1, 4, 1, 5)) == ((1, 1, 8, 5), (0, 0, 5, 1))
    assert folded(torch.empty(7)) == ((1, 1, 1, 7), (0, 0, 0, 1))


def test_a_broadcast_mask_keeps_apart_only_what_it_must():
    x = torch.empty(2, 3, 4, 5)
    assert folded(x, -1, torch.empty(2, 1, 1, 5).expand(2, 3, 4, 5))[0] == (1, 2, 12, 5)
    assert folded(x, -1, torch.empty(2, 1, 4, 5).expand(2, 3, 4, 5))[0] == (2, 3, 4, 5)


def test_queries_stay_by_themselves():
    assert folded(torch.empty(2, 3, 4, 5), queries=True)[0] == (1, 6, 4, 5)
    assert folded(torch.empty(2, 3, 1, 5), queries=True)[0] == (1, 6, 1, 5)


def test_more_than_three_dimensions_that_do_not_merge_are_copied():
    f, (x, _) = fold(torch.empty(6, 6, 6, 6, 10)[::2, ::2, ::2, ::2].transpose(0, 3))
    assert (f.n0, f.groups) == (81, 1)
    assert x.is_contiguous()


def across(x, dim=-1):
    return fold(x, dim)[0].plan.block_m >= plan.ACROSS_LEAST


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
        f, _ = fold(torch.empty(groups, 19, n0), -2)
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
    assert fold(x)[0].arguments["WIDE"]
    agree(x, dim, log=log)
    force(plan.Plan(False, 2, 32, 4, 1))
    agree(x, dim, log=log, causal=dim == -1)


def test_wide_exactly_where_32_bits_end():
    """The last block may look one block past the row: n + block_n = 16 strides away."""
    for step, wide in (((2**31 - 1) // 16, False), ((2**31 - 1) // 16 + 1, True)):
        f, _ = fold(torch.empty_strided((2, 8), (1, step), device="meta"))
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
