"""The whole ladder on this GPU, predicted, measured and counted: ``python benchmarks/ladder_gpu.py --json FILE [--no-counters]``.

Every rung at N = 4K, 8K and 16K (64, 32 and 16 heads, d = 128, bf16, full and causal): time and error beside the time its ledger predicts
under this card's measured roofs, and Nsight Compute's DRAM bytes, L2 traffic, tensor pipe, occupancy, registers and bank conflicts beside
the ledger's. The backward's rungs likewise, causal. Then the incident that started it all, at a size that fits: 4 heads from 2K to 32K,
naive against fused, and 128K, where naive would run out of memory. And softmax by itself, on rows that stay in L2 between passes and on
rows that do not.

``--seqs 4096 --parts ladder`` is a part of it, in about a minute; `--parts` takes any of ladder, backward, incident, softmax.
Times are kept where counting fails: the reason goes to standard error and the exit status is 1.
"""
import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from onchip.bench.counters import find_ncu
from onchip.bench.machine import Ceilings, measure_ceilings
from onchip.bench.timing import median_time
from onchip.cli.common import whole_file
from onchip.errors import InputError
from onchip.ladder.counted import Counted, Job, count_jobs
from onchip.ladder.gpu import GPU_RUNGS, card
from onchip.ladder.gpu_backward import BACKWARD_RUNGS
from onchip.ladder.inputs import random_inputs
from onchip.ladder.measure import Budget, measure_rungs
from onchip.ladder.measure_backward import measure_backward
from onchip.ladder.softmax import SOFTMAX_RUNGS
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

DTYPE = "bfloat16"
SEQS = {"ladder": (4096, 8192, 16384), "backward": (4096, 8192, 16384), "incident": (2048, 4096, 8192, 16384, 32768, 131072)}
# Heads × N of the ladder and its backward. Q and O of all heads, which FA1 walks again for every key tile, are 134 MB at each N, and under
# a causal mask half of that: beyond the L2. 16 heads of 4096 are 34 MB, on its edge: FA1's DRAM was 0.59, 0.21, 0.33 GB in three runs.
TOKENS = 2**18
SOFTMAX = [Rows(4096, 32768, DTYPE), Rows(256, 2**20, DTYPE)]
PARTS = (*SEQS, "softmax")
COUNTED, LIMIT = 32768, 240  # longest rows that are counted: the profiler keeps a copy of all that is allocated; seconds a part may take
BEFORE, AFTER = ("eager", "naive_scaled", "naive"), ("fa2", "hopper")


def climb(shape: AttentionShape, ceilings: Ceilings, keys: set[str], *, backward: bool = False) -> tuple[dict[str, Any], Job]:
    """One problem: every rung of `keys` timed; what is to be counted of it."""
    inputs, budget = random_inputs(shape), Budget(seconds=0.5)
    if backward:
        report = measure_backward(inputs, "cuda", shape.causal, DTYPE, budget, ceilings, keys=keys)
    else:
        report = measure_rungs(inputs, "cuda", shape.causal, DTYPE, budget, ceilings, keys={*keys, "sdpa"})
    print(f"N {shape.seq_q}, {shape.heads} heads, {'causal' if shape.masked else 'full'}{', backward' * backward}", flush=True)
    for m in report.measurements:
        predicted = "" if m.predicted is None else f"  predicted {m.predicted * 1e6:8.0f} µs ({m.roof})"
        print(f"  {m.title:26} {m.seconds * 1e6:9.0f} µs{predicted}  error {m.error.rms:.1e}", flush=True)
    for key, reason in report.skipped.items():
        print(f"  {key:26} {reason}", flush=True)
    result = {"shape": asdict(shape), "measured": [asdict(m) for m in report.measurements], "skipped": report.skipped, "counted": []}
    return result, Job(shape, DTYPE, tuple(m.key for m in report.measurements if m.key in keys))


