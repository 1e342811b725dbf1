"""The interpreted Triton kernels across tile edges: small tiles, so that masked, whole and empty blocks all occur, against float64."""
import itertools

import pytest
import torch
import triton
import triton.language as tl

from onchip.attention.problem import Spec
from onchip.attention.triton import backward, forward, launch, tiles
from onchip.attention.triton.common import segment, statistics
from onchip.testing.attention import Case, Target, build, check, run

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
    Case(lengths=((20, 40), (0, 5), (33, 33)), causal=True), Case(lengths=((13, 40), (9, 0), (33, 33)), sinks=True)])
def test_tile_edges(case: Case) -> None:
    check(case, TRITON)


@pytest.mark.parametrize("case", [
    Case(seq_q=40, seq_k=70, dtype="float16"), Case(seq_q=40, seq_k=70, causal=True, dtype="bfloat16"),
    Case(seq_q=40, seq_k=70, dtype="float16", dim=72, dim_v=80),  # whose last tile of keys ends past the tensor
    # whose heads or sequences do not all have a multiple of four rows
    Case(batch=2, heads=4, seq_q=41, seq_k=70, dtype="float16"), Case(batch=2, seq_q=70, seq_k=70, causal=True, dtype="bfloat16"),
    Case(lengths=((40, 70), (9, 40), (33, 65)), dtype="bfloat16"),
    Case(lengths=((41, 70), (9, 40), (33, 65)), causal=True, sinks=True, dtype="float16")])
