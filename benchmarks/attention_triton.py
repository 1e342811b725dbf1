"""The Triton attention kernels on a GPU: checked against float64, then timed with SDPA's FlashAttention-2 and memory-efficient kernels.

    python benchmarks/attention_triton.py --json benchmarks/results/h200/attention_triton.json
    python benchmarks/attention_triton.py --sweep          # times every tile of CANDIDATES too, for tiles.py

Contenders of a row take turns, so all meet the same clocks; the median round counts. FLOPs: 4 · B · H · S² · D forward, half of it causal,
2.5 times that backward. Kernels are first compiled by worker processes side by side, which fill Triton's disk cache.
"""
import argparse
import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from onchip.attention import reference
from onchip.attention.contract import Spec
from onchip.attention.triton import backward, forward, launch, tiles

SHAPES = [(8, 16, 4096, 128), (2, 16, 16384, 128), (4, 32, 8192, 64)]  # batch, heads, seq, head dim
FP32_SHAPES = [(2, 16, 4096, 128), (2, 32, 4096, 64)]
ROUNDS, CALLS = 5, 2

CANDIDATES = {
    ("forward", 2, 128): [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2)],
    ("forward", 2, 64): [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
    ("queries", 2, 128): [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2)],
    ("queries", 2, 64): [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("keys", 2, 128): [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3)],
    ("keys", 2, 64): [(64, 128, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2)],
    ("forward", 4, 128): [(32, 32, 4, 2), (128, 32, 8, 2, "tf32x3"), (128, 32, 8, 2, "bf16x6")],
    ("forward", 4, 64): [(64, 64, 8, 2), (64, 64, 4, 2, "tf32x3"), (64, 64, 4, 2, "bf16x6")],
}


def inputs(shape, dtype, device="cuda"):
    """q, k, v, dout."""
    b, h, s, d = shape
    return [torch.randn(b, h, s, d, device=device, dtype=dtype) for _ in range(4)]


def plain(shape, causal):
    """The spec of attention with nothing but, perhaps, a causal mask."""
    _, _, s, d = shape
    return Spec(int(causal), -1, 0 if causal else -1, d**-0.5, 0.0, 0.0, s, s, True, False)


def run_forward(q, k, v, spec):
    """(out, lse) from the kernels."""
    return forward.forward(q, k, v, *[None] * 7, spec)


def run_backward(q, k, v, out, lse, dout, spec, needs=(True, True, True, False, False)):
    """Gradients from the kernels."""
    return backward.backward(dout, None, q, k, v, out, lse, *[None] * 7, spec, needs)


# ---- correctness -----------------------------------------------------------------------------------------------------------------------

CASES = [
    {},
    {"causal": 1},
    {"causal": 2, "sq": 300, "sk": 200},
    {"causal": 1, "sq": 300, "sk": 200},
    {"window": (65, 17)},
    {"causal": 1, "window": (100, 0)},
    {"softcap": 3.0},
    {"scale": -0.2},
    {"bias": "bhij"},
    {"bias": "h1j"},
    {"mask": "b1ij", "causal": 1},
    {"alibi": True},
    {"sinks": True, "causal": 1},
    {"dropout": 0.3},
    {"dropout": 0.2, "bias": "1hij", "sinks": True, "softcap": 5.0, "causal": 1, "alibi": True},
    {"varlen": True},
    {"varlen": True, "causal": 1},
    {"d": 16, "dv": 40},
    {"d": 96},
    {"d": 192, "dv": 128},
    {"d": 256},
    {"d": 512},
    {"d": 72, "odd": True},
    {"bshd": True, "causal": 1},
    {"big": True, "causal": 1},
    {"big": True},
    {"d": 64, "big": True},
    {"d": 64},
]


