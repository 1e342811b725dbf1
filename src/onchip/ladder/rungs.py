"""The rungs: what each step of the ladder is, and its ledger.

A rung owns no arithmetic of its own: its bytes come from `onchip.roofline`, its execution from `onchip.simulate`.
"""
from collections.abc import Callable
from dataclasses import dataclass

from onchip.roofline import attention, backward
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Pipeline
from onchip.roofline.shape import AttentionShape, count_blocks

GEMM_TILE = Tile(128, 128)  # output tile of the naive rungs' matmuls, as library GEMMs use at these sizes


@dataclass(frozen=True)
class Rung:
    """One step of the ladder."""

    key: str  # stable: the name in JSON
    title: str
    lesson: str  # what this step changes, in one line
    ledger: Callable[[AttentionShape, Tile, Formats, GPU], Pipeline]


@dataclass(frozen=True)
class Problem:
    """What the ladder is climbed with: a shape, the fused rungs' tile, number formats and the GPU the times are predicted for."""

    shape: AttentionShape
    tile: Tile
    formats: Formats
    gpu: GPU

    def pipeline(self, rung: Rung) -> Pipeline:
        """The rung's ledger for this problem."""
        return rung.ledger(self.shape, self.tile, self.formats, self.gpu)


def row_on_chip(shape: AttentionShape, gpu: GPU) -> bool:
    """True when a softmax kernel of `gpu` can hold a row of S in fp32; otherwise naive's softmax reads S twice."""
    return 4 * shape.seq_k <= gpu.smem_per_block


def useful_splits(shape: AttentionShape, tile: Tile, gpu: GPU) -> int:
    """Splits of K and V that give every SM a block: 1 when the query tiles alone do. Query heads are packed where the mask allows."""
    shape = shape.packed() if shape.packable else shape
    grid = shape.query_heads * count_blocks(shape.seq_q, tile.br)
    return max(1, min(count_blocks(shape.seq_k, tile.bc), gpu.sms // grid))


FORWARD = (
    Rung("naive_scaled", "naive + scale", "QKᵀ, scale (and mask), softmax, PV: eager code, every step through memory",
         lambda s, t, f, g: attention.naive(s, GEMM_TILE, f, scale_kernel=True, mask_kernel=s.masked, row_on_chip=row_on_chip(s, g))),
    Rung("naive", "naive", "three kernels, scale and mask folded into the softmax; S and P still cross the memory bus twice each",
         lambda s, t, f, g: attention.naive(s, GEMM_TILE, f, row_on_chip=row_on_chip(s, g))),
    Rung("tiled", "tiled, 3 passes", "S stays on the chip; safe softmax walks the row three times: K is read, QKᵀ computed three times",
         lambda s, t, f, g: attention.tiled(s, t, f)),
    Rung("online", "online, 2 passes", "m and l in one pass: one walk over K less",
         lambda s, t, f, g: attention.online(s, t, f)),
    Rung("fa1", "FA1, K/V outer", "one pass, K/V outer: O, m and l go through memory at every step, one block a head",
         lambda s, t, f, g: attention.fa1(s, t, f)),
    Rung("fa2", "FA2, Q outer", "one pass, Q outer: O stays on the chip and is divided once; a block a query tile",
         lambda s, t, f, g: attention.fa2(s, t, f)),
)

SPLIT_KV = Rung("split_kv", "FA2 + split-KV",
                "too few query tiles for the SMs: keys are split, a group's query heads packed, partial results merged by lse",
                lambda s, t, f, g: attention.split_kv(s, t, useful_splits(s, t, g), f, pack_gqa=s.packable))

BACKWARD = (
    Rung("naive_backward", "naive backward", "P kept from the forward; dP and dS through memory",
         lambda s, t, f, g: backward.naive_backward(s, GEMM_TILE, f)),
    Rung("fa2_backward", "recomputing (FA2)", "P recomputed from Q, K and lse: one matmul more, no N² byte",
         lambda s, t, f, g: backward.fa2_backward(s, t, f)),
)


def climb(problem: Problem, *, backward: bool = False) -> tuple[Rung, ...]:
    """The rungs that mean something for this problem; split-KV only where it has SMs to fill."""
    if backward:
        return BACKWARD
    return (*FORWARD, SPLIT_KV) if useful_splits(problem.shape, problem.tile, problem.gpu) > 1 else FORWARD
