"""Softmax forward and backward against torch and quack: correctness first, then time at the memory roof.

    python benchmarks/softmax.py --json benchmarks/results/h200/softmax.json

Every call starts with its data out of L2 (buffers rotate, and a tensor exceeds it), implementations alternate call by call, and the median
counts. Bytes are the compulsory ones: forward one read and one write of the tensor, backward two and one; the copy that sets the roof, one
and one. A sleep in front of each call lets the host run ahead, so that what is timed is the card's work.
"""
import argparse
import importlib.metadata
import json
import statistics
import sys
from pathlib import Path

import torch

from onchip.softmax.api import softmax

WIDTHS = [2**k for k in range(10, 19)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHECKED_ROWS = 8
SLEEP = 500_000  # clocks, about 0.3 ms


def implementations():
    """name → softmax over the last dimension of a 2-D tensor, for what is installed."""
    found = {"onchip": softmax, "torch": lambda x: torch.softmax(x, -1)}
    try:
        from quack.softmax import softmax as quack
    except ImportError:
        print("quack: not installed")
    else:
        found["quack"] = quack
    return found


def version(package):
    """The installed version, None when absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def errors(function, x, dy):
    """max |error| of y and dx against float64 over a few rows, relative to the largest value."""
    rows = torch.cat([torch.arange(CHECKED_ROWS), torch.arange(len(x) - CHECKED_ROWS, len(x))]).clamp(0, len(x) - 1)
    leaf, exact = x.detach().requires_grad_(), x[rows].double().requires_grad_()
    y, right = function(leaf), torch.softmax(exact, -1)
    dx, = torch.autograd.grad(y, leaf, dy)
    right_dx, = torch.autograd.grad(right, exact, dy[rows].double())
    return [((a[rows].double() - b).abs().max() / b.abs().max()).item() for a, b in ((y.detach(), right.detach()), (dx, right_dx))]


def timed(calls, repeats):
    """name → median microseconds of `calls[name](i)`, i = 0, 1, … choosing the buffers; the calls alternate."""
    samples = {name: [] for name in calls}
    for i in range(repeats + 3):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP)
            start.record()
            call(i)
            stop.record()
            if i >= 3:  # the first ones compile and warm up
                samples[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 for name, pairs in samples.items()}


def measure(n, dtype, elements, repeats):
    """One shape: a list of result rows."""
    rows = max(1, elements // n)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    nbytes = rows * n * dtype.itemsize
    sets = 1 + -(-2 * l2 // nbytes)
    xs = [torch.randn(rows, n, device="cuda").to(dtype).requires_grad_() for _ in range(sets)]
    dys = [torch.randn(rows, n, device="cuda").to(dtype) for _ in range(sets)]
    functions, results = implementations(), []
    wrong = {name: errors(f, xs[0], dys[0]) for name, f in functions.items()}
    worst = 2 * max(wrong["torch"]) + 2 * torch.finfo(dtype).eps
    if max(wrong["onchip"]) > worst:
        sys.exit(f"onchip is wrong at {rows} × {n} {dtype}: relative errors {wrong['onchip']}, allowed {worst:.3g}; no speed is reported")
    out = torch.empty_like(xs[0])
    kept = {name: [f(x) for x in xs] for name, f in functions.items()}

    def backward(name):
        return lambda i: torch.autograd.grad(kept[name][i % sets], xs[i % sets], dys[i % sets], retain_graph=True)

    with torch.no_grad():
        forward_us = timed({"copy": lambda i: out.copy_(xs[i % sets])} | {
            name: (lambda i, f=f: f(xs[i % sets])) for name, f in functions.items()}, repeats)
    backward_us = timed({name: backward(name) for name in functions}, repeats)
    for direction, times, tensors in (("forward", forward_us, 2), ("backward", backward_us, 3)):
        for name, us in times.items():
            error = wrong[name][direction == "backward"] if name in wrong else None
            results.append({"pass": direction, "dtype": str(dtype)[6:], "rows": rows, "n": n, "name": name, "us": round(us, 2),
                            "tb_per_s": round(tensors * nbytes / us / 1e6, 3), "relative_error": error})
    return results


def main():
    """Measure every width, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--elements", type=int, default=2**27, help="elements of a tensor (default 2^27)")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/softmax.py needs a CUDA device")
    results = []
    for dtype in options.dtypes:
        for n in options.widths:
            rows = measure(n, DTYPES[dtype], options.elements, options.repeats)
            results += rows
            for direction in ("forward", "backward"):
                speeds = "  ".join(f"{r['name']} {r['tb_per_s']:.2f}" for r in rows if r["pass"] == direction)
                print(f"{dtype} {rows[0]['rows']:>7} × {n:<7} {direction:<8} TB/s: {speeds}", flush=True)
            torch.cuda.empty_cache()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        versions = {name: version(name) for name in ("torch", "triton", "quack-kernels")}
        record = {"device": torch.cuda.get_device_name(), "versions": versions, "repeats": options.repeats, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
