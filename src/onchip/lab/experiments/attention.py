"""Attention in CUDA C++, step by step: from the textbook's kernels to tensor cores, FA1's loop against FA2's, and what a layout, a second
buffer and a division cost.

A fused kernel's time lies between the highest of its roofs (all units busy at once) and the sum of those on the SM (each waits for the one
before): a ratio of two kernels between the ratios of the two.
"""
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from onchip.lab.bench import HEAD_DIM, TILE, Bench, Case
from onchip.lab.compiler import Source, source
from onchip.lab.experiment import Experiment, Interval, Prediction, Sizes, about, at_least, at_most, between
from onchip.lab.experiments.banks import requests as tile_requests
from onchip.roofline import attention as ledger
from onchip.roofline.attention import Formats
from onchip.roofline.banks import LINE, Layout, Request, request
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Kernel
from onchip.roofline.planner import CHAIN, HOPPER_MMA_SYNC, ON_SM, plan_tile
from onchip.roofline.roofs import kernel_time
from onchip.roofline.shape import AttentionShape, count_blocks
from onchip.roofline.tiles import TileConfig, footprint, occupancy
from onchip.simulate import attention as schedule
from onchip.simulate.problem import Result
from onchip.simulate.unfused import naive as naive_schedule

DTYPE, LOG2E = "float16", float(np.log2(np.e))
FORMATS = Formats(DTYPE, DTYPE)
PLAIN, PADDED, SWIZZLED = source("attention_fa2", PAD=0), source("attention_fa2"), source("attention_fa2", PAD=0, SWIZZLE=1)
BUFFERED, DIVIDING = source("attention_fa2", STAGES=2), source("attention_fa2", DIVIDE=1)
NAIVE, TILED, FA1 = source("attention_naive"), source("attention_tiled"), source("attention_fa1")
THREADS, WARPS = 128, 4
# What __launch_bounds__(128, 3) leaves a thread of attention_fa2.cu. It takes 140 to 159 on sm_90; the tile model's 104 hold neither
# the rows of Q that this kernel keeps nor K and V on their way to shared memory. So 3 blocks share an SM, not 4.
REGISTERS = 168


def config(stages: int = 1, pad: int = 8) -> TileConfig:
    """The tile of attention_fa2.cu as the planner takes it."""
    return TileConfig(TILE.br, TILE.bc, stages=stages, warps=WARPS, pad=pad)


def resident(gpu: GPU, stages: int = 1) -> int:
    """Its blocks an SM."""
    return occupancy(replace(footprint(config(stages), DTYPE, HEAD_DIM), registers=REGISTERS), gpu).blocks


def square(size: tuple[int, int]) -> AttentionShape:
    """(heads, N) with d = 64."""
    heads, n = size
    return AttentionShape.square(n, HEAD_DIM, heads=heads)


def fa2_ledger(shape: AttentionShape) -> Kernel:
    """What attention_fa2.cu moves and computes; it writes no lse."""
    return ledger.fa2(shape, TILE, FORMATS, lse=False).kernels[0]


def bounds(kernel: Kernel, gpu: GPU, *, wavefronts: float = 0, stages: int = 1) -> tuple[float, float]:
    """Seconds: all units at once, and those on the SM in turn. `wavefronts` of shared memory that the ledger does not count."""
    roofs = kernel_time(kernel, gpu, DTYPE, resident(gpu, stages)).seconds
    roofs["shared memory"] += wavefronts * LINE / gpu.smem_rate
    if gpu.capability == (9, 0):
        roofs["tensor cores"] /= HOPPER_MMA_SYNC
    in_turn = sum(seconds for roof, seconds in roofs.items() if roof in ON_SM)
    return max(roofs.values()), max(in_turn, *roofs.values())


def ratio(over: tuple[float, float], under: tuple[float, float]) -> Interval:
    """The ratio of two kernels bounded as `bounds` says."""
    return between(over[0] / under[0], over[1] / under[1])


class Counted(NamedTuple):
    """Wavefronts of shared memory, and those of them beyond the unavoidable ones."""

    wavefronts: int
    conflicts: int


