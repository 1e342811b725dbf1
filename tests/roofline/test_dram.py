"""The L2 model: its limits, its monotonicity, and the DRAM bytes counted on an H200."""
import pytest

from onchip.roofline.attention import Tile, fa1, fa2, naive
from onchip.roofline.dram import dram_bytes, pipeline_dram_bytes, stays
from onchip.roofline.shape import AttentionShape

H200_L2, WAVE = 60 * 10**6, 132
MEASURED = AttentionShape.square(8192, 128, heads=8)


def test_stays_is_a_ramp():
    assert [stays(x, 100) for x in (0, 50, 75, 100, 200)] == [1, 1, 0.5, 0, 0]


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
