"""Rows of which positions are hidden: by a triangle, whose tiles are halved, and by masks, which groups may share."""
from dataclasses import replace

import pytest
import torch

from onchip.softmax import log_softmax, logsumexp, softmax
from onchip.softmax.triton import plan, rows
from onchip.testing.softmax import DEVICE, agree
from tests.softmax.test_rows import fold


def triangle(rows, n, dtype=torch.float32):
    """x, NaN wherever the triangle hides it: what is read beside the last position seen must not count."""
    x = torch.randn(1, rows, n, generator=torch.Generator().manual_seed(n)) * 3
    return torch.where(torch.ones(rows, n, dtype=torch.bool).tril(n - rows), x, torch.nan).to(DEVICE, dtype)


def right_under(x, log=False, scale=1.0):
    """Softmax over what the triangle leaves, in float64; a row that it leaves nothing is empty."""
    rows, n = x.shape[-2:]
    s = (x.double() * scale).masked_fill(~torch.ones(rows, n, dtype=torch.bool, device=x.device).tril(n - rows), -torch.inf)
    y = (torch.log_softmax if log else torch.softmax)(s, -1)
    y[:, : max(0, rows - n)] = -torch.inf if log else 0.0
    return y


def close(got, right):
    roundings = 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), right, equal_nan=True, rtol=max(roundings, 1e-5), atol=roundings)


@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 64), (torch.float32, 62), (torch.bfloat16, 64), (torch.float16, 62)])
def test_tiles_of_a_triangle_are_halved_for_rows_that_see_little(force, monkeypatch, dtype, n):
    """Rows that see nothing, all that a tile holds, one position more and less, and all; of whole vectors, and with edges."""
    monkeypatch.setattr(plan, "EDGES_FROM", 50)
    force(plan.Plan(True, 1, 64, 1, narrow=dtype != torch.float32))
    x = triangle(n + 2, n, dtype)
    assert fold(x, queries=True).edges is (n == 62)
    close(softmax(x, causal=True, backend="triton"), right_under(x))


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_halved_tiles_of_logarithms_of_scaled_rows(force, narrow, scale):
    """In 16 bits what is hidden waits as the infinity that becomes −∞ when it is scaled: there is none for 0."""
    force(plan.Plan(True, 1, 64, 1, narrow=narrow))
    x = triangle(66, 64, torch.float16 if narrow else torch.float32)
    close(log_softmax(x, causal=True, scale=scale, backend="triton"), right_under(x, log=True, scale=scale))


def test_halved_tiles_with_a_mask_and_a_bias(force):
    force(plan.Plan(True, 1, 64, 1))
    bias, mask = triangle(66, 64), (torch.rand(66, 64, generator=torch.Generator().manual_seed(1)) < 0.7).to(DEVICE)
    x, mask[:4] = triangle(66, 64), False
    y = softmax(x, causal=True, mask=mask, bias=bias, backend="triton")
    right = torch.softmax((x + bias).double().masked_fill(x.isnan() | ~mask, -torch.inf), -1)
    right[:, :4] = 0.0
    close(y, right)


@pytest.mark.parametrize("log", [False, True])
def test_what_is_special_reaches_the_hidden_part_as_well(force, log):
    """As in torch's own softmax of scores with −∞ there: 0 · (1/NaN) is NaN, in the parts of a tile that are only written too."""
    force(plan.Plan(True, 1, 64, 1))
    x = triangle(64, 64)
    for seen in (10, 30, 60):  # in a quarter of the tile, in a half, in all of it
        x[0, seen - 1, 3], x[0, seen, 4], x[0, seen + 1, 5] = torch.nan, torch.inf, -torch.inf
    x[0, 20, :21] = -torch.inf
    right = right_under(x, log)
    right[0, 20] = -torch.inf if log else 0.0  # hidden or −∞ altogether: an empty row
    close((log_softmax if log else softmax)(x, causal=True, backend="triton"), right)


