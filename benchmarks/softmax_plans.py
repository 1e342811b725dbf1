"""Which tile serves which row: candidates beside those of `onchip.softmax.triton.plan`, each checked, all timed call by call in turn.

    python benchmarks/softmax_plans.py --widths 512 4096 --passes forward --json plans.json
    python benchmarks/softmax_plans.py --widths 151936 --clusters 1024,10,4,64 1024,16,4,120

Those of `--tiles` and `--clusters` are tried where they hold the row. Without them the candidates are the present plan and its
neighbours: half and twice the rows and warps, rows that wait in 16 bits, clusters. Rates are of compulsory bytes, as in
benchmarks/softmax.py, which measures what the library does with the winner.
"""
import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from onchip.cli.common import whole_file
from onchip.softmax.contract import Spec
from onchip.softmax.triton import launch, plan, rows
from onchip.softmax.triton.plan import Plan
from softmax import DTYPES, buffers, implementations, timed

MOST_WARPS = 32  # of a block


@contextmanager
def forced(wanted: Plan) -> Iterator[None]:
    """Rows are served as `wanted` says."""
    rows.layout.cache_clear()
    alone = wanted if wanted.parts == 1 else replace(wanted, parts=1)
    with (patch.object(plan, "choose", lambda *_: alone), patch.object(plan, "choose_parts", lambda *_: None),
          patch.object(launch, "_clustered", lambda found, *_: replace(found, plan=wanted))):
        yield
    rows.layout.cache_clear()


