"""A ladder as benchmarks/ladder_gpu.py writes it, made up through the very dataclasses: no card was asked."""
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onchip.bench.counters import Counters
from onchip.bench.machine import Ceilings
from onchip.ladder.counted import Counted, Ledger, held_against
from onchip.ladder.measure import Measurement
from onchip.ladder.rungs import GEMM_TILE, RUNGS, Choices
from onchip.roofline.attention import Formats, Sizes, Tile, useful_flops
from onchip.roofline.dram import counted_dram_bytes
from onchip.roofline.hardware import find_gpu
from onchip.roofline.l2 import lookups
from onchip.roofline.roofs import predict
from onchip.roofline.shape import AttentionShape
from onchip.simulate.reference import Error

CEILINGS = Ceilings("NVIDIA H200", "bfloat16", 4.25e12, 7.1e14, matmul_size=8192)
GPU = find_gpu("h200").with_ceilings(dram_gbps=4250, matmul_tflops={"bfloat16": 710})
FORMATS = Formats("bfloat16", "bfloat16")
# rung → (time over prediction, DRAM bytes over prediction, tensor pipe in percent)
FOUND = {"naive": (1.05, 1.02, 20.0), "fa1": (2.5, 1.4, 15.0), "fa2": (1.6, 1.0, 58.0), "hopper": (1.04, 1.01, 93.0)}
FOUND |= {"naive_backward": (1.2, 1.0, 30.0), "apart_backward": (1.3, 1.0, 60.0)}
FORWARD, BACKWARD = ("naive", "fa1", "fa2", "hopper"), ("naive_backward", "apart_backward")
LEDGER = {"hopper": "fa2"}
TITLES = {"naive": "naive", "fa1": "FA1, K/V outer", "fa2": "FA2, Q outer", "hopper": "Hopper, anchored <softmax>",
          "naive_backward": "naive backward", "apart_backward": "recomputing, dQ apart"}


def rung(key: str, shape: AttentionShape) -> tuple[Measurement, Counted]:
    """One rung, off its prediction by the factors of FOUND."""
    slower, more, pipe = FOUND[key]
    tile = GEMM_TILE if key.startswith("naive") else Tile(128, 128, 64)
    pipeline = RUNGS[LEDGER.get(key, key)].predict(shape, tile, FORMATS, Choices())
    prediction = predict(pipeline, GPU, "bfloat16")
    seconds, flops = prediction.time * slower, useful_flops(shape)
    measured = Measurement(key, TITLES[key], seconds, flops / seconds, flops / seconds / CEILINGS.matmul,
                           Sizes(shape, FORMATS).forward / seconds / CEILINGS.copy, 1 << 24, Error(2e-2, 4e-3, 2.4e-3), prediction.time,
                           prediction.binding)
    launches = []
    for kernel, time in zip(pipeline.kernels, prediction.kernels, strict=True):
        dram = counted_dram_bytes(kernel, GPU.l2_bytes or 0, GPU.sms)
        read = dram.read + (more - 1) * (dram.read + dram.written)
        found = lookups(kernel, GPU.l2_bytes or 0, GPU.sms)  # two requests merged into one
        launches.append(Counters(kernel.name, (key,), time.time * slower, read, dram.written, found.read + found.shared / 2,
                                 found.written / 2, found.written / 2, kernel.issued * 0.7, kernel.issued * 0.3, 0.0, 1000.0, pipe, 18.75,
                                 168.0))
    return measured, held_against(Ledger(key, TITLES[key], pipeline), launches, GPU, "bfloat16")


def climb(seq: int, causal: str | None, keys: tuple[str, ...], heads: int = 16, counters: bool = True) -> dict[str, Any]:
    """One problem."""
    shape = AttentionShape.square(seq, 128, heads=heads, causal=causal)
    pairs = [rung(key, shape) for key in keys]
    return {"shape": asdict(shape), "measured": [asdict(m) for m, _ in pairs], "skipped": {},
            "counted": [asdict(c) for _, c in pairs] if counters else []}


def ladder(counters: bool = True) -> dict[str, Any]:
    """The whole result, as it reads back from its file."""
    incident = [climb(seq, None, ("naive", "hopper"), 4, counters) for seq in (2048, 4096, 8192)]
    last = climb(32768, None, ("hopper",), 4, counters)
    last["skipped"] = {"naive": "S and P would take 17.2 GB, more than the 9.1 GB free: out of memory"}
    result = {"ceilings": asdict(CEILINGS), "card": GPU.title, "torch": "2.11.0", "triton": "3.6.0",
              "ladder": [climb(seq, causal, FORWARD, counters=counters) for seq in (4096, 8192) for causal in (None, "bottom-right")],
              "backward": [climb(4096, "bottom-right", BACKWARD, counters=counters)],
              "incident": [*incident, last]}
    return json.loads(json.dumps(result))


def lab() -> dict[str, Any]:
    """A lab's result: one claim confirmed, one refuted, one not measured."""
    from onchip.lab.experiment import Experiment, Prediction, Sizes, at_least, exactly
    from onchip.lab.run import judge, report

    def experiment(name: str, *predictions: Prediction) -> Experiment:
        return Experiment(name, f"the claim of {name}", (), lambda gpu, sizes: predictions, lambda bench: None, pitfall=f"pitfall {name}")

    conflicts = Prediction("a.conflicts", "conflicts of a & b", exactly(31.0), "", "banks")
    speed = Prediction("b.seconds", "seconds of b", at_least(2e-6), "s", "roofs")
    outcomes = [judge(experiment("padding", conflicts), GPU, Sizes(), {"a.conflicts": 31.0}),
                judge(experiment("order", conflicts, speed), GPU, Sizes(), {"a.conflicts": 7.0, "b.seconds": 3e-6}),
                judge(experiment("later", speed), GPU, Sizes(), {})]
    return json.loads(json.dumps(report(outcomes, GPU, Sizes(), {"gpu": "made-up H200"})))


def write(folder: Path, name: str, data: object) -> Path:
    """`data` as JSON in `folder`."""
    file = folder / name
    file.write_text(json.dumps(data))
    return file
