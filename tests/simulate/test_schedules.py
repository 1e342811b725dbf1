"""Every attention schedule: exact against float64, and to the byte what the ledger says. The last tests show that faults would be seen."""
import random

import numpy as np
import pytest

from onchip.roofline import attention as forward_ledger
from onchip.roofline import backward as backward_ledger
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.shape import AttentionShape, walk
from onchip.simulate import attention, backward, unfused
from onchip.simulate.arithmetic import Arithmetic
from onchip.simulate.formats import Precision
from onchip.simulate.meter import Chip
from onchip.simulate.problem import Problem
from onchip.simulate.run import Run, TileMask

# name → (execute(problem, tile, **), ledger(shape, tile, formats))
SCHEDULES = {
    "naive": (unfused.naive, forward_ledger.naive),
    "naive + scale + mask": (
        lambda p, t, **o: unfused.naive(p, t, scale_kernel=True, mask_kernel=True, **o),
        lambda s, t, f: forward_ledger.naive(s, t, f, scale_kernel=True, mask_kernel=True)),
    "naive, long rows": (
        lambda p, t, **o: unfused.naive(p, t, row_on_chip=False, **o), lambda s, t, f: forward_ledger.naive(s, t, f, row_on_chip=False)),
    "naive, textbook": (lambda p, t, **o: unfused.naive(p, **o), lambda s, t, f: forward_ledger.naive(s, None, f)),
    "tiled": (attention.tiled, forward_ledger.tiled),
    "online": (attention.online, forward_ledger.online),
    "fa1": (attention.fa1, forward_ledger.fa1),
    "fa2": (attention.fa2, forward_ledger.fa2),
    "fa2 without lse": (lambda p, t, **o: attention.fa2(p, t, lse=False, **o), lambda s, t, f: forward_ledger.fa2(s, t, f, lse=False)),
    "split-KV 3": (lambda p, t, **o: attention.split_kv(p, t, 3, **o), lambda s, t, f: forward_ledger.split_kv(s, t, 3, f)),
    "naive backward": (unfused.naive_backward, backward_ledger.naive_backward),
    "naive backward + scale + mask": (
        lambda p, t, **o: unfused.naive_backward(p, t, scale_kernel=True, mask_kernel=True, **o),
        lambda s, t, f: backward_ledger.naive_backward(s, t, f, scale_kernel=True, mask_kernel=True)),
    "fa2 backward": (backward.fa2_backward, backward_ledger.fa2_backward),
    "backward, dQ apart": (backward.apart_backward, backward_ledger.apart_backward),
}
FUSED = [name for name in SCHEDULES if "naive" not in name]
MASKS = [{}, {"causal": "bottom-right"}, {"causal": "top-left"}, {"window": (9, 3)}, {"window": (None, 0)}, {"window": (5, None)},
         {"causal": "bottom-right", "window": (7, 2)}, {"causal": "top-left", "window": (4, None)}]
FLOAT64 = Precision.uniform("float64")


def random_case(rng, largest=60):
    """A shape and a tile: cross-attention, ragged tiles, grouped heads, any mask, empty rows among them."""
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 1, 3])
    shape = AttentionShape(rng.randint(1, largest), rng.randint(1, largest), rng.choice([1, 8, 13]), rng.choice([1, 8, 24]),
                           batch=rng.choice([1, 2]), heads=kv_heads * group, kv_heads=kv_heads, **rng.choice(MASKS))
    return shape, Tile(rng.choice([1, 5, 8, 16, 64]), rng.choice([1, 4, 8, 16, 64]))


def assert_exact(result):
    assert result.errors
    for name, error in result.errors.items():
        assert min(error.relative, error.max_abs) <= 1e-12, (result.name, name, error)  # both NaN where one is


def assert_counts(result, pipeline):
    assert [k.name for k in result.kernels] == [k.name for k in pipeline.kernels]
    for counted, derived in zip(result.kernels, pipeline.kernels, strict=True):
        for tensor in {stream.tensor for stream in derived.streams} | set(counted.reads) | set(counted.writes):
            moved = counted.read(tensor), counted.written(tensor)
            assert moved == (derived.read(tensor), derived.written(tensor)), (counted.name, tensor)
    assert result.issued == pipeline.issued


