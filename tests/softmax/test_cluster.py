"""Rows cut in parts for a cluster: under the interpreter every program works out the whole row's sums, on a card they are exchanged."""
import pytest
import torch

from onchip.softmax import logsumexp, softmax
from onchip.softmax.triton import plan
from onchip.testing.softmax import DEVICE, agree

BOTH = pytest.mark.parametrize("log", [False, True])


def data(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


def cluster(parts, block=256, narrow=False, pieces=1):
    held = pieces // 2 if block == plan.HELD_VECTOR * 32 * 4 else 0  # a vector a thread
    return plan.Plan(True, 1, block, 4, parts=parts, narrow=narrow, pieces=pieces, held=held)


@BOTH
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"scale": -0.5}, {"mask": True}, {"scale": 0.0}], ids=str)
@pytest.mark.parametrize(("parts", "n"), [(2, 512), (3, 600), (3, 601), (3, 70)])
def test_rows_of_a_cluster(force, parts, n, features, log):
    """Whole parts, ragged ones and empty ones; rows that start and end inside vectors."""
    force(cluster(parts))
    arguments = dict(features)
    if arguments.get("mask"):
        arguments["mask"] = (torch.rand(5, n, generator=torch.Generator().manual_seed(1)) < 0.5).to(DEVICE)
    agree(data(1, 5, n), log=log, **arguments)


@pytest.mark.parametrize(("parts", "n", "log"), [(5, 1023, False), (5, 1023, True), (16, 1030, True)])
def test_rows_of_many_parts(force, parts, n, log):
    """As many as a cluster has, and a number that is no power of two. (Under the interpreter a row costs the square of its parts.)"""
    force(cluster(parts, block=128 if parts == 16 else 256))
    rows = 1 if parts == 16 else 2
    mask = (torch.rand(rows, n, generator=torch.Generator().manual_seed(1)) < 0.5).to(DEVICE)
    agree(data(1, rows, n), log=log, scale=-0.5, mask=mask, causal=True)


@pytest.mark.parametrize(("parts", "n", "dtype"), [(2, 512, torch.bfloat16), (3, 601, torch.float16), (5, 1020, torch.bfloat16)])
def test_rows_of_16_bits(force, parts, n, dtype):
    force(cluster(parts, narrow=True))
    x = data(1, 2, n, dtype=dtype)
    agree(x)
    agree(x, log=True, scale=-0.5)
    agree(x, causal=True)
    force(cluster(parts))
    agree(x, dim=-1)


@pytest.mark.parametrize(("parts", "n", "dtype"), [
    (1, 1200, torch.float32), (1, 301, torch.float16), (1, 384, torch.bfloat16), (2, 2400, torch.float32), (2, 2401, torch.float32),
    (2, 700, torch.bfloat16), (2, 701, torch.float16)])
def test_parts_of_several_pieces(force, parts, n, dtype):
    """Of which the last is ragged or empty, and on a card one of dy's waits in shared memory. One part alone has its own sums under the
    interpreter too."""
    force(cluster(parts, block=512 if dtype == torch.float32 else 128, narrow=dtype != torch.float32, pieces=3))
    x = data(1, 3, n, dtype=dtype)
    x[:, :, -40:] += 20  # the largest in the last piece
    agree(x)
    agree(x, log=True, scale=-0.5, causal=True)
    if dtype == torch.float32:
        agree(x, bias=data(3, n, seed=1))


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_a_part_that_is_hidden_altogether_has_no_say(force, offset):
    """Its m is −∞ and its l 0: exp(0 − m) of the others would be infinite, and 0 · ∞ no number."""
    force(cluster(3))
    for hidden in (slice(0, 256), slice(256, 512), slice(512, 700)):
        x = data(4, 700) + offset
        x[:, hidden] = -torch.inf
        torch.testing.assert_close(softmax(x, backend="triton"), torch.softmax(x, -1), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(logsumexp(x, backend="triton"), torch.logsumexp(x, -1))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_special_reaches_all_parts_of_its_row_and_no_other(force, poison):
    force(cluster(3))
    x = data(4, 700)
    x[1, 300], x[2], x[3, 690] = poison, -torch.inf, poison  # in the second part and in the last
    torch.testing.assert_close(softmax(x, backend="triton"), torch.softmax(x, -1), equal_nan=True, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(logsumexp(x, backend="triton"), torch.logsumexp(x, -1), equal_nan=True)


WIDEST = 262_144
KINDS = pytest.mark.parametrize(("narrow", "backward"), [(narrow, backward) for narrow in (True, False) for backward in (False, True)])


@KINDS
def test_a_cluster_holds_the_row_in_parts_of_whole_lines(narrow, backward):
    for n in (16_385, 32_768, 32_769, 33_000, 50_257, 65_536, 100_000, 128_256, 131_072, 151_936, 163_840, 163_841, WIDEST):
        chosen = plan.choose_cluster(n, backward, narrow)
        span = chosen.span(n)
        assert span % 64 == 0
        assert (chosen.parts - 1) * span < n <= chosen.parts * span <= chosen.parts * chosen.pieces * chosen.block_n
        assert span > (chosen.pieces - 1) * chosen.block_n  # no piece is empty in all blocks
        assert 1 < chosen.parts <= 16
        assert chosen.narrow is narrow
        assert chosen.block_n * (2 if narrow else 4) == 32 * chosen.warps * 16  # bytes: a vector a thread
    assert plan.choose_cluster(WIDEST + 1, backward, narrow) is None
    assert plan.choose_cluster(8192, backward, narrow) is None


def test_rows_with_ends_and_sums_get_fewer_larger_blocks():
    for n, narrow in ((16_384, True), (32_768, True), (32_768, False), (65_536, False)):
        few, more = (plan.choose_cluster(n, False, narrow, whole) for whole in (False, True))
        assert 2 <= few.parts < more.parts <= 10
        assert few.pieces > more.pieces
    assert plan.choose_cluster(16_384, False, False, whole=False) is None  # float32: a program is as good


@KINDS
@pytest.mark.parametrize("n", [33_000, 50_257, 65_536, 131_072, 151_936, WIDEST])
def test_enough_of_a_row_waits_on_an_sm(narrow, backward, n):
    """95 KB of what is read, on a card of six clusters of 16 SMs and two of 18, from blocks that share their registers."""
    chosen = plan.choose_cluster(n, backward, narrow)
    threads = 32 * chosen.warps
    blocks, shared = 65_536 // (threads * chosen.registers), chosen.held * threads * 16
    assert shared < 48 * 1024  # what PTX may declare, some of it taken by the cluster's mail
    assert blocks * (shared + 2048) <= 228 * 1024
    assert bool(chosen.held) <= (backward and not narrow)
    rows = 6 * (16 * blocks // chosen.parts) + 2 * (18 * blocks // chosen.parts)
    assert rows * n * (2 if narrow else 4) * (1 + backward) >= 132 * 95_000
