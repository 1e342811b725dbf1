"""The interpreted Triton kernels across tile edges: small tiles, so that masked, whole and empty blocks all occur, against float64."""
import pytest
import torch

from onchip.attention.triton import launch, tiles
from onchip.testing.attention import Case, Target, check

TRITON = Target("triton", "cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 × 32 tiles whatever the head dim."""
    monkeypatch.setattr(tiles, "choose", lambda *_: tiles.Tile(16, 32, 4, 2))


@pytest.mark.parametrize("case", [
    Case(seq_q=40, seq_k=70), Case(seq_q=40, seq_k=70, causal=True), Case(seq_q=40, seq_k=20, causal=True),
    Case(seq_q=33, seq_k=65, causal="top-left", dtype="bfloat16"), Case(seq_q=48, seq_k=64, window=(9, 5), dtype="float16"),
    Case(seq_q=33, seq_k=70, causal=True, mask=(1, 2, 33, 70), sinks=True),
    Case(heads=4, seq_q=17, seq_k=33, bias=(1, 1, 1, 33), softcap=2.0),
    Case(seq_q=17, seq_k=65, dropout_p=0.3, alibi=1, causal=True, dim=24, dim_v=40),
    Case(lengths=((20, 40), (0, 5), (33, 33)), causal=True)])
def test_tile_edges(case: Case) -> None:
    check(case, TRITON)


@pytest.mark.parametrize("causal", [False, True])
def test_whole_tiles_through_descriptors(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    made = []
    monkeypatch.setattr(tiles, "capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "TMA_PAIRS", 0)
    original = launch.TensorDescriptor
    monkeypatch.setattr(launch, "TensorDescriptor", lambda *args: made.append(args) or original(*args))
    check(Case(seq_q=40, seq_k=70, causal=causal), TRITON)
    runs = 2 if TRITON.device == "cuda" else 1  # `check` runs a GPU twice
    assert len(made) == 8 * runs  # K and V forward; Q, dO and two statistics for dK, dV; K and V for dQ


@pytest.mark.parametrize(("budget", "level"), [(227, 0), (200, 1), (163, 1), (99, 2), (64, 3), (48, 3)])
def test_a_card_takes_the_largest_class_it_holds(monkeypatch: pytest.MonkeyPatch, budget: int, level: int) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tiles, "shared_memory", lambda _: budget * tiles.KIB)
    for kernel, table in tiles.TABLE.items():
        for (size, dim), row in table.items():
            dtype = torch.bfloat16 if size == 2 else torch.float32
            assert tiles.choose(kernel, torch.device("cpu"), dtype, dim, False) == row[level]
            assert tiles.choose(kernel, torch.device("cpu"), dtype, dim, True) == row[min(level + 1, 3)]
