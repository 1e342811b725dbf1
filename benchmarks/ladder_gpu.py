"""The whole ladder on this GPU, predicted, measured and counted: ``python benchmarks/ladder_gpu.py --json FILE [--no-counters]``.

Every rung at N = 4K, 8K and 16K (16 heads, d = 128, bf16, full and causal): time and error beside the time its ledger predicts under
this card's measured roofs, and Nsight Compute's DRAM bytes, L2 traffic, tensor pipe, occupancy, registers and bank conflicts beside the
ledger's. Then the incident that started it all, at a size that fits: 4 heads from 2K to 32K, naive against fused, and where naive would
run out of memory. And softmax by itself, on rows that stay in L2 between passes and on rows that do not.
"""
import argparse
import json
import sys
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
from onchip.ladder.counted import count_rungs, count_softmax
from onchip.ladder.gpu import GPU_RUNGS, card, needed_bytes, problem_of
from onchip.ladder.inputs import random_inputs
from onchip.ladder.measure import Budget, measure_rungs
from onchip.ladder.softmax import SOFTMAX_RUNGS
from onchip.roofline.hardware import find_gpu
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

DTYPE = "bfloat16"
LADDER = [AttentionShape.square(seq, 128, heads=16, causal=causal) for seq in (4096, 8192, 16384) for causal in (None, "bottom-right")]
INCIDENT = [AttentionShape.square(seq, 128, heads=4) for seq in (2048, 4096, 8192, 16384, 32768)]
SOFTMAX = [Rows(4096, 32768, DTYPE), Rows(256, 2**20, DTYPE)]
BEFORE, AFTER = ("eager", "naive_scaled", "naive"), ("fa2", "hopper")


def climb(shape: AttentionShape, ceilings: Ceilings, ncu: Path | None, keys: set[str]) -> dict[str, Any]:
    """One problem: every rung of `keys` timed, and counted where there is a profiler."""
    report = measure_rungs(random_inputs(shape), "cuda", shape.causal, DTYPE, Budget(seconds=0.5), ceilings)
    problem, free = problem_of(shape, DTYPE), torch.cuda.mem_get_info()[0]
    able = [r.key for r in GPU_RUNGS if r.key in keys and r.refusal(problem) is None and needed_bytes(r, problem) < free]
    counted = [] if ncu is None else count_rungs(shape, DTYPE, able, find_gpu(ceilings.device), ncu)
    print(f"N {shape.seq_q} {'causal' if shape.masked else 'full'}", flush=True)
    for m in report.measurements:
        found = next((c for c in counted if c.key == m.key), None)
        beside = "" if found is None else (
            f"  DRAM {found.dram_bytes / 1e9:8.3f} GB, {found.dram_ratio:.2f} of predicted; L2 to SMs {found.sm_bytes / 1e9:8.3f} GB, "
            f"{found.issued_ratio:.2f}; tensor pipe {found.tensor_pipe:3.0f} %")
        predicted = "" if m.predicted is None else f"  predicted {m.predicted * 1e6:8.0f} µs ({m.roof})"
        print(f"  {m.title:26} {m.seconds * 1e6:9.0f} µs{predicted}{beside}", flush=True)
    for key, reason in report.skipped.items():
        print(f"  {key:26} {reason}", flush=True)
    return {"shape": asdict(shape), "measured": [asdict(m) for m in report.measurements if m.key in keys | {"sdpa"}],
            "skipped": report.skipped, "counted": [asdict(c) for c in counted]}


def softmax(rows: Rows, ceilings: Ceilings, ncu: Path | None) -> dict[str, Any]:
    """Every softmax rung on one array: checked, timed, predicted, counted."""
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
    counted = [] if ncu is None else count_softmax(rows, find_gpu(ceilings.device), ncu)
    for found in counted:
        print(f"  {found.title:26} DRAM {found.dram_bytes / 1e9:8.3f} GB, {found.dram_ratio:.2f} of predicted", flush=True)
    return {"rows": asdict(rows), "measured": measured, "counted": [asdict(c) for c in counted]}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--counters", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ncu", type=Path, help="Nsight Compute's program")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/ladder_gpu.py needs a GPU", file=sys.stderr)
        return 2
    try:
        ncu = find_ncu(args.ncu) if args.counters else None
        ceilings = measure_ceilings("cuda", DTYPE)
        every, incident = {rung.key for rung in GPU_RUNGS}, {*BEFORE, *AFTER}
        result = {"ceilings": asdict(ceilings), "card": card(ceilings).title, "torch": torch.__version__, "triton": triton.__version__,
                  "ladder": [climb(shape, ceilings, ncu, every) for shape in LADDER],
                  "incident": [climb(shape, ceilings, ncu, incident) for shape in INCIDENT],
                  "softmax": [softmax(rows, ceilings, ncu) for rows in SOFTMAX]}
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        with whole_file(args.json) as file:
            file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
