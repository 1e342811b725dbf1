"""Forward attention on a GPU against cuDNN (through torch's SDPA) and FlashAttention-4 where it is installed.

    python benchmarks/attention_forward.py --json out.json            the whole grid
    python benchmarks/attention_forward.py --only d128 s4096
    python benchmarks/attention_forward.py --only split               few rows, many keys
    python benchmarks/attention_forward.py --only d128 s32768,s131072 --clocks --counters

Each cell first compares every contender's whole output with float64, then times them in turn: rounds of several calls between two events,
contender after contender, the median round of each. So all of them meet the same clocks. FLOPs are 4 · visible pairs · head dim
(2 · pairs · (d + dv)). `call` is the time of one eager call with the device idle before it, host included. Kernels are compiled
beforehand, by several processes. FlashAttention-2 is left out: in every cell of an earlier grid a peer here was 1.4 to 2.9 times as fast.

`--clocks` then runs each contender by itself for about a second and says at which clock, power and share of the tensor cores' peak at that
clock; an 8192³ matmul, so measured, stands beside. `--counters` has Nsight Compute count one launch of each: bytes, tensor pipe.
"""
import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_cells import Case, chosen, contenders, grid, inputs, truth
from onchip.attention import attention
from onchip.bench.clocks import Meter, sustain
from onchip.bench.counters import count, find_ncu, record
from onchip.cli.common import whole_file
from onchip.errors import InputError
from onchip.roofline.hardware import ARCHITECTURES

MATMUL = 8192  # rows and columns of the matmul that --clocks measures
COUNTED = ("seconds", "dram_read", "dram_written", "l2_read", "sm_read", "tensor_pipe")  # of a launch, with --counters


def measure(runs: dict[str, Callable[[], Tensor]], rounds: int, budget: float) -> dict[str, float]:
    """Median seconds a call of each, taken in turn."""
    repeats = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        repeats[name] = max(1, min(50, math.ceil(budget / (time.perf_counter() - start))))
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


def eager_calls(runs: dict[str, Callable[[], object]], count: int = 40) -> dict[str, float]:
    """Median seconds of one call of each by the wall clock, taken in turn, the device idle before and after."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def refusal(run: Callable[[], Tensor]) -> str | None:
    """Why a peer does not serve a case: that is a row without a figure, not the end of the benchmark."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as reason:
        return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:100]
    return None


def cell(case: Case, rounds: int, budget: float, card: Meter | None = None) -> dict[str, object]:
    """Errors, times and rates of all contenders on one case, and the memory onchip took beyond inputs and output."""
    q, k, v, cu = inputs(case)
    exact = truth(case, q, k, v)
    runs = contenders(case, q, k, v, cu)
    refused = {name: reason for name, run in runs.items() if name != "onchip" and (reason := refusal(run))}
    runs = {name: run for name, run in runs.items() if name not in refused}
    errors = {name: float((run() - exact).norm() / exact.norm()) for name, run in runs.items()}
    wrong = {name: error for name, error in errors.items() if not error < 8e-3}
    if wrong:
        raise SystemExit(f"{case.name}: wrong results, nothing is timed: {wrong}")
    del exact
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = runs["onchip"]()
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    del out
    seconds = measure(runs, rounds, budget)
    result: dict[str, object] = {"case": case.name, **asdict(case), "error": errors, "refused": refused, "extra_bytes": extra,
                                 "seconds": seconds, "tflops": {name: case.flops / t / 1e12 for name, t in seconds.items()}}
    if card is not None:
        result["sustained"] = at_clocks(runs, case.flops, seconds, card)
    if not case.lengths and case.s <= 1024:
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        result["call_seconds"] = eager_calls({
            "onchip": lambda: attention(qt, kt, vt, causal=case.causal), "kernel": runs["onchip"],
            "sdpa": lambda: scaled_dot_product_attention(qt, kt, vt, is_causal=case.causal, enable_gqa=case.hq != case.hkv)})
    return result


