"""Which tile serves which row: candidates beside those of `onchip.softmax.triton.plan`, each checked, all timed call by call in turn.

    python benchmarks/softmax_plans.py --widths 512 4096 --passes forward --json plans.json
    python benchmarks/softmax_plans.py --widths 5000 --pieces 1,1024,4,0 1,512,2,0
    python benchmarks/softmax_plans.py --widths 151936 --clusters 1024,10,4,64 1024,16,4,120
    python benchmarks/softmax_plans.py --widths 8192 --passes mask --tiles 1,8192,4,64,1 --turns 64 512
    python benchmarks/softmax_plans.py --widths 8192 --across --stripes 32,64,16,8,104 64,64,16,16,104

Those of `--tiles`, `--pieces`, `--clusters` and `--stripes` are tried where they hold the row. Without them the candidates are the present
plan and its neighbours: half and twice the rows and warps, rows that wait in 16 bits, clusters; with `--across`, where rows lie side by
side, the present one and two passes. The pass 'sum' is logsumexp's; 'causal' and 'mask' are forward ones, of the shapes that
benchmarks/softmax.py measures; a mask's groups may take `--turns`. Rates are of compulsory bytes, as in benchmarks/softmax.py, which
measures what the library does with the winner.
"""
import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from onchip.cli.common import whole_file
from onchip.softmax.contract import Spec
from onchip.softmax.triton import launch, plan, rows
from onchip.softmax.triton.plan import Plan
from softmax import CAUSAL, DTYPES
from softmax_cells import buffers, implementations, softmax, timed

MOST_WARPS = 32  # of a block
MOST_PIECES = 32  # of a row: each is code of its own
PASSES = ("forward", "backward", "sum", "causal", "mask")


class Candidate(NamedTuple):
    """A plan, and how many tiles a group has at a turn where groups share a mask; None: as the library has it."""

    plan: Plan
    turn: int | None = None


@contextmanager
def forced(wanted: Candidate) -> Iterator[None]:
    """Rows are served as `wanted` says."""
    rows.layout.cache_clear()
    alone = wanted.plan if wanted.plan.parts == 1 else replace(wanted.plan, parts=1)
    turn = property(lambda found: math.gcd(found.tiles_a_group, wanted.turn) if wanted.turn else 0)
    with (patch.object(plan, "choose", lambda *_: alone), patch.object(plan, "choose_parts", lambda *_: None),
          patch.object(launch, "_clustered", lambda found, *_: replace(found, plan=wanted.plan)),
          patch.object(rows.Rows, "shared", rows.Rows.shared if wanted.turn is None else turn)):
        yield
    rows.layout.cache_clear()


