"""The GPU rungs under Nsight Compute: counted bytes, conflicts and pipes beside the ledger's.

``python -m onchip.ladder.counted '{"seq_q": 4096, …}'`` is the program that is profiled: it launches each rung once, warm, in an NVTX range
of its name; with ``'{"rows": 4096, "n": 32768, "dtype": "bfloat16"}'`` those of softmax.
"""
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onchip.bench import counters
from onchip.bench.counters import Counters
from onchip.roofline.dram import pipeline_dram_bytes
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Pipeline
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows


@dataclass(frozen=True)
class Counted:
    """One rung: what its kernels moved, and what its ledger says they should have."""

    key: str
    title: str
    kernels: tuple[Counters, ...]
    dram_bytes: float  # read and written
    dram_predicted: int
    sm_bytes: float  # between L2 and SMs, read and written
    issued: int  # what the ledger says the thread blocks ask for
    tensor_pipe: float  # percent, the kernels' mean weighted by their time
    occupancy: float  # likewise
    conflicts: float
    registers: int  # of the kernel that uses most

    @property
    def dram_ratio(self) -> float:
        """Counted over predicted."""
        return self.dram_bytes / self.dram_predicted

    @property
    def issued_ratio(self) -> float:
        """Counted over predicted."""
        return self.sm_bytes / self.issued


def count_rungs(shape: AttentionShape, dtype: str, keys: list[str], gpu: GPU, ncu: Path) -> list[Counted]:
    """Launch the rungs `keys` on random numbers under `ncu`, in a process of its own."""
    from onchip.ladder.gpu import GPU_RUNGS, problem_of

    sizes = {"batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "seq_q": shape.seq_q, "seq_k": shape.seq_k,
             "head_dim": shape.head_dim, "head_dim_v": shape.head_dim_v, "causal": shape.masked, "dtype": dtype, "rungs": keys}
    launches = counters.count([sys.executable, "-m", "onchip.ladder.counted", json.dumps(sizes)], ncu)
    problem = problem_of(shape, dtype)
    return [held_against(rung.key, rung.title, rung.pipeline(problem, gpu), [x for x in launches if x.within == rung.key], gpu)
            for rung in GPU_RUNGS if rung.key in keys]


def count_softmax(rows: Rows, gpu: GPU, ncu: Path) -> list[Counted]:
    """The same for the softmax rungs, all of them."""
    from onchip.ladder.softmax import SOFTMAX_RUNGS

    launches = counters.count([sys.executable, "-m", "onchip.ladder.counted", json.dumps(asdict(rows))], ncu)
    return [held_against(rung.key, rung.title, rung.ledger(rows), [x for x in launches if x.within == rung.key], gpu)
            for rung in SOFTMAX_RUNGS]


def held_against(key: str, title: str, pipeline: Pipeline, launches: list[Counters], gpu: GPU) -> Counted:
    """The launches of one rung beside its ledger."""
    def total(*names: str) -> float:
        return sum(getattr(x, name) or 0.0 for x in launches for name in names)

    def mean(name: str) -> float:
        return sum((getattr(x, name) or 0.0) * (x.seconds or 0.0) for x in launches) / (total("seconds") or 1.0)

    predicted = pipeline_dram_bytes(pipeline, gpu.l2_bytes or 0, gpu.sms)
    return Counted(key, title, tuple(launches), total("dram_read", "dram_written"), predicted, total("sm_read", "sm_written"),
                   pipeline.issued, mean("tensor_pipe"), mean("occupancy"), total("conflicts"),
                   int(max((x.registers or 0.0 for x in launches), default=0)))


def profiled(sizes: dict[str, Any]) -> None:
    """What runs under the profiler."""
    import torch

    from onchip.ladder.gpu import GPU_RUNGS
    from onchip.ladder.softmax import SOFTMAX_RUNGS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(getattr(torch, sizes["dtype"]))

    if "rows" in sizes:
        x = normal(sizes["rows"], sizes["n"])
        runs: dict[str, Callable[[], Any]] = {rung.key: partial(rung.run, x) for rung in SOFTMAX_RUNGS}
    else:
        batch, kv_heads, seq_k = sizes["batch"], sizes["kv_heads"], sizes["seq_k"]
        q = normal(batch, sizes["heads"], sizes["seq_q"], sizes["head_dim"])
        k, v = normal(batch, kv_heads, seq_k, sizes["head_dim"]), normal(batch, kv_heads, seq_k, sizes["head_dim_v"])
        runs = {rung.key: partial(rung.run, q, k, v, sizes["causal"]) for rung in GPU_RUNGS if rung.key in sizes["rungs"]}
    for key, run in runs.items():
        for _ in range(2):  # compile, and start the library's kernels the short way
            run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(key)
        run()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    profiled(json.loads(sys.argv[1]))
