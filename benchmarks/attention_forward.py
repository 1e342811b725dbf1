"""Forward attention on a GPU against cuDNN and FlashAttention-2 (through torch's SDPA) and FlashAttention-4 where it is installed.

    python benchmarks/attention_forward.py --json out.json            the whole grid
    python benchmarks/attention_forward.py --only d128 --tokens 32768

Each cell first compares every contender's output with float64 on a few rows, then times them in turn: rounds of several calls between two
events, contender after contender, the median round of each. So all of them meet the same clocks. FLOPs are 4 · visible pairs · head dim
(2 · pairs · (d + dv)). `call` is the time of one eager call with the device idle before it, host included.
"""
import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from onchip.attention.contract import Spec
from onchip.attention.hopper import launch
from onchip.roofline.shape import AttentionShape

WIDTH = 2048  # heads · head dim
ROWS = 16  # rows of a head whose exact result is worked out


@dataclass(frozen=True)
class Case:
    """One problem. `lengths` makes it a packed batch, and b, s of no account."""

    b: int
    s: int
    hq: int
    hkv: int
    d: int
    dv: int
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The case in a few words."""
        size = f"packed {len(self.lengths)} sequences" if self.lengths else f"b{self.b} s{self.s}"
        heads = f"h{self.hq}" if self.hq == self.hkv else f"h{self.hq}/{self.hkv}"
        width = f"d{self.d}" if self.d == self.dv else f"d{self.d}/{self.dv}"
        return " ".join([size, heads, width, "causal" if self.causal else "full"] + [f"window{self.window}"] * bool(self.window)
                        + ["fp16"] * (self.dtype == "float16"))

    @property
    def flops(self) -> int:
        """Of the two matmuls, visible pairs only."""
        def pairs(s: int) -> int:
            return AttentionShape(s, s, 1, 1, causal="bottom-right" if self.causal else None, window=(self.window, None)).pairs()

        total = sum(map(pairs, self.lengths)) if self.lengths else self.b * pairs(self.s)
        return 2 * total * self.hq * (self.d + self.dv)


def grid(tokens: list[int]) -> list[Case]:
    """The cells the project answers for."""
    cases = []
    for n, d, s, causal in product(tokens, (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384, 32768), (False, True)):
        if s <= n:
            cases.append(Case(n // s, s, WIDTH // d, WIDTH // d, d, d, causal))
    n = max(tokens)
    for causal in (False, True):
        cases += [Case(n // 8192, 8192, 32, 8, 128, 128, causal), Case(n // 8192, 8192, 16, 16, 96, 96, causal),
                  Case(n // 8192, 8192, 16, 16, 192, 128, causal), Case(n // 8192, 8192, 8, 8, 192, 192, causal),
                  Case(n // 8192, 8192, 16, 16, 128, 128, causal, dtype="float16")]
        lengths = [round(100 * 80 ** (i / 15)) for i in range(16)]  # 100 … 8000, log-spaced, mean near 2K
        cases.append(Case(0, 0, 16, 16, 128, 128, causal, lengths=tuple(lengths)))
    cases.append(Case(max(1, n // 16384), 16384, 16, 16, 128, 128, True, window=1024))
    return cases


def contenders(case: Case, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    """What can run the case. q, k, v are (B, S, H, D) or packed (total, H, D) in memory, the layout all of them read without a copy."""
    longest = max(case.lengths, default=case.s)
    spec = Spec(int(case.causal), -1 if case.window is None else case.window, 0 if case.causal else -1, case.d**-0.5, 0.0, 0.0, longest,
                longest, False, False)
    runs: dict[str, Callable[[], Tensor]] = {}
    if cu is not None:
        runs["onchip"] = lambda: launch.run(q, k, v, None, cu, cu, spec)[0]
    else:
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        runs["onchip"] = lambda: launch.run(qt, kt, vt, None, None, None, spec)[0].transpose(1, 2)
        if case.window is None:
            def sdpa(backend: SDPBackend) -> Callable[[], Tensor]:
                def call() -> Tensor:
                    with sdpa_kernel(backend):
                        out = scaled_dot_product_attention(qt, kt, vt, is_causal=case.causal, enable_gqa=case.hq != case.hkv)
                    return out.transpose(1, 2)
                return call
            runs |= {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    try:
        from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return runs
    window = (None, None) if case.window is None else (case.window, 0)
    if cu is not None:
        runs["fa4"] = lambda: flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=case.causal)[0]
    else:
        runs["fa4"] = lambda: flash_attn_func(q, k, v, causal=case.causal, window_size=window)[0]
    return runs


def exact_rows(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[object, ...], Tensor]:
    """(index of some rows of the output, their exact values): of the first head, or of the longest packed sequence's first head."""
    if case.lengths:
        longest = max(range(len(case.lengths)), key=lambda i: case.lengths[i])
        start, s = sum(case.lengths[:longest]), case.lengths[longest]
        q, k, v = (x[start : start + s, 0].double() for x in (q, k, v))
    else:
        start, s = 0, case.s
        q, k, v = (x[-1, :, 0].double() for x in (q, k, v))
    rows = torch.linspace(0, s - 1, ROWS, device=q.device).long()
    x = q[rows] @ k.T * case.d**-0.5
    distance = torch.arange(s, device=q.device) - rows[:, None]
    if case.causal:
        x.masked_fill_(distance > 0, -math.inf)
    if case.window is not None:
        x.masked_fill_(distance < -case.window, -math.inf)
    index = (start + rows, 0) if case.lengths else (-1, rows, 0)
    return index, torch.softmax(x, -1) @ v


