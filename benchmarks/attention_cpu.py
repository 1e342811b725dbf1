"""Attention on a CPU: ``python benchmarks/attention_cpu.py [--json FILE]``.

B1 H8 S4096 D64, fp32, two threads. `onchip.attention` beside torch's SDPA, and the reference backend beside eager naive attention
(softmax(q kᵀ · scale) v, three operators): medians of calls taken in turn, after a comparison with float64, and the peak extra memory of
one call. The exit status says whether the promises hold: at least 0.9x SDPA, 1.3x naive, and an eighth of naive's memory.
"""
import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import onchip
from onchip.bench.machine import device_name
from onchip.bench.memory import peak_extra_bytes
from onchip.cli.common import whole_file

SHAPE, ROUNDS = (1, 8, 4096, 64), 7


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Scores, softmax, output: each operator reads and writes N² numbers."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(s, -1) @ v


def median_seconds(runs: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Of each contender, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(causal: bool) -> dict[str, dict[str, float]]:
    """Seconds, peak extra bytes and relative error of every contender."""
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    runs: dict[str, Callable[[], Tensor]] = {
        "onchip": partial(onchip.attention, q, k, v, causal=causal),
        "sdpa": partial(scaled_dot_product_attention, q, k, v, is_causal=causal),
        "reference": partial(onchip.attention, q, k, v, causal=causal, backend="reference"),
        "naive": partial(naive, q, k, v, causal),
    }
    exact = naive(q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), causal)
    errors = {name: float((run()[:, :1] - exact).norm() / exact.norm()) for name, run in runs.items()}
    if not max(errors.values()) < 1e-5:
        raise SystemExit(f"wrong results, nothing is timed: {errors}")
    return {"error": errors, "seconds": median_seconds(runs), "peak_extra_bytes": {n: peak_extra_bytes(run)[0] for n, run in runs.items()}}


def promises(seconds: dict[str, float], memory: dict[str, float]) -> dict[str, tuple[float, bool]]:
    """(ratio, does it hold) of each promise."""
    sdpa, eager = seconds["sdpa"] / seconds["onchip"], seconds["naive"] / seconds["reference"]
    share = memory["reference"] / memory["naive"]
    return {"onchip against SDPA ≥ 0.9": (sdpa, sdpa >= 0.9), "reference against naive ≥ 1.3": (eager, eager >= 1.3),
            "reference's memory of naive's ≤ 0.125": (share, share <= 0.125)}


def main() -> int:
    """Measure full and causal, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    record: dict[str, object] = {"device": device_name(torch.device("cpu")), "torch": torch.__version__, "shape": SHAPE, "dtype": "float32"}
    kept = True
    for name, causal in (("full", False), ("causal", True)):
        figures = measure(causal)
        record[name] = figures
        for promise, (ratio, holds) in promises(figures["seconds"], figures["peak_extra_bytes"]).items():
            print(f"{name:7} {promise:38} {ratio:6.3f} {'holds' if holds else 'DOES NOT HOLD'}")
            kept &= holds
    if args.json:
        with whole_file(args.json) as file:
            file.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
