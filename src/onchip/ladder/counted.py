"""The GPU rungs under Nsight Compute: counted bytes, conflicts and pipes beside the ledger's.

``python -m onchip.ladder.counted '[{"seq_q": 4096, …}, {"rows": 4096, "n": 32768, …}]'`` is the program that is profiled: of each problem
it launches each rung once, warm, in an NVTX range of its own. All problems share one run, whose start is most of the cost.
"""
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onchip.bench import counters
from onchip.bench.counters import Counters
from onchip.roofline.dram import counted_dram_bytes
from onchip.roofline.hardware import GPU
from onchip.roofline.l2 import lookups
from onchip.roofline.ledger import Kernel, Pipeline
from onchip.roofline.roofs import kernel_time
from onchip.roofline.shape import AttentionShape, count_blocks
from onchip.roofline.softmax import Rows
from onchip.roofline.tiles import Footprint, occupancy, register_cap


@dataclass(frozen=True)
class Job:
    """Rungs to launch on one problem: of attention, or of softmax, where a problem is rows."""

    problem: AttentionShape | Rows
    dtype: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    """One kernel of a rung's ledger: what its counters should say. Seconds and bytes."""

    kernel: str
    seconds: float
    roof: str
    dram_read: float
    dram_written: float
    issued: int
    l2_own: float  # looked up in L2, read and written, but for what blocks share
    l2_shared: float  # what they share; requests for it are merged before they are looked up


@dataclass(frozen=True)
class Counted:
    """One rung: what its kernels moved, and what its ledger says they should have."""

    key: str
    title: str
    kernels: tuple[Counters, ...]
    expected: tuple[Expected, ...]
    dram_bytes: float  # read and written
    dram_predicted: float  # what the counters of each kernel alone should see
    sm_bytes: float  # between L2 and SMs, read and written
    issued: int  # what the ledger says the thread blocks ask for
    l2_bytes: float  # looked up in L2: for SMs, and for the other half of the L2
    tensor_pipe: float  # percent, the kernels' mean weighted by their time
    occupancy: float  # likewise
    conflicts: float
    registers: int  # of the kernel that uses most
    tensor_pipe_predicted: float | None = None  # percent, at the predicted time and the card's boost clock
    occupancy_predicted: float | None = None  # percent, by the planner; None for more kernels than one
    registers_predicted: int | None = None  # likewise

    @property
    def dram_ratio(self) -> float:
        """Counted over predicted."""
        return self.dram_bytes / self.dram_predicted

    @property
    def issued_ratio(self) -> float:
        """Counted over predicted."""
        return self.sm_bytes / self.issued


def count_jobs(jobs: Sequence[Job], gpu: GPU, ncu: Path, seconds: float | None = None) -> list[list[Counted]]:
    """Launch the rungs of all `jobs` on random numbers under `ncu`, in one process of its own; the rungs of each job in the ladder's order.

    Raises `InputError` where counting fails or takes more than `seconds`.
    """
    told = [{**asdict(job.problem), "dtype": job.dtype, "keys": job.keys} for job in jobs]
    launches = counters.count([sys.executable, "-m", "onchip.ladder.counted", json.dumps(told)], ncu, seconds)
    found = []
    for number, job in enumerate(jobs):
        found.append([held_against(rung, [x for x in launches if _range(number, rung.key) in x.within], gpu, job.dtype)
                      for rung in _ledgers(job, gpu) if rung.key in job.keys])
    return found


def count_rungs(shape: AttentionShape, dtype: str, keys: Sequence[str], gpu: GPU, ncu: Path) -> list[Counted]:
    """The same for the rungs `keys` of one attention problem."""
    return count_jobs([Job(shape, dtype, tuple(keys))], gpu, ncu)[0]


def _range(number: int, key: str) -> str:
    """Name of the NVTX range that rung `key` of a job is launched in."""
    return f"{number} {key}"


@dataclass(frozen=True)
class Ledger:
    """One rung's, for one problem on one card."""

    key: str
    title: str
    pipeline: Pipeline
    blocks_per_sm: int = 1
    planned: Footprint | None = None


def _ledgers(job: Job, gpu: GPU) -> Iterator[Ledger]:
    """Of every rung there is for the job's problem."""
    if isinstance(job.problem, Rows):
        from onchip.ladder.softmax import SOFTMAX_RUNGS

        yield from (Ledger(r.key, r.title, r.ledger(job.problem), r.blocks_per_sm(gpu)) for r in SOFTMAX_RUNGS)
    else:
        from onchip.ladder.gpu import GPU_RUNGS, problem_of
        from onchip.ladder.gpu_backward import BACKWARD_RUNGS

        problem = problem_of(job.problem, job.dtype)
        yield from (Ledger(r.key, r.title, r.pipeline(problem, gpu), planned=r.planned(problem, gpu)) for r in GPU_RUNGS)
        yield from (Ledger(r.key, r.title, r.pipeline(problem, gpu)) for r in BACKWARD_RUNGS)


