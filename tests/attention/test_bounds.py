"""No kernel touches what is not its tensors', forward or backward: the interpreter's addresses, looked at one by one."""
import pytest
import torch

from onchip.attention.triton import launch, tiles
from onchip.testing.attention import Case, Target, check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's addresses; on a GPU benchmarks/sanitize.py looks")
if not torch.cuda.is_available():
    from tests.bounds import bounded

ODD = {"seq_q": 33, "seq_k": 45, "dim": 20, "dim_v": 36}


@pytest.mark.parametrize("descriptors", [True, False], ids=["by descriptors", "by pointers"])
@pytest.mark.parametrize("case", [
    Case(**ODD, causal=True, sinks=True, dtype="bfloat16"), Case(**ODD, heads=4, window=(9, 5), mask=(1, 1, 33, 45), bias=(1, 4, 1, 45)),
    Case(**{**ODD, "dim": 72, "dim_v": 64}, dtype="float16", dropout_p=0.2, alibi=1, softcap=3.0),
    Case(lengths=((13, 21), (0, 5), (7, 0), (21, 33)), causal=True, sinks=True, dtype="bfloat16")])
def test_attention(monkeypatch: pytest.MonkeyPatch, case: Case, descriptors: bool) -> None:
    monkeypatch.setattr(tiles, "choose", lambda *_: tiles.Tile(16, 32, 4, 2))
    if descriptors:
        monkeypatch.setattr(tiles, "capability", lambda _: (9, 0))
        monkeypatch.setattr(launch, "TMA_PAIRS", 0)
    with bounded():
        check(case, Target("triton", "cpu"))
