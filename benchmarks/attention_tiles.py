"""Candidate tiles of the Triton attention kernels beside each other, for `onchip.attention.triton.tiles`.

    python benchmarks/attention_tiles.py --json tiles.json

Each candidate's results are held against float64 first, as benchmarks/attention_triton.py does; then they take turns.
"""
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from attention_triton import DEVICE, FP32_SHAPES, SHAPES, Calls, eager, flops, inputs, main, timed
from onchip.attention import attention
from onchip.attention.contract import Spec
from onchip.attention.triton import backward, forward, launch
from onchip.attention.triton.tiles import Tile

# (kernel, dtype, head dim) → tiles to time: rows x keys x warps x stages, in 16 bits with descriptors unless it says pointers
CANDIDATES: dict[tuple[str, str, int], list[str]] = {
    ("forward", "bfloat16", 64): ["128x64x4x3", "128x64x4x2", "64x64x4x3"],
    ("forward", "bfloat16", 128): ["128x64x4x2", "128x64x8x3", "128x64x8x3 pointers", "128x32x4x3"],
    ("forward", "bfloat16", 256): ["128x64x8x2", "128x64x8x1", "128x32x8x3"],
    ("queries", "bfloat16", 64): ["64x64x4x3", "64x64x4x4", "128x64x4x3"],
    ("queries", "bfloat16", 128): ["128x64x8x3", "128x64x8x4"],
    ("queries", "bfloat16", 256): ["128x32x8x2", "64x64x8x2", "128x64x8x1"],
    ("keys", "bfloat16", 64): ["128x64x4x2", "64x64x4x2", "64x64x4x3"],
    ("keys", "bfloat16", 128): ["64x64x4x2", "64x128x8x3", "64x128x8x3 pointers"],
    ("keys", "bfloat16", 256): ["64x64x8x2", "32x64x8x2"],
    ("forward", "float32", 64): ["64x64x4x2", "128x64x8x2", "128x32x8x2"],
    ("forward", "float32", 128): ["64x32x4x2", "128x32x8x1", "128x32x8x2"],
    ("queries", "float32", 64): ["128x64x8x2", "64x32x4x2", "128x32x8x2", "32x32x4x2"],
    ("queries", "float32", 128): ["128x32x8x1", "64x32x4x1", "128x16x8x2", "32x32x8x2"],
    ("keys", "float32", 64): ["32x128x8x2", "32x64x4x2", "32x32x8x2"],
    ("keys", "float32", 128): ["32x128x8x1", "16x128x8x2", "64x32x8x1", "32x32x8x2"],
}


def kernel_call(kind: str, candidate: str, tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """Run one kernel with one tile; what it computes. `tensors`: q, k, v, dout, out, lse."""
    tile, _, pointers = candidate.partition(" ")
    launch.TMA_PAIRS = 2**62 if pointers else 0
    launch.Call.tile = lambda *_: Tile(*map(int, tile.split("x")))
    q, k, v, dout, out, lse = tensors
    spec = Spec(int(causal), -1, 0 if causal else -1, q.shape[-1] ** -0.5, 0.0, 0.0, q.shape[2], q.shape[2], True, False)
    if kind == "forward":
        return [forward.forward(q, k, v, *[None] * 7, spec)[0]]
    needs = (kind == "queries", kind == "keys", kind == "keys", False, False)
    return [x for x in backward.backward(dout, None, q, k, v, out, lse, *[None] * 7, spec, needs) if x is not None]


def build_tile(job: tuple[str, str, int, str, bool]) -> tuple[Any, str | None]:
    """Run one configuration once on a small input, so that its kernel lies in Triton's disk cache; what went wrong, if anything did."""
    kind, dtype, d, candidate, causal = job
    tensors = inputs((1, 1, 256, d), getattr(torch, dtype))
    try:
        kernel_call(kind, candidate, [*tensors, tensors[0], torch.zeros(1, 1, 256, device=DEVICE)], causal)
        torch.cuda.synchronize()
    except Exception as error:
        return job, (str(error).splitlines() or [repr(error)])[0][:120]
    return job, None


def sweep(workers: int) -> list[dict[str, Any]]:
    """Time every candidate at the shapes of its head dim; rates count what a kernel multiplies: 2, 3 or 4 matmuls."""
    jobs = [(*key, candidate, causal) for key, candidates in CANDIDATES.items() for candidate in candidates for causal in (False, True)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        broken = {job: why for job, why in pool.map(build_tile, jobs) if why}
    for job, why in broken.items():
        print("cannot run", job, why)
    own_tile, rows = launch.Call.tile, []
    for (kind, dtype, d), causal in product(CANDIDATES, (False, True)):
        for shape in {2: [*SHAPES, (4, 8, 8192, 256)], 4: FP32_SHAPES}[getattr(torch, dtype).itemsize]:
            if shape[3] != d:
                continue
            b, h, s, _ = shape
            tensors = inputs(shape, getattr(torch, dtype))
            head = [x[-1, -1] for x in tensors]
            launch.Call.tile = own_tile
            with torch.no_grad():
                tensors += attention(*tensors[:3], causal=causal, backend="triton", return_lse=True)
            truth = dict(zip(("forward", "queries", "keys"), ([0], [1], [2, 3]), strict=True))[kind]
            exact, yard = (eager(*(x.to(t) for x in head), causal) for t in (torch.float64, head[0].dtype))
            calls: Calls = {c: partial(kernel_call, kind, c, tensors, causal) for c in CANDIDATES[kind, dtype, d]
                            if (kind, dtype, d, c, causal) not in broken}
            for name, call in list(calls.items()):
                for ours, at in zip(call(), truth, strict=True):
                    error, allowed = (float((x.double() - exact[at]).norm() / exact[at].norm()) for x in (ours[-1, -1], yard[at]))
                    if not error <= 2 * allowed:
                        print(f"{kind} {dtype} {d} {name} is wrong and not timed: {error:.1e}, eager {allowed:.1e}")
                        calls.pop(name, None)
            del exact, yard
            seconds = timed(calls)
            work = flops([s] * b, h, d, causal, "forward") * {"forward": 1, "queries": 1.5, "keys": 2}[kind]
            rates = {name: work / t / 1e12 for name, t in seconds.items()}
            print(f"{kind} {dtype} {shape} {'causal' if causal else 'full'}: "
                  + ", ".join(f"{name} {rate:.0f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1])), flush=True)
            rows.append({"kernel": kind, "dtype": dtype, "shape": shape, "causal": causal, "seconds": seconds, "tflops": rates})
    return rows


if __name__ == "__main__":
    main(__doc__, lambda workers: {"sweep": sweep(workers)})
