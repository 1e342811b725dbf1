"""The rungs' kernels under the interpreter: each gives attention, to twice the error of eager torch in the same dtype."""
from collections.abc import Callable
from functools import partial

import pytest
import torch

from onchip.errors import InputError
from onchip.ladder.kernels import fused, unfused
from onchip.ladder.kernels import softmax as softmax_kernels
from onchip.ladder.kernels.common import Launch
from onchip.ladder.softmax import SOFTMAX_RUNGS
from onchip.roofline.hardware import find_gpu
from onchip.roofline.softmax import Rows

RUNGS: dict[str, Callable[..., torch.Tensor]] = {
    "naive_scaled": partial(unfused.naive, apart=True), "naive": unfused.naive, "tiled": fused.tiled, "online": fused.online,
    "fa1": fused.fa1, "fa2": fused.fa2}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("small")


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v  # a row that sees nothing is 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 2, 21, 34, 24, 40), (1, 1, 1, 34, 21, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_attention(name: str, dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> None:
    b, h, h_kv, sq, sk, d, dv = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, *size, device=DEVICE).to(dtype) for size in ((h, sq, d), (h_kv, sk, d), (h_kv, sk, dv)))
    truth = eager(q.double(), k.double(), v.double(), causal)
    allowed = 2 * (eager(q, k, v, causal) - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.abs().max()
    assert (RUNGS[name](q, k, v, causal) - truth).abs().max() <= allowed


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_beyond_the_chip_is_read_twice(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setattr(unfused, "ROW", 16)
    q, k, v = torch.randn(3, 1, 2, 40, 16, device=DEVICE).unbind(0)
    torch.testing.assert_close(unfused.naive(q, k, v, causal), eager(q, k, v, causal), rtol=1e-5, atol=1e-5)


def test_another_layout_is_refused() -> None:
    q = torch.randn(1, 8, 2, 16, device=DEVICE).transpose(1, 2)
    with pytest.raises(InputError, match="q: got strides"):
        fused.fa2(q, q, q)


def test_wide_heads_take_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q = torch.empty(1, 1, 8, 256, dtype=torch.bfloat16)
    assert fused.launch_for("fa2", q, q)[:2] == (64, 32)
    assert fused.launch_for("fa2", q.float(), q.float())[:2] == (32, 16)
    assert fused.launch_for("fa2", q[..., :128], q[..., :128])[:2] == (128, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eager", "safe", "online"])
def test_a_softmax_rung_is_softmax(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(softmax_kernels, "LAUNCH", Launch(1, 32, 4, 1))
    rung = next(rung for rung in SOFTMAX_RUNGS if rung.key == name)
    x = (5 * torch.randn(3, 100, device=DEVICE)).to(dtype)
    x[1, :40] = -torch.inf  # a first block, and more, of nothing
    truth = torch.softmax(x.double(), -1)
    allowed = 2 * (torch.softmax(x, -1) - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.max()
    assert (rung.run(x) - truth).abs().max() <= allowed * (3 if name == "eager" else 1)  # eager rounds s, p and l on its way


def test_softmax_rungs_are_predicted_by_what_they_move() -> None:
    rows, card = Rows(4096, 32768), find_gpu("h200")
    reads = {"eager": 8, "torch": 4, "safe": 4, "online": 3, "chip": 2}
    for rung in SOFTMAX_RUNGS:
        assert rung.ledger(rows).issued == pytest.approx(reads[rung.key] * rows.nbytes, rel=1e-3)
    within = {rung.key: rung.predict(Rows(2**15, 4096), card).time for rung in SOFTMAX_RUNGS}
    assert within["online"] == within["chip"] < within["safe"] < 1.05 * within["chip"]  # 1056 rows of 8 KB at once: read again from L2
    many = {rung.key: rung.predict(rows, card).time for rung in SOFTMAX_RUNGS}
    assert many["safe"] == pytest.approx(2 * many["chip"], rel=1e-3)  # 1056 rows of 64 KB exceed the L2: four passes through DRAM for two
    assert many["online"] == pytest.approx(1.5 * many["chip"], rel=0.01)
    assert many["torch"] < 1.05 * many["chip"]  # two blocks an SM: 17 MB
    beyond = {rung.key: rung.predict(Rows(256, 2**20), card).time for rung in SOFTMAX_RUNGS}
    assert beyond["eager"] > beyond["safe"] > beyond["online"] > beyond["chip"]
