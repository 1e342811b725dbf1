"""Reductions: what a shuffle costs, how a warp and a block agree on a maximum or a sum, and how wide loads should be.

Clocks are the SM's own (clock64), read before and after a chain that nothing can shorten.
"""
import numpy as np

from onchip.lab.bench import Bench
from onchip.lab.compiler import source
from onchip.lab.experiment import Experiment, Prediction, Sizes, about, at_least, between
from onchip.roofline.hardware import GPU

# Latencies in clocks. SHARED: A100 and H100 (arXiv 2402.13499, table of memory latencies); ADD: Volta on (arXiv 1804.06826). AFTER: an
# addition or a maximum that waits for a shuffle: its own 4 and up to 2 until the scoreboard lets it go; on an H200 29.1 clocks a step, less
# 24.1 for the shuffle, leave 5.1 for either. SHUFFLE is what the planner's CHAIN counts two of; EXP2 and BARRIER (with the store before
# it) are estimates that the experiments put to the test.
SHUFFLE, SHARED, ADD, AFTER = (20, 25), 29, 4, (4, 6)
EXP2, BARRIER = 18, 20

CHAINS, STEPS, THREADS = 8, 160, 1024  # kernels/shuffle.cu: chains a thread in flight, exchanges of each; threads of a full SM's block
OPS, ROUNDS = {"max": 0, "sum": 1, "pair": 2}, 16  # kernels/butterfly.cu
WAYS, REDUCE_ROUNDS = {"serial": 0, "tree": 1, "warp": 2}, 8  # kernels/reduce.cu
WALK_GRID, WALK_BLOCK = 1024, 256


def _clocks(pairs: np.ndarray) -> float:
    """From the first warp's start to the last one's end; `pairs` (start, end) of each."""
    starts, ends = pairs.reshape(-1, 2).T
    return float(ends.max() - starts.min())


def shuffles_per_clock(gpu: GPU) -> float:
    """Warp-wide shuffles an SM can start a clock: 32 lanes × 4 bytes through the shared-memory pipe."""
    return gpu.smem_bytes_per_clock_sm / (gpu.warp * 4)