def check(case):
    """Relative Frobenius errors of out, dq, dk, dv, dbias, dsinks against float64, ours and the reference's in the same dtype."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    dtype, case = case
    dt = getattr(torch, dtype)
    b, h, hk, d = 2, 4, 2, case.get("d", 128)
    dv, sq, sk = case.get("dv", d), case.get("sq", 333), case.get("sk", 333)
    launch.TMA_PAIRS = 0 if case.get("big") else 2**62
    if case.get("big"):
        sq = sk = 1024
    make = partial(torch.randn, device="cuda")
    q, k, v, dout = make(b, h, sq, d), make(b, hk, sk, d), make(b, hk, sk, dv), make(b, h, sq, dv)
    if case.get("bshd"):
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    if case.get("odd"):
        q, k, v = (torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in (q, k, v))
    q, k, v, dout = (x.to(dt) for x in (q, k, v, dout))
    bias = mask = slopes = sinks = seed = cu = None
    if "bias" in case:
        sizes = {"b": b, "h": h, "i": sq, "j": sk, "1": 1}
        bias = make([sizes[c] for c in case["bias"].rjust(4, "1")]).to(dt)
    if "mask" in case:
        mask = (torch.rand(b, 1, sq, sk, device="cuda") > 0.4).expand(b, h, sq, sk)
    slopes = torch.rand(h, device="cuda") if "alibi" in case else None
    sinks = make(h) if "sinks" in case else None
    seed = torch.tensor([987654321987], device="cuda") if "dropout" in case else None
    left, right = case.get("window", (-1, -1))
    causal = case.get("causal", 0)
    dlse = make(b, h, sq)
    if case.get("varlen"):
        cu = torch.tensor([0, 100, 100, 357, 600], dtype=torch.int32, device="cuda")
        q, k, v, dout = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])[:610].contiguous() for x in (q, k, v, dout))
        dlse = make(h, 610)
        sq = sk = 257
    spec = Spec(causal, left, 0 if causal else right, case.get("scale", d**-0.5), case.get("softcap", 0.0),
                case.get("dropout", 0.0), sq, sk, True, False)
    needs = (True, True, True, bias is not None, sinks is not None)
    extra = (mask, slopes, sinks, cu, cu, seed)

    def everything(module, cast):
        x = [t.to(cast) for t in (q, k, v)]
        e = (None if bias is None else bias.to(cast).expand(b, h, sq, sk), *extra)
        with torch.no_grad():
            out, lse = module[0](*x, *e, spec)
            return out, *module[1](dout.to(cast), dlse.to(lse.dtype), *x, out, lse, *e[:4], *e[4:], spec, needs)

    kernels, exact = (forward.forward, backward.backward), (reference.forward, reference.backward)
    truth = everything(exact, torch.float64)
    ours, eager = everything(kernels, dt), everything(exact, dt)
    return dtype, case, [(float((a.double() - t).norm() / t.norm()), float((e.double() - t).norm() / t.norm()))
                         for a, e, t in zip(ours, eager, truth, strict=True) if a is not None]


def check_all(pool):
    """Check every case; the list of failures."""
    jobs = [("bfloat16", c) for c in CASES]
    jobs += [(dt, c) for dt in ("float32", "float16") for c in ({}, {"causal": 1, "d": 64}, {"bias": "bhij", "d": 64})]
    failures, worst = [], 0.0
    for dtype, case, errors in pool.map(check, jobs):
        ratios = [ours / (eager + torch.finfo(getattr(torch, dtype)).eps / 4) for ours, eager in errors]
        worst = max(worst, *ratios)
        bad = not all(r < 2 for r in ratios)
        if bad:
            failures.append((dtype, case))
        print("check", "FAIL" if bad else "ok  ", dtype, case, " ".join(f"{o:.1e}/{e:.1e}" for o, e in errors), flush=True)
    print(f"checked {len(jobs)} cases, {len(failures)} failed, worst error {worst:.2f}x the eager run's")
    return failures


# ---- time ------------------------------------------------------------------------------------------------------------------------------


def timed(contenders, rounds=ROUNDS, calls=CALLS):
    """name → median seconds of a call; the contenders take turns, round by round."""
    times = {name: [] for name in contenders}
    for r in range(rounds + 1):
        for name, call in contenders.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                call()
            stop.record()
            stop.synchronize()
            if r:
                times[name].append(start.elapsed_time(stop) / 1e3 / calls)
    return {name: statistics.median(t) for name, t in times.items()}


NUMBERS, CHOOSE, TMA_PAIRS = launch._numbers, tiles.choose, launch.TMA_PAIRS


def fix_tiles(tile):
    """Make every kernel run `tile`: rows, keys, warps, stages and, for fp32, perhaps another way to multiply."""
    tiles.choose = lambda *_: tiles.Tile(*tile[:4])
    launch._numbers = (lambda *a: NUMBERS(*a) | {"PRECISION": tile[4]}) if len(tile) > 4 else NUMBERS


def compile_one(job):
    """Run one configuration once on a small input, so that its kernel lies in the disk cache."""
    kind, element, d, tile, causal, tma = job
    launch.TMA_PAIRS = 0 if tma else 2**62
    fix_tiles(tile)
    dtype = torch.bfloat16 if element == 2 else torch.float32
    shape = (1, 1, 256, d)
    q, k, v, dout = inputs(shape, dtype)
    spec = plain(shape, causal)
    try:
        if kind == "forward":
            run_forward(q, k, v, spec)
        else:
            lse = torch.zeros(shape[:3], device="cuda")
            run_backward(q, k, v, q, lse, dout, spec, (kind == "queries", kind == "keys", kind == "keys", False, False))
        torch.cuda.synchronize()
    except Exception as error:
        return job, repr(error)[:200]
    return job, None


def sweep(pool):
    """Time every candidate tile at the shapes of its head dim."""
    jobs = [(kind, e, d, t, causal, tma) for (kind, e, d), options in CANDIDATES.items() for t in options
            for causal, tma in itertools.product((False, True), (False, True) if e == 2 else (False,))]
    broken = {job: why for job, why in pool.map(compile_one, jobs) if why}
    for job, why in broken.items():
        print("cannot run", job, why)
    rows = []
    for (kind, e, d), options in CANDIDATES.items():
        shapes = [s for s in (SHAPES if e == 2 else FP32_SHAPES) if s[3] == d]
        for shape, causal in itertools.product(shapes, (False, True)):
            b, h, s, _ = shape
            q, k, v, dout = inputs(shape, torch.bfloat16 if e == 2 else torch.float32)
            spec = plain(shape, causal)
            out, lse = torch.empty_like(q).normal_(), torch.full((b, h, s), 8.0, device="cuda")
            contenders = {}

            def one(tile, tma, kind=kind, q=q, k=k, v=v, out=out, lse=lse, dout=dout, spec=spec):
                launch.TMA_PAIRS = 0 if tma else 2**62
                fix_tiles(tile)
                if kind == "forward":
                    return run_forward(q, k, v, spec)[0]
                return run_backward(q, k, v, out, lse, dout, spec, (kind == "queries", kind == "keys", kind == "keys", False, False))

            for t, tma in itertools.product(options, (False, True) if e == 2 else (False,)):
                if (kind, e, d, t, causal, tma) not in broken:
                    contenders[f"{'x'.join(map(str, t))}{' tma' if tma else ''}"] = partial(one, t, tma)
            if kind == "forward":
                for name, backend in (("fa2", SDPBackend.FLASH_ATTENTION), ("efficient", SDPBackend.EFFICIENT_ATTENTION)):
                    if e == 2 or name == "efficient":
                        contenders[name] = partial(peer, backend, q, k, v, causal)
            if e == 4:
                print("errors:", {name: f"{fp32_error(call, q, k, v, causal):.1e}" for name, call in contenders.items()})
            seconds = timed(contenders, 3, 2)
            matmuls = {"forward": 2, "queries": 3, "keys": 4}[kind]
            flops = 2 * matmuls * b * h * s * s * d / (2 if causal else 1)
            print(f"{kind} {'bf16' if e == 2 else 'fp32'} {shape} {'causal' if causal else 'full'}: TFLOP/s executed",
                  ", ".join(f"{n} {flops / t / 1e12:.0f}" for n, t in sorted(seconds.items(), key=lambda item: item[1])), flush=True)
            rows += [{"kind": kind, "bytes": e, "shape": shape, "causal": causal, "contender": n, "seconds": t, "tflops": flops / t / 1e12}
                     for n, t in seconds.items()]
    return rows


def fp32_error(call, q, k, v, causal):
    """Relative error of the first two heads of one call against float64: what a cheaper fp32 product costs."""
    exact = peer(SDPBackend.MATH, *(x[:1, :2].double() for x in (q, k, v)), causal)
    return float((call()[:1, :2] - exact).norm() / exact.norm())


def host_overhead():
    """Microseconds the host spends on an eager call of a tiny shape, ours beside SDPA's."""
    q, k, v, _ = inputs((1, 1, 64, 64), torch.bfloat16)
    calls = {"onchip": partial(run_forward, q, k, v, plain((1, 1, 64, 64), False)), "sdpa": partial(scaled_dot_product_attention, q, k, v)}
    result = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        result[name] = (time.perf_counter() - start) / 500 * 1e6
    print("host, us a call:", result)
    return result