def neighbours(n: int, backward: bool, dtype: torch.dtype) -> list[Plan]:
    """Tiles worth a try for rows of n elements, the present one first."""
    waits, width = dtype.itemsize == 2, 1 << (n - 1).bit_length()
    present = plan.choose(n, False, forward=not backward, narrow=waits)
    beyond = n > plan.CLUSTERS_BEYOND[waits, backward] and plan.choose_cluster(n, backward, waits)
    found = [beyond] if beyond else [present] if present.resident else []
    if width <= 32768:
        least = present.block_m if width < plan.SHORT_TILE else 1
        for block_m in [least * k // 2 for k in (1, 2, 4, 8, 16)] if n == width <= 4096 else [1]:
            for each in (8, 16, 32, 64, 128):  # elements a thread
                warps = block_m * width // (32 * each)
                if block_m and 1 <= warps <= MOST_WARPS:
                    found += [Plan(True, block_m, width, warps)] * (each <= 64)
                    found += [Plan(True, block_m, width, warps, narrow=True)] * (waits and each >= 16)
    if n > 8192:
        found += [plan.cluster(n, waits, *one) for table in plan.CLUSTERS.values() for _, one in table if held(n, *one)]
    return list(dict.fromkeys(found))


def held(n: int, piece: int, most: int, *_: int) -> bool:
    """Do 2 to 16 thread blocks hold rows of n elements?"""
    return piece * most < n <= 16 * piece * most


def made(wanted: Plan, tensors: tuple[torch.Tensor, ...]) -> Callable[..., None]:
    """The launch of (x, y), or of (dy, y, dx), by a plan."""
    with forced(wanted):
        if len(tensors) == 2:
            return launch._forward(*tensors, None, None, Spec(-1, False, 1.0, False, False, tensors[0].dtype))
        return launch._backward(*tensors, Spec(-1, False, 1.0, False, False, tensors[0].dtype))


def compile_one(wanted: Plan, shape: tuple[int, int], dtype: torch.dtype, backward: bool) -> str:
    """Into Triton's cache, in a process of its own; why not, if not."""
    try:
        tensors = tuple(torch.empty(shape, dtype=dtype, device="cuda") for _ in range(2 + backward))
        made(wanted, tensors)(*tensors, *tensors[:1], *tensors[:1])
        torch.cuda.synchronize()
    except Exception as reason:
        return str(reason).strip().splitlines()[0][:100]
    return ""


def measure(n: int, candidates: list[Plan], dtype: torch.dtype, backward: bool, elements: int, repeats: int) -> list[dict]:
    """Each candidate's rate, checked; a copy's and quack's beside them."""
    shape = (elements // n, n)
    xs, dys = buffers(shape, dtype, 2)
    ys, sets, calls = [torch.softmax(x, -1) for x in xs], len(xs), {}
    out, right = torch.empty_like(xs[0]), ys[0].double()[:64]
    if backward:
        d = dys[0][:64].double()
        right = right * (d - (right * d).sum(-1, keepdim=True))
    for wanted in candidates:
        run = made(wanted, (dys[0], ys[0], out) if backward else (xs[0], out))
        out.fill_(torch.nan)
        arguments = (lambda i: (dys[i], ys[i], out)) if backward else (lambda i: (xs[i], out, xs[i], xs[i]))
        run(*arguments(0))
        wrong = ((out[:64].double() - right).abs().max() / right.abs().max()).item()
        if not wrong <= 4 * torch.finfo(dtype).eps or out.isnan().any():
            sys.exit(f"{wanted}: wrong by {wrong}")
        calls[wanted] = lambda i, run=run, arguments=arguments: run(*arguments(i % sets))
    calls["copy"] = lambda i: out.copy_(xs[i % sets])
    quack = implementations().get("quack")
    if quack:
        for x in xs:
            x.requires_grad_(backward)
        kept = [quack(x) for x in xs]
        calls["quack"] = ((lambda i: torch.autograd.grad(kept[i % sets], xs[i % sets], dys[i % sets], retain_graph=True)) if backward
                          else lambda i: quack(xs[i % sets]))
    passes = {name: 2 + (backward and name != "copy") for name in calls}
    return [{"n": n, "pass": "backward" if backward else "forward", "plan": name if isinstance(name, str) else asdict(name),
             "us": round(us, 2), "tb_per_s": round(passes[name] * out.nbytes / us / 1e6, 3)} for name, us in timed(calls, repeats).items()]


def shown(found: dict) -> str:
    """One line of the table."""
    p = found["plan"]
    if isinstance(p, str):
        what = p
    else:
        tile = [p["parts"], p["pieces"], p["block_n"]] if p["parts"] > 1 else [p["block_m"], p["block_n"]]
        what = f"{' × '.join(map(str, tile))}, {p['warps']} warps" + ", 16 bits" * p["narrow"]
        what += f", {p['registers']} registers" if p["registers"] else ""
    return f"  {found['tb_per_s']:.3f} TB/s {found['us']:8.2f} µs  {what}{found.get('note', '')}"


def main() -> None:
    """Compile side by side, time one by one, print each width's table best first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward"), default=("forward", "backward"))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tiles", nargs="+", metavar="M,N,WARPS,REGISTERS,WAITS", help="tiles to try; 0 registers: no limit")
    parser.add_argument("--clusters", nargs="+", metavar="PIECE,MOST,WARPS,REGISTERS", help="blocks of clusters to try")
    parser.add_argument("--elements", type=int, default=2**27)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/softmax_plans.py needs a CUDA device")
    dtype, jobs, results = DTYPES[options.dtype], {}, []
    tiles = [tuple(map(int, one.split(","))) for one in options.tiles or ()]
    clusters = [tuple(map(int, one.split(","))) for one in options.clusters or ()]
    for n in options.widths:
        for backward in (what == "backward" for what in options.passes):
            jobs[n, backward] = neighbours(n, backward, dtype)
            if tiles or clusters:
                jobs[n, backward][1:] = [Plan(True, *one, registers=most or None, narrow=waits > 0) for *one, most, waits in tiles
                                         if one[1] == 1 << (n - 1).bit_length()]
                jobs[n, backward] += [plan.cluster(n, dtype.itemsize == 2, *one) for one in clusters if held(n, *one)]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        waiting = {(n, backward, one): pool.submit(compile_one, one, (options.elements // n, n), dtype, backward)
                   for (n, backward), candidates in jobs.items() for one in candidates}
        reasons = {key: future.result() for key, future in waiting.items()}
    for (n, backward), candidates in jobs.items():
        served = [one for one in candidates if not reasons[n, backward, one]]
        found = measure(n, served, dtype, backward, options.elements, options.repeats)
        found[0]["note"] = "  ← present"
        results += found
        print(f"{options.dtype} {n}, {'backward' if backward else 'forward'}", flush=True)
        for one in sorted(found, key=lambda one: one["us"]):
            print(shown(one), flush=True)
        for one in candidates:
            if reasons[n, backward, one]:
                print(f"  {one}: {reasons[n, backward, one]}", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        with whole_file(options.json) as file:
            file.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": options.dtype,
                                        "repeats": options.repeats, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
