"""An experiment: softmax across rows, dim 0 of a matrix, longer than a tile's 512. Beside the library's two passes and a copy, on Hopper.

    python benchmarks/softmax_across.py --json across.json
    python benchmarks/softmax_across.py --lengths 8192 --shapes 16,104 32,168

A stripe of 32 neighbouring rows, 64 bytes of a line, is shared by the thread blocks of a cluster. Each has some of its positions, in pieces
of a vector a thread that wait in 16 bits; m and l of all 32 rows go from every block to every other by stores that count at the receiver's
barrier, as in `onchip.softmax.triton.cluster`. One read and one write, where two passes take two reads. Written before it was run;
docs/notes/softmax.md ("Next") has what it is expected to give. It is no part of the library until it gives that.
"""
import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.launcher import Launcher
from onchip.softmax import softmax
from onchip.softmax.triton.addresses import BF16, BF16_AGAIN
from onchip.softmax.triton.cluster import BEGUN, TAKE, beginning
from onchip.softmax.triton.parts import LOG2E
from softmax_cells import buffers, demand, timed
from softmax_plans import keep, whole_numbers

ROWS, WARPS = 32, 8  # of a stripe, of a block: a warp sends to one block of the cluster, each of its lanes a row's pair
PIECE = 64  # positions that a block's threads have with a vector of eight rows each
BEGIN = gl.constexpr(beginning(8 * ROWS))
EXCHANGE = gl.constexpr("""{
    .reg .pred out;
    .reg .b32 there, barrier;
    .reg .b64 pair;
    setp.ge.u32 out, $4, $6;
    @out bra AWAIT;
    mov.u32 there, %cluster_ctarank;
    mad.lo.u32 there, there, 32, $3;
    mad.lo.u32 there, there, 8, $5;
    add.u32 there, there, 16;
    mapa.shared::cluster.u32 there, there, $4;
    mapa.shared::cluster.u32 barrier, $5, $4;
    mov.b64 pair, {$1, $2};
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], pair, [barrier];
AWAIT:
    mbarrier.try_wait.parity.shared::cta.b64 out, [$5], 0;
    @!out bra AWAIT;
    add.u32 $0, $5, 16;
}""")
LARGER = gl.constexpr("max.bf16x2 $0, $1, $2;")


class Shape(NamedTuple):
    """Pieces of a block, and registers of a thread at most."""

    pieces: int
    registers: int


SHAPES = [Shape(4, 48), Shape(8, 64), Shape(8, 80), Shape(16, 104), Shape(16, 120), Shape(32, 184)]


@gluon.jit
def _widen(x, HOW: gl.constexpr):
    return gl.inline_asm_elementwise(HOW, "=&f,=&f,r", [x.to(gl.int16, bitcast=True)], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _larger(a, b):
    a, b = a.to(gl.int16, bitcast=True), b.to(gl.int16, bitcast=True)
    return gl.inline_asm_elementwise(LARGER, "=r,r,r", [a, b], dtype=gl.int16, is_pure=True, pack=2).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _exchange(m, l, mail, PARTS: gl.constexpr):
    """m and l of every part, [32, 8] with each thread all of a row's, from this part's own, [32]; beyond PARTS the last one's and 0."""
    sent: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 8], [0, 1])  # an element a thread
    had: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, sent))[:, None] + gl.zeros([32, 8], gl.int32, sent)
    part = gl.arange(0, 8, gl.SliceLayout(0, sent))[None, :] + gl.zeros([32, 8], gl.int32, sent)
    a = gl.convert_layout(m, gl.SliceLayout(1, sent))[:, None] + gl.zeros([32, 8], gl.float32, sent)
    b = gl.convert_layout(l, gl.SliceLayout(1, sent))[:, None] + gl.zeros([32, 8], gl.float32, sent)
    own = [a, b, row, part, mail + gl.zeros([32, 8], gl.int32, sent), gl.full([32, 8], PARTS, gl.int32, sent)]
    pairs = gl.max(gl.max(gl.inline_asm_elementwise(EXCHANGE, "=r,f,f,r,r,r,r", own, dtype=gl.int32, is_pure=False, pack=1), 1), 0)
    row, part = gl.arange(0, 32, gl.SliceLayout(1, had))[:, None], gl.arange(0, 8, gl.SliceLayout(0, had))[None, :]
    places = pairs + 8 * (gl.minimum(part, PARTS - 1) * 32 + row)
    a, b = gl.inline_asm_elementwise(TAKE, "=f,=f,r", [places], dtype=(gl.float32, gl.float32), is_pure=False, pack=1)
    return a, gl.where(part < PARTS, b, 0.0)