def _predict_shuffle(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    return (
        Prediction("shuffle.latency", "a dependent shuffle", between(*SHUFFLE), "clocks", "planner.CHAIN: two shuffles a key tile"),
        Prediction("shuffle.rate", "independent shuffles an SM", about(shuffles_per_clock(gpu), 0.1), "a clock",
                   "hardware.smem_bytes_per_clock_sm / 128 B"))


def _measure_shuffle(bench: Bench) -> None:
    card = bench.card
    for chains, threads in ((1, 32), (CHAINS, THREADS)):
        kernel = card.kernel(source("shuffle", CHAINS=chains), "shuffle")
        out, clocks = card.empty((threads, chains), np.float32), card.empty((threads // 32, 2), np.int64)
        card.launch(kernel, (1,), (threads,), out, clocks)
        # every bit of the lane number is exchanged an even number of times, so each value comes home
        bench.equal("shuffle", card.numpy(out), np.arange(threads * chains, dtype=float).reshape(threads, chains), 0)
        card.launch(kernel, (1,), (threads,), out, clocks)  # again, the instructions now in the cache
        spent = _clocks(card.numpy(clocks))
        if chains == 1:
            bench.found["shuffle.latency"] = spent / STEPS
        else:
            bench.found["shuffle.rate"] = threads // 32 * chains * STEPS / spent


def _predict_butterfly(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    fast, slow = (5 * (shuffle + after) for shuffle, after in zip(SHUFFLE, AFTER, strict=True))
    exps = 1 + (3 * ADD + EXP2) / (fast / 5)  # m − m_new and its scaling, 2^x, an FMA behind it
    return (
        Prediction("butterfly.max32", "maximum over 32 lanes", between(fast, slow), "clocks", "5 · (shuffle + max)"),
        Prediction("butterfly.sum32", "sum over 32 lanes", between(fast + ADD, slow + ADD), "clocks",
                   "5 · (shuffle + add), and the product that makes it a mean"),
        Prediction("butterfly.quad", "a row in 4 lanes over a row in 32", about(2 / 5, 0.15), "", "two steps of five"),
        Prediction("butterfly.pair", "(m, l) over m alone", between(1, exps), "",
                   "the second shuffle hides behind the first; the exponentials do not"))


def _measure_butterfly(bench: Bench) -> None:
    card = bench.card
    x = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    given, clocks = card.array(x), card.empty((1,), np.int64)
    for lanes in (32, 4):
        groups = x.astype(float).reshape(-1, lanes)
        truths = {"max": groups.max(1), "sum": groups.mean(1), "pair": np.log(np.exp(groups).mean(1))}
        for name, op in OPS.items():
            kernel, out = card.kernel(source("butterfly", OP=op, LANES=lanes), "butterfly"), card.empty((32,), np.float32)
            for _ in range(2):
                card.launch(kernel, (1,), (32,), given, out, clocks)
            # ROUNDS · log2(lanes) fp32 roundings; ex2.approx is good to 2⁻²²
            bench.equal(f"butterfly {name}", card.numpy(out), np.repeat(truths[name], lanes), 5 * ROUNDS * 2.0**-22)
            bench.found[f"butterfly.{name}{lanes}"] = float(card.numpy(clocks)[0]) / ROUNDS
    bench.ratio("butterfly.quad", "butterfly.max4", "butterfly.max32")
    bench.ratio("butterfly.pair", "butterfly.pair32", "butterfly.max32")


def _predict_reduce(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shuffle = sum(SHUFFLE) / 2
    barriers = 2 * BARRIER  # every way ends in one; a second follows the first store
    serial = SHARED + 256 * ADD + barriers
    tree = 8 * (SHARED + ADD + BARRIER) + SHARED + barriers
    warp = 8 * (shuffle + ADD) + SHARED + barriers
    return (
        Prediction("reduce.serial_over_warp", "one thread adds 256 values, over shuffles", about(serial / warp, 0.4), "",
                   f"{serial:.0f} over {warp:.0f} clocks of latency"),
        Prediction("reduce.tree_over_warp", "tree in shared memory, over shuffles", about(tree / warp, 0.4), "",
                   f"{tree:.0f} over {warp:.0f} clocks of latency"))


def _measure_reduce(bench: Bench) -> None:
    card = bench.card
    x = np.random.default_rng(0).integers(-50, 50, 256).astype(np.float32)  # whole numbers: their sums are exact
    given, clocks = card.array(x), card.empty((1,), np.int64)
    for name, how in WAYS.items():
        kernel, out = card.kernel(source("reduce", HOW=how), "reduce"), card.empty((1,), np.float32)
        for _ in range(2):
            card.launch(kernel, (1,), (256,), given, out, clocks)
        bench.equal(f"reduce, {name}", card.numpy(out)[0], x.sum(dtype=float), 0)
        bench.found[f"reduce.{name}"] = float(card.numpy(clocks)[0]) / REDUCE_ROUNDS
    for name in ("serial", "tree"):
        bench.ratio(f"reduce.{name}_over_warp", f"reduce.{name}", "reduce.warp")


def walk_grid(floats: int) -> tuple[int, int]:
    """Blocks and threads that share out `floats` evenly, 16 bytes × 4 a thread at a time."""
    return min(WALK_GRID, floats // (WALK_BLOCK * 16)), WALK_BLOCK


def _predict_loads(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    nbytes = 4 * sizes.floats
    return (
        Prediction("loads.wide.seconds", "16-byte loads, at DRAM's roof", about(nbytes / gpu.dram_rate, 0.25), "s", "bytes / dram_rate"),
        Prediction("loads.gain", "4-byte loads are no faster", at_least(0.98), "", "four times the instructions, the same bytes"),
        Prediction("loads.wide.dram_read", "DRAM bytes read", about(nbytes, 0.02), "B", "each byte once"))


def _measure_loads(bench: Bench) -> None:
    card, n = bench.card, bench.sizes.floats
    x = np.random.default_rng(0).integers(0, 4, n, np.int8).astype(np.float32)
    given = card.array(x)
    blocks, threads = walk_grid(n)
    for name, width in (("wide", 4), ("narrow", 1)):
        kernel, out = card.kernel(source("walk", WIDTH=width), "walk"), card.empty((blocks * threads,), np.float32)

        def call(kernel: object = kernel, out: object = out) -> None:
            card.launch(kernel, (blocks,), (threads,), given, out, np.int64(n), 1)

        call()
        bench.equal(f"walk, {name}", card.numpy(out).sum(dtype=float), x.sum(dtype=float), 0)
        bench.measure(f"loads.{name}", call)
    bench.ratio("loads.gain", "loads.narrow.seconds", "loads.wide.seconds")


EXPERIMENTS = (
    Experiment("shuffle", "A warp shuffle does not take one clock: one a clock is an SM's throughput, its latency is twenty or more.",
               (source("shuffle", CHAINS=1), source("shuffle", CHAINS=CHAINS)), _predict_shuffle, _measure_shuffle),
    Experiment("butterfly", "A five-step butterfly takes over 100 clocks; a row that lies in four lanes, as mma leaves it, needs two.",
               tuple(source("butterfly", OP=op, LANES=lanes) for lanes in (32, 4) for op in OPS.values()),
               _predict_butterfly, _measure_butterfly),
    Experiment("block-reduce", "Shuffles beat a tree in shared memory, and both beat one thread: barriers and round trips are the cost.",
               tuple(source("reduce", HOW=how) for how in WAYS.values()), _predict_reduce, _measure_reduce),
    Experiment("loads", "16-byte loads reach the DRAM roof with a quarter of the instructions.",
               (source("walk", WIDTH=4), source("walk", WIDTH=1)), _predict_loads, _measure_loads),
)
