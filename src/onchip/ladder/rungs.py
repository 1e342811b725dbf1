"""The rungs: what each step of the ladder is, its ledger and the schedule that executes it.

A rung owns no arithmetic: its bytes come from `onchip.roofline`, its execution from `onchip.simulate`. Both take the same options.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onchip.roofline import attention as ledger
from onchip.roofline import backward as backward_ledger
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Pipeline
from onchip.roofline.shape import AttentionShape, count_blocks
from onchip.simulate import attention as schedule
from onchip.simulate import backward as backward_schedule
from onchip.simulate.problem import Problem, Result
from onchip.simulate.unfused import naive, naive_backward

GEMM_TILE = Tile(128, 128)  # output tile of the naive rungs' matmuls, as library GEMMs use at these sizes


@dataclass(frozen=True)
class Choices:
    """What some schedules depend on besides shape and tile."""

    splits: int = 1  # parts the keys are split into
    row_on_chip: bool = True  # a thread block of the softmax kernel can hold a row of S


@dataclass(frozen=True)
class Rung:
    """One step of the ladder."""

    key: str  # stable: the name in JSON and of ``onchip simulate attention --schedule``
    title: str
    lesson: str  # what this step changes, in one line
    ledger: Callable[..., Pipeline]
    schedule: Callable[..., Result]
    options: Callable[[AttentionShape, Choices], dict[str, Any]] = lambda shape, choices: {}
    grad: bool = False

    def predict(self, shape: AttentionShape, tile: Tile, formats: Formats, choices: Choices) -> Pipeline:
        """The rung's ledger."""
        return self.ledger(shape, tile, formats=formats, **self.options(shape, choices))

    def execute(self, problem: Problem, tile: Tile, choices: Choices, *, sram: int | None = None, sample: int | None = None) -> Result:
        """The rung's schedule, executed on `problem` and counted."""
        return self.schedule(problem, tile, sram=sram, sample=sample, **self.options(problem.shape, choices))


FORWARD = (
    Rung("naive_scaled", "naive + scale", "QKᵀ, scale (and mask), softmax, PV: eager code, every step through memory", ledger.naive, naive,
         lambda shape, choices: {"scale_kernel": True, "mask_kernel": shape.masked, "row_on_chip": choices.row_on_chip}),
    Rung("naive", "naive", "three kernels, scale and mask folded into the softmax; S and P still cross the memory bus twice each",
         ledger.naive, naive, lambda shape, choices: {"row_on_chip": choices.row_on_chip}),
    Rung("tiled", "tiled, 3 passes", "S stays on the chip; safe softmax walks the row three times: K is read, QKᵀ computed three times",
         ledger.tiled, schedule.tiled),
    Rung("online", "online, 2 passes", "m and l in one pass: one walk over K less", ledger.online, schedule.online),
    Rung("fa1", "FA1, K/V outer", "one pass over K and V, but O, m and l go through memory at every step; one block a head",
         ledger.fa1, schedule.fa1),
    Rung("fa2", "FA2, Q outer", "one pass, O stays on the chip and is divided once; a block a query tile", ledger.fa2, schedule.fa2),
)

SPLIT_KV = Rung("split_kv", "FA2 + split-KV",
                "too few query tiles for the SMs: keys are split, a group's query heads packed, partial results merged by lse",
                ledger.split_kv, schedule.split_kv, lambda shape, choices: {"splits": choices.splits, "pack_gqa": shape.packable})

BACKWARD = (
    Rung("naive_scaled_backward", "naive + scale backward", "autograd of eager code: dS is masked and scaled by kernels of its own",
         backward_ledger.naive_backward, naive_backward,
         lambda shape, choices: {"scale_kernel": True, "mask_kernel": shape.masked}, grad=True),
    Rung("naive_backward", "naive backward", "P kept from the forward; dP and dS through memory", backward_ledger.naive_backward,
         naive_backward, grad=True),
    Rung("apart_backward", "recomputing, dQ apart", "P recomputed from Q, K and lse, once for dK and dV and once for dQ: no N² byte, three "
         "matmuls more", backward_ledger.apart_backward, backward_schedule.apart_backward, grad=True),
    Rung("fa2_backward", "recomputing (FA2)", "P recomputed once: one matmul more than naive; dQ is accumulated in memory",
         backward_ledger.fa2_backward, backward_schedule.fa2_backward, grad=True),
)

RUNGS = {rung.key: rung for rung in (*FORWARD, SPLIT_KV, *BACKWARD)}


@dataclass(frozen=True)
class Ladder:
    """What is climbed: a shape, the fused rungs' tile, number formats and the GPU the times are predicted for."""

    shape: AttentionShape
    tile: Tile
    formats: Formats
    gpu: GPU

    @property
    def choices(self) -> Choices:
        """Splits that fill the GPU, and whether its shared memory holds a row of S in fp32."""
        return Choices(useful_splits(self.shape, self.tile, self.gpu), 4 * self.shape.seq_k <= self.gpu.smem_per_block)

    @property
    def sram(self) -> int:
        """Bytes a thread block can hold on the chip at most: all the shared memory it may have, and an SM's registers."""
        return self.gpu.smem_per_block + 4 * self.gpu.registers_per_sm

    def rungs(self, *, backward: bool = False) -> tuple[Rung, ...]:
        """The rungs that mean something here; split-KV only where it has SMs to fill."""
        if backward:
            return BACKWARD
        return (*FORWARD, SPLIT_KV) if self.choices.splits > 1 else FORWARD

    def tile_of(self, rung: Rung) -> Tile:
        """The naive rungs' matmuls have a tile of their own."""
        return GEMM_TILE if rung.key.startswith("naive") else self.tile

    def pipeline(self, rung: Rung) -> Pipeline:
        """The rung's ledger here."""
        return rung.predict(self.shape, self.tile_of(rung), self.formats, self.choices)


def useful_splits(shape: AttentionShape, tile: Tile, gpu: GPU) -> int:
    """Splits of K and V that give every SM a block: 1 when the query tiles alone do. Query heads are packed where the mask allows."""
    shape = shape.packed() if shape.packable else shape
    grid = shape.query_heads * count_blocks(shape.seq_q, tile.br)
    return max(1, min(count_blocks(shape.seq_k, tile.bc), gpu.sms // grid))
