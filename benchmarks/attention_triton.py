"""The Triton attention kernels on a GPU beside SDPA's own: every speed and memory bar they answer for, in one command.

    python benchmarks/attention_triton.py --json benchmarks/results/h200/attention_triton.json

`onchip.attention` is called with ``backend="triton"``. Before anything of a problem is timed, out and the three gradients of its last head
(packed: of the longest sequence) are held against float64: at most twice the error of the same mathematics run eagerly in the same dtype.
Contenders then take turns, so all meet the same clocks; the median round counts. FLOPs: 4 · H · D · Σ S² forward, half of it causal, 2.5
times that backward. Memory is the allocator's peak during a call beyond what was there before it and what it returns.
"""
import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from onchip.attention import attention, attention_varlen
from onchip.attention.triton import launch
from onchip.bench.memory import peak_extra_bytes
from onchip.cli.common import whole_file

DEVICE = "cuda"
Shape = tuple[int, int, int, int]  # batch, heads, seq, head dim
Calls = dict[str, Callable[[], Any]]

SHAPES: list[Shape] = [(8, 16, 4096, 128), (2, 16, 16384, 128), (4, 32, 8192, 64)]
FP32_SHAPES: list[Shape] = [(2, 16, 4096, 128), (2, 32, 4096, 64)]
# 16 sequences of 100 … 8000 tokens, log-spaced, shuffled; and as many of one length with the same Σ S² (within 1 %)
LENGTHS = [round(100 * 80 ** (i * 7 % 16 / 15)) for i in range(16)]
EQUAL = round(math.sqrt(statistics.fmean(s * s for s in LENGTHS)) / 64) * 64
MEMORY_LENGTHS = [1 << 14, 1 << 15, 1 << 16]
# time of the peer over ours, by (direction, dtype, head dim); packed: our rate over that of equal lengths; memory: bytes at the longest
BARS = {("forward", "bfloat16", 128): 1.2, ("forward", "bfloat16", 64): 1.0, ("backward", "bfloat16", 128): 1.0,
        ("backward", "bfloat16", 64): 1.0, ("forward", "float32", 128): 1.0, ("forward", "float32", 64): 1.0}
PACKED_BAR, MEMORY_BAR = 0.9, 1e9
ROUNDS, BUDGET = 5, 0.015  # seconds of calls a contender and round

def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout."""
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(4)]


def eager(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> list[Tensor]:
    """out, dq, dk, dv of one head, q … dout (S, D), by the definition in their dtype."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].T * q.shape[-1] ** -0.5  # (S, S)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(s, -1) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(results: list[Tensor], head: list[Tensor], causal: bool) -> dict[str, list[float]]:
    """Relative Frobenius errors, ours and the eager run's, of out, dq, dk, dv of one head. The benchmark ends where ours is too large."""
    exact = eager(*(x.double() for x in head), causal)
    found = {}
    for name, ours, own, truth in zip(("out", "dq", "dk", "dv"), results, eager(*head, causal), exact, strict=True):
        pair = [float((x.double() - truth).norm() / truth.norm()) for x in (ours, own)]
        if not pair[0] <= 2 * pair[1]:
            sys.exit(f"wrong {name}: relative error {pair[0]:.1e}, eager {pair[1]:.1e}; nothing more is timed")
        found[name] = pair
    return found