def peer(backend, q, k, v, causal):
    """torch's own kernel."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def compare():
    """The rows of the acceptance: forward and backward beside torch's kernels."""
    rows = []
    for dtype, shapes in ((torch.bfloat16, SHAPES), (torch.float32, FP32_SHAPES)):
        for shape, causal in itertools.product(shapes, (False, True)):
            b, h, s, d = shape
            q, k, v, dout = inputs(shape, dtype)
            spec = plain(shape, causal)
            out, lse = run_forward(q, k, v, spec)
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            name = "fa2" if dtype == torch.bfloat16 else "efficient"
            backend = SDPBackend.FLASH_ATTENTION if name == "fa2" else SDPBackend.EFFICIENT_ATTENTION
            theirs = peer(backend, *leaves, causal)
            flops = 4 * b * h * s * s * d / (2 if causal else 1)
            forwards = {"onchip": partial(run_forward, q, k, v, spec), name: partial(peer, backend, q, k, v, causal)}
            backwards = {"onchip": partial(run_backward, q, k, v, out, lse, dout, spec),
                         name: partial(torch.autograd.grad, theirs, leaves, dout, retain_graph=True)}
            for direction, contenders, work in (("forward", forwards, flops), ("backward", backwards, 2.5 * flops)):
                seconds = timed(contenders)
                row = {"direction": direction, "dtype": str(dtype), "shape": shape, "causal": causal, "peer": name,
                       "tflops": {n: work / t / 1e12 for n, t in seconds.items()}, "ratio": seconds[name] / seconds["onchip"]}
                rows.append(row)
                print(f"{direction:8} {str(dtype)[6:]:8} {shape} {'causal' if causal else 'full  '} "
                      + " ".join(f"{n} {t:.0f}" for n, t in row["tflops"].items()) + f" ratio {row['ratio']:.2f}", flush=True)
    return rows


def main():
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--sweep", action="store_true", help="time candidate tiles")
    parser.add_argument("--workers", type=int, default=15, help="processes that compile and check")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_triton: no CUDA device")
    start = time.time()
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        result["failures"] = [str(f) for f in check_all(pool)]
        print(f"{time.time() - start:.0f} s")
        result["sweep"] = sweep(pool) if args.sweep else []
    tiles.choose, launch._numbers, launch.TMA_PAIRS = CHOOSE, NUMBERS, TMA_PAIRS
    result["rows"] = compare()
    result["host_us"] = host_overhead()
    print(f"{time.time() - start:.0f} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