@gluon.jit
def across(x, y, n, r, stripes, PIECES: gl.constexpr, PARTS: gl.constexpr):
    """y = softmax along n of x, [groups, n, r]; `stripes` of 32 rows in a group, r a multiple of 32."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 8], [0, 1])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    part, stripe = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS
    mail = gl.inline_asm_elementwise(BEGIN, "=r,r", [stripe * 0 + 8 * 32 * PARTS], dtype=gl.int32, is_pure=False, pack=1)
    row = gl.arange(0, 32, of_rows) + stripe % stripes * 32
    place = gl.arange(0, 64, gl.SliceLayout(0, layout)) + part * (PIECES * 64)
    start = (stripe // stripes).to(gl.int64) * n * r
    first = start + place.to(gl.int64)[None, :] * r + row[:, None]  # [32, 64]
    pieces = ()
    for piece in gl.static_range(PIECES):
        there = (place[None, :] + piece * 64 < n)
        pieces += (gl.load(x + first + gl.to_tensor(piece * 64).to(gl.int64) * r, mask=there, other=float("-inf")),)
    mail = gl.inline_asm_elementwise(BEGUN, "=r,r", [mail], dtype=gl.int32, is_pure=False, pack=1)
    best = pieces[0]
    for piece in gl.static_range(1, PIECES):
        best = _larger(best, pieces[piece])
    m = gl.max(_widen(best, BF16), 1)  # [32]
    shift = gl.where(m == float("-inf"), 0.0, m)[:, None]
    terms = gl.exp2((_widen(pieces[0], BF16) - shift) * LOG2E)
    for piece in gl.static_range(1, PIECES):
        terms += gl.exp2((_widen(pieces[piece], BF16) - shift) * LOG2E)
    ms, ls = _exchange(m, gl.sum(terms, 1), mail, PARTS)
    m = gl.max(ms, 1)
    m = gl.where(m == float("-inf"), 0.0, m)
    l = gl.sum(ls * gl.exp2((ms - m[:, None]) * LOG2E), 1)
    shift = gl.convert_layout(m, of_rows)[:, None]
    less = gl.convert_layout(gl.log2(l), of_rows)[:, None]
    for piece in gl.static_range(PIECES):
        there = (place[None, :] + piece * 64 < n)
        p = gl.exp2((_widen(pieces[piece], BF16_AGAIN) - shift) * LOG2E - less)
        gl.store(y + first + gl.to_tensor(piece * 64).to(gl.int64) * r, p.to(gl.bfloat16), mask=there)


def arguments(x: torch.Tensor, y: torch.Tensor, shape: Shape) -> dict[str, object]:
    """The kernel's, by name, for x as [groups, n, r]."""
    _, n, r = x.shape
    return {"x": x, "y": y, "n": n, "r": r, "stripes": r // ROWS, "PIECES": shape.pieces, "PARTS": parts_of(n, shape)}


def parts_of(n: int, shape: Shape) -> int:
    """Blocks of a cluster."""
    return -(-n // (PIECE * shape.pieces))


def made(x: torch.Tensor, y: torch.Tensor, shape: Shape) -> Callable[[torch.Tensor], None]:
    """The launch for tensors like x."""
    named = arguments(x, y, shape)
    grid = x.shape[0] * named["stripes"] * named["PARTS"]
    compiled = across.warmup(*named.values(), grid=(grid,), num_warps=WARPS, maxnreg=shape.registers)
    launcher, rest = Launcher(compiled, named["PARTS"]), tuple(named.values())[2:]
    return lambda t: launcher(grid, torch.cuda.current_stream().cuda_stream, (t.data_ptr(), y.data_ptr(), *rest))


def compile_one(size: tuple[int, int, int], shape: Shape) -> str:
    """Into Triton's cache, in a process of its own; why not, if not."""
    try:
        x = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        made(x, x, shape)
    except Exception as reason:
        return str(reason).strip().splitlines()[-1][:100]
    return ""


def measure(size: tuple[int, int, int], shapes: list[Shape], repeats: int) -> list[dict]:
    """The rate of each, checked."""
    (xs,), results, calls = buffers(size, torch.bfloat16), [], {}
    out, right = torch.empty_like(xs[0]), torch.softmax(xs[0][-1, :, -64:].double(), 0)
    for shape in shapes:
        run = made(xs[0], out, shape)
        out.fill_(torch.nan)
        run(xs[0])
        wrong = ((out[-1, :, -64:].double() - right).abs().max() / right.max()).item()
        demand(wrong <= 2 * torch.finfo(torch.bfloat16).eps and not out.isnan().any(), f"{size}, {shape}: {wrong}")
        calls[f"{parts_of(size[1], shape)} blocks of {shape.pieces} pieces, {shape.registers} registers"] = (
            lambda i, run=run: run(xs[i % len(xs)]))
    calls |= {"copy": lambda i: out.copy_(xs[i % len(xs)]), "library": lambda i: softmax(xs[i % len(xs)], -2),
              "torch": lambda i: torch.softmax(xs[i % len(xs)], -2)}
    for name, us in sorted(timed(calls, repeats).items(), key=lambda one: one[1]):
        results.append({"size": list(size), "name": name, "us": round(us, 2), "tb_per_s": round(2 * out.nbytes / us / 1e6, 3)})
        print(f"  {results[-1]['tb_per_s']:.3f} TB/s {us:8.2f} µs  {name}", flush=True)
    return results


def main() -> None:
    """Compile side by side, time one by one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 5000, 8192, 16384])
    names = "PIECES,REGISTERS"
    parser.add_argument("--shapes", nargs="+", type=whole_numbers(names), metavar=names)
    parser.add_argument("--elements", type=int, default=2**27)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(dtype="bf16")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("benchmarks/softmax_across.py needs a Hopper GPU")
    shapes, results = [Shape(*one) for one in options.shapes or SHAPES], []
    sizes = [(groups, n, options.elements // (groups * n) // ROWS * ROWS) for n in options.lengths for groups in (1, 8)]
    jobs = [(size, shape) for size in sizes for shape in shapes if 1 < parts_of(size[1], shape) <= WARPS]
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        reasons = dict(zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True))
    for size in sizes:
        print(size, flush=True)
        results += measure(size, [shape for at, shape in jobs if at == size and not reasons[at, shape]], options.repeats)
        for (at, shape), reason in reasons.items():
            if at == size and reason:
                print(f"  {shape}: {reason}", flush=True)
        torch.cuda.empty_cache()
    keep(options, results)


if __name__ == "__main__":
    main()
