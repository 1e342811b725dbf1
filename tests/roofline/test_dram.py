"""The L2 model: its limits, its monotonicity, and the DRAM bytes counted on an H200."""
import random

import pytest

from onchip.roofline import dram, softmax
from onchip.roofline.attention import Formats, Tile, fa1, fa2, naive, online, tiled
from onchip.roofline.dram import CLEAN, KEPT, WAYS, counted_dram_bytes, dram_bytes, pipeline_dram_bytes, rewalked, stays
from onchip.roofline.hardware import find_gpu
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

H200_L2, WAVE = find_gpu("h200").l2_bytes, 132
MEASURED = AttentionShape.square(8192, 128, heads=8)


def test_stays_is_a_ramp():
    assert [stays(x * 100, 100) for x in (0, KEPT, (1 + KEPT) / 2, 1, 2)] == pytest.approx([1, 1, 0.5, 0, 0])


def test_lines_are_found_where_fewer_than_their_set_has_ways_came_between():
    """Against 2000 lines, others thrown into their sets at random."""
    rng = random.Random(1)
    for load in (0.6, 0.9, 1.1):
        fell = [sum(rng.random() < 1 / 64 for _ in range(round(load * WAYS * 64))) for _ in range(2000)]
        assert dram.found(load, 1) == pytest.approx(sum(n < WAYS for n in fell) / len(fell), abs=0.03)
        assert dram.found(load, 1, WAYS - CLEAN) < dram.found(load, 1)
    assert (dram.found(0, 1), dram.found(100, 1), dram.found(1, 0)) == (1, 0, 0)


def test_a_walk_that_shrinks_is_found_from_where_it_fits():
    """Causal FA1 at 16K: 136 MB at first, a 256th less at each step; found once a sweep touches less than the L2 holds."""
    shape = AttentionShape.square(16384, 128, heads=16, causal="bottom-right")
    q, o_read, o_written = fa1(shape, Tile(64, 64)).kernels[0].streams[:3]
    assert (q.shares[0], q.shares[-1], len(q.shares)) == (1, 1 / 256, 256)
    between = dram.copies(fa1(shape, Tile(64, 64)).kernels[0]) * 16 * q.set_bytes
    assert between == pytest.approx(1.25 * 16 * q.set_bytes, rel=0.01)
    fits = H200_L2 / between  # the share of the rows
    again = rewalked(q, between, H200_L2)
    assert again == rewalked(o_read, between, H200_L2) == pytest.approx(1 - fits**2, abs=0.02)
    assert rewalked(o_written, between, H200_L2) > again
    assert fa1(AttentionShape.square(16384, 128), Tile(64, 64)).kernels[0].streams[0].shares == ()


# (rung, tile) → MB read and written, kernel by kernel, of 16 heads of 4096 × 4096, d = 128, bf16: Nsight Compute on an H200
COUNTED = {
    naive: (Tile(128, 128), [(33.6, 509.5), (536.9, 511.9), (554.7, 11.1)]),
    tiled: (Tile(128, 64), [(50.4, 8.5)]),
    online: (Tile(128, 64), [(50.4, 8.6)]),
    fa2: (Tile(128, 64), [(50.4, 8.5)]),
}


@pytest.mark.parametrize("rung", COUNTED, ids=lambda rung: rung.__name__)
def test_what_counters_of_a_kernel_see(rung):
    tile, counted = COUNTED[rung]
    kernels = rung(AttentionShape.square(4096, 128, heads=16), tile, Formats()).kernels
    expected = [counted_dram_bytes(kernel, H200_L2, WAVE) for kernel in kernels]
    assert len(expected) == len(counted)
    for found, (read, written) in zip(expected, counted, strict=True):
        assert found.read / 1e6 == pytest.approx(read, rel=0.01)
        assert found.written / 1e6 == pytest.approx(written, abs=5)  # the last wave of blocks writes when nothing comes in any more
    assert sum(x.read + x.written for x in expected) / 1e6 == pytest.approx(sum(map(sum, counted)), rel=0.01)


