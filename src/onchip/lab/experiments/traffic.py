"""Bytes that need not move: P written out "for debugging", kernels just for the scale and the mask; and a timing loop inside L2."""
import math
from functools import partial

import numpy as np

from onchip.lab.bench import TILE, Bench
from onchip.lab.compiler import source
from onchip.lab.experiment import Experiment, Interval, Prediction, Sizes, about, at_least, at_most
from onchip.lab.experiments.attention import DTYPE, FORMATS, NAIVE, PADDED, Fused, bounds, fa2_ledger, ratio, square
from onchip.lab.experiments.reductions import walk_grid
from onchip.roofline.attention import Sizes as Bytes
from onchip.roofline.attention import naive
from onchip.roofline.dram import stays
from onchip.roofline.hardware import GPU
from onchip.roofline.roofs import predict

WRITING = source("attention_fa2", WRITE_P=1)
WIDE = source("walk", WIDTH=4)
ROUNDS = 64  # of the timing loop
BATCH = 4  # kernels/attention_naive.cu: vectors of 8 scores a thread


def _predict_debug(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shape = square(sizes.scores)
    nbytes, base = Bytes(shape, FORMATS), bounds(fa2_ledger(shape), gpu)
    written, staged = nbytes.s / gpu.dram_rate, 2 * nbytes.s / gpu.smem_rate  # P crosses shared memory on its way: stored and loaded
    return (
        Prediction("debug.writing.dram_written", "with P: DRAM bytes written", Interval(nbytes.s + nbytes.o - (gpu.l2_bytes or 0),
                                                                                     1.05 * (nbytes.s + nbytes.o)), "B",
                   "N²·e + Nd·e a head, less what L2 still holds"),
        Prediction("debug.plain.dram_written", "without: DRAM bytes written", at_most(1.05 * nbytes.o), "B", "Nd·e a head"),
        Prediction("debug.cost", "with P over without", ratio((max(base[0], written), base[1] + staged + written), base), "",
                   f"P alone takes {written * 1e6:.3g} µs of DRAM and {staged * 1e6:.2g} µs of shared memory: beside the rest … after it"))


def _measure_debug(bench: Bench) -> None:
    fused = Fused(bench, bench.sizes.scores)
    heads, n = bench.sizes.scores
    p = bench.card.empty((heads, n, n), np.float16)
    fused.run("debug.writing", WRITING, p)
    scores = fused.case.q[-1].astype(float) @ fused.case.k[-1].astype(float).T * fused.case.scale
    # in its last tile a row's running maximum is final: P there is e^(s − m), rounded once
    last = np.exp(scores[:, -TILE.bc:] - scores.max(1, keepdims=True))
    bench.equal("P written out, last tile", bench.card.numpy(p)[-1, :, -TILE.bc:], last, 2.0**-10)
    fused.run("debug.plain", PADDED)
    bench.ratio("debug.cost", "debug.writing.seconds", "debug.plain.seconds")


def _predict_separate(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    pipeline = naive(square(sizes.scores), formats=FORMATS, scale_kernel=True, mask_kernel=True)
    seconds = {k.name: t.time for k, t in zip(pipeline.kernels, predict(pipeline, gpu, DTYPE).kernels, strict=True)}
    scale, mask, softmax = (seconds[name] for name in ("S · scale", "mask S", "P = softmax(S)"))
    moved = pipeline.kernels[1].unique
    return (
        Prediction("separate.scale.seconds", "scale kernel", about(scale, 0.25), "s", "2N²·e a head over dram_rate"),
        Prediction("separate.mask.seconds", "mask kernel", about(mask, 0.25), "s", "2N²·e a head over dram_rate"),
        Prediction("separate.scale.dram_bytes", "scale kernel: DRAM bytes", Interval(moved - (gpu.l2_bytes or 0), 1.05 * moved), "B",
                   "2N²·e a head, less what L2 still holds"),
        Prediction("separate.cost", "scale + mask + softmax over softmax alone", about((scale + mask + softmax) / softmax, 0.25), "",
                   "three kernels of equal traffic over one"))


def _measure_separate(bench: Bench) -> None:
    card, (heads, n) = bench.card, bench.sizes.scores
    given = np.random.default_rng(0).standard_normal((heads, n, n), np.float32).astype(np.float16)
    rows, scale = given[-1].astype(float), 0.125  # a power of two: the scaled halves are exact
    causal = np.tril(np.ones((n, n), bool))
    s, p = card.array(given), card.empty(given.shape, np.float16)
    kernels = {name: card.kernel(NAIVE, name) for name in ("scale_scores", "mask_scores", "softmax_rows")}
    vectors = heads * n * n // 8
    blocks = -(-vectors // (256 * BATCH))
    calls = {
        "scale": partial(card.launch, kernels["scale_scores"], (blocks,), (256,), s, np.int64(vectors), scale),
        "mask": partial(card.launch, kernels["mask_scores"], (n // BATCH, heads), (256,), s, n),
        "softmax": partial(card.launch, kernels["softmax_rows"], (heads * n,), (256,), s, p, n),
    }
    for call in calls.values():
        call()
    # timed, the scale flips signs: any other would drive S to zero or infinity, launch by launch
    timed = {**calls, "scale": partial(card.launch, kernels["scale_scores"], (blocks,), (256,), s, np.int64(vectors), -1.0)}
    exp = np.where(causal, np.exp(rows * scale - np.where(causal, rows * scale, -np.inf).max(1, keepdims=True)), 0)
    truth = exp / exp.sum(1, keepdims=True)
    # one rounding of P to fp16 is 2⁻¹¹ at most, and halves below 2⁻¹⁴ lose more of themselves: twice that of the norm
    bench.equal("scale, mask, softmax", card.numpy(p)[-1], truth, 2.0**-10)
    for name, call in timed.items():
        bench.measure(f"separate.{name}", call)
    found = bench.found
    if "separate.softmax.seconds" in found:
        found["separate.all.seconds"] = sum(found[f"separate.{name}.seconds"] for name in calls)
        bench.ratio("separate.cost", "separate.all.seconds", "separate.softmax.seconds")


def cached_floats(gpu: GPU, sizes: Sizes) -> int:
    """A power of two of floats that stays in L2 (in half of it, by `roofline.dram`), at most an eighth of the array that does not."""
    n = sizes.floats // 8
    while n > 1 << 12 and stays(4 * n, gpu.l2_bytes or 0) < 1:
        n //= 2
    return n


def _predict_loop(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    small, large = 4 * cached_floats(gpu, sizes), 4 * sizes.floats
    kept = min(1.0, (gpu.l2_bytes or 0) / large)  # of each walk but the first, L2 cannot hold more, whatever it chooses to keep
    fastest = gpu.dram_rate / (1 - kept) if kept < 1 else math.inf
    return (
        Prediction("loop.cached.rate", f"{small / 2**20:.3g} MiB read {ROUNDS} times: apparent bandwidth", at_least(gpu.dram_rate), "B/s",
                   "dram.stays: L2 answers, and memory could not"),
        Prediction("loop.large.rate", f"{large / 2**20:.3g} MiB read {ROUNDS} times", at_most(fastest), "B/s",
                   f"dram_rate / (1 − {kept:.3g}): memory answers, but for the share that L2 has room for"),
        Prediction("loop.cached.dram_read", "cached: DRAM bytes read", at_most(1.25 * small), "B", "the first round only"),
        Prediction("loop.large.dram_read", "large: DRAM bytes read",
                   Interval((1 - kept) * ROUNDS * large, 1.05 * ROUNDS * large), "B", "every round, but for what L2 has room for"))


def _measure_loop(bench: Bench) -> None:
    card, kernel = bench.card, bench.card.kernel(WIDE, "walk")
    for name, n in (("cached", cached_floats(bench.gpu, bench.sizes)), ("large", bench.sizes.floats)):
        x = np.random.default_rng(0).integers(0, 4, n, np.int8).astype(np.float32)
        blocks, threads = walk_grid(n)
        given, out = card.array(x), card.empty((blocks * threads,), np.float32)
        call = partial(card.launch, kernel, (blocks,), (threads,), given, out, np.int64(n), ROUNDS)
        call()
        bench.equal(f"walk, {name}", card.numpy(out).sum(dtype=float), ROUNDS * x.sum(dtype=float), 0)
        bench.measure(f"loop.{name}", call)
        if f"loop.{name}.seconds" in bench.found:
            bench.found[f"loop.{name}.rate"] = ROUNDS * 4 * n / bench.found[f"loop.{name}.seconds"]


EXPERIMENTS = (
    Experiment("debug-p", "Writing P out \"for debugging\" brings the N² bytes back that the fused kernel was written to avoid.",
               (WRITING, PADDED), _predict_debug, _measure_debug, pitfall="writing P to device memory"),
    Experiment("separate", "A kernel of its own for the scale, another for the mask: each moves as many bytes as the softmax.",
               (NAIVE,), _predict_separate, _measure_separate, pitfall="separate scale and mask kernels"),
    Experiment("timing", "A timing loop whose data fits in L2 reports a bandwidth the memory does not have.",
               (WIDE,), _predict_loop, _measure_loop, pitfall="a timing loop whose data fits in L2"),
)