def held_against(rung: Ledger, launches: Sequence[Counters], gpu: GPU, dtype: str) -> Counted:
    """The launches of one rung beside its ledger."""
    def total(*names: str) -> float:
        return sum(getattr(x, name) or 0.0 for x in launches for name in names)

    def mean(name: str) -> float:
        return sum((getattr(x, name) or 0.0) * (x.seconds or 0.0) for x in launches) / (total("seconds") or 1.0)

    def expected(kernel: Kernel) -> Expected:
        roofs = kernel_time(kernel, gpu, dtype, rung.blocks_per_sm)
        dram = counted_dram_bytes(kernel, gpu.l2_bytes or 0, gpu.sms * rung.blocks_per_sm)
        l2 = lookups(kernel, gpu.l2_bytes or 0, gpu.sms * rung.blocks_per_sm)
        return Expected(kernel.name, roofs.time, roofs.binding, dram.read, dram.written, kernel.issued, l2.read + l2.written, l2.shared)

    kernels = tuple(expected(kernel) for kernel in rung.pipeline.kernels)
    predicted = sum(k.dram_read + k.dram_written for k in kernels)
    return Counted(
        rung.key, rung.title, tuple(launches), kernels, total("dram_read", "dram_written"), predicted,
        total("sm_read", "sm_written"), rung.pipeline.issued, total("l2_read", "l2_written", "l2_fabric"), mean("tensor_pipe"),
        mean("occupancy"), total("conflicts"), int(max((x.registers or 0.0 for x in launches), default=0)),
        _tensor_pipe(rung.pipeline, sum(k.seconds for k in kernels), gpu), *_planned(rung, gpu))


def _tensor_pipe(pipeline: Pipeline, seconds: float, gpu: GPU) -> float | None:
    """Percent of the tensor cores' clocks that the pipeline's 16-bit matmuls take of `seconds`; None where an SM's rate is not known."""
    if gpu.tensor_flops_per_clock_sm is None:
        return None
    return 100 * pipeline.matmul_flops / (gpu.sms * gpu.tensor_flops_per_clock_sm * gpu.clock_ghz * 1e9 * seconds)


def _planned(rung: Ledger, gpu: GPU) -> tuple[float | None, int | None]:
    """(percent of an SM's threads that are resident, registers a thread) by the planner, where the grid gives every SM that many blocks."""
    if rung.planned is None:
        return None, None
    found = occupancy(rung.planned, gpu)
    blocks = min(found.blocks, count_blocks(rung.pipeline.kernels[0].blocks, gpu.sms))
    return 100 * blocks * found.threads / found.max_threads, min(rung.planned.registers, register_cap(rung.planned, gpu))


def profiled(told: Sequence[dict[str, Any]]) -> None:
    """What runs under the profiler."""
    for number, job in enumerate(told):
        for key, run in _calls(job):
            for _ in range(2):  # compile, and start the library's kernels the short way
                run()
            counters.record(_range(number, key), run)


def _calls(job: dict[str, Any], device: str = "cuda") -> Iterator[tuple[str, Callable[[], Any]]]:
    """(key, call) of each rung of a job, on random numbers. What a backward keeps of its forward is made before the call is handed out."""
    import torch

    from onchip.ladder.gpu import GPU_RUNGS
    from onchip.ladder.gpu_backward import BACKWARD_RUNGS
    from onchip.ladder.softmax import SOFTMAX_RUNGS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(getattr(torch, job["dtype"]))

    if "rows" in job:
        x = normal(job["rows"], job["n"])
        yield from ((rung.key, partial(rung.run, x)) for rung in SOFTMAX_RUNGS if rung.key in job["keys"])
        return
    batch, heads, kv_heads, seq_q, seq_k = (job[name] for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k"))
    q, dout = normal(batch, heads, seq_q, job["head_dim"]), normal(batch, heads, seq_q, job["head_dim_v"])
    k, v = normal(batch, kv_heads, seq_k, job["head_dim"]), normal(batch, kv_heads, seq_k, job["head_dim_v"])
    masked = job["causal"] is not None
    yield from ((rung.key, partial(rung.run, q, k, v, masked)) for rung in GPU_RUNGS if rung.key in job["keys"])
    yield from ((rung.key, rung.prepare(q, k, v, dout, masked)) for rung in BACKWARD_RUNGS if rung.key in job["keys"])


if __name__ == "__main__":
    profiled(json.loads(sys.argv[1]))