@pytest.mark.parametrize("name", SCHEDULES)
def test_exact_in_float64(name):
    rng = random.Random(name)
    empty = 0
    for seed in range(14):  # 168 cases over the schedules
        shape, tile = random_case(rng)
        problem = Problem.random(shape, FLOAT64, seed, grad=True, scale=rng.choice([None, -1.5, 0.0]))
        result = SCHEDULES[name][0](problem, tile)
        assert_exact(result)
        assert result.executed == 1
        empty += any(shape.key_range(row)[0] >= shape.key_range(row)[1] for row in range(shape.seq_q))
    assert empty  # rows that see nothing were among the cases


@pytest.mark.parametrize("name", SCHEDULES)
def test_bytes_are_the_ledgers(name):
    execute, ledger = SCHEDULES[name]
    rng = random.Random(name)
    for _ in range(40):  # 480 cases over the schedules
        shape, tile = random_case(rng, 150)
        inputs, scores = rng.choice(["float32", "bfloat16", "e4m3"]), rng.choice(["float32", "float16"])
        assert_counts(execute(Problem(shape, Precision(inputs, scores)), tile), ledger(shape, tile, Formats(inputs, scores)))


@pytest.mark.parametrize("name", FUSED)
def test_tiles(name):
    rng = random.Random(name)
    for _ in range(10):
        shape, tile = random_case(rng)
        tiles, expected = SCHEDULES[name][0](Problem(shape), tile).tiles, walk(shape, tile.br, tile.bc)
        full = 0
        for i in range(0, shape.seq_q, tile.br):
            for j in range(0, shape.seq_k, tile.bc):
                ranges = [shape.key_range(row) for row in range(i, min(i + tile.br, shape.seq_q))]
                full += all(lo <= j and hi >= min(j + tile.bc, shape.seq_k) for lo, hi in ranges)
        visited, heads = expected.tiles, shape.query_heads * (2 if "apart" in name else 1)  # dK and dV walk the tiles, and dQ again
        assert (tiles["full"], tiles["masked"], tiles["skipped"]) == (
            heads * full, heads * (visited - full), heads * (expected.all_tiles - visited))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sample_counts_everything_and_executes_its_rows(name):
    shape, tile = AttentionShape(50, 41, 8, 8, batch=2, heads=4, kv_heads=2, causal="bottom-right"), Tile(16, 8)
    problem, execute = Problem.random(shape, FLOAT64, grad=True), SCHEDULES[name][0]
    whole, part, dry = (execute(problem, tile, sample=sample) for sample in (None, 5, 0))
    assert_exact(part)
    for other in (part, dry):
        assert [(k.reads, k.writes, k.tiles) for k in other.kernels] == [(k.reads, k.writes, k.tiles) for k in whole.kernels]
        assert (other.peak, other.memory) == (whole.peak, whole.memory)
    assert dry.tensors == {}
    assert dry.errors == {}
    row_tiles = 1 if "textbook" in name else 4
    assert part.executed == pytest.approx(5 / (8 * row_tiles), rel=0.4)  # the last tile of a head has 2 rows of 16
    executed = part.rows.reshape(2, 4, 50)
    for tensor in {"out", "dq"} & part.tensors.keys():
        assert (np.isfinite(part.tensors[tensor]).all(axis=3) == executed).all()
        np.testing.assert_array_equal(part.tensors[tensor][executed], whole.tensors[tensor][executed])


# --- number formats: what rounding one tensor costs, derived

PLAIN = AttentionShape.square(256, 32)


def rounding_rms(bits):
    """Relative rms error of rounding to `bits` mantissa bits, mantissas log-uniform in [1, 2): 2^−bits / √12 · √(3 / (8 ln 2))."""
    return 2.0**-bits / 12**0.5 * (3 / (8 * np.log(2))) ** 0.5


def rms(name, **precision):
    exact = dict.fromkeys(("inputs", "scores", "state", "accumulation"), "float64")
    return SCHEDULES[name][0](Problem.random(PLAIN, Precision(**exact | precision)), Tile(64, 64)).errors["out"].rms


@pytest.mark.parametrize(("fmt", "bits"), [("bfloat16", 7), ("float16", 10)])
def test_rounding_one_tensor(fmt, bits):
    one = rounding_rms(bits)
    for name in ("naive", "tiled", "online", "fa2", "split-KV 3"):
        assert rms(name, inputs=fmt) == pytest.approx(one, rel=0.05)  # O, on its way to memory
    # v is random: independent errors of the p's add up as the p's themselves do, so the relative rms of out is that of p
    for name in ("tiled", "online"):
        assert rms(name, scores=fmt) == pytest.approx(one, rel=0.06)
    # unnormalised, a row's largest p is exactly 1 when its tile is the one that holds the maximum
    assert 0.7 * one < rms("fa2", scores=fmt) < one
    # naive rounds S as well, and an absolute error of s is a relative one of p
    assert rms("naive", scores=fmt) > 1.5 * one
    # FlashAttention-1 rounds O at each of its four outer steps, each time less of it final
    assert one < rms("fa1", inputs=fmt) < 2 * one


