"""Predicted times: published speed-ups, which roof binds, and what a small grid costs."""
from dataclasses import replace

import pytest

from onchip.roofline.attention import Formats, Tile, fa1, fa2, naive, split_kv
from onchip.roofline.hardware import find_gpu
from onchip.roofline.ledger import Kernel, once
from onchip.roofline.roofs import ideal_time, kernel_time, naive_to_fused, predict, speedup_limit
from onchip.roofline.shape import AttentionShape

A100, H100, H200 = (find_gpu(name) for name in ("a100-80gb", "h100", "h200"))
LONG = AttentionShape.square(32768, 128)


@pytest.mark.parametrize(("scale_kernel", "speedup"), [(False, 2.400), (True, 3.596)])
def test_naive_to_fused_on_an_a100(scale_kernel, speedup):
    assert round(naive_to_fused(LONG, A100, Formats(), scale_kernel=scale_kernel), 3) == speedup


@pytest.mark.parametrize(("gpu", "limit"), [(A100, 2.391), (H200, 3.221), (H100, 4.614)])
def test_limits_for_long_sequences(gpu, limit):
    assert speedup_limit(gpu, "bf16", 128, 8) == pytest.approx(limit, abs=1.1e-3)
    assert speedup_limit(gpu, "bf16", 128, 12) == pytest.approx(1.5 * limit, abs=2e-3)
    huge = AttentionShape.square(2**24, 128)
    assert naive_to_fused(huge, gpu, Formats()) == pytest.approx(speedup_limit(gpu, "bf16", 128, 8), rel=1e-4)


def test_charging_softmax_to_the_tensor_cores_would_give_the_popular_wrong_figure():
    """3N² more FLOPs at the tensor peak give 2.386 and 3.575: not what this ledger does."""
    naive_bytes, wrong = 8 * 32768**2 + 8 * 32768 * 128, (4 * 128 + 3) * 32768**2 / A100.matmul_rate("bf16")
    assert round(naive_bytes / A100.dram_rate / wrong, 3) == 2.386
    assert round(naive_to_fused(LONG, A100, Formats()), 3) != 2.386


@pytest.mark.parametrize(("gpu", "head_dim", "percent"), [(A100, 128, 25), (H100, 128, 50), (H200, 128, 50), (H200, 64, 100)])
def test_exp_unit_beside_the_tensor_cores(gpu, head_dim, percent):
    shape = AttentionShape.square(65536, head_dim)
    roofs = kernel_time(fa2(shape, Tile(128, 4096, 64)).kernels[0], gpu, "bf16").seconds
    assert 100 * roofs["exp unit"] / roofs["tensor cores"] == pytest.approx(percent, rel=0.01)


def test_which_roof_binds():
    assert predict(naive(LONG, Tile(128, 128)), A100, "bf16").binding == "DRAM"
    assert predict(fa2(LONG, Tile(128, 64)), A100, "bf16").binding == "tensor cores"
    # 16 rows a warp: K and V pass through shared memory once for each, and that pipe is the roof
    assert predict(fa2(LONG, Tile(64, 64)), A100, "bf16").binding == "shared memory"


def test_a_pipeline_is_the_sum_of_its_kernels_not_one_roof():
    p = predict(naive(LONG, scale_kernel=True), A100, "bf16")
    assert p.time == pytest.approx(sum(max(k.seconds.values()) for k in p.kernels))
    assert len(p.kernels) == 4
    assert p.slowest.next is not None
    assert 0 < p.slowest.next[1] <= 1


def test_one_block_cannot_use_a_whole_gpu():
    """FA1's grid is one block a head; split-KV exists because a decode's grid is as small."""
    assert predict(fa1(LONG, Tile(64, 64)), A100, "bf16").time > 50 * predict(fa2(LONG, Tile(128, 64)), A100, "bf16").time
    decode = AttentionShape(1, 65536, 128, 128, 1, 32, 8, causal="bottom-right")
    one, many = (predict(split_kv(decode, Tile(16, 128), s, pack_gqa=True), H200, "bf16").time for s in (1, 16))
    assert one > 5 * many  # 8 blocks draw 8 · 64 B a clock, a fifth of the DRAM bandwidth
    cache = 2 * 8 * 65536 * 128 * 2
    assert many == pytest.approx(cache / H200.dram_rate, rel=0.05)


def test_unknown_l2_has_no_roof_and_measured_ceilings_replace():
    kernel = Kernel("copy", (once("x", 10**9), once("y", 10**9, write=True)), blocks=10**6)
    assert kernel_time(kernel, replace(H200, l2_bytes_per_clock=None), "bf16").seconds.keys() == {"DRAM"}
    measured = kernel_time(kernel, H200.with_ceilings(dram_gbps=4250), "bf16")
    assert measured.time == pytest.approx(2e9 / 4.25e12)
    assert ideal_time(2 * 10**9, 0, H200, "bf16") == pytest.approx(2e9 / 4.8e12)
