"""Which tile to build a fused attention kernel with: candidates, predicted time, rank.

    time = max(DRAM, L2, busiest SM) [+ the backward's pre- and postprocess]
    busiest SM = longest of its roofs + taking turns + latency that shows

What `onchip.roofline.roofs` does not know is added here:

* **the busiest SM** (wave quantisation): no schedule gives every SM less than `busiest_sm` says, and thread blocks taken heaviest first
  come close. A ragged tile takes as long as a whole one.
* **taking turns**: within one warp softmax waits for QKᵀ and PV for softmax, and each key tile has a chain nothing shortens: two shuffles
  for the row maximum, two drains of the matmul pipe (as much again where P is stored, fenced and read back, or where a row's maximum is
  joined across warps). With `streams` warps on each scheduler the others fill the gaps: what the longest unit does not cover of one warp's
  time shows once in `streams`. A consumer warpgroup counts twice: its next QKᵀ runs under its softmax, which is what the registers for
  S + P + O are spent on. Fewer than one warp a scheduler leaves schedulers idle.
* **latency**: a tile of K and V is asked for stages − 1 steps ahead; with one stage half a step in uniform kernels (K and V alternate),
  not at all in specialised ones (the consumers, half a step apart, keep both). What the SM's resident blocks do not cover of it shows at
  every step; and once where a block starts: for each block of a uniform kernel, once an SM where a producer runs ahead into the next tile.
* P written to and read from shared memory where it does not stay in registers, and mma.sync on Hopper, which reaches 62.9 % of the tensor
  peak there.

A model for ranking, not a simulator: it knows neither power limits nor clocks below boost.
"""
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from onchip.errors import InputError, require
from onchip.roofline.attention import Formats, Tile, fa2
from onchip.roofline.backward import fa2_backward
from onchip.roofline.dtypes import BYTES, parse_dtype
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Kernel, Pipeline
from onchip.roofline.roofs import kernel_time
from onchip.roofline.shape import AttentionShape, count_blocks, visits
from onchip.roofline.tiles import BUDGETS, Footprint, Occupancy, TileConfig, footprint, launchable, occupancy, spilled, splits

LATENCY = 500  # clocks of a load from device memory: 470–540 on A100, H100 and RTX 4090 (arXiv 2402.13499)
CHAIN = 100  # clocks a key tile: two shuffles at 20–25 each and two drains of the matmul pipe at about as much; an estimate
HOPPER_MMA_SYNC = 0.629  # share of the tensor peak that mma.sync reaches on compute capability 9.0 (arXiv 2402.13499)
ON_SM = ("shared memory", "tensor cores", "exp unit", "fp32 pipe")


def busiest_sm(blocks: "Counter[int]", sms: int) -> int:
    """Least work the busiest of `sms` SMs can have; `blocks` counts thread blocks by their steps.

    Some SM gets k of the (k − 1)·sms + 1 longest blocks, so at least the k shortest of those: the maximum over k, and the mean rounded up.
    ⌈blocks / sms⌉ · steps where all are equal.
    """
    work = sorted(blocks, reverse=True)
    ends = list(accumulate(blocks[w] for w in work))
    sums = list(accumulate(w * blocks[w] for w in work))

    def longest(count: int) -> int:
        group = bisect_left(ends, count)
        return sums[group] - (ends[group] - count) * work[group]

    bound = count_blocks(sums[-1], sms)
    for k in range(1, count_blocks(ends[-1], sms) + 1):
        first = (k - 1) * sms + 1
        bound = max(bound, longest(first) - longest(first - k))
    return bound


@dataclass(frozen=True)
class Work:
    """A schedule's work on one shape and tile."""

    pipeline: Pipeline
    main: Kernel  # the kernel with the matmuls
    one_step: Kernel  # the same kernel on a shape of one whole tile
    blocks: "Counter[int]"  # thread blocks of the main kernel by the tiles each visits
    area: int  # real rows × keys of all visited tiles