def test_p_in_e4m3_must_not_be_normalised():
    # normalised, p is about 1/256: far below e4m3's smallest normal 2⁻⁶, where few bits are left
    assert rms("fa2", scores="e4m3") < rounding_rms(3) < rms("tiled", scores="e4m3") / 2


def test_state_and_accumulation_are_chosen_apart():
    for part in ("state", "accumulation"):
        errors = [rms("fa2", **{part: fmt}) for fmt in ("float64", "float32", "float16", "bfloat16")]
        assert errors[0] < 1e-15 < 1e-8 < errors[1] < 1e-6 < 1e-4 < errors[2] < errors[3] / 4 < 0.01


# --- the figures of the published ledger, counted at full size without arithmetic

@pytest.mark.parametrize(("name", "tile", "causal", "megabytes"), [
    ("fa1", (64, 64), None, 13179), ("fa1", (128, 128), None, 6602), ("fa2", (64, 64), None, 8607), ("fa2", (128, 64), None, 4312),
    ("fa2", (128, 128), None, 4312), ("fa2", (128, 64), "bottom-right", 2173), ("naive, textbook", (64, 64), None, 8623.5)])
def test_issued_bytes_of_one_head_at_32768(name, tile, causal, megabytes):
    result = SCHEDULES[name][0](Problem(AttentionShape.square(32768, 128, causal=causal), Precision("float16")), Tile(*tile))
    assert result.executed == 0
    assert round(result.issued / 1e6, 1 if megabytes % 1 else None) == megabytes
    if causal:
        assert round(100 * (1 - result.tiles["skipped"] / result.tiles.total()), 1) == 50.2


@pytest.mark.parametrize(("seq", "side", "percent"), [(1024, 64, 53.1), (4096, 64, 50.8), (1024, 128, 56.3)])
def test_share_of_tiles_executed_when_causal(seq, side, percent):
    tiles = attention.fa2(Problem(AttentionShape.square(seq, 128, causal="bottom-right")), Tile(side, side)).tiles
    assert 100 * (tiles["full"] + tiles["masked"]) / tiles.total() == pytest.approx(percent, abs=0.051)
    assert tiles["masked"] == seq // side  # the diagonal


# --- faults: each of these must make the checks above fail

def skip_a_tile(monkeypatch):
    visible = Run.visible_keys
    monkeypatch.setattr(Run, "visible_keys", lambda run, rows: visible(run, rows)[:-1])


def drop_the_rescale(monkeypatch):
    def online(math, s, m, l, o=None):
        math.maximum(s, m)
        p = math.exp(s, m)
        math.add_rows(p, l)
        return p

    monkeypatch.setattr(Arithmetic, "online", online)


def forget_the_mask(monkeypatch):
    classify = TileMask.__call__
    monkeypatch.setattr(TileMask, "__call__", lambda mask, rows, keys: (classify(mask, rows, keys)[0], None))


def load_twice(monkeypatch):
    load = Chip.load

    def twice(chip, name, head, rows, cols=None):
        load(chip, name, head, rows, cols)
        return load(chip, name, head, rows, cols)

    monkeypatch.setattr(Chip, "load", twice)


@pytest.mark.parametrize(("fault", "exact", "counts"), [
    (None, True, True), (skip_a_tile, False, False), (drop_the_rescale, False, True), (forget_the_mask, False, True),
    (load_twice, True, False)])
def test_faults_are_seen(monkeypatch, fault, exact, counts):
    shape, tile = AttentionShape.square(40, 8, causal="bottom-right"), Tile(16, 8)
    if fault:
        fault(monkeypatch)
    for passes, check in (
            (exact, lambda: assert_exact(attention.fa2(Problem.random(shape, FLOAT64), tile))),
            (counts, lambda: assert_counts(attention.fa2(Problem(shape), tile), forward_ledger.fa2(shape, tile)))):
        if passes:
            check()
        else:
            with pytest.raises(AssertionError):
                check()
