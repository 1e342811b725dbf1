"""Roofs: how long a kernel takes when the unit it needs most is never idle.

    time(kernel) = max over roofs of work / rate            time(pipeline) = Σ over its kernels

The roofs: DRAM, L2, shared memory (operands of the matmuls; shuffles share that pipe), tensor cores, the exp unit (MUFU) and the fp32
pipe of the CUDA cores. Softmax work is never charged to the tensor peak. A grid with fewer blocks than the GPU has SMs gets only their
share of every on-SM roof, and at most 64 B a clock a block from L2 and DRAM (an SM's port): why decode needs split-KV.

Not here: wave quantisation, latency and launch time; `onchip.roofline.tiles` adds the first.
"""
from dataclasses import dataclass

from onchip.roofline.attention import Formats, Tile, naive
from onchip.roofline.dram import dram_bytes
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Kernel, Pipeline
from onchip.roofline.shape import AttentionShape

SM_PORT = 64  # bytes a clock between one SM and the L2, NVIDIA from Volta on

ROOFS = ("DRAM", "L2", "shared memory", "tensor cores", "exp unit", "fp32 pipe")


@dataclass(frozen=True)
class KernelTime:
    """What each roof asks of one kernel, in seconds; a roof without work or without a known rate is absent."""

    name: str
    seconds: dict[str, float]
    dram_bytes: int

    @property
    def time(self) -> float:
        """Predicted seconds: the highest roof."""
        return max(self.seconds.values())

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Roofs from the one that binds down."""
        return sorted(self.seconds.items(), key=lambda item: -item[1])

    @property
    def binding(self) -> str:
        """The roof that binds."""
        return self.ranked[0][0]

    @property
    def next(self) -> tuple[str, float] | None:
        """The roof that would bind next and its share of the binding one's time."""
        ranked = self.ranked
        return (ranked[1][0], ranked[1][1] / ranked[0][1]) if len(ranked) > 1 else None


@dataclass(frozen=True)
class Prediction:
    """A pipeline's predicted time on one GPU, kernel by kernel."""

    kernels: tuple[KernelTime, ...]

    @property
    def time(self) -> float:
        """Seconds: the sum over the kernels."""
        return sum(k.time for k in self.kernels)

    @property
    def dram_bytes(self) -> int:
        """DRAM bytes, all kernels."""
        return sum(k.dram_bytes for k in self.kernels)

    @property
    def slowest(self) -> KernelTime:
        """The kernel that takes longest."""
        return max(self.kernels, key=lambda k: k.time)

    @property
    def binding(self) -> str:
        """The roof under which the pipeline spends most of its time."""
        spent: dict[str, float] = {}
        for k in self.kernels:
            spent[k.binding] = spent.get(k.binding, 0.0) + k.time
        return max(spent, key=lambda roof: spent[roof])


def kernel_time(kernel: Kernel, gpu: GPU, dtype: str, blocks_per_sm: int = 1) -> KernelTime:
    """Roofs of one kernel whose matmuls run in `dtype`, with `blocks_per_sm` thread blocks resident on each SM."""
    share = min(1.0, kernel.blocks / gpu.sms)
    port = share * gpu.sms * SM_PORT * gpu.clock_ghz * 1e9
    nbytes = dram_bytes(kernel, gpu.l2_bytes or 0, gpu.sms * blocks_per_sm)
    work: dict[str, tuple[float, float | None]] = {
        "DRAM": (nbytes, min(gpu.dram_rate, port)),
        "L2": (kernel.issued, min(gpu.l2_rate, port) if gpu.l2_rate else None),
        "shared memory": (kernel.smem_bytes, gpu.smem_rate * share),
        "tensor cores": (kernel.matmul_flops, gpu.matmul_rate(dtype) * share if kernel.matmul_flops else None),
        "exp unit": (kernel.exps, gpu.exp_rate * share),
        "fp32 pipe": (kernel.vector_ops, gpu.vector_rate * share),
    }
    return KernelTime(kernel.name, {roof: amount / rate for roof, (amount, rate) in work.items() if amount and rate}, nbytes)


def tile_on(gpu: GPU, br: int, bc: int) -> Tile:
    """A tile of br query rows × bc keys as `gpu` would run it: on Hopper wgmma reads K and V once for 64 rows, where br is made of them."""
    return Tile(br, bc, 64 if gpu.capability == (9, 0) and br % 64 == 0 else 0)


def predict(pipeline: Pipeline, gpu: GPU, dtype: str, blocks_per_sm: int = 1) -> Prediction:
    """Predicted time of every kernel of `pipeline` on `gpu`."""
    return Prediction(tuple(kernel_time(k, gpu, dtype, blocks_per_sm) for k in pipeline.kernels))


def ideal_time(compulsory: int, flops: int, gpu: GPU, dtype: str) -> float:
    """The classic roofline: max of compulsory bytes over DRAM bandwidth and FLOPs over the tensor peak, in seconds."""
    return max(compulsory / gpu.dram_rate, flops / gpu.matmul_rate(dtype))


def speedup_limit(gpu: GPU, dtype: str, head_dim: int, score_bytes: int) -> float:
    """Naive → fused as N → ∞: (`score_bytes` · N² / bandwidth) / (4N²d / tensor peak) = knee / (naive FLOP/B).

    `score_bytes` is what naive attention moves a score: 8 for S and P written and read at two bytes, 12 with a separate scale kernel.
    Holds while naive is bound by DRAM and the fused kernel by the tensor cores.
    """
    return gpu.knee(dtype) * score_bytes / (4 * head_dim)


def naive_to_fused(shape: AttentionShape, gpu: GPU, formats: Formats, *, scale_kernel: bool = False) -> float:
    """The classic speed-up: naive's kernels, each at the higher of its two classic roofs, over one fused kernel at its own.

    The textbook ledger (operands once a kernel: 8Nd + 8N² at two bytes, 12N² with the scale kernel) against compulsory bytes and 4N²d.
    """
    pipeline = naive(shape, formats=formats, scale_kernel=scale_kernel)
    separate = sum(ideal_time(k.unique, k.matmul_flops, gpu, formats.inputs) for k in pipeline.kernels)
    return separate / ideal_time(pipeline.compulsory, pipeline.useful_flops, gpu, formats.inputs)
