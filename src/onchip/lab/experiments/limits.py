"""Limits: a tile too large to launch, and an exponential too large for its format."""
import ml_dtypes
import numpy as np

from onchip.lab.bench import Bench
from onchip.lab.card import LaunchError
from onchip.lab.compiler import source
from onchip.lab.experiment import Experiment, Prediction, Sizes, at_most, exactly
from onchip.roofline.hardware import GPU
from onchip.roofline.tiles import Footprint, TileConfig, footprint, launchable, needs_opt_in, resident

OVERSIZED = source("oversized")
THREADS, REGISTERS = 256, 16  # of kernels/oversized.cu; it uses fewer registers than any limit notices
# (Br, Bc, stages) at d = 128 in fp16: 48 KiB needs no opt-in; 192 KiB launches on Hopper and not on an A100; 320 KiB nowhere
TILES = {"64x64": (64, 64, 1), "128x128": (128, 128, 1), "256x256": (256, 256, 1), "256x256 twice": (256, 256, 2)}
FORMATS = {"fp16": (0, np.dtype(np.float16)), "bf16": (1, np.dtype(ml_dtypes.bfloat16)), "fp32": (2, np.dtype(np.float32))}
STEP, POINTS = 2.0**-8, 24576  # the exponents that are tried: 0 … 96


def tile(name: str) -> Footprint:
    """What a block of that tile takes."""
    br, bc, stages = TILES[name]
    return footprint(TileConfig(br, bc, stages=stages, warps=THREADS // 32), "float16", 128)


def _predict_oversized(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    found = []
    for name in TILES:
        taken = tile(name)
        reason = launchable(taken, gpu)
        blocks = 0 if reason else resident(THREADS, REGISTERS, taken.smem, gpu).blocks
        what = f"{name}, {taken.smem // 1024} KiB"
        found += [
            Prediction(f"oversized.{name}.launches", f"{what}: launches after the opt-in", exactly(reason is None), "yes/no",
                       "tiles.launchable"),
            Prediction(f"oversized.{name}.blocks", f"{what}: blocks an SM", exactly(blocks), "", "tiles.resident"),
            Prediction(f"oversized.{name}.without", f"{what}: launches without it", exactly(not needs_opt_in(taken, gpu)), "yes/no",
                       "tiles.needs_opt_in")]
    return tuple(found)


def _measure_oversized(bench: Bench) -> None:
    card = bench.card
    kernel = card.kernel(OVERSIZED, "oversized")

    def launches(nbytes: int, opt_in: bool) -> bool:
        out, words = card.empty((4,), np.int32), nbytes // 4
        try:
            if opt_in:
                card.allow_shared(kernel, nbytes)
            card.launch(kernel, (4,), (THREADS,), out, words, shared=nbytes)
            card.wait()
        except LaunchError:
            return False
        bench.equal("oversized", card.numpy(out), np.full(4, float(words)), 0)
        return True

    if bench.counting:
        return
    for name in TILES:
        nbytes = tile(name).smem
        bench.found[f"oversized.{name}.without"] = float(launches(nbytes, False))  # before a larger tile raises the limit
    for name in TILES:
        nbytes = tile(name).smem
        works = launches(nbytes, True)
        bench.found[f"oversized.{name}.launches"] = float(works)
        bench.found[f"oversized.{name}.blocks"] = float(card.blocks_per_sm(kernel, THREADS, nbytes)) if works else 0.0


def overflow_at(dtype: np.dtype) -> float:
    """The x beyond which eˣ rounds to infinity: ln of the largest finite value and half a step more."""
    info = ml_dtypes.finfo(dtype)
    return float(np.log(float(info.max) * (1 + float(info.eps) / 4)))


def _predict_overflow(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    found = []
    for name, (_, dtype) in FORMATS.items():
        first = np.ceil(overflow_at(dtype) / STEP) * STEP
        found += [
            Prediction(f"overflow.{name}.first", f"{name}: first x in steps of 1/{int(1 / STEP)} whose eˣ is infinite", exactly(first), "",
                       "ln(largest value)"),
            Prediction(f"overflow.{name}.nan", f"{name}: NaN in a softmax without the maximum", exactly(1), "yes/no", "∞ / ∞"),
            Prediction(f"overflow.{name}.error", f"{name}: error with it", at_most(float(ml_dtypes.finfo(dtype).eps) + 2.0**-20), "",
                       "one rounding of p each in the sum and in y")]
    return tuple(found)


def _measure_overflow(bench: Bench) -> None:
    card, n = bench.card, 1024
    exponents = np.arange(POINTS, dtype=np.float32) * np.float32(STEP)
    row = np.random.default_rng(0).uniform(80, 95, (4, n)).astype(np.float32)  # beyond every format's limit
    shifted = row.astype(float) - row.max(1, keepdims=True)
    truth = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    for name, (number, dtype) in FORMATS.items():
        with_max, without = (source("overflow", FORMAT=number, MAX=use) for use in (1, 0))
        powers, results = card.empty((POINTS,), np.float32), {}
        card.launch(card.kernel(without, "powers"), (POINTS // 256,), (256,), card.array(exponents), powers, POINTS)
        values = card.numpy(powers)
        finite = np.isfinite(values)
        # Below the overflow every power must be right to the rounding of its format and to that of the exponent, up to 139, in fp32
        rounding = float(ml_dtypes.finfo(dtype).eps)
        bench.equal(f"powers, {name}", values[finite], np.exp(exponents[finite].astype(float)), rounding + 2.0**-15)
        bench.found[f"overflow.{name}.first"] = float(exponents[~finite][0]) if not finite.all() else float("inf")
        for use, made in ((1, with_max), (0, without)):
            out = card.empty(row.shape, np.float32)
            card.launch(card.kernel(made, "softmax"), (len(row),), (32,), card.array(row), out, n)
            results[use] = card.numpy(out)
        bench.found[f"overflow.{name}.nan"] = float(np.isnan(results[0]).any())
        bench.found[f"overflow.{name}.error"] = float(np.linalg.norm(results[1] - truth) / np.linalg.norm(truth))


EXPERIMENTS = (
    Experiment("oversized", "A tile beyond the limit of shared memory does not run slowly: it does not launch, and the planner says so.",
               (OVERSIZED,), _predict_oversized, _measure_oversized, pitfall="oversized tile"),
    Experiment("overflow", "eˣ leaves fp16 at x = 11.09, bf16 and fp32 at 88.7: without the maximum a softmax is NaN, with it right.",
               tuple(source("overflow", FORMAT=number, MAX=use) for number, _ in FORMATS.values() for use in (1, 0)),
               _predict_overflow, _measure_overflow, pitfall="exp without the maximum"),
)