def test_whole_tiles_through_descriptors(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    made = []
    monkeypatch.setattr(tiles, "capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "TMA_PAIRS", 0)
    original = launch.TensorDescriptor
    monkeypatch.setattr(launch, "TensorDescriptor", lambda *args: made.append(args) or original(*args))
    check(case, TRITON)
    runs = 2 if TRITON.device == "cuda" else 1  # `check` runs a GPU twice
    assert len(made) == 8 * runs  # K and V forward; Q, dO and two statistics for dK, dV; K and V for dQ


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, of the sequence that is nothing else
@pytest.mark.parametrize(("case", "which", "hidden"), [  # of 72 dims: up to 64 the forward's masked tiles come by pointers
    (Case(seq_q=20, seq_k=70, causal="top-left", dtype="float16", dim=72, dim_v=72), ("k", "v"), slice(20, None)),
    (Case(seq_q=20, seq_k=70, causal="top-left", window=(3, 4), dtype="bfloat16", dim=72, dim_v=72), ("k", "v"), slice(24, None)),
    (Case(seq_q=70, seq_k=20, causal=True, dtype="bfloat16", dim=72, dim_v=72), ("q", "dout"), slice(0, 50)),
    (Case(lengths=((40, 70), (24, 34)), dtype="float16", dim=72, dim_v=72), ("k", "v"), slice(70, None)),
    (Case(lengths=((40, 70), (24, 34)), causal=True, dtype="bfloat16", dim=40, dim_v=40), ("q", "dout"), slice(40, None))])
def test_what_descriptors_bring_of_hidden_rows_reaches_no_result(monkeypatch: pytest.MonkeyPatch, case: Case, which: tuple[str, ...],
                                                                 hidden: slice) -> None:
    """They lie inside the tensor, in tiles that are read; those of a second sequence are its own."""
    monkeypatch.setattr(tiles, "capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "TMA_PAIRS", 0)
    inputs, answers = build(case, TRITON.device), []
    for filling in (0.0, torch.nan):
        for name in which:
            rows = getattr(inputs, name).data
            (rows if case.lengths else rows.transpose(1, 2)[0])[hidden] = filling
        got = run(case, inputs, TRITON.backend)
        if case.lengths:  # the first sequence's
            got = {name: x[:, :40] if name == "lse" else x[: 70 if name in ("dk", "dv") else 40] for name, x in got.items()}
        answers.append(got)
    for name, right in answers[0].items():
        assert right.nan_to_num(neginf=0.0).abs().sum() > 0
        assert torch.equal(answers[1][name], right), name


@pytest.mark.parametrize(("budget", "level"), [(227, 0), (200, 1), (163, 1), (99, 2), (64, 3), (48, 3)])
def test_a_card_takes_the_largest_class_it_holds(monkeypatch: pytest.MonkeyPatch, budget: int, level: int) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tiles, "shared_memory", lambda _: budget * tiles.KIB)
    for kernel, table in tiles.TABLE.items():
        for (size, dim), row in table.items():
            dtype = torch.bfloat16 if size == 2 else torch.float32
            assert tiles.choose(kernel, torch.device("cpu"), dtype, dim, False) == row[level]
            assert tiles.choose(kernel, torch.device("cpu"), dtype, dim, True) == row[min(level + 1, 3)]


def test_calls_with_descriptors_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kernel, rows in tiles.DESCRIBED.items():
        for key, tile in rows.items():
            usual = tiles.TABLE[kernel][key]
            assert tile not in usual, "a row that changes nothing"
            assert tiles.pick(kernel, 227 * tiles.KIB, *key, extra=False, described=True) == tile
            assert tiles.pick(kernel, 227 * tiles.KIB, *key, extra=False, described=False) == usual[0]
            assert tiles.pick(kernel, 227 * tiles.KIB, *key, extra=True, described=True) == usual[1]
            assert tiles.pick(kernel, 99 * tiles.KIB, *key, extra=False, described=True) == usual[2]  # a Blackwell of 99 KiB


@pytest.mark.parametrize(("spoil", "described"), [
    ("nothing", True), ("float32", False), ("a stride of 0", False), ("an odd address", False), ("odd rows", True), ("Ampere", False)])
def test_a_call_counts_as_described_when_all_it_reads_is(monkeypatch: pytest.MonkeyPatch, spoil: str, described: bool) -> None:
    asked = []
    monkeypatch.setattr(tiles, "choose", lambda *args: asked.append(args[-1]) or tiles.Tile(16, 32, 4, 2))
    monkeypatch.setattr(tiles, "capability", lambda _: (8, 0) if spoil == "Ampere" else (9, 0))
    monkeypatch.setattr(launch, "TMA_PAIRS", 0)
    monkeypatch.setattr(launch, "launch", lambda *_: None)
    rows = 63 if spoil == "odd rows" else 64
    q, k, v, dout = (torch.zeros(2, 2, rows, 64, dtype=torch.float32 if spoil == "float32" else torch.bfloat16) for _ in range(4))
    if spoil == "a stride of 0":
        k, dout = k[:1].expand_as(k), dout[:1].expand_as(dout)
    if spoil == "an odd address":
        k, dout = (torch.zeros(2 * 2 * 64 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 2, 64, 64) for _ in range(2))
    spec = Spec(0, -1, -1, 0.125, 0.0, 0.0, rows, rows, True, False)
    forward.forward(q, k, v, *[None] * 7, spec)
    backward.backward(dout, None, q, k, v, q, torch.zeros(2, 2, rows), *[None] * 7, spec, (True, True, True, False, False))
    assert asked == [described] * 3  # forward; dK and dV; dQ


@triton.jit
def starts_kernel(out, cu_seqlens, heads, length, pitch):
    """out (B, H) = where each sequence's row statistics begin."""
    b, h = tl.program_id(0), tl.program_id(1)
    begin, _ = segment(cu_seqlens, b, length)
    tl.store(out + b * heads + h, statistics(cu_seqlens, b, h, heads, pitch, begin, 0))


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1, 1, 1, 1), (4, 8, 3, 0, 0, 6, 16), (0, 7, 2, 0)])
@pytest.mark.parametrize("packed", [True, False])
def test_row_statistics_lie_apart_and_start_at_16_bytes(lengths: tuple[int, ...], packed: bool) -> None:
    """Within the room that `backward` makes for them."""
    heads, spec = 3, Spec(0, -1, -1, 0.125, 0.0, 0.0, max(lengths), max(lengths), True, False)
    lengths = lengths if packed else (max(lengths),) * len(lengths)
    shape = (sum(lengths), heads, 8) if packed else (len(lengths), heads, max(lengths), 8)
    cu = torch.tensor([0, *lengths], device=TRITON.device).cumsum(0).int() if packed else None
    q = torch.empty(shape, device=TRITON.device)
    numbers = launch.Layout(q, q, q, None, None, None, cu, spec, {}).numbers
    out = torch.full((len(lengths), heads), -1, dtype=torch.int64, device=TRITON.device)
    starts_kernel[tuple(out.shape)](out, cu, heads, numbers["len_q"], numbers["pitch"])
    runs = sorted((start, start + n) for starts, n in zip(out.tolist(), lengths, strict=True) for start in starts)
    assert all(start % 4 == 0 for start, _ in runs)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(runs))
    assert runs[-1][1] <= (1 if packed else len(lengths)) * heads * numbers["pitch"]