@pytest.mark.parametrize(("ledger", "blocks", "counted"), [
    (softmax.safe, 8, (760.4, 247.2)), (lambda x: softmax.online(x, 4096), 8, (519.5, 247.3)), (softmax.safe, 2, (268.5, 245.6)),
    (softmax.resident, 1, (268.5, 245.7))])
def test_rows_are_read_again_from_dram_where_too_many_run_at_once(ledger, blocks, counted):
    """4096 rows of 32768: eight blocks an SM walk 69 MB at once, which do not stay; two (torch.softmax) walk 17 MB, which do."""
    (kernel,) = ledger(Rows(4096, 32768)).kernels
    found = counted_dram_bytes(kernel, H200_L2, blocks * WAVE)
    assert (found.read / 1e6, found.written / 1e6) == pytest.approx(counted, rel=0.06)


def test_a_counter_sees_intermediates_that_a_run_finds_in_l2():
    first, second, _ = naive(AttentionShape.square(1024, 64), Tile(128, 128)).kernels
    square = 2 * 1024**2
    assert dram_bytes(second, H200_L2, WAVE) == 0  # S and P, 2 MB each, never leave the L2
    assert counted_dram_bytes(second, H200_L2, WAVE).read == square
    assert counted_dram_bytes(first, H200_L2, WAVE).written == 0  # all of it is still in L2


def test_fused_forward_reads_its_inputs_once():
    """Counted on an H200 at B1 H8 N8192 d128 bf16: 50.6 MB read against 50.3 MB compulsory."""
    p = fa2(MEASURED, Tile(128, 128), lse=False)
    reads = pipeline_dram_bytes(p, H200_L2, WAVE) - p.kernels[0].written("O")
    assert reads == pytest.approx(50.6e6, rel=0.02)


def test_naive_moves_the_textbook_bytes():
    """Counted: QKᵀ 52 MB + 1.04 GB, PV 1.10 GB + 10 MB; the writes are short by what stays dirty in L2."""
    p = naive(MEASURED, Tile(128, 128))
    qk, softmax, pv = (dram_bytes(k, H200_L2, WAVE) for k in p.kernels)
    assert qk == pytest.approx(52e6 + 1.04e9, rel=0.05)
    assert softmax == pytest.approx(2 * 1.07e9, rel=0.01)
    assert pv == pytest.approx(1.10e9 + 10e6, rel=0.05)
    assert p.issued > pipeline_dram_bytes(p, H200_L2, WAVE) == p.textbook


@pytest.mark.parametrize("schedule", [fa1, fa2, lambda s, t: naive(s, t)])
@pytest.mark.parametrize("causal", [None, "bottom-right"])
def test_between_compulsory_and_issued_and_falling_with_the_cache(schedule, causal):
    p = schedule(AttentionShape.square(4096, 128, heads=6, batch=2, causal=causal), Tile(64, 64))
    counts = [pipeline_dram_bytes(p, l2, WAVE) for l2 in (1, 10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 10**12)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] <= p.issued
    assert counts[-1] == sum(s.unique for k in p.kernels for s in k.streams if not s.intermediate)
    if schedule is not fa2:  # twelve heads of 64 tiles on 132 blocks: FA2 never needs a second fetch
        assert counts[0] > counts[-1]


def test_without_a_cache_fa1_pays_every_byte_it_issues():
    p = fa1(AttentionShape.square(2048, 128), Tile(64, 64))
    assert pipeline_dram_bytes(p, 1, WAVE) == p.issued


def test_a_wave_of_query_tiles_shares_its_fetch():
    """Without a cache, 512 query tiles of one head on 132 blocks fetch K and V four times, not 512 times."""
    p = fa2(AttentionShape.square(32768, 128), Tile(64, 64), lse=False)
    one = 32768 * 128 * 2
    assert pipeline_dram_bytes(p, 1, WAVE) == 2 * one + 4 * 2 * one