def report(row: dict[str, object]) -> str:
    """One line: rates, and ours over each peer's."""
    tflops, errors = row["tflops"], row["error"]
    parts = [f"{name} {rate:5.1f}" for name, rate in tflops.items()]
    parts += [f"{tflops['onchip'] / rate:.2f}x {name}" for name, rate in tflops.items() if name != "onchip"]
    parts.append("error e-3 " + " ".join(f"{e * 1e3:.2f}" for e in errors.values()))
    if row["keys"]:
        parts.append("µs " + " ".join(f"{t * 1e6:.1f}" for t in row["seconds"].values()))
    if "call_seconds" in row:
        parts.append("call µs " + " ".join(f"{t * 1e6:.0f}" for t in row["call_seconds"].values()))
    return f"{row['case']:36}" + "  ".join(parts) + "".join(f"  {name}: {reason}" for name, reason in row["refused"].items())


def compile_first(cases: list[Case]) -> None:
    """Call every contender of the cases once, so that the caches of Triton and of FlashAttention-4 on disk hold what the cells need."""
    for case in cases:
        q, k, v, cu = inputs(case)
        for run in contenders(case, q, k, v, cu).values():
            refusal(run)


def compile_in_parallel(cases: list[Case], processes: int) -> None:
    """`compile_first` for kinds of cases side by side."""
    kinds: dict[Case, list[Case]] = {}
    for case in cases:
        kinds.setdefault(replace(case, b=0, s=0, hq=case.hq // case.hkv, hkv=1, worst=False, keys=min(case.keys, 1)), []).append(case)
    with multiprocessing.get_context("spawn").Pool(min(processes, len(kinds))) as pool:
        pool.map(compile_first, kinds.values(), chunksize=1)


def meter() -> Meter:
    """Clock and power of the card at hand."""
    uuid = str(torch.cuda.get_device_properties().uuid)
    return Meter(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def at_clocks(runs: dict[str, Callable[[], object]], flops: int, seconds: dict[str, float], card: Meter) -> dict[str, dict[str, object]]:
    """What each sustains by itself: TFLOP/s, and clock, power and share of the tensor cores' peak at that clock while it did."""
    device = torch.cuda.get_device_properties()
    a_clock = device.multi_processor_count * ARCHITECTURES[device.major, device.minor].tensor_flops_per_clock_sm
    found: dict[str, dict[str, object]] = {}
    for name, run in runs.items():
        sustained = sustain(run, torch.cuda.synchronize, card, seconds[name])
        rate = flops / sustained.seconds
        found[name] = {"tflops": rate / 1e12, "of_peak": rate / (a_clock * sustained.mhz * 1e6), **asdict(sustained)}
    return found


def matmul_at_clocks(card: Meter) -> dict[str, object]:
    """The same of a plain bf16 matmul: what the card sustains where nothing but operands is in its way."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    runs = {"matmul": lambda: a @ b}
    return at_clocks(runs, 2 * MATMUL**3, measure(runs, 3, 0.01), card)["matmul"]


def clocks_line(name: str, found: dict[str, object]) -> str:
    """One contender at its clock."""
    watts = "" if found["watts"] is None else f"{found['watts']:4.0f} W"
    limit = "" if found["limit_watts"] is None else f" of {found['limit_watts']:.0f}"
    why = ", ".join(f"{reason} {share:.0%}" for reason, share in found["reasons"].items())
    return (f"    sustained {name:8}{found['tflops']:6.1f} TFLOP/s at {found['mhz']:4.0f} MHz {watts}{limit} = "
            f"{found['of_peak']:.1%} of the tensor peak at that clock; {why or 'nothing held the clock'}")


def label(case: Case, name: str) -> str:
    """The NVTX range of one contender's launch under the profiler."""
    return f"{case.name}: {name}"


def counters(cases: list[Case], words: list[str], tokens: list[int], ncu: Path) -> dict[str, dict[str, dict[str, float | None]]]:
    """By case and contender, the counters of one call's longest kernel, all counted by one run under Nsight Compute at the card's own
    clocks; "launches" is how many kernels the call took."""
    selection = ["--tokens", *map(str, tokens), *(["--only", *words] if words else [])]
    launches = count([sys.executable, __file__, "--alone", *selection], ncu)
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for case in cases:
        found[case.name] = {}
        for name in ("onchip", "unsplit", "cudnn", "fa4"):
            own = [launch for launch in launches if label(case, name) in launch.within]
            if own:
                longest = max(own, key=lambda launch: launch.seconds or 0.0)
                found[case.name][name] = {"launches": len(own), **{key: getattr(longest, key) for key in COUNTED}}
    return found


def counters_line(name: str, found: dict[str, float | None]) -> str:
    """One contender's counters."""
    def giga(key: str) -> str:
        return "–" if found[key] is None else f"{found[key] / 1e9:.2f}"

    pipe = "–" if found["tensor_pipe"] is None else f"{found['tensor_pipe']:.1f}"
    return (f"    counted   {name:8}tensor pipe {pipe} %, GB: DRAM read {giga('dram_read')}, written {giga('dram_written')}, "
            f"looked up in the L2 {giga('l2_read')}, read by SMs {giga('sm_read')}; kernels a call: {found['launches']}")


def alone(cases: list[Case]) -> None:
    """What `counters` counts: one warm call of each contender."""
    for case in cases:
        for name, run in contenders(case, *inputs(case)).items():
            if not refusal(run):
                record(label(case, name), run)


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
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells whose name has all of these words; a,b is either")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.01, help="seconds of calls a round")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)), help="that compile first; 0: none")
    parser.add_argument("--clocks", action="store_true", help="clock, power and what held the clock down while each contender ran for 1 s")
    parser.add_argument("--counters", action="store_true", help="bytes and tensor pipe of a launch of each, by Nsight Compute")
    parser.add_argument("--alone", action="store_true", help="only call each contender once: what --counters counts")
    args = parser.parse_args()
    cases = chosen(grid(args.tokens), args.only)
    if not cases:
        parser.error(f"--only: no cell's name contains all of {' '.join(args.only)}; a name looks like «{grid(args.tokens)[0].name}»")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if args.alone:
        alone(cases)
        return
    try:
        card, ncu = meter() if args.clocks else None, find_ncu() if args.counters else None
        run_cells(cases, args, card, ncu)
    except InputError as error:
        parser.error(str(error))


def run_cells(cases: list[Case], args: argparse.Namespace, card: Meter | None, ncu: Path | None) -> None:
    """What `main` does once it knows what to do."""
    results: dict[str, object] = {"machine": {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "flash-attn-4": installed("flash-attn-4")}}
    print(results["machine"], flush=True)
    if args.processes:
        compile_in_parallel(cases, args.processes)
    if card is not None:
        results["matmul"] = matmul_at_clocks(card)
        print(clocks_line("matmul", results["matmul"]), flush=True)
    results["cells"] = rows = []

    def write() -> None:
        if args.json:
            with whole_file(args.json) as temporary:
                temporary.write_text(json.dumps(results, indent=1))

    for case in cases:
        rows.append(cell(case, args.rounds, args.budget, card))
        print("\n".join([report(rows[-1])] + [clocks_line(*found) for found in rows[-1].get("sustained", {}).items()]), flush=True)
        write()
    best = [row["tflops"]["onchip"] / max(rate for name, rate in row["tflops"].items() if name != "onchip")
            for row in rows if len(row["tflops"]) > 1 and not row["worst"] and not row["keys"]]
    if best:
        print(f"against the best peer: geometric mean {statistics.geometric_mean(best):.3f}x, worst {min(best):.3f}x, {len(best)} cells")
    if ncu is not None:
        torch.cuda.empty_cache()
        counted = counters(cases, args.only, args.tokens, ncu)
        for row in rows:
            row["counters"] = counted[row["case"]]
            print("\n".join([row["case"]] + [counters_line(*found) for found in row["counters"].items()]), flush=True)
        write()


if __name__ == "__main__":
    main()