@lru_cache(maxsize=512)
def _work(shape: AttentionShape, tile: Tile, dtype: str, backward: bool) -> Work:
    def main(pipeline: Pipeline) -> Kernel:
        return max(pipeline.kernels, key=lambda kernel: kernel.matmul_flops)

    schedule, formats = fa2_backward if backward else fa2, Formats(dtype, dtype)
    whole = AttentionShape(tile.br, tile.bc, shape.head_dim, shape.head_dim_v)
    pipeline = schedule(shape, tile, formats)
    area, visited = 0, []
    edges = [0] * (count_blocks(shape.seq_k, tile.bc) + 1)  # the difference, from key tile to key tile, of the query tiles that see it
    for rows, first, last, keys in visits(shape, tile.br, tile.bc):
        area += rows * keys
        visited.append(last - first)
        edges[first] += 1
        edges[last] -= 1
    if backward:
        blocks, problems = Counter(shape.group * seen for seen in list(accumulate(edges))[:-1]), shape.kv_pairs
    else:
        blocks, problems = Counter(visited), shape.query_heads
    blocks = Counter({steps: count * problems for steps, count in blocks.items()})
    return Work(pipeline, main(pipeline), main(schedule(whole, tile, formats)), blocks, area * shape.query_heads)


@dataclass(frozen=True)
class Plan:
    """One configuration on one GPU: what it takes and how long it is predicted to run. Times in seconds."""

    config: TileConfig
    footprint: Footprint
    occupancy: Occupancy
    roofs: dict[str, float]  # on-SM ones on the busiest SM
    turns: float  # matmul and softmax taking turns
    latency: float  # loads that no work covers
    other: float  # the backward's pre- and postprocess
    blocks: int  # thread blocks in the grid
    streams: float  # independent warps a scheduler
    dram_bytes: int
    balance: float  # the average SM's work over the busiest one's; rows and keys past a ragged end are no work
    useful_flops: int

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Roofs, highest first."""
        return sorted(self.roofs.items(), key=lambda roof: -roof[1])

    @property
    def sm_time(self) -> float:
        """The busiest SM's time."""
        return max(self.roofs[roof] for roof in ON_SM) + self.turns + self.latency

    @property
    def binding(self) -> str:
        """The roof that binds: DRAM or L2 if it alone takes longer than the busiest SM, else the SM's highest."""
        roof, seconds = self.ranked[0]
        return roof if roof in ON_SM or seconds > self.sm_time else max(ON_SM, key=lambda name: self.roofs[name])

    @property
    def time(self) -> float:
        """Predicted time."""
        return max(self.ranked[0][1], self.sm_time) + self.other

    @property
    def tflops(self) -> float:
        """Useful matmul FLOPs (visible pairs, nothing recomputed) over the predicted time, in TFLOP/s."""
        return self.useful_flops / self.time / 1e12


def plan_tile(config: TileConfig, shape: AttentionShape, gpu: GPU, dtype: str, registers: int | None = None) -> Plan:
    """Predict one configuration. `registers`: what a thread of the kernel as compiled takes, where that is known; else the tile model's.

    Raises `InputError` where it cannot launch and where `gpu` has no matmul peak for `dtype`.
    """
    taken = footprint(config, dtype, shape.head_dim, shape.head_dim_v)
    if registers is not None:
        taken = replace(taken, registers=registers)
    reason = launchable(taken, gpu)
    require(reason is None, "tile", config, f"one that can launch: this one {reason}")
    resident = occupancy(taken, gpu)
    key, clock = parse_dtype(dtype), gpu.clock_ghz * 1e9
    work = _work(shape, Tile(config.br, config.bc, config.mma_rows), key, config.backward)
    busiest = busiest_sm(work.blocks, gpu.sms)
    all_sms = kernel_time(work.main, gpu, key, resident.blocks)
    step = dict.fromkeys(ON_SM, 0.0) | kernel_time(work.one_step, gpu, key).seconds  # one block: the rates of one SM
    if config.p_in_smem:
        step["shared memory"] += 2 * config.br * config.bc * BYTES[key] * gpu.sms / gpu.smem_rate
    if not config.specialised and gpu.capability == (9, 0):
        step["tensor cores"] /= HOPPER_MMA_SYNC
    roofs = all_sms.seconds | {roof: busiest * step[roof] for roof in ON_SM}

    per_sm = min(resident.blocks, count_blocks(work.main.blocks, gpu.sms))
    streams = per_sm * config.compute_threads / 128 * (2 if config.specialised else 1)
    longest = max(roofs[roof] for roof in ON_SM)
    chain = busiest * CHAIN * (1 + config.p_in_smem + config.splits_rows) / clock
    one_warp = max(roofs["tensor cores"], roofs["shared memory"]) + max(roofs["exp unit"], roofs["fp32 pipe"]) + chain
    turns = (one_warp - longest) / streams + longest * max(0.0, 1 / streams - 1)

    ahead = (config.stages - 1 or (0.0 if config.specialised else 0.5)) * per_sm * (longest + turns) / busiest * clock
    starts = 1 if config.specialised else count_blocks(count_blocks(work.main.blocks, gpu.sms), per_sm)
    latency = (starts * LATENCY + busiest / per_sm * max(0.0, LATENCY - ahead)) / clock
    other = sum(kernel_time(k, gpu, key).time for k in work.pipeline.kernels if k is not work.main)
    return Plan(config, taken, resident, roofs, turns, latency, other, work.main.blocks, streams, all_sms.dram_bytes,
                balance=work.area / (config.br * config.bc * gpu.sms * busiest), useful_flops=work.pipeline.useful_flops)


