"""What an eager call of attention costs the host: ``python benchmarks/attention_overhead.py [--json FILE]``.

The problem is so small (2 heads, 16 × 16, head dim 64) that the host decides. Microseconds a call of `onchip.attention` by each backend of
this machine and of torch's SDPA, contenders in turn, the median of the rounds. Every contender's result is compared with float64 first.

    microseconds   calls without waiting for the device between them, no gradient
    after_wait     one call, until it returns, after a wait for the device: caches have gone cold meanwhile
    training       as microseconds, the inputs requiring gradients
    new            one call of a length that no call had before, dense and packed (its kernel being compiled)
    parts          pieces of a call by themselves: the checks, the key of a plain call with its look-up, all but the backend
"""
import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import onchip
from onchip.attention import ops
from onchip.attention.contract import check_dense
from onchip.attention.dispatch import CAPABILITIES, why_not
from onchip.bench.machine import device_name
from onchip.cli.common import whole_file

CALLS, ROUNDS = 200, 15
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("window", "scale", "softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_seed")),
    "causal": False, "dropout_p": 0.0, "deterministic": False, "backend": "auto"}


def interleaved(runs: dict[str, Callable[[], Any]], wait: Callable[[], None]) -> dict[str, float]:
    """Median microseconds a call of each, `CALLS` calls in a row, contender after contender."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            run()
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            wait()
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def contenders(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """SDPA and every backend that serves this device by itself, full and causal."""
    runs: dict[str, Callable[[], Any]] = {}
    for causal in (False, True):
        name = "causal" if causal else "full"
        runs[f"sdpa {name}"] = partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
        runs[f"auto {name}"] = partial(onchip.attention, q, k, v, causal=causal)
        problem = onchip.explain(q, k, v, causal=causal).problem
        for backend, able in CAPABILITIES.items():
            if q.device.type not in able.only_named and why_not(backend, problem) is None:
                runs[f"{backend} {name}"] = partial(onchip.attention, q, k, v, causal=causal, backend=backend)
    return runs


def after_wait(runs: dict[str, Callable[[], Any]], wait: Callable[[], None], count: int = 200) -> dict[str, float]:
    """Median microseconds until one call of each returns, the device idle before it."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def new_lengths(q: Tensor, wait: Callable[[], None], count: int = 50) -> dict[str, float]:
    """Median microseconds of the first call of a length, dense and packed."""
    heads, dim = q.shape[1], q.shape[3]
    ready, runs = [], []
    for n in range(1000, 1001 + count):
        x = torch.randn(n, heads, dim, device=q.device, dtype=q.dtype)
        cu = torch.tensor([0, 500, n], device=q.device, dtype=torch.int32)
        ready.append(x.transpose(0, 1)[None])
        runs.append(partial(onchip.attention_varlen, x, x, x, cu, cu, max_seqlen_q=n, max_seqlen_k=n))
    times: dict[str, list[float]] = {"dense": [], "packed": []}
    for x, packed in zip(ready, runs, strict=True):
        for name, run in (("dense", partial(onchip.attention, x, x, x)), ("packed", packed)):
            wait()
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.median(t[1:]), 2) for name, t in times.items()}  # the first may compile


def above_backend(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """The parts of a call that no backend does: its checks; the way past them; and a call whose backend returns at once."""
    scale = 0.25  # a kind of call that nothing else here makes
    result = onchip.attention(q, k, v, scale=scale, return_lse=True)

    def find() -> ops.Route | None:
        key = ops.plain(q, k, v, False, None, scale, None, False, "auto")
        return None if key is None else ops.known(key)

    route = find()
    assert route is not None
    route.memo["again"] = lambda q, k, v: result
    return {"checks": partial(check_dense, q, k, v, **DEFAULTS), "key and look-up": find,
            "all but the backend": partial(onchip.attention, q, k, v, scale=scale)}


def main() -> None:
    """Check, time, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 64, device=device, dtype=dtype) for _ in range(3))
    runs = contenders(q, k, v)
    with torch.no_grad():
        for name, run in runs.items():
            exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal="causal" in name)
            error = float((run().double() - exact).norm() / exact.norm())
            if not error < 1e-2:
                raise SystemExit(f"{name}: wrong by {error:.2g}, nothing is timed")
        figures = {"microseconds": interleaved(runs, wait), "after_wait": after_wait(runs, wait)}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    figures["training"] = interleaved(contenders(*leaves), wait)
    with torch.no_grad():
        figures["new"] = new_lengths(q, wait)
        figures["parts"] = interleaved(above_backend(q, k, v), wait)
    print(f"{'µs (over SDPA)':18} {'in a row':>16} {'after a wait':>16} {'training':>16}")
    for name in runs:
        peer = "sdpa " + name.split()[-1]
        columns = (figures[kind] for kind in ("microseconds", "after_wait", "training"))
        print(f"{name:18}" + "".join(f" {column[name]:8.1f} ({column[name] / column[peer]:.2f})" for column in columns))
    print("new length", figures["new"], "parts", figures["parts"])
    if args.json:
        record = {"device": device_name(device), "torch": torch.__version__, "shape": list(q.shape),
                  "dtype": str(dtype).removeprefix("torch."), **figures}
        with whole_file(args.json) as file:
            file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
