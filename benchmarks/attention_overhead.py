"""What an eager call of attention costs the host: ``python benchmarks/attention_overhead.py [--json FILE]``.

The problem is so small (2 heads, 16 × 16, head dim 64) that the host decides. Microseconds a call, no gradient, of `onchip.attention` by
each backend of this machine and of torch's SDPA: calls without waiting for the device between them, contenders in turn, the median of the
rounds. Every contender's result is compared with float64 first. `parts` are pieces of a call by themselves: its checks, and all but the
backend.
"""
import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import onchip
from onchip.attention import ops
from onchip.attention.contract import check_dense
from onchip.attention.dispatch import CAPABILITIES, why_not
from onchip.bench.machine import device_name
from onchip.cli.common import whole_file

CALLS, ROUNDS = 200, 15
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("window", "scale", "softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_seed")),
    "causal": False, "dropout_p": 0.0, "deterministic": False, "backend": "auto"}


def interleaved(runs: dict[str, Callable[[], Any]], wait: Callable[[], None]) -> dict[str, float]:
    """Median microseconds a call of each, `CALLS` calls in a row, contender after contender."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            run()
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            wait()
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def contenders(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """SDPA and every backend that serves this device by itself, full and causal."""
    runs: dict[str, Callable[[], Any]] = {}
    for causal in (False, True):
        name = "causal" if causal else "full"
        runs[f"sdpa {name}"] = partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
        runs[f"auto {name}"] = partial(onchip.attention, q, k, v, causal=causal)
        problem = onchip.explain(q, k, v, causal=causal).problem
        for backend, able in CAPABILITIES.items():
            if q.device.type not in able.only_named and why_not(backend, problem) is None:
                runs[f"{backend} {name}"] = partial(onchip.attention, q, k, v, causal=causal, backend=backend)
    return runs


def above_backend(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """The parts of a call that no backend does: its checks, and a call whose backend returns at once."""
    result = (q, q[..., 0])
    implementation = ops.implementation

    def without_backend() -> None:
        ops.implementation = lambda backend, direction: lambda *_: result  # type: ignore[assignment]
        try:
            for _ in range(10):
                onchip.attention(q, k, v)
        finally:
            ops.implementation = implementation

    return {"checks": partial(check_dense, q, k, v, **DEFAULTS), "ten calls without their backend": without_backend}


def main() -> None:
    """Check, time, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 64, device=device, dtype=dtype) for _ in range(3))
    runs = contenders(q, k, v)
    with torch.no_grad():
        for name, run in runs.items():
            exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal="causal" in name)
            error = float((run().double() - exact).norm() / exact.norm())
            if not error < 1e-2:
                raise SystemExit(f"{name}: wrong by {error:.2g}, nothing is timed")
        microseconds = interleaved(runs, wait)
        parts = interleaved(above_backend(q, k, v), wait)
    for name, time_ in microseconds.items():
        print(f"{name:18} {time_:7.1f} µs  {time_ / microseconds['sdpa ' + name.split()[-1]]:5.2f}x SDPA")
    print(parts)
    if args.json:
        record = {"device": device_name(device), "torch": torch.__version__, "shape": list(q.shape),
                  "dtype": str(dtype).removeprefix("torch."), "microseconds": microseconds, "parts": parts}
        with whole_file(args.json) as file:
            file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
