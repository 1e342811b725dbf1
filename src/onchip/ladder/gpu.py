"""The rungs that run on a GPU: each a kernel of its own, the ledger that predicts it, and the tile it runs with.

From torch's eager operators and the readable Triton kernels of `onchip.ladder.kernels` up to the library's own. The prediction is the
ledger's with the tile that really runs, under the roofs of the card, of which copy and matmul were measured on it a moment before.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip.attention import attention
from onchip.attention.dispatch import why_not
from onchip.attention.explain import forward_tile
from onchip.attention.hopper import tiles as hopper_tiles
from onchip.attention.problem import AttentionProblem
from onchip.bench.machine import Ceilings
from onchip.errors import InputError
from onchip.ladder.kernels import fused, unfused
from onchip.ladder.kernels.common import Launch
from onchip.ladder.rungs import GEMM_TILE, RUNGS, Choices
from onchip.roofline.attention import Formats
from onchip.roofline.dtypes import BYTES
from onchip.roofline.hardware import GPU, find_gpu
from onchip.roofline.ledger import Pipeline
from onchip.roofline.roofs import Prediction, predict, tile_on
from onchip.roofline.shape import AttentionShape
from onchip.roofline.tiles import Footprint, TileConfig, footprint

if TYPE_CHECKING:
    from onchip.attention.triton.tiles import Tile as TritonTile

Fields = dict[str, Any]  # of a `GpuRung`
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class GpuRung:
    """One kernel, or pipeline of kernels."""

    key: str
    title: str
    ledger: str  # key of the rung in `onchip.ladder.rungs` that counts it
    run: Attention
    tile: Callable[[AttentionProblem, GPU], tuple[int, int]]  # query rows × keys
    backend: str | None = None  # of the library, where it is one of its kernels
    config: Callable[[AttentionProblem, GPU], TileConfig] | None = None  # how a single kernel is built, for the planner

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Why it cannot run `problem` on this machine; None when it can."""
        return None if self.backend is None else why_not(self.backend, problem)

    def pipeline(self, problem: AttentionProblem, gpu: GPU) -> Pipeline:
        """Its ledger for `problem`, with the tile it runs on `gpu`."""
        tile = tile_on(gpu, *self.tile(problem, gpu))
        choices = Choices(row_on_chip=problem.seq_k <= unfused.ROW)
        return RUNGS[self.ledger].predict(problem.shape, tile, Formats(problem.dtype, problem.dtype), choices)

    def planned(self, problem: AttentionProblem, gpu: GPU) -> Footprint | None:
        """What the planner says a thread block takes; None for a pipeline of kernels, and for a tile it has no model of."""
        try:
            return None if self.config is None else footprint(
                self.config(problem, gpu), problem.dtype, problem.head_dim, problem.head_dim_v)
        except InputError:
            return None

    def predict(self, problem: AttentionProblem, gpu: GPU) -> Prediction:
        """Its time on `gpu`."""
        return predict(self.pipeline(problem, gpu), gpu, problem.dtype)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The usual snippet in torch: matmul, scale, mask, softmax, matmul; every step through memory."""
    group = q.shape[1] // k.shape[1]
    s = q @ (k.repeat_interleave(group, 1) if group > 1 else k).mT
    s = s * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1 + s.shape[-1] - s.shape[-2])
        s = s.masked_fill(hidden, -torch.inf)
    return torch.softmax(s, -1) @ (v.repeat_interleave(group, 1) if group > 1 else v)


def online_hopper(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The Hopper kernel with the online softmax compiled in: a maximum over every score, a rescaling of o at every block."""
    from onchip.attention.hopper import launch

    problem = AttentionProblem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
                               causal="bottom-right" if causal else None)
    return launch.run(q, k, v, None, None, None, problem.spec, online=True)[0]


def _library(backend: str) -> Attention:
    return lambda q, k, v, causal: attention(q, k, v, causal=causal, backend=backend)


def cublas_tile(problem: AttentionProblem, gpu: GPU) -> tuple[int, int]:
    """Of torch's matmuls: on Hopper cuBLAS takes 256 × 128 at these sizes (its kernels' names say so), elsewhere 128 × 128."""
    return (256, 128) if gpu.capability == (9, 0) else (GEMM_TILE.br, GEMM_TILE.bc)


