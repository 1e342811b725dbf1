"""The reference block by block: forced small blocks, what it skips, its memory, and its repeatability."""
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.attention import attention
from onchip.attention.problem import Spec
from onchip.attention.reference import blocks, passes
from onchip.testing.attention import Case, Target, build, check, run

REFERENCE = Target("reference", "cpu")
EVERYTHING = {"causal": True, "window": (40, None), "softcap": 3.0, "bias": (2, 1, 1, 70), "mask": (1, 4, 50, 70), "alibi": 2,
              "sinks": True, "dropout_p": 0.2, "seed": 4}


@pytest.mark.parametrize("scores", [1, 300, 5000, 1 << 22])
@pytest.mark.parametrize("more", [{}, {"causal": True}, EVERYTHING], ids=["plain", "causal", "everything"])
def test_any_block_size_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch, scores: int, more: dict) -> None:
    """Chunks of batches, of heads, blocks of one row: the budget decides, never the result."""
    monkeypatch.setitem(blocks._SCORES, "cpu", scores)
    monkeypatch.setattr(blocks, "_ROWS", range(1, 17))
    check(Case(batch=2, heads=4, kv_heads=2, seq_q=50, seq_k=70, dim=8, dim_v=8, **more), REFERENCE)


def test_causal_blocks_see_only_the_keys_they_may() -> None:
    """Blocks below the diagonal are unmasked, those above are not computed: about half of the scores."""
    q = torch.zeros(1, 1, 1024, 8)
    done: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default and args[0].shape[-1] == 8:
                done.append(args[0].shape[-2] * args[1].shape[-1])
            return func(*args, **(kwargs or {}))

    with Count():
        passes.forward(q, q, q, *(None,) * 7, Spec(1, -1, 0, 1.0, 0.0, 0.0, 1024, 1024, False, False))
    assert 0.5 < sum(done) / 1024**2 < 0.6


def _extra_memory(call: Callable[[], object]) -> int:
    """Bytes the process needed at once for `call`, beyond what it held before."""
    call()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for its peak memory")
def test_extra_memory_is_a_small_part_of_naive_attentions() -> None:
    """Naive holds S and P, 2 · 8 · 2048² · 4 B = 268 MB; the reference its scores in flight, whatever the length."""
    q, k, v = (torch.randn(1, 8, 2048, 64) for _ in range(3))
    # the process's peak also holds a first call's one-time buffers: 37 MB then, 25 MB ever after
    naive = min(_extra_memory(lambda: torch.softmax(q @ k.mT * 64**-0.5, -1) @ v) for _ in range(2))
    assert naive > 250e6
    assert any(_extra_memory(lambda: attention(q, k, v, backend="reference")) < naive / 8 for _ in range(5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_repeat_bit_for_bit(dtype: str) -> None:
    case = Case(batch=2, heads=4, kv_heads=1, seq_q=70, seq_k=70, dtype=dtype, causal=True, bias=(1, 4, 1, 70), sinks=True)
    inputs = build(case)
    one, two = (run(case, inputs, "reference", deterministic=True) for _ in range(2))
    for name in one:
        assert torch.equal(one[name], two[name])
