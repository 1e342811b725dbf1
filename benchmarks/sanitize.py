"""The GPU kernels under NVIDIA's compute-sanitizer: out-of-bounds and misaligned accesses (memcheck), races in shared memory (racecheck).

    python benchmarks/sanitize.py --json benchmarks/results/h200/sanitizer.json

Each case is a process of its own: a small problem, forward and backward, checked against float64 and watched by the tool. Tensors come
straight from cudaMalloc, so that a byte past one of them is a byte outside, not another tensor's. Exit status 1 when a tool reports
anything that `EXPLAINED` does not name, or a result is wrong; 2 when the tool cannot run here.
"""
import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOPPER = {path.name: path for path in (ROOT / "src/onchip/attention/hopper").glob("*.py")}
# Races that racecheck reports and that are none: it does not follow an mbarrier from one partition of a specialised block to another.
# (function that reads, function that writes) → why they never meet, whichever comes first, as read in the PTX.
EXPLAINED = {
    ("read_word", "write_word"): "write, then read: the producer writes, syncs its warp and arrives at q_full, where consumers wait before "
                                 "they read; read, then write: consumers read, sync and arrive at q_empty, where the producer waits before "
                                 "it writes again",
    ("forward_kernel", "forward_kernel"): "Triton's own state of the partitions, written and read on either side of a barrier of the block",
}
TOOLS = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
SMALL = {"heads": 2, "kv_heads": 1, "seq_q": 200, "seq_k": 230, "dim": 64, "dim_v": 64, "dtype": "bfloat16"}
PACKED = {**SMALL, "causal": True, "tail": 3, "lengths": ((70, 70), (0, 9), (130, 150), (5, 0))}
# name → (backend, fields of `onchip.testing.attention.Case`); of softmax (shape, dim)
CASES = {
    "triton fp16 causal": ("triton", {**SMALL, "dtype": "float16", "causal": True}),
    "triton bf16 d128 window sinks": ("triton", {**SMALL, "dim": 128, "dim_v": 128, "causal": True, "window": (50, 0), "sinks": True}),
    "triton fp32 d40": ("triton", {**SMALL, "dim": 40, "dim_v": 24, "dtype": "float32"}),
    "triton bf16 bias dropout": ("triton", {**SMALL, "bias": (1, 2, 200, 230), "dropout_p": 0.3}),
    "triton fp16 mask softcap alibi": ("triton", {**SMALL, "dtype": "float16", "mask": (1, 1, 200, 230), "softcap": 5.0, "alibi": 1}),
    "triton bf16 packed": ("triton", PACKED),
    "hopper bf16 d64 causal": ("hopper", {**SMALL, "causal": True}),
    "hopper bf16 d128": ("hopper", {**SMALL, "dim": 128, "dim_v": 128}),
    "hopper fp16 d256 causal": ("hopper", {**SMALL, "dim": 256, "dim_v": 256, "dtype": "float16", "causal": True}),
    "hopper bf16 d128 packed": ("hopper", {**PACKED, "dim": 128, "dim_v": 128}),
    "softmax rows": ((64, 1000), -1),
    "softmax pieces": ((40, 5000), -1),
    "softmax ends": ((61, 4095), -1),  # rows that start inside vectors, the last of which ends inside one
    "softmax triangle": ((1024, 1024), -1),  # in halves
    "softmax clusters": ((30, 33_001), -1),
    "softmax small blocks": ((50, 16_384), -1),  # of clusters
    "softmax long rows": ((2, 70_001), -1),  # in parts
    "softmax across": ((300, 77), 0),
    "softmax stripes": ((1100, 72), 0),
}


def run(name: str) -> None:
    """One case, in the process that the tool watches."""
    import torch

    torch.set_num_threads(1)  # the cases share the cores
    if isinstance(CASES[name][0], str):
        from onchip.testing.attention import Case, Target, check

        backend, fields = CASES[name]
        check(Case(**fields), Target(backend, "cuda"))
    else:
        from onchip.softmax import softmax_topk
        from onchip.testing.softmax import agree

        shape, dim = CASES[name]
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        agree(x, dim)
        if dim == -1:
            agree(x, dim, log=True, causal=True)
            agree(x, dim, scale=-0.5, mask=torch.randn(shape, device="cuda") > 0)
            p = torch.softmax(x.double(), -1)
            values, indices = softmax_topk(x, 8, dtype=torch.float32)
            assert torch.equal(p.gather(-1, indices), p.topk(8).values)
            assert torch.allclose(values.double(), p.gather(-1, indices), rtol=1e-5)
    torch.cuda.synchronize()
    print("the result is right")


def watch(sanitizer: str, tool: str, name: str, timeout: float) -> dict[str, object]:
    """Run a case under `tool`: its verdict, and what it said if that was not "clean"."""
    start = time.monotonic()
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--print-limit", "20", "--show-backtrace", "device",
               "--launch-timeout", "120", sys.executable, __file__, "--case", name]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        said = "".join(part.decode() for part in (stopped.stdout, stopped.stderr) if part) + f"stopped after {timeout:g} s"
    found = TOOLS[tool].search(said)
    reports = int(found[1]) if found else None
    right = "the result is right" in said
    if reports is None or not right:
        verdict = f"{reports} reports, wrong result" if reports else "did not run"
    else:
        known = CASES[name][0] == "hopper" and _explained(said, reports)
        verdict = "clean" if reports == 0 else f"{reports} explained" if known else f"{reports} reports"
    return {"case": name, "tool": tool, "verdict": verdict, "seconds": round(time.monotonic() - start, 1),
            "said": "" if verdict == "clean" else said[:3000]}


def _explained(said: str, reports: int) -> bool:
    """Every report is a race between places that `EXPLAINED` names."""
    def function(place: str) -> str:
        file, _, line = place.rpartition(":")
        body = ast.parse(HOPPER[file].read_text()).body if file in HOPPER else []
        inside = [node.name for node in body if isinstance(node, ast.FunctionDef)
                  and node.lineno - len(node.decorator_list) <= int(line) <= (node.end_lineno or 0)]
        return inside[0] if inside else place

    seen = 0
    for report in said.split("Race reported between ")[1:]:
        (kind, place), *others = re.findall(r"(Read|Write) access at \S+ in (\S+:\d+)", report)
        seen += 1
        for other_kind, other in others:
            places = {kind: function(place), other_kind: function(other)}
            if (places.get("Read"), places.get("Write")) not in EXPLAINED:
                return False
    return seen == reports


def main() -> None:
    """Watch every case with every tool, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes side by side")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a case may take")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run(options.case)
        return
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    names = [name for name in CASES if options.only in name]
    if sanitizer is None or not names:
        missing = "compute-sanitizer: not found; it comes with the CUDA toolkit"
        print(missing if sanitizer is None else f"--only: got {options.only!r}, accepted: {', '.join(CASES)}", file=sys.stderr)
        sys.exit(2)
    jobs, results = [(tool, name) for tool in options.tools for name in names], []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda job: watch(sanitizer, *job, options.timeout), jobs):
            print(f"{result['tool']:<10} {result['case']:<32} {result['verdict']:<14} {result['seconds']:>6} s", flush=True)
            results.append(result)
    for result in results:
        if result["said"]:
            print(f"\n== {result['tool']}: {result['case']}\n{result['said']}")
    if options.json:
        import torch

        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        partial = options.json.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(options.json)
    if all(result["verdict"] == "did not run" for result in results):
        sys.exit(2)
    sys.exit(any(result["verdict"] != "clean" and not result["verdict"].endswith("explained") for result in results))


if __name__ == "__main__":
    main()