@pytest.mark.skipif(DEVICE == "cpu", reason="thousands of rows: too many for the interpreter")
@pytest.mark.parametrize("n", [512, 600, 1024, 2047, 2048, 4096, 8192, 8190, 16384, 20000, 32768, 50257, 65536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triangles_by_the_plans_of_the_card(dtype, n):
    """A thousand rows of a square, from those that see nothing; of the longest ones the last rows alone."""
    count = n + 2 if n <= 20000 else 64
    x = torch.randn(1, count, n, device=DEVICE, dtype=dtype)
    x.masked_fill_(~torch.ones(count, n, dtype=torch.bool, device=DEVICE).tril_(n - count), torch.nan)
    at = torch.arange(0, count, max(1, count // 1000), device=DEVICE)
    seen = torch.arange(n, device=DEVICE) <= (at + n - count)[:, None]
    for scale in (1.0, -0.5):
        right = torch.softmax((x[0, at].double() * scale).masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0.0)
        close(softmax(x, causal=True, scale=scale, backend="triton")[0, at], right)


def masked(rows, n, dtype):
    """x, and bytes of a mask, any of which but 0 keeps; x is NaN where it is 0, and one row is hidden altogether."""
    generator = torch.Generator().manual_seed(n)
    kept = torch.tensor([0, 1, 2, 128, 255], dtype=torch.uint8)[torch.randint(0, 5, (rows, n), generator=generator)]
    kept[1] = 0
    x = torch.randn(rows, n, generator=generator) * 3
    return torch.where(kept != 0, x, torch.nan).to(DEVICE, dtype), kept.to(DEVICE).view(torch.bool)


@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0])
@pytest.mark.parametrize(("dtype", "tile"), [(torch.bfloat16, (1, 64)), (torch.float16, (2, 64)), (torch.bfloat16, (1, 32))])
def test_masks_of_rows_that_wait_in_16_bits(force, dtype, tile, scale):
    force(plan.Plan(True, *tile, 1, narrow=True, parts=64 // tile[1]))
    for n in (64, 56):
        x, mask = masked(5, n, dtype)
        assert fold(x, -1, mask.view(torch.uint8)).mask_vector == 8
        s = (x.double() * scale).masked_fill(x.isnan(), -torch.inf)
        right = torch.softmax(s, -1).masked_fill(x.isnan(), 0.0)
        close(softmax(x, mask=mask, scale=scale, backend="triton"), right)
        seen = torch.ones(5, n, dtype=torch.bool, device=DEVICE).tril(n - 5)
        right = torch.softmax(s.masked_fill(~seen, -torch.inf), -1).masked_fill(x.isnan() | ~seen, 0.0)
        close(softmax(x, mask=mask, causal=True, scale=scale, backend="triton"), right)


@pytest.mark.parametrize("tile", [None, plan.Plan(True, 1, 256, 1, narrow=True, parts=2, pieces=2), plan.Plan(False, 1, 64, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_of_rows_with_edges(force, dtype, tile):
    """In pieces, in a cluster, in two passes; shared by groups whose rows lie in vectors alike, whole, and of rows that do not."""
    if tile:
        force(replace(tile, narrow=tile.narrow and dtype == torch.bfloat16))
    for n in (601, 1001):
        x, mask = masked(8, n, dtype)
        under = mask & torch.ones_like(mask).tril(n - 8)
        for scale in (1.0, -0.5):
            for seen, causal in ((mask, False), (under, True)):
                right = torch.softmax((x.double() * scale).masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0.0)
                close(softmax(x.repeat(3, 1, 1), mask=mask, scale=scale, causal=causal, backend="triton"), right.expand(3, 8, n))
        same = x.nan_to_num(0.5).repeat(3, 1, 1)
        close(softmax(same, mask=mask[0], backend="triton"), torch.softmax(same.double().masked_fill(~mask[0], -torch.inf), -1))


@pytest.mark.skipif(DEVICE == "cpu", reason="thousands of rows: too many for the interpreter")
@pytest.mark.parametrize("n", [600, 1001, 1024, 2048, 4096, 5001, 8192, 8190, 9001, 16384, 20000, 20001, 32768, 65536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masks_by_the_plans_of_the_card(dtype, n):
    """Four groups that share it, so many rows that clusters serve the longest ones as well."""
    x, mask = masked(72, n, dtype)
    for scale in (1.0, -0.5):
        s = (x.double() * scale).masked_fill(~mask, -torch.inf)
        right = torch.softmax(s, -1).masked_fill(~mask, 0.0)
        close(softmax(x.repeat(4, 1, 1), mask=mask, scale=scale, backend="triton"), right.expand(4, 72, n))
    seen = torch.ones(72, n, dtype=torch.bool, device=DEVICE).tril(n - 72)
    right = torch.softmax((x.double()).masked_fill(~mask | ~seen, -torch.inf), -1).masked_fill(~mask | ~seen, 0.0)
    close(softmax(x.repeat(4, 1, 1), mask=mask, causal=True, backend="triton"), right.expand(4, 72, n))


@pytest.mark.parametrize(("block_m", "queries", "at_once"), [(1, 4, 2), (2, 8, 2), (1, 3, 0)])
def test_groups_that_share_a_mask_take_turns(force, monkeypatch, block_m, queries, at_once):
    """A few rows each that need the same rows of the mask, whatever its groups are: all, heads of a batch, batches of a head."""
    force(plan.Plan(True, block_m, 64, 1))
    for name, few in (("SHARED_FROM", 1), ("SHARED_BYTES", 3 * block_m * 64 * (2 * 4 + 1)), ("SHARED_ROWS", 2)):  # less than 4 tiles
        monkeypatch.setattr(rows, name, few)
    x = (torch.randn(2, 3, queries, 64, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE)
    for shape, shared in ((x.shape[2:], True), ((2, 1, *x.shape[2:]), True), (x.shape[1:], True), (x.shape, False), ((64,), False)):
        mask = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7).to(DEVICE)
        assert fold(x, -1, mask.expand(x.shape), queries=True).shared == (at_once if shared else 0)
        if shared:
            agree(x, mask=mask, causal=shape != x.shape[1:])


def test_turns_are_for_masks_that_the_l2_does_not_keep():
    for rows_, n, dtype, tiles in ((1024, 1024, torch.bfloat16, 0), (4096, 4096, torch.bfloat16, 512), (8192, 8192, torch.bfloat16, 256),
                                   (256, 16384, torch.bfloat16, 0), (256, 16384, torch.float32, 64)):
        x = torch.empty(3, rows_, n, dtype=dtype, device="meta")
        assert fold(x, -1, torch.empty(rows_, n, dtype=torch.uint8, device="meta").expand(x.shape), queries=True).shared == tiles


def test_sums_of_halved_tiles(force):
    force(plan.Plan(True, 1, 64, 1))
    x = triangle(66, 64)
    close(logsumexp(x, causal=True, backend="triton"), torch.logsumexp(x.double().masked_fill(x.isnan(), -torch.inf), -1))
