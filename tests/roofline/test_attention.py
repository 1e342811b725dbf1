"""The attention ledgers against the published figures and against each other."""
import pytest

from onchip.errors import InputError
from onchip.roofline.attention import Formats, Tile, fa1, fa2, naive, online, split_kv, tiled
from onchip.roofline.backward import fa2_backward, naive_backward
from onchip.roofline.shape import AttentionShape

N, D = 32768, 128
LONG = AttentionShape.square(N, D)


@pytest.mark.parametrize(("n", "linear", "quadratic"), [(4096, 4.194e6, 134.218e6), (32768, 33.554e6, 8.590e9)])
def test_naive_is_8nd_plus_8n2(n, linear, quadratic):
    p = naive(AttentionShape.square(n, D))
    assert p.issued == p.textbook == 8 * n * D + 8 * n * n
    assert 8 * n * D == pytest.approx(linear, rel=2e-4)
    assert 8 * n * n == pytest.approx(quadratic, rel=2e-4)


def test_separate_kernels_add_two_passes_each():
    plain = naive(LONG)
    assert naive(LONG, scale_kernel=True).issued == 12 * N * N + 8 * N * D
    assert naive(LONG, mask_kernel=True).issued - plain.issued == 4 * N * N
    assert naive(LONG, row_on_chip=False).issued - plain.issued == 2 * N * N
    wide = naive(LONG, formats=Formats("bf16", "fp32"))
    assert wide.issued - 8 * N * D == 2 * (plain.issued - 8 * N * D)


def test_one_head_at_32k():
    assert naive(LONG).issued == pytest.approx(8623.5e6, rel=1e-5)
    s_bytes = naive(LONG).kernels[0].written("S")
    assert s_bytes == 2 * 2**30
    many = naive(AttentionShape.square(N, D, heads=32))
    assert many.kernels[0].written("S") == 64 * 2**30


@pytest.mark.parametrize(("n", "intensity"), [(1024, 56.9), (4096, 62.1), (32768, 63.8)])
def test_naive_intensity_tends_to_half_the_head_dim(n, intensity):
    assert naive(AttentionShape.square(n, D)).intensity == pytest.approx(intensity, abs=0.05)


@pytest.mark.parametrize(("schedule", "br", "bc", "megabytes", "ratio", "intensity"), [
    (fa1, 64, 64, 13179, 0.65, 42), (fa1, 128, 128, 6602, 1.31, 83),
    (fa2, 64, 64, 8607, 1.00, 64), (fa2, 128, 64, 4312, 2.00, 127), (fa2, 128, 128, 4312, 2.00, 127)])
def test_issued_bytes_table(schedule, br, bc, megabytes, ratio, intensity):
    p = schedule(LONG, Tile(br, bc), Formats("fp16", "fp16"))
    assert round(p.issued / 1e6) == megabytes
    assert round(naive(LONG).textbook / p.issued, 2) == ratio
    assert round(p.intensity) == intensity
    assert p.compulsory == pytest.approx(33.6e6, rel=5e-3)


def test_fa2_causal_issues_half():
    shape = AttentionShape.square(N, D, causal="bottom-right")
    p = fa2(shape, Tile(128, 64))
    assert round(p.issued / 1e6) == 2173
    assert p.matmul_flops / fa2(LONG, Tile(128, 64)).matmul_flops == pytest.approx(0.502, abs=5e-4)


@pytest.mark.parametrize("br", [16, 64, 128, 256])
def test_fa2_closed_form(br):
    assert fa2(LONG, Tile(br, 64), lse=False).issued == 4 * N * D + 4 * N * N * D // br


def test_fa2_equals_naive_at_half_the_head_dim():
    """At br = d/2 the quadratic terms are equal: tiling alone saves nothing."""
    assert fa2(LONG, Tile(D // 2, 64), lse=False).issued - 4 * N * D == naive(LONG).issued - 8 * N * D


def test_fa1_reads_and_writes_its_state_every_step():
    p = fa1(LONG, Tile(64, 64)).kernels[0]
    steps = N // 64
    assert p.read("Q") == p.read("O") == steps * N * D * 2
    assert p.written("O") == (steps + 1) * N * D * 2
    assert p.written("m") == p.written("l") == (steps + 1) * N * 4
    assert p.read("K") == p.read("V") == N * D * 2


def test_passes_over_k():
    three, two, one = (f(LONG, Tile(128, 64)) for f in (tiled, online, fa2))
    k = one.kernels[0].read("K")
    assert (three.kernels[0].read("K"), two.kernels[0].read("K")) == (3 * k, 2 * k)
    assert three.kernels[0].read("V") == two.kernels[0].read("V") == one.kernels[0].read("V")
    assert (three.matmul_flops, two.matmul_flops) == (2 * one.matmul_flops, 1.5 * one.matmul_flops)


def test_grouped_heads_issue_per_query_head_unless_packed():
    shape = AttentionShape(1, 8192, D, D, batch=16, heads=32, kv_heads=8, causal="bottom-right")
    cache = 2 * 16 * 8 * 8192 * D * 2
    assert fa2(shape, Tile(16, 128)).kernels[0].read("K") * 2 == 4 * cache
    packed = split_kv(shape, Tile(16, 128), 4, pack_gqa=True)
    assert packed.kernels[0].read("K") + packed.kernels[0].read("V") == cache
    assert packed.kernels[0].written("partial O") == packed.kernels[1].read("partial O") == 4 * 16 * 32 * D * 4
    assert packed.compulsory == fa2(shape, Tile(16, 128), lse=False).compulsory


def test_backward_is_five_matmuls():
    w = AttentionShape.square(4096, D)
    assert fa2_backward(w, Tile(64, 128)).matmul_flops == 2.5 * fa2(w, Tile(64, 128)).matmul_flops
    assert naive_backward(w).matmul_flops == 2 * fa2(w, Tile(64, 128)).matmul_flops  # P is kept, S not recomputed
    p = naive_backward(w)
    square = 4096 * 4096 * 2
    assert sum(k.read("P") for k in p.kernels) == 2 * square
    assert [sum(k.written(t) for k in p.kernels) for t in ("dP", "dS")] == [square, square]
    assert [sum(k.read(t) for k in p.kernels) for t in ("dP", "dS")] == [square, 2 * square]


def test_recomputing_backward_moves_no_square():
    small, large = (fa2_backward(AttentionShape.square(n, D), Tile(64, 128)).textbook for n in (4096, 8192))
    assert large == 2 * small


def test_bad_tiles_and_splits():
    with pytest.raises(InputError, match="tile br"):
        Tile(0, 64)
    with pytest.raises(InputError, match="splits"):
        split_kv(LONG, Tile(64, 64), 0)
    with pytest.raises(InputError, match="scores"):
        Formats("bf16", "int8")
