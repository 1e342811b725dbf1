"""What the L2's counters see, held against an H200's: 16 heads of 4096 × 4096, d = 128, bf16; softmax of 4096 rows of 32768."""
import pytest

from onchip.roofline import softmax
from onchip.roofline.attention import Tile, fa1, fa2, naive, online, tiled
from onchip.roofline.hardware import find_gpu
from onchip.roofline.l2 import crossing, lookups
from onchip.roofline.ledger import Kernel
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

H200 = find_gpu("h200")
SHAPE, ROWS = AttentionShape.square(4096, 128, heads=16), Rows(4096, 32768)
NAIVE = naive(SHAPE, Tile(128, 128), scale_kernel=True).kernels
FA2 = fa2(SHAPE, Tile(128, 64)).kernels[0]


# kernel, blocks an SM, MB that crossed (read, written), MB looked up (read, written)
COUNTED = {
    "QK": (NAIVE[0], 2, (1073.7, 536.9), (877.2, 805.3)),
    "scale": (NAIVE[1], 8, (536.9, 536.9), (805.4, 805.4)),
    "softmax of S": (NAIVE[2], 8, (536.9, 536.9), (805.4, 805.4)),
    "PV": (NAIVE[3], 2, (1073.7, 16.8), (1194.9, 25.2)),
    "tiled": (tiled(SHAPE, Tile(128, 64)).kernels[0], 1, (2164.3, 16.8), (714.9, 25.3)),
    "online": (online(SHAPE, Tile(128, 64)).kernels[0], 1, (1627.4, 16.8), (600.2, 25.3)),
    "fa1": (fa1(SHAPE, Tile(64, 64)).kernels[0], 1, (2214.6, 1124.6), (2303.7, 1686.9)),
    "fa2": (FA2, 1, (1090.5, 17.0), (464.2, 25.6)),
    "hopper": (FA2, 1, (1090.5, 17.1), (461.0, 25.7)),
    "softmax, three passes": (softmax.safe(ROWS).kernels[0], 8, (789.3, 268.4), (1174.8, 402.7)),
    "softmax, two passes": (softmax.online(ROWS, 4096).kernels[0], 8, (529.8, 268.4), (791.0, 402.7)),
    "softmax, row on chip": (softmax.resident(ROWS).kernels[0], 1, (268.4, 268.4), (403.1, 403.0)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_issued_crosses(name: str) -> None:
    kernel, _, (read, written), _ = COUNTED[name]
    assert kernel.issued / 1e6 == pytest.approx(read + written, rel=0.02)


@pytest.mark.parametrize("name", [name for name, (kernel, *_) in COUNTED.items() if lookups(kernel, H200.l2_bytes, 132).shared == 0])
def test_without_sharing_every_lookup_is_accounted_for(name: str) -> None:
    kernel, blocks, _, (read, written) = COUNTED[name]
    found = lookups(kernel, H200.l2_bytes, blocks * H200.sms)
    assert found.read / 1e6 == pytest.approx(read, rel=0.03)
    assert found.written / 1e6 == pytest.approx(written, rel=0.02)
    assert found.least == found.most


@pytest.mark.parametrize(("name", "low", "high"), [
    ("QK", 1.2, 1.4), ("PV", 1.3, 1.6), ("tiled", 3.0, 3.3), ("online", 2.7, 3.0), ("fa2", 2.3, 2.6), ("hopper", 2.3, 2.6)])
def test_requests_for_what_blocks_walk_in_step_are_merged(name: str, low: float, high: float) -> None:
    kernel, blocks, _, (read, written) = COUNTED[name]
    found = lookups(kernel, H200.l2_bytes, blocks * H200.sms)
    assert found.least < (read + written) * 1e6 < found.most
    assert low < found.merged((read + written) * 1e6) < high
    assert found.written / 1e6 == pytest.approx(written, rel=0.02)


def test_merging_is_between_one_walker_and_all() -> None:
    found = lookups(FA2, H200.l2_bytes, H200.sms)
    assert (found.merged(found.most), found.merged(found.least)) == pytest.approx((1, 32))
    assert lookups(Kernel("nothing", (), 1), H200.l2_bytes, 132).merged(0.0) == 1


def test_what_an_l1_holds_need_not_cross_again() -> None:
    """torch.softmax, 1024 threads a row: two rows of 64 KB fit an SM's 228 KB, eight do not, nor do rows of 2 MB; 693.5 MB crossed."""
    (kernel,) = softmax.safe(ROWS).kernels
    assert crossing(kernel, H200.smem_per_sm, 2) == 2 * ROWS.nbytes < 693.5e6 < kernel.issued == crossing(kernel, H200.smem_per_sm, 8)
    (kernel,) = softmax.safe(Rows(256, 2**20)).kernels
    assert crossing(kernel, H200.smem_per_sm, 2) == kernel.issued == 2147483648  # and 2147.5 MB crossed