def measure(runs: dict[str, Callable[[], Tensor]], rounds: int, budget: float) -> dict[str, float]:
    """Median seconds a call of each, taken in turn."""
    repeats = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        run()
        torch.cuda.synchronize()
        repeats[name] = max(1, min(50, math.ceil(budget / ((time.perf_counter() - start) / 2))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeats[name]):
                run()
            last.record()
            torch.cuda.synchronize()
            times[name].append(first.elapsed_time(last) / 1e3 / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def eager_call(run: Callable[[], Tensor], count: int = 50) -> float:
    """Median seconds of one call by the wall clock, the device idle before and after."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def refusal(run: Callable[[], Tensor]) -> str | None:
    """Why a peer does not serve a case: that is a row without a figure, not the end of the benchmark."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as reason:
        return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:100]
    return None


def cell(case: Case, rounds: int, budget: float) -> dict[str, object]:
    """Errors, times and rates of all contenders on one case."""
    dtype = getattr(torch, case.dtype)
    lead = (sum(case.lengths),) if case.lengths else (case.b, case.s)
    generator = torch.Generator("cuda").manual_seed(case.s + case.d)
    q, k, v = (torch.randn(*lead, h, d, device="cuda", dtype=dtype, generator=generator)
               for h, d in ((case.hq, case.d), (case.hkv, case.d), (case.hkv, case.dv)))
    cu = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0)], device="cuda", dtype=torch.int32) if case.lengths else None
    index, exact = exact_rows(case, q, k, v)
    runs = contenders(case, q, k, v, cu)
    refused = {name: reason for name, run in runs.items() if name != "onchip" and (reason := refusal(run))}
    runs = {name: run for name, run in runs.items() if name not in refused}
    errors = {name: float((run()[index].double() - exact).norm() / exact.norm()) for name, run in runs.items()}
    wrong = {name: error for name, error in errors.items() if not error < 8e-3}
    if wrong:
        raise SystemExit(f"{case.name}: wrong results, nothing is timed: {wrong}")
    seconds = measure(runs, rounds, budget)
    result: dict[str, object] = {"case": case.name, **asdict(case), "error": errors, "refused": refused, "seconds": seconds,
                                 "tflops": {name: case.flops / t / 1e12 for name, t in seconds.items()}}
    if not case.lengths and case.s <= 1024:
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        result["call_seconds"] = {"onchip": eager_call(runs["onchip"]), "sdpa": eager_call(
            lambda: scaled_dot_product_attention(qt, kt, vt, is_causal=case.causal))}
    return result


def report(row: dict[str, object]) -> str:
    """One line: rates, and ours over each peer's."""
    tflops, errors = row["tflops"], row["error"]
    parts = [f"{name} {rate:6.1f}" for name, rate in tflops.items()]
    parts += [f"{tflops['onchip'] / rate:.2f}x {name}" for name, rate in tflops.items() if name != "onchip"]
    parts.append("error " + " ".join(f"{e * 1e3:.2f}e-3" for e in errors.values()))
    if "call_seconds" in row:
        parts.append("call µs " + " ".join(f"{t * 1e6:.0f}" for t in row["call_seconds"].values()))
    return f"{row['case']:36}" + "  ".join(parts)


def installed(package: str) -> str:
    """Version, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Run the grid, print a line a cell, write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768], help="B · S of the grid")
    parser.add_argument("--only", default="", help="cells whose name contains all of these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.01, help="seconds of calls a round")
    args = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
               "cudnn": torch.backends.cudnn.version(), "flash-attn-4": installed("flash-attn-4")}
    print(machine)
    rows = []
    for case in grid(args.tokens):
        if all(word in case.name.split() for word in args.only.split()):
            rows.append(cell(case, args.rounds, args.budget))
            print(report(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"machine": machine, "cells": rows}, indent=1))
    best = [row["tflops"]["onchip"] / max(rate for name, rate in row["tflops"].items() if name != "onchip")
            for row in rows if len(row["tflops"]) > 1]
    if best:
        print(f"against the best peer: geometric mean {statistics.geometric_mean(best):.3f}x, worst {min(best):.3f}x, {len(best)} cells")


if __name__ == "__main__":
    main()