def _unfused(problem: AttentionProblem, gpu: GPU) -> tuple[int, int]:
    """Rows of both products, and keys of S that a program owns."""
    return unfused.SCORES.br, unfused.STRIP


def _written(name: str) -> Fields:
    """Tile and build of a kernel of `fused`."""
    def launch(problem: AttentionProblem) -> Launch:
        like = torch.empty(0, max(problem.head_dim, problem.head_dim_v), dtype=getattr(torch, problem.dtype), device="meta")
        return fused.launch_for(name, like, like)

    def config(problem: AttentionProblem, gpu: GPU) -> TileConfig:
        found = launch(problem)
        return TileConfig(found.br, found.bc, found.stages, found.warps)

    return {"tile": lambda problem, gpu: launch(problem)[:2], "config": config}


def _chosen(backend: str) -> Fields:
    """Tile and build that the library takes."""
    def config(problem: AttentionProblem, gpu: GPU) -> TileConfig:
        if backend == "triton":
            picked = triton_tile("forward", problem, gpu)
            return TileConfig(picked.bm, picked.bn, picked.stages, picked.warps)
        wide = hopper_tiles.forward(problem.head_dim, problem.head_dim_v, problem.seq_q, problem.spec.window_right >= 0)
        return TileConfig(wide.rows, wide.keys, wide.stages, consumers=wide.consumers)

    return {"tile": lambda problem, gpu: forward_tile(problem, backend, gpu), "config": config, "backend": backend}


def triton_tile(kernel: str, problem: AttentionProblem, gpu: GPU, *, rows: bool = False) -> "TritonTile":
    """The tile with which a kernel of the Triton backend serves a dense, plain `problem` on `gpu`; `rows`: it reads row statistics."""
    from onchip.attention.triton import launch, tiles

    size = BYTES[problem.dtype]
    aligned = problem.head_dim * size % 16 == problem.head_dim_v * size % 16 == 0 and not (rows and problem.seq_q % 4)
    described = aligned and launch.accelerates(
        gpu.capability or (0, 0), size, problem.batch * problem.heads * problem.seq_q * problem.seq_k)
    width = launch.block(max(problem.head_dim, problem.head_dim_v))
    return tiles.pick(kernel, gpu.smem_per_block, size, width, False, described)


GPU_RUNGS = (
    GpuRung("eager", "naive, torch eager", "naive_scaled", eager, cublas_tile),
    GpuRung("naive_scaled", "naive + scale", "naive_scaled", partial(unfused.naive, apart=True), _unfused),
    GpuRung("naive", "naive", "naive", unfused.naive, _unfused),
    GpuRung("tiled", "tiled, 3 passes", "tiled", fused.tiled, **_written("tiled")),
    GpuRung("online", "online, 2 passes", "online", fused.online, **_written("online")),
    GpuRung("fa1", "FA1, K/V outer", "fa1", fused.fa1, **_written("fa1")),
    GpuRung("fa2", "FA2, Q outer", "fa2", fused.fa2, **_written("fa2")),
    GpuRung("triton", "FA2, masked tiles apart", "fa2", _library("triton"), **_chosen("triton")),
    GpuRung("hopper_online", "Hopper, online softmax", "fa2", online_hopper, **_chosen("hopper")),
    GpuRung("hopper", "Hopper, anchored softmax", "fa2", _library("hopper"), **_chosen("hopper")),
)


def problem_of(shape: AttentionShape, dtype: str) -> AttentionProblem:
    """A dense problem on a GPU."""
    return AttentionProblem(shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v, dtype,
                            causal=shape.causal)


def needed_bytes(rung: GpuRung, problem: AttentionProblem) -> int:
    """Device memory `rung` allocates: two arrays of scores at once where it has any, and the output."""
    alive = 2 if rung.ledger.startswith("naive") else 0
    size = getattr(torch, problem.dtype).itemsize
    rows = problem.batch * problem.heads * problem.seq_q
    return rows * (alive * problem.seq_k + problem.head_dim_v) * size


def card(ceilings: Ceilings) -> GPU:
    """The card as it was measured. Raises `InputError` for one the roofline does not know."""
    return find_gpu(ceilings.device).with_ceilings(dram_gbps=ceilings.copy / 1e9, matmul_tflops={ceilings.dtype: ceilings.matmul / 1e12})