class Fused:
    """attention_fa2.cu, and kernels that are called like it, on one case."""

    def __init__(self, bench: Bench, size: tuple[int, int]) -> None:
        self.bench, self.card, self.case = bench, bench.card, Case(*size)
        self.q, self.k, self.v = map(self.card.array, (self.case.q, self.case.k, self.case.v))
        self.base2 = self.case.scale * LOG2E  # exponentials are powers of two

    def run(self, key: str, made: Source, p: object = None) -> object:
        """Check the variant `made` against float64, then time or count it as `key`; the array of its output."""
        kernel, out = self.card.kernel(made, "fa2"), self.card.empty(self.case.q.shape, np.float16)
        p = self.card.empty((1,), np.float16) if p is None else p
        grid = (self.case.n // TILE.br, self.case.heads)
        self._measure(key, partial(self.card.launch, kernel, grid, (THREADS,), self.q, self.k, self.v, out, p, self.case.n, self.base2),
                      out, schedule.fa2)
        return out

    def run_fa1(self, key: str) -> None:
        """The same for attention_fa1.cu."""
        heads, n = self.case.heads, self.case.n
        kernel, out = self.card.kernel(FA1, "fa1"), self.card.empty(self.case.q.shape, np.float16)
        m, l = (self.card.empty((heads, n), np.float32) for _ in "ml")
        self._measure(key, partial(self.card.launch, kernel, (heads,), (THREADS,), self.q, self.k, self.v, out, m, l, n, self.base2),
                      out, schedule.fa1)

    def run_tiled(self, key: str) -> None:
        """The same for attention_tiled.cu."""
        kernel, out = self.card.kernel(TILED, "tiled"), self.card.empty(self.case.q.shape, np.float16)
        grid = (self.case.n // TILE.br, self.case.heads)
        self._measure(key, partial(self.card.launch, kernel, grid, (256,), self.q, self.k, self.v, out, self.case.n, self.base2), out,
                      schedule.fa2)

    def run_naive(self, key: str) -> None:
        """The same for the three kernels of attention_naive.cu, one after another."""
        card, heads, n = self.card, self.case.heads, self.case.n
        kernels = [card.kernel(NAIVE, name) for name in ("scores", "softmax_rows", "out")]
        s, p = (card.empty((heads, n, n), np.float16) for _ in "sp")
        out = card.empty(self.case.q.shape, np.float16)

        def call() -> None:
            card.launch(kernels[0], (n // 16, n // 16, heads), (16, 16), self.q, self.k, s, n, self.case.scale)
            card.launch(kernels[1], (heads * n,), (256,), s, p, n)
            card.launch(kernels[2], (HEAD_DIM // 16, n // 16, heads), (16, 16), p, self.v, out, n)

        self._measure(key, call, out, naive_schedule)

    def _measure(self, key: str, call: Callable[[], None], out: object, check: Callable[..., Result]) -> None:
        call()
        self.case.check(key, self.card.numpy(out), check)
        self.bench.measure(key, call)


def _predict_steps(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shape = square(sizes.scores)
    naive = ledger.naive(shape, formats=FORMATS)
    cores = ledger.useful_flops(shape) / (2 * gpu.vector_rate)  # an FMA is two FLOPs
    return (
        Prediction("steps.tiled.seconds", "on the CUDA cores, no faster than their fp32 rate", at_least(cores), "s",
                   "4N²d / (2 · vector_rate)"),
        Prediction("steps.fa2.seconds", "on the tensor cores, faster than the CUDA cores could ever be", at_most(cores), "s",
                   "4N²d / (2 · vector_rate)"),
        Prediction("steps.kept", "naive over tiled", at_least(1), "", "S and P stay on the chip"),
        Prediction("steps.naive.dram_bytes", "naive: DRAM bytes", Interval(naive.textbook - 3 * (gpu.l2_bytes or 0), 1.1 * naive.textbook),
                   "B", "attention.naive: 8Nd + 8N² a head, less what L2 still holds after each kernel"),
        Prediction("steps.fa2.dram_bytes", "FA2: DRAM bytes", at_most(1.25 * naive.compulsory), "B", "compulsory: 8Nd a head"))


def _measure_steps(bench: Bench) -> None:
    fused = Fused(bench, bench.sizes.scores)
    fused.run_naive("steps.naive")
    fused.run_tiled("steps.tiled")
    fused.run("steps.fa2", PADDED)
    bench.ratio("steps.kept", "steps.naive.seconds", "steps.tiled.seconds")


def _predict_order(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shape = square(sizes.loops)
    fa1, fa2 = ledger.fa1(shape, TILE, FORMATS).kernels[0], fa2_ledger(shape)
    found = [Prediction("order.slower", "FA1's loop over FA2's", at_least(ratio(bounds(fa1, gpu), bounds(fa2, gpu)).low), "",
                        "attention.fa1 over attention.fa2; their roofs")]
    for name, kernel in (("fa1", fa1), ("fa2", fa2)):
        read, written = (sum(s.issued for s in kernel.streams if s.write == write) for write in (False, True))
        found += [
            Prediction(f"order.{name}.sm_read", f"{name.upper()}: bytes from L2 to the SMs", about(read, 0.1), "B", f"attention.{name}"),
            Prediction(f"order.{name}.sm_written", f"{name.upper()}: bytes from the SMs to L2", about(written, 0.1), "B",
                       f"attention.{name}")]
    return tuple(found)


def _measure_order(bench: Bench) -> None:
    fused = Fused(bench, bench.sizes.loops)
    fused.run_fa1("order.fa1")
    fused.run("order.fa2", PADDED)
    bench.ratio("order.slower", "order.fa1.seconds", "order.fa2.seconds")


def loads(shape: AttentionShape, layout: Layout) -> Counted:
    """All ldmatrix of attention_fa2.cu: the warps of a block read the tile of Q once between them and each tile of K and V whole."""
    tiles, blocks = shape.seq_k // TILE.bc, shape.query_heads * shape.seq_q // TILE.br
    q, k, v = (count(tile_requests(layout, access)) for access in ("ldmatrix", "ldmatrix across", "ldmatrix.trans"))
    return Counted(*(blocks * (a + tiles * WARPS * (b + c)) for a, b, c in zip(q, k, v, strict=True)))


def stores(shape: AttentionShape, layout: Layout) -> Counted:
    """Its stores of O: at the end a warp puts its 16 rows into the tile, two halves a lane, 8 rows × 8 columns at a time. Whole rows, on
    their way in and out, meet no conflict."""
    requests = [request([layout.address(row + lane // 4, col + lane % 4 * 2) for lane in range(32)], 4)
                for row in (0, 8) for col in range(0, HEAD_DIM, 8)]
    return Counted(*(shape.query_heads * shape.seq_q // 16 * one for one in count(requests)))


def count(requests: Iterable[Request]) -> Counted:
    """Of aligned requests, added up."""
    known = [(one.wavefronts or 0, one.ideal or 0) for one in requests]
    return Counted(sum(wavefronts for wavefronts, _ in known), sum(wavefronts - ideal for wavefronts, ideal in known))


# Blocks that start and end beside running ones add to what the requests make by themselves: with the same number of ldmatrix, none of them
# conflicting, an H200 counted 331 for 512 blocks that start nearly together and 122,963, 0.7 % of the wavefronts, for 2048.
MEETING = 0.01
LAYOUTS = {"plain": (PLAIN, Layout(64, HEAD_DIM)), "padded": (PADDED, Layout(64, HEAD_DIM, pad=8)),
           "swizzled": (SWIZZLED, Layout(64, HEAD_DIM, swizzle="xor"))}


def _predict_layout(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shape = square(sizes.loops)
    kernel = fa2_ledger(shape)
    made = {name: Counted(*map(sum, zip(loads(shape, layout), stores(shape, layout), strict=True)))
            for name, (_, layout) in LAYOUTS.items()}
    waits = made["plain"].conflicts
    return (
        *(Prediction(f"layout.{name}.conflicts", f"{name} tiles: conflicts",
                     Interval(one.conflicts, one.conflicts + MEETING * one.wavefronts), "",
                     f"banks: every ldmatrix of the loop, the stores of O; up to {MEETING * 100:.0f} % more where blocks meet")
          for name, one in made.items()),
        Prediction("layout.cost", "unpadded over padded tiles", ratio(bounds(kernel, gpu, wavefronts=waits), bounds(kernel, gpu)), "",
                   f"{waits * LINE / gpu.smem_rate * 1e6:.3g} µs more of shared memory; roofs at once … in turn"),
        Prediction("layout.swizzle", "swizzled over padded tiles", about(1, 0.1), "", "neither has a conflict"))


def _measure_layout(bench: Bench) -> None:
    fused = Fused(bench, bench.sizes.loops)
    for name, (made, _) in LAYOUTS.items():
        fused.run(f"layout.{name}", made)
    bench.ratio("layout.cost", "layout.plain.seconds", "layout.padded.seconds")
    bench.ratio("layout.swizzle", "layout.swizzled.seconds", "layout.padded.seconds")


def _predict_buffers(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shape = square(sizes.loops)
    one, two = (plan_tile(config(stages), shape, gpu, DTYPE, REGISTERS) for stages in (1, 2))
    gain = about(one.time / two.time, 0.25)
    return (Prediction("buffers.gain", "one buffer over two", gain, "", f"planner: {one.config} over {two.config}"),)


def _measure_buffers(bench: Bench) -> None:
    fused = Fused(bench, bench.sizes.loops)
    fused.run("buffers.one", PADDED)
    fused.run("buffers.two", BUFFERED)
    bench.ratio("buffers.gain", "buffers.one.seconds", "buffers.two.seconds")


def _predict_division(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    shape = square(sizes.loops)
    kernel, tiles = fa2_ledger(shape), shape.seq_k // TILE.bc
    fastest, _ = bounds(kernel, gpu)
    products = shape.query_heads * shape.seq_q * tiles * HEAD_DIM / gpu.vector_rate  # one for each element of O at each tile
    waves = count_blocks(kernel.blocks, gpu.sms * resident(gpu))
    chain = waves * tiles * CHAIN / (gpu.clock_ghz * 1e9)  # l is needed at each tile: its two shuffles, where nothing hides them
    return (Prediction("division.cost", "dividing at every tile over once", Interval(0.98, 1 + (products + chain) / fastest), "",
                       f"free … N²d / Bc products, {products * 1e6:.2g} µs, and two shuffles a tile, {chain * 1e6:.2g} µs"),)


def _measure_division(bench: Bench) -> None:
    fused = Fused(bench, bench.sizes.loops)
    fused.run("division.every", DIVIDING)
    fused.run("division.once", PADDED)
    bench.ratio("division.cost", "division.every.seconds", "division.once.seconds")


EXPERIMENTS = (
    Experiment("steps", "Keeping S and P on the chip beats writing them out; the tensor cores then beat what the CUDA cores could ever do.",
               (NAIVE, TILED, PADDED), _predict_steps, _measure_steps),
    Experiment("loop-order", "FA1's order, keys outside, sends O, m and l through memory at every step and leaves one block a head.",
               (FA1, PADDED), _predict_order, _measure_order, pitfall="FA1's loop order"),
    Experiment("layout", "Unpadded tiles conflict 8 ways under ldmatrix and make shared memory the limit; padding or a swizzle cures that.",
               tuple(made for made, _ in LAYOUTS.values()), _predict_layout, _measure_layout, pitfall="unpadded shared-memory tile"),
    Experiment("buffers", "A second buffer, filled by cp.async, gains only what the other blocks of the SM do not hide already.",
               (PADDED, BUFFERED), _predict_buffers, _measure_buffers),
    Experiment("division", "Dividing by l at every tile costs a product for each element of O and gains nothing: the result is the same.",
               (PADDED, DIVIDING), _predict_division, _measure_division, pitfall="dividing by l inside the loop"),
)
