"""The rungs that run on a GPU: each a kernel of its own, the ledger that predicts it, and the tile it runs with.

From torch's eager operators and the readable Triton kernels of `onchip.ladder.kernels` up to the library's own. The prediction is the
ledger's with the tile that really runs, under the roofs of the card, of which copy and matmul were measured on it a moment before.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onchip.attention import attention
from onchip.attention.dispatch import why_not
from onchip.attention.explain import forward_tile
from onchip.attention.problem import AttentionProblem
from onchip.bench.machine import Ceilings
from onchip.ladder.kernels import fused, unfused
from onchip.ladder.rungs import GEMM_TILE, RUNGS, Choices
from onchip.roofline.attention import Formats
from onchip.roofline.hardware import GPU, find_gpu
from onchip.roofline.ledger import Pipeline
from onchip.roofline.roofs import Prediction, predict, tile_on
from onchip.roofline.shape import AttentionShape

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

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Why it cannot run `problem` on this machine; None when it can."""
        return None if self.backend is None else why_not(self.backend, problem)

    def pipeline(self, problem: AttentionProblem, gpu: GPU) -> Pipeline:
        """Its ledger for `problem`, with the tile it runs on `gpu`."""
        tile = tile_on(gpu, *self.tile(problem, gpu))
        choices = Choices(row_on_chip=problem.seq_k <= unfused.ROW)
        return RUNGS[self.ledger].predict(problem.shape, tile, Formats(problem.dtype, problem.dtype), choices)

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


def _gemm(problem: AttentionProblem, gpu: GPU) -> tuple[int, int]:
    return GEMM_TILE.br, GEMM_TILE.bc


def _written(name: str) -> Callable[[AttentionProblem, GPU], tuple[int, int]]:
    """The tile of a kernel of `fused`."""
    def tile(problem: AttentionProblem, gpu: GPU) -> tuple[int, int]:
        like = torch.empty(0, max(problem.head_dim, problem.head_dim_v), dtype=getattr(torch, problem.dtype), device="meta")
        return fused.launch_for(name, like, like)[:2]

    return tile


def _chosen(backend: str) -> Callable[[AttentionProblem, GPU], tuple[int, int]]:
    """The tile that the library takes."""
    return lambda problem, gpu: forward_tile(problem, backend, gpu)


GPU_RUNGS = (
    GpuRung("eager", "naive, torch eager", "naive_scaled", eager, _gemm),
    GpuRung("naive_scaled", "naive + scale", "naive_scaled", partial(unfused.naive, apart=True), _gemm),
    GpuRung("naive", "naive", "naive", unfused.naive, _gemm),
    GpuRung("tiled", "tiled, 3 passes", "tiled", fused.tiled, _written("tiled")),
    GpuRung("online", "online, 2 passes", "online", fused.online, _written("online")),
    GpuRung("fa1", "FA1, K/V outer", "fa1", fused.fa1, _written("fa1")),
    GpuRung("fa2", "FA2, Q outer", "fa2", fused.fa2, _written("fa2")),
    GpuRung("triton", "FA2, masked tiles apart", "fa2", _library("triton"), _chosen("triton"), "triton"),
    GpuRung("hopper_online", "Hopper, online softmax", "fa2", online_hopper, _chosen("hopper"), "hopper"),
    GpuRung("hopper", "Hopper, anchored softmax", "fa2", _library("hopper"), _chosen("hopper"), "hopper"),
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
