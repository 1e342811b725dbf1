"""What the tests of the rungs' kernels share."""
import pytest
import torch

from onchip.ladder.kernels import backward, fused, unfused
from onchip.ladder.kernels.common import Launch


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small problems have many; fresh memory is NaN."""
    monkeypatch.setattr(fused, "LAUNCH", {name: Launch(16, 32, 4, 1) for name in fused.LAUNCH})
    monkeypatch.setattr(unfused, "GEMM", Launch(32, 16, 4, 1))
    monkeypatch.setattr(unfused, "SCORES", Launch(16, 16, 4, 1))
    monkeypatch.setattr(unfused, "STRIP", 32)
    monkeypatch.setattr(backward, "KEYS", Launch(16, 16, 4, 1))
    for module in (unfused, backward):
        monkeypatch.setattr(module, "INNER", 16)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **more: empty(*args, **more).fill_(torch.nan))
