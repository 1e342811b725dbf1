"""The cells of softmax's benchmark (`softmax.py`): who can run them, what they have to move, whether they are right, and their times."""
import random
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

from onchip.softmax.api import logsumexp, softmax, softmax_topk

CHECKED_ROWS = 8
SETS = 4  # of buffers: where one lies in memory moves a rate by some 0.3 %
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


def buffers(shape, dtype, tensors=1):
    """As many random tensors of each kind as make 2·L2, and at least SETS."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    sets = max(SETS, 1 + 2 * torch.cuda.get_device_properties(0).L2_cache_size // nbytes)
    return [[torch.randn(shape, device="cuda").to(dtype) for _ in range(sets)] for _ in range(tensors)]


def errors(function, x, dy):
    """max |error| of y and dx against float64 over a few rows, relative to the largest value."""
    rows = torch.cat([torch.arange(CHECKED_ROWS), torch.arange(len(x) - CHECKED_ROWS, len(x))]).clamp(0, len(x) - 1)
    leaf, exact = x.detach().requires_grad_(), x[rows].double().requires_grad_()
    y, right = function(leaf), torch.softmax(exact, -1)
    dx, = torch.autograd.grad(y, leaf, dy)
    right_dx, = torch.autograd.grad(right, exact, dy[rows].double())
    return [((a[rows].double() - b).abs().max() / b.abs().max()).item() for a, b in ((y.detach(), right.detach()), (dx, right_dx))]


def tried(function, x, dy):
    """(its errors, None), or where it does not serve such rows (None, why)."""
    try:
        return errors(function, x, dy), None
    except Exception as reason:
        return None, (str(reason).strip().splitlines() or [type(reason).__name__])[0][:100]


def demand(good, what):
    """No speed is reported of what is wrong."""
    if not good:
        sys.exit(f"onchip is wrong: {what}; no speed is reported")


def timed(calls, repeats):
    """name → median microseconds of `calls[name](i)`, i = 0, 1, … choosing the buffers; the calls alternate."""
    samples, order = {name: [] for name in calls}, random.Random(0)
    for i in range(repeats + 3):
        for name in order.sample(list(calls), len(calls)):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP)
            start.record()
            calls[name](i)
            stop.record()
            if i >= 3:  # the first ones compile and warm up
                samples[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 for name, pairs in samples.items()}


def rows_of(what, times, nbytes, passes, **facts):
    """One result for each implementation; `passes`: tensors moved, by name or for all."""
    return [{"pass": what, **facts, "name": name, "us": round(us, 2),
             "tb_per_s": round((passes[name] if isinstance(passes, dict) else passes) * nbytes / us / 1e6, 3)}
            for name, us in times.items()]


def widths(n, dtype, elements, repeats):
    """Forward and backward of rows of n elements, as many as make `elements`."""
    rows = max(1, elements // n)
    xs, dys = buffers((rows, n), dtype, 2)
    functions, wrong = implementations(), {}
    for name, function in implementations().items():
        wrong[name], reason = tried(function, xs[0], dys[0])
        if reason and name != "onchip":
            print(f"{name} does not serve rows of {n}: {reason}")
            del functions[name], wrong[name]
        elif reason:
            sys.exit(reason)
    return both_ways(functions, xs, dys, wrong, repeats, rows, n)


def across(n, dtype, elements, repeats):
    """The same of columns: softmax over dim 0 of a matrix of n rows, as wide as makes `elements` or, by up to 63, less."""
    rows = elements // n // 64 * 64
    xs, dys = buffers((n, rows), dtype, 2)
    functions = {"onchip": lambda x: softmax(x, 0), "torch": lambda x: torch.softmax(x, 0)}
    wrong = {name: errors(lambda t, f=f: f(t.T).T, xs[0].T, dys[0].T) for name, f in functions.items()}
    return both_ways(functions, xs, dys, wrong, repeats, rows, n)


def both_ways(functions, xs, dys, wrong, repeats, rows, n):
    """Results of forward and backward, if onchip's errors among `wrong` are no larger than others'."""
    out, sets, nbytes, eps = torch.empty_like(xs[0]), len(xs), xs[0].nbytes, torch.finfo(xs[0].dtype).eps
    demand(max(wrong["onchip"]) <= 2 * max(wrong["torch"]) + 2 * eps, f"{rows} rows of {n} {xs[0].dtype}: {wrong['onchip']}")
    for x in xs:
        x.requires_grad_()
    kept = {name: [f(x) for x in xs] for name, f in functions.items()}

    def backward(name):
        return lambda i: torch.autograd.grad(kept[name][i % sets], xs[i % sets], dys[i % sets], retain_graph=True)

    copy = {"copy": lambda i: out.copy_(xs[i % sets])}
    with torch.no_grad():
        forward_us = timed(copy | {name: (lambda i, f=f: f(xs[i % sets])) for name, f in functions.items()}, repeats)
    found = rows_of("forward", forward_us, nbytes, 2, rows=rows, n=n)
    found += rows_of("backward", timed({name: backward(name) for name in functions}, repeats), nbytes, 3, rows=rows, n=n)
    for result in found:
        result["relative_error"] = wrong.get(result["name"], (None, None))[result["pass"] == "backward"]
    return found


@triton.jit
def copy_triangle(x, y, rows, n: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """y = x where the triangle of `rows` × n is seen, else 0, by vectors: what its softmax has to move, and nothing to compute."""
    row, j = tl.program_id(0) // (n // BLOCK), tl.program_id(0) % (n // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    last, at = row % rows + (n - rows), row.to(tl.int64) * n + j
    tl.store(y + at, tl.where(j <= last, tl.load(x + at, mask=j // VECTOR * VECTOR <= last, other=0.0), 0.0))


def causal(shape, dtype, repeats):
    """A triangle and a mask beside the plain kernel and a copy of the triangle, the roof of a mix with more writes than reads.

    Bytes: of a triangle what is seen of x is read, else x, and the mask; y is written.
    """
    (xs,), rows, n = buffers(shape, dtype), shape[-2], shape[-1]
    sets, mask = len(xs), torch.ones(rows, n, dtype=torch.bool, device="cuda").tril(n - rows)
    right = torch.softmax(xs[0][:2].double().masked_fill(~mask, -torch.inf), -1)
    for arguments in ({"causal": True}, {"mask": mask}):
        wrong = (softmax(xs[0], **arguments)[:2].double() - right).abs().max().item()
        demand(wrong <= 2 * torch.finfo(dtype).eps, f"{shape} {arguments.keys()}: {wrong}")
    seen, out = mask.sum().item() / mask.numel(), torch.empty_like(xs[0])

    def copy(i):  # blocks of 2048 and 4096 elements are 1 to 2 % slower
        copy_triangle[(out.numel() // 1024,)](xs[i % sets], out, rows, n, 1024, 16 // dtype.itemsize)

    copy(0)
    demand(torch.equal(out[0], xs[0][0].masked_fill(~mask, 0.0)), "the copy of a triangle")
    times = timed({"copy": copy, "plain": lambda i: softmax(xs[i % sets]),
                   "causal": lambda i: softmax(xs[i % sets], causal=True), "mask": lambda i: softmax(xs[i % sets], mask=mask)}, repeats)
    passes = {"plain": 2, "copy": 1 + seen, "causal": 1 + seen, "mask": 2 + 1 / (len(xs[0]) * dtype.itemsize)}
    return rows_of("causal", times, xs[0].nbytes, passes, shape=list(shape))


def selection(n, k, dtype, elements, repeats):
    """`softmax_topk` beside torch's two calls; bytes: one read of x."""
    (xs,), functions = buffers((elements // n, n), dtype), {
        "onchip": lambda x: softmax_topk(x, k), "torch": lambda x: torch.topk(torch.softmax(x, -1), k), "copy": lambda x: x.clone()}
    values, indices = softmax_topk(xs[0], k, dtype=torch.float32)
    p = torch.softmax(xs[0][:64].double(), -1)
    right = torch.sort(p, descending=True).values[:, :k]
    demand(torch.equal(p.gather(-1, indices[:64]), right), f"places of the {k} largest of {n}")
    demand((values[:64].double() - right).abs().max() <= 1e-6 * right.max(), f"values of the {k} largest of {n}")
    times = timed({name: (lambda i, f=f: f(xs[i % len(xs)])) for name, f in functions.items()}, repeats)
    return rows_of("topk", times, xs[0].nbytes, {"onchip": 1, "torch": 1, "copy": 2}, rows=elements // n, n=n, k=k)


def sums(n, dtype, elements, repeats):
    """`logsumexp` beside torch's; bytes: one read of x."""
    (xs,), functions = buffers((elements // n, n), dtype), {"onchip": logsumexp, "torch": lambda x: torch.logsumexp(x, -1)}
    right = torch.logsumexp(xs[0][:64].double(), -1)
    demand((logsumexp(xs[0])[:64].double() - right).abs().max() <= 2 * torch.finfo(dtype).eps * right.abs().max(), f"sums of {n}")
    times = timed({name: (lambda i, f=f: f(xs[i % len(xs)])) for name, f in functions.items()}, repeats)
    return rows_of("logsumexp", times, xs[0].nbytes, 1, rows=elements // n, n=n)


def on_card(call, repeats):
    """Median microseconds of one of 20 calls in a graph that is replayed: no host takes part."""
    graph, samples = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP)
        start.record()
        graph.replay()
        stop.record()
        samples.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in samples) / 20 * 1e3


def small(shape, dtype, repeats):
    """Wall time of an eager call, and the card's own time, by implementation."""
    x, samples = torch.randn(shape, device="cuda").to(dtype), {}
    functions = {"onchip": lambda: softmax(x), "torch": lambda: torch.softmax(x, -1)}
    demand(torch.allclose(softmax(x).double(), torch.softmax(x.double(), -1), rtol=0, atol=torch.finfo(dtype).eps), f"{shape}")
    for round_ in range(repeats // 3 + 2):
        for name, call in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            torch.cuda.synchronize()
            if round_ > 1:
                samples.setdefault(name, []).append((time.perf_counter() - start) / 200 * 1e6)
    times = {name: statistics.median(values) for name, values in samples.items()}
    return [{**row, "card_us": round(on_card(functions[row["name"]], repeats), 2)}
            for row in rows_of("small", times, x.nbytes, 2, shape=list(shape))]