def timed(calls: Calls) -> dict[str, float]:
    """Median seconds of a call of each contender, round after round in turn."""
    def stretch(call: Callable[[], Any], repeats: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / repeats

    for call in calls.values():
        call()
    repeats = {name: min(50, max(1, math.ceil(BUDGET / stretch(call, 2)))) for name, call in calls.items()}
    rounds = [{name: stretch(call, repeats[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(times[name] for times in rounds) for name in calls}


def flops(seqs: list[int], heads: int, dim: int, causal: bool, direction: str) -> float:
    """Useful operations of one call."""
    return 4 * heads * dim * sum(s * s for s in seqs) * (0.5 if causal else 1) * (2.5 if direction == "backward" else 1)


def both(run: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> Calls:
    """The two directions of one contender."""
    out = run(*leaves)
    q, k, v = (x.detach() for x in leaves)
    return {"forward": lambda: run(q, k, v), "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)}


def sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One of torch's own kernels."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def build(job: tuple[int, str, bool, bool]) -> None:
    """Run a call of one kind once, small, with the descriptors of a large one, so that its kernels lie in Triton's disk cache."""
    dim, dtype, causal, is_packed = job
    launch.TMA_PAIRS = 0
    *leaves, dout = inputs((256, 1, dim) if is_packed else (1, 1, 256, dim), getattr(torch, dtype))
    cu = torch.tensor([0, 256], device=DEVICE, dtype=torch.int32)
    run = partial(attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu) if is_packed else attention
    both(partial(run, causal=causal, backend="triton"), [x.requires_grad_() for x in leaves], dout)["backward"]()


def compare(shape: Shape, dtype: torch.dtype, causal: bool) -> list[dict[str, Any]]:
    """Forward and backward beside SDPA's FlashAttention-2 (16 bit) or memory-efficient kernel (fp32)."""
    b, h, s, d = shape
    *leaves, dout = inputs(shape, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    peer, kernel = ("fa2", SDPBackend.FLASH_ATTENTION) if dtype.itemsize == 2 else ("efficient", SDPBackend.EFFICIENT_ATTENTION)
    calls = {"onchip": both(partial(attention, causal=causal, backend="triton"), leaves, dout),
             peer: both(partial(sdpa, kernel, causal), leaves, dout)}
    ours = calls["onchip"]
    error = errors([x[-1, -1].detach() for x in (ours["forward"](), *ours["backward"]())],
                   [x[-1, -1].detach() for x in (*leaves, dout)], causal)
    rows = []
    for direction in ("forward", "backward"):
        seconds = timed({name: call[direction] for name, call in calls.items()})
        work, name = flops([s] * b, h, d, causal, direction), str(dtype)[6:]
        rows.append({"direction": direction, "dtype": name, "shape": shape, "causal": causal, "error": error, "seconds": seconds,
                     "tflops": {who: work / t / 1e12 for who, t in seconds.items()}, "ratio": seconds[peer] / seconds["onchip"],
                     "bar": BARS.get((direction, name, d))})
        report(f"{direction:8} {name:8} {shape}", rows[-1])
    return rows


def packed(causal: bool, heads: int = 16, dim: int = 128) -> list[dict[str, Any]]:
    """Sequences of very different lengths, packed, beside a dense batch of equal lengths with the same work."""
    *leaves, dout = inputs((sum(LENGTHS), heads, dim), torch.bfloat16)
    leaves = [x.requires_grad_() for x in leaves]
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], device=DEVICE, dtype=torch.int32)
    longest = LENGTHS.index(max(LENGTHS))
    *dense, dense_dout = inputs((len(LENGTHS), heads, EQUAL, dim), torch.bfloat16)
    run = partial(attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(LENGTHS), max_seqlen_k=max(LENGTHS), causal=causal,
                  backend="triton")
    calls = {"packed": both(run, leaves, dout),
             "equal": both(partial(attention, causal=causal, backend="triton"), [x.requires_grad_() for x in dense], dense_dout)}
    rows_of = slice(sum(LENGTHS[:longest]), sum(LENGTHS[:longest + 1]))
    ours = calls["packed"]
    error = errors([x[rows_of, -1].detach() for x in (ours["forward"](), *ours["backward"]())],
                   [x[rows_of, -1].detach() for x in (*leaves, dout)], causal)
    rows = []
    for direction in ("forward", "backward"):
        seconds = timed({name: call[direction] for name, call in calls.items()})
        tflops = {name: flops(seqs, heads, dim, causal, direction) / seconds[name] / 1e12
                  for name, seqs in (("packed", LENGTHS), ("equal", [EQUAL] * len(LENGTHS)))}
        rows.append({"direction": direction, "lengths": LENGTHS, "equal": EQUAL, "heads": heads, "head_dim": dim, "causal": causal,
                     "error": error, "seconds": seconds, "tflops": tflops, "ratio": tflops["packed"] / tflops["equal"], "bar": PACKED_BAR})
        report(f"{direction:8} packed", rows[-1])
    return rows


def memory(seq: int) -> dict[str, Any]:
    """Peak extra bytes of a forward and a backward call, one head of dim 128."""
    def extra(call: Callable[[], Any]) -> int:
        call()  # one-time buffers are no call's own
        peak, result = peak_extra_bytes(call, DEVICE)
        return peak - sum(x.nbytes for x in result)

    *leaves, dout = inputs((1, 1, seq, 128), torch.bfloat16)
    leaves = [x.requires_grad_() for x in leaves]
    run = partial(attention, backend="triton", return_lse=True)
    calls = both(lambda *x: run(*x)[0], leaves, dout)
    row = {"seq": seq, "forward": extra(lambda: run(*(x.detach() for x in leaves))), "backward": extra(calls["backward"]),
           "bar": MEMORY_BAR}
    print(f"memory   seq {seq}: {row['forward'] / 1e6:.2f} MB forward, {row['backward'] / 1e6:.2f} MB backward, beyond inputs and outputs",
          flush=True)
    return row


def report(title: str, row: dict[str, Any]) -> None:
    """One line: rates, ratio, bar."""
    bar = "" if row["bar"] is None else f", bar {row['bar']}: {'met' if row['ratio'] >= row['bar'] else 'MISSED'}"
    print(f"{title} {'causal' if row['causal'] else 'full  '} " + " ".join(f"{name} {t:.0f}" for name, t in row["tflops"].items())
          + f" ratio {row['ratio']:.2f}{bar}", flush=True)


def bars(workers: int) -> dict[str, Any]:
    """Every row, compiled by so many processes beforehand."""
    jobs = [(*kind, causal, False) for kind in ((128, "bfloat16"), (64, "bfloat16"), (128, "float32"), (64, "float32"))
            for causal in (False, True)] + [(128, "bfloat16", causal, True) for causal in (False, True)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(build, jobs))
    cases = [(s, torch.bfloat16) for s in SHAPES] + [(s, torch.float32) for s in FP32_SHAPES]
    return {"rows": [row for (shape, dtype), causal in product(cases, (False, True)) for row in compare(shape, dtype, causal)],
            "packed": [row for causal in (False, True) for row in packed(causal)], "memory": [memory(seq) for seq in MEMORY_LENGTHS]}


def main(about: str | None, measure: Callable[[int], dict[str, Any]]) -> None:
    """Check and measure, a line a row, then all of it as JSON."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).stem}: no CUDA device")
    torch.manual_seed(0)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, **measure(args.workers)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(args.json) as path:
            path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(__doc__, bars)