def candidates(backward: bool = False) -> list[TileConfig]:
    """Every configuration the planner considers, whatever the GPU.

    A warp owns 32 rows, or 16, or half the columns of 16 (P then crosses warps through shared memory); a warpgroup owns 64.
    """
    found = []
    for stages in (1, 2, 3):
        for br in (32, 64, 128) if backward else (16, 32, 64, 128, 256):
            owners = {4, 8} if backward else {max(1, br // 32), br // 16, min(8, br // 8)}
            found += [TileConfig(br, bc, stages, warps, p_in_smem=not backward and 16 * warps > br, backward=backward)
                      for bc in (32, 64, 96, 128, 256) for warps in sorted(owners)]
        for consumers in BUDGETS:
            found += [TileConfig(br, bc, stages, consumers=consumers, p_in_smem=p_in_smem, backward=backward)
                      for br in (64, 80, 96, 128, 192) for bc in range(64, 257, 16) for p_in_smem in (False, True)
                      if splits(br, bc, consumers, backward)]
    return found


@dataclass(frozen=True)
class Ranking:
    """Plans of the candidates that launch and do not spill, fastest first; and what became of the others."""

    plans: tuple[Plan, ...]
    refused: tuple[tuple[Footprint, str], ...]  # cannot launch, and why
    spilling: tuple[Footprint, ...]  # launch, but some registers live in local memory


def rank(shape: AttentionShape, gpu: GPU, dtype: str, *, backward: bool = False) -> Ranking:
    """Plan every candidate; of configurations that differ in stages or in where P lives the best stays.

    Equal times go to the one that takes less shared memory, then fewer registers. Raises `InputError` where `gpu` has no matmul peak for
    `dtype`, where it is not an NVIDIA card, and where no candidate launches without spilling.
    """
    if gpu.capability is None:
        raise InputError(f"gpu: got {gpu.name}, accepted: an NVIDIA card (the tile model describes mma.sync and wgmma kernels)")
    gpu.matmul_rate(dtype)
    plans: dict[tuple[int, ...], Plan] = {}
    refused, spilling = [], []
    k_step = 32 // BYTES[parse_dtype(dtype)]
    for config in candidates(backward):
        if config.br % k_step or config.bc % k_step:
            continue
        taken = footprint(config, dtype, shape.head_dim, shape.head_dim_v)
        reason = launchable(taken, gpu)
        if reason:
            refused.append((taken, reason))
        elif spilled(taken, gpu):
            spilling.append(taken)
        else:
            plan = plan_tile(config, shape, gpu, dtype)
            same = (config.br, config.bc, config.warps, config.consumers)
            if same not in plans or _order(plan) < _order(plans[same]):
                plans[same] = plan
    if not plans:
        why = f"all {len(spilling)} that launch spill registers" if spilling else f"none launches: it {refused[0][1]}"
        raise InputError(f"head_dim: got {shape.head_dim}, accepted: one some tile can hold on {gpu.title} ({why})")
    return Ranking(tuple(sorted(plans.values(), key=_order)), tuple(refused), tuple(spilling))


def _order(plan: Plan) -> tuple[float, int, int]:
    return plan.time, plan.footprint.smem, plan.footprint.registers