def shape_of(n: int, what: str, elements: int) -> tuple[int, ...]:
    """(rows, n); where positions are hidden (groups, rows, n), those of benchmarks/softmax.py or squares."""
    if what in ("forward", "backward", "sum"):
        return elements // n, n
    return next((shape for shape in CAUSAL if shape[-1] == n), (max(1, elements // n**2), min(n, elements // n), n))


def turned(t: torch.Tensor, across: bool) -> torch.Tensor:
    """t itself, or with its rows side by side in memory."""
    return t.mT.contiguous().mT if across else t


def neighbours(n: int, what: str, dtype: torch.dtype, across: bool) -> list[Plan]:
    """Tiles worth a try for rows of n elements, the present one first; of rows across that one and two passes."""
    waits, width, backward = dtype.itemsize == 2, 1 << (n - 1).bit_length(), what == "backward"
    if across:
        return [plan.choose_stripe(n, plan.ACROSS_ROWS, backward, waits) or plan.choose(n, True), plan.ACROSS_STREAMED]
    edges = n % (16 // dtype.itemsize) > 0 and n >= plan.EDGES_FROM
    present = plan.choose(n, False, edges, forward=not backward, narrow=waits, triangle=what == "causal", masked=what == "mask",
                          summed=what == "sum")
    beyond = what != "causal" and plan.choose_cluster(n, backward, waits, not (edges or what == "sum"))
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
        tables = *plan.CLUSTERS.values(), *plan.SMALLER.values()
        found += [plan.cluster(n, waits, *one) for table in tables for _, one in table if held(n, *one)]
    return list(dict.fromkeys(found))


def held(n: int, piece: int, most: int, *_: int, least: int = 2) -> bool:
    """Do `least` to 16 thread blocks hold rows of n elements?"""
    return piece * most * (least - 1) < n <= 16 * piece * most


def made(wanted: Candidate, tensors: tuple[torch.Tensor, ...], what: str) -> Callable[..., None]:
    """The launch of (x, y, x, x), of (x, y, mask, x), or backward of (dy, y, dx), by a plan; y is log Σ exp x for 'sum'."""
    x, *others = tensors
    with forced(wanted):
        if what == "backward":
            return launch._backward(x, *others, Spec(-1, False, 1.0, False, False, x.dtype))
        mask = others[1] if what == "mask" else None
        spec = Spec(-1, False, 1.0, what == "causal", what in ("causal", "mask"), others[0].dtype, what == "sum")
        return launch._forward(x, others[0].expand(x.shape), mask, None, spec)


def arguments(what: str, x: torch.Tensor, out: torch.Tensor, beside: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Tensors of a launch, as `made` has them: `beside` is the mask, shared by all groups, or y where x is dy."""
    if what == "backward":
        return x, beside, out
    return x, out, x if beside is None else beside.view(torch.uint8).expand(x.shape), x


def beside_of(what: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The mask: of what a triangle leaves."""
    return torch.ones(shape[-2:], dtype=torch.bool, device="cuda").tril(shape[-1] - shape[-2]) if what == "mask" else None


def result(x: torch.Tensor, what: str) -> torch.Tensor:
    """What a pass over x writes to."""
    return torch.empty(*x.shape[:-1], 1, device="cuda") if what == "sum" else torch.empty_like(x)


def compile_one(wanted: Candidate, shape: tuple[int, ...], dtype: torch.dtype, what: str, across: bool) -> str:
    """Into Triton's cache, in a process of its own; why not, if not."""
    try:
        x = turned(torch.empty(shape, dtype=dtype, device="cuda"), across)
        out = result(x, what)
        tensors = arguments(what, x, out, x if what == "backward" else beside_of(what, shape))
        made(wanted, tensors, what)(*tensors)
        torch.cuda.synchronize()
    except Exception as reason:
        return str(reason).strip().splitlines()[0][:100]
    return ""


def measure(n: int, candidates: list[Candidate], dtype: torch.dtype, what: str, across: bool, elements: int, repeats: int) -> list[dict]:
    """Each candidate's rate, checked; a copy's and quack's beside them, where positions are hidden the plain kernel's."""
    shape, backward = shape_of(n, what, elements), what == "backward"
    xs, *more = ([turned(x, across) for x in of] for of in buffers(shape, dtype, 1 + backward))
    dys = more[0] if backward else None
    mask, sets, calls = beside_of(what, shape), len(xs), {}
    out, copied = result(xs[0], what), torch.empty_like(xs[0])
    some = torch.linspace(0, copied.numel() // n - 1, 64, device="cuda").long()
    s = xs[0].view(-1, n)[some].double()
    if what in ("causal", "mask"):
        s = s.masked_fill(torch.arange(n, device="cuda") > (some % shape[-2] + n - shape[-2])[:, None], -torch.inf)
    right, ys = torch.softmax(s, -1), [turned(torch.softmax(x, -1), across) for x in xs] if backward else None
    if what == "sum":
        right = torch.logsumexp(s, -1, True)
    if backward:
        d, p = (t.view(-1, n)[some].double() for t in (dys[0], ys[0]))
        right = p * (d - (p * d).sum(-1, keepdim=True))
    sources, others = (dys, ys) if backward else (xs, [mask] * sets)
    for wanted in candidates:
        run = made(wanted, arguments(what, sources[0], out, others[0]), what)
        out.fill_(torch.nan)
        run(*arguments(what, sources[0], out, others[0]))
        wrong = ((out.view(-1, out.shape[-1])[some].double() - right).abs().max() / right.abs().max()).item()
        if not wrong <= 4 * torch.finfo(dtype).eps or out.isnan().any():
            sys.exit(f"{wanted}: wrong by {wrong}")
        calls[wanted] = lambda i, run=run: run(*arguments(what, sources[i % sets], out, others[i % sets]))
    calls["copy"] = lambda i: copied.copy_(xs[i % sets])
    quack = None if across else implementations().get("quack")
    if what in ("causal", "mask"):
        calls["plain"] = lambda i: softmax(xs[i % sets])
    elif quack and what != "sum":
        for x in xs:
            x.requires_grad_(backward)
        kept = [quack(x) for x in xs]
        calls["quack"] = ((lambda i: torch.autograd.grad(kept[i % sets], xs[i % sets], dys[i % sets], retain_graph=True)) if backward
                          else lambda i: quack(xs[i % sets]))
    seen = 1 - (shape[-2] - 1) / (2 * n)  # of a triangle
    passes = {"forward": 2, "backward": 3, "sum": 1, "causal": 1 + seen, "mask": 2 + 1 / (shape[0] * dtype.itemsize)}[what]
    return [{"n": n, "pass": what, "plan": name if isinstance(name, str) else {**asdict(name.plan), "turn": name.turn}, "us": round(us, 2),
             "tb_per_s": round((2 if name in ("copy", "plain") else passes) * copied.nbytes / us / 1e6, 3)}
            for name, us in timed(calls, repeats).items()]


def shown(found: dict) -> str:
    """One line of the table."""
    p = found["plan"]
    if isinstance(p, str):
        what = p
    else:
        tile = [p["parts"]] * (p["parts"] > 1) + [p["block_m"]] * (p["parts"] == 1 or p["block_m"] > 1) + [p["pieces"], p["block_n"]]
        what = f"{' × '.join(map(str, tile))}, {p['warps']} warps" + ", 16 bits" * p["narrow"]
        what += f", {p['registers']} registers" if p["registers"] else ""
        what += f", turns of {p['turn']}" if p["turn"] is not None else ""
    return f"  {found['tb_per_s']:.3f} TB/s {found['us']:8.2f} µs  {what}{found.get('note', '')}"


def whole_numbers(names: str) -> Callable[[str], tuple[int, ...]]:
    """What reads an option's value, one whole number for each of `names`."""
    def read(text: str) -> tuple[int, ...]:
        found = text.split(",")
        if len(found) != len(names.split(",")) or not all(one.isdecimal() for one in found):
            raise argparse.ArgumentTypeError(f"got {text!r}, accepted: whole numbers {names}")
        return tuple(map(int, found))
    return read


def keep(options: argparse.Namespace, results: list[dict]) -> None:
    """Write what was measured to `--json`, if it is given."""
    if options.json:
        with whole_file(options.json) as file:
            file.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": options.dtype,
                                        "repeats": options.repeats, "results": results}, indent=1) + "\n")


def main() -> None:
    """Compile side by side, time one by one, print each width's table best first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES[:2])
    parser.add_argument("--across", action="store_true", help="rows lie side by side, as in softmax over dim 0")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, names, what in (("--tiles", "M,N,WARPS,REGISTERS,WAITS", "tiles to try; 0 registers: no limit"),
                              ("--pieces", "M,PIECE,WARPS,REGISTERS", "programs that hold their rows in pieces, to try"),
                              ("--clusters", "PIECE,MOST,WARPS,REGISTERS", "blocks of clusters to try"),
                              ("--stripes", "M,PIECE,MOST,WARPS,REGISTERS", "blocks that hold neighbouring rows, to try with --across"),
                              ("--turns", "TILES", "how many a group that shares a mask has at a turn, to try; 0: no turns")):
        parser.add_argument(name, nargs="+", type=whole_numbers(names), default=(), metavar=names, help=what)
    parser.add_argument("--elements", type=int, default=2**27)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/softmax_plans.py needs a CUDA device")
    dtype, jobs, results = DTYPES[options.dtype], {}, []
    for n in options.widths:
        for what in options.passes:
            found = neighbours(n, what, dtype, options.across)
            if options.tiles or options.pieces or options.clusters or options.stripes:
                del found[1 + options.across:]
                found += [Plan(True, *one, registers=most or None, narrow=waits > 0) for *one, most, waits in options.tiles
                          if one[1] == 1 << (n - 1).bit_length()]
                found += [Plan(True, m, piece, warps, registers=most or None, narrow=dtype.itemsize == 2, pieces=-(-n // piece))
                          for m, piece, warps, most in options.pieces if n <= MOST_PIECES * piece]
                found += [plan.cluster(n, dtype.itemsize == 2, *one) for one in options.clusters if held(n, *one)]
                found += [plan.stripe(n, dtype.itemsize == 2, *one) for one in options.stripes if held(n, *one[1:], least=1)]
            turns = options.turns if what == "mask" else ()
            jobs[n, what] = list(dict.fromkeys(Candidate(one, *turn) for turn in ((), *turns) for one in found))
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        waiting = {(n, what, one): pool.submit(compile_one, one, shape_of(n, what, options.elements), dtype, what, options.across)
                   for (n, what), candidates in jobs.items() for one in candidates}
        reasons = {key: future.result() for key, future in waiting.items()}
    for (n, what), candidates in jobs.items():
        served = [one for one in candidates if not reasons[n, what, one]]
        found = measure(n, served, dtype, what, options.across, options.elements, options.repeats)
        found[0]["note"] = "  ← present"
        results += found
        print(f"{options.dtype} {n}, {what}", flush=True)
        for one in sorted(found, key=lambda one: one["us"]):
            print(shown(one), flush=True)
        for one in candidates:
            if reasons[n, what, one]:
                print(f"  {one}: {reasons[n, what, one]}", flush=True)
        torch.cuda.empty_cache()
    keep(options, results)


if __name__ == "__main__":
    main()
