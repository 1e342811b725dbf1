"""How shapes and strides fold into rows, and addresses beyond 32 bits."""
from dataclasses import replace

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


@pytest.mark.parametrize("rows", [5, 66])
@pytest.mark.parametrize("narrow", [False, True])
def test_two_rows_of_a_triangle_share_a_tile(force, narrow, rows):
    """Rows in order would be 31 and 32 in one tile, of which one sees half of it and one more; tiles begin from both ends of the grid."""
    force(plan.Plan(True, 2, 64, 1, narrow=narrow))
    x = triangle(rows, 64, torch.bfloat16 if narrow else torch.float32).repeat(3, 1, 1)
    close(softmax(x, causal=True, backend="triton"), right_under(x[:1]).expand(x.shape))


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