def softmax(rows: Rows, ceilings: Ceilings) -> tuple[dict[str, Any], Job]:
    """Every softmax rung on one array: checked, timed, predicted."""
    x = torch.randn(rows.rows, rows.n, device="cuda").to(getattr(torch, rows.dtype))
    truth = torch.softmax(x[:4].double(), -1)
    measured = []
    print(f"softmax {rows.rows} × {rows.n}", flush=True)
    for rung in SOFTMAX_RUNGS:
        error = float((rung.run(x)[:4] - truth).norm() / truth.norm())
        if not error < 2e-2:  # eager rounds to bf16 three times on its way
            raise SystemExit(f"softmax, {rung.title}: wrong by {error:.2g}")
        seconds, prediction = median_time(partial(rung.run, x), "cuda"), rung.predict(rows, card(ceilings))
        measured.append({"key": rung.key, "title": rung.title, "seconds": seconds, "error": error, "predicted": prediction.time,
                         "roof": prediction.binding, "bytes_per_s": 2 * rows.nbytes / seconds})
        print(f"  {rung.title:26} {seconds * 1e6:9.0f} µs  predicted {prediction.time * 1e6:8.0f} µs ({prediction.binding})", flush=True)
    return {"rows": asdict(rows), "measured": measured, "counted": []}, Job(rows, rows.dtype, tuple(rung.key for rung in SOFTMAX_RUNGS))


def show(job: Job, counted: Sequence[Counted]) -> None:
    """Counted beside predicted."""
    print(job.problem, flush=True)
    for found in counted:
        print(f"  {found.title:26} DRAM {found.dram_bytes / 1e9:8.3f} GB, {found.dram_ratio:.2f} of predicted; L2 to SMs "
              f"{found.sm_bytes / 1e9:8.3f} GB, {found.issued_ratio:.2f}; looked up in L2 {found.l2_bytes / 1e9:8.3f} GB; "
              f"tensor pipe {found.tensor_pipe:3.0f} %; launches: {len(found.kernels)}", flush=True)


def run(parts: Sequence[str], seqs: Sequence[int] | None, ceilings: Ceilings) -> dict[str, list[tuple[dict[str, Any], Job]]]:
    """All that is timed: part → each problem with what is to be counted of it."""
    lengths = {part: [seq for seq in SEQS[part] if seqs is None or seq in seqs] for part in SEQS}
    every, back, few = {rung.key for rung in GPU_RUNGS}, {rung.key for rung in BACKWARD_RUNGS}, {*BEFORE, *AFTER}
    causal = "bottom-right"
    return {
        "ladder": [climb(AttentionShape.square(seq, 128, heads=TOKENS // seq, causal=mask), ceilings, every)
                   for seq in lengths["ladder"] for mask in (None, causal)] if "ladder" in parts else [],
        "backward": [climb(AttentionShape.square(seq, 128, heads=TOKENS // seq, causal=causal), ceilings, back, backward=True)
                     for seq in lengths["backward"]] if "backward" in parts else [],
        "incident": [climb(AttentionShape.square(seq, 128, heads=4), ceilings, few)
                     for seq in lengths["incident"]] if "incident" in parts else [],
        "softmax": [softmax(rows, ceilings) for rows in SOFTMAX] if "softmax" in parts else []}


def write(file: Path | None, result: dict[str, Any]) -> None:
    """To `file`, where one was named."""
    if file:
        with whole_file(file) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    """Measure, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run; all unless given")
    parser.add_argument("--seqs", nargs="+", type=int, metavar="N", help="of the ladder's and the incident's lengths, only these")
    parser.add_argument("--counters", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ncu", type=Path, help="Nsight Compute's program")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/ladder_gpu.py needs a GPU", file=sys.stderr)
        return 2
    start = time.perf_counter()
    try:
        ncu = find_ncu(args.ncu) if args.counters else None
        ceilings = measure_ceilings("cuda", DTYPE)
        done = run(args.parts, args.seqs, ceilings)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    result = {"ceilings": asdict(ceilings), "card": card(ceilings).title, "torch": torch.__version__, "triton": triton.__version__,
              **{part: [problem for problem, _ in pairs] for part, pairs in done.items()}}
    write(args.json, result)
    print(f"timed in {time.perf_counter() - start:.0f} s", flush=True)
    status = 0
    torch.cuda.empty_cache()
    for part, pairs in done.items():
        pairs = [(problem, job) for problem, job in pairs if isinstance(job.problem, Rows) or job.problem.seq_k <= COUNTED]
        if ncu is None or not pairs:
            continue
        try:
            counted = count_jobs([job for _, job in pairs], card(ceilings), ncu, LIMIT)
        except InputError as error:
            print(f"{part}: {error}", file=sys.stderr, flush=True)
            status = 1
            continue
        for (problem, job), found in zip(pairs, counted, strict=True):
            problem["counted"] = [asdict(c) for c in found]
            show(job, found)
        write(args.json, result)
        print(f"{part} counted by {time.perf_counter() - start:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
