"""An experiment: would thread blocks that stay serve plain rows of 16 bits better? Beside the library, a copy and quack, on Hopper.

    python benchmarks/softmax_ring.py --json ring.json
    python benchmarks/softmax_ring.py --widths 4096 --shapes 1,3,1,0 1,4,1,0

Rows come by TMA into a ring of slots in shared memory and leave from the slot they came in, so a block needs no addresses, and reads while
it computes and writes; a row's way through the card is paid for once a block, not once a row. A thread has all of its elements in float32:
one exponential each, 8 instructions an element where the library's kernels have 13. Written before it was run; docs/notes/softmax.md
("Next") has what it is expected to give. It is no part of the library until it gives that.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.attention.hopper.compat import tma_load, tma_store
from onchip.softmax.triton.addresses import BF16
from softmax import DTYPES
from softmax_cells import buffers, demand, implementations, timed
from softmax_plans import keep, whole_numbers

PIECE = 256  # elements: the longest side of a TMA box, and 16 bytes for each lane of a warp
LOG2E = gl.constexpr(1.4426950408889634)


class Shape(NamedTuple):
    """Rows of a tile, slots of the ring, warps of a block, registers of a thread at most (0: no limit)."""

    rows: int
    slots: int
    warps: int
    registers: int


SHAPES = {
    512: [(8, 3, 1, 0), (4, 3, 1, 0), (4, 4, 1, 0)], 1024: [(4, 3, 1, 0), (2, 3, 1, 0)], 2048: [(2, 3, 1, 0), (1, 3, 1, 0), (1, 4, 1, 0)],
    4096: [(1, 3, 1, 0), (1, 2, 1, 0), (1, 4, 1, 0), (1, 3, 2, 96)], 8192: [(1, 3, 2, 0), (1, 2, 2, 0), (1, 3, 4, 96)],
    16384: [(1, 3, 4, 0), (1, 2, 4, 0), (1, 3, 8, 96), (1, 2, 8, 96)], 32768: [(1, 3, 8, 0), (1, 2, 8, 0), (1, 3, 16, 104)],
}


@gluon.jit
def _widen(x):
    """x in float32; of bf16 the compiler's own way takes three instructions for two elements, this one two."""
    if x.dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(BF16, "=&f,=&f,r", [x.to(gl.int16, bitcast=True)], dtype=gl.float32, is_pure=True, pack=2)
    else:
        wide = x.to(gl.float32)
    return wide


@gluon.jit
def _joined(s, MAX: gl.constexpr):
    """Largest or sum of each row of [rows, pieces, 256]: what a thread has of it first, then across lanes, then across warps."""
    WARPS: gl.constexpr = gl.num_warps()
    s = s.reshape([s.shape[0], s.shape[1] // WARPS, WARPS, 32, s.shape[2] // 32])
    return gl.max(gl.max(gl.max(gl.max(s, 4), 1), 2), 1) if MAX else gl.sum(gl.sum(gl.sum(gl.sum(s, 4), 1), 2), 1)


@gluon.jit
def ring(x_desc, y_desc, tiles, ROWS: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr):
    """y = softmax of ROWS rows of PIECES · 256 elements at a time; x and y as [all rows, PIECES, 256]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, gl.num_warps(), 1], [2, 1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    BYTES: gl.constexpr = ROWS * PIECES * 512
    slots = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, ROWS, PIECES, 256], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    first, step = gl.program_id(0), gl.num_programs(0)
    for slot in gl.static_range(SLOTS - 1):
        tile = first + slot * step
        mbarrier.expect(full.index(slot), BYTES, pred=tile < tiles)
        tma_load(x_desc, [tile * ROWS, 0, 0], full.index(slot), slots.index(slot), pred=tile < tiles)
    turn = 0
    for tile in range(first, tiles, step):
        mbarrier.wait(full.index(turn % SLOTS), turn // SLOTS & 1)
        row = slots.index(turn % SLOTS)
        s = _widen(row.load(layout))  # [ROWS, PIECES, 256]
        m = gl.convert_layout(_joined(s, True), of_rows)  # [ROWS]
        m = gl.where(m == float("-inf"), 0.0, m)
        p = gl.exp2((s - m[:, None, None]) * LOG2E)
        l = gl.convert_layout(_joined(p, False), of_rows)  # [ROWS]
        row.store((p * (1.0 / l)[:, None, None]).to(x_desc.dtype))
        fence_async_shared()
        tma_store(y_desc, [tile * ROWS, 0, 0], row)
        tma.store_wait(1)  # the tile before has left its slot
        following, into = tile + (SLOTS - 1) * step, (turn + SLOTS - 1) % SLOTS
        mbarrier.expect(full.index(into), BYTES, pred=following < tiles)
        tma_load(x_desc, [following * ROWS, 0, 0], full.index(into), slots.index(into), pred=following < tiles)
        turn += 1  # noqa: SIM113  Gluon knows no enumerate
    tma.store_wait(0)


def arguments(x: torch.Tensor, y: torch.Tensor, shape: Shape) -> dict[str, object]:
    """The kernel's, by name, for all rows of x, which is contiguous."""
    rows, n = x.shape
    box, layout = [shape.rows, n // PIECE, PIECE], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)
    described = [TensorDescriptor(t, [rows, n // PIECE, PIECE], [n, PIECE, 1], box, layout) for t in (x, y)]
    return {"x_desc": described[0], "y_desc": described[1], "tiles": rows // shape.rows, "ROWS": shape.rows, "PIECES": n // PIECE,
            "SLOTS": shape.slots, "num_warps": shape.warps, "maxnreg": shape.registers or None}


def made(x: torch.Tensor, y: torch.Tensor, shape: Shape) -> tuple[Callable[[], None], int]:
    """The launch, and how many thread blocks an SM runs at once."""
    card, named = torch.cuda.get_device_properties(x.device), arguments(x, y, shape)
    compiled = ring.warmup(grid=(1,), **named)
    compiled._init_handles()
    registers, shared = 32 * shape.warps * -(-compiled.n_regs // 8) * 8, compiled.metadata.shared + 1024
    resident = min(card.shared_memory_per_multiprocessor // shared, card.regs_per_multiprocessor // registers, 32)
    blocks = min(named["tiles"], resident * card.multi_processor_count)
    return lambda: ring[(blocks,)](**named), resident


def compile_one(n: int, shape: Shape, dtype: torch.dtype) -> str:
    """Into Triton's cache, in a process of its own; why not, if not."""
    try:
        x = torch.zeros(64, n, dtype=dtype, device="cuda")
        made(x, torch.empty_like(x), shape)
    except Exception as reason:
        return str(reason).strip().splitlines()[-1][:100]
    return ""


def measure(n: int, shapes: list[Shape], dtype: torch.dtype, elements: int, repeats: int) -> list[dict]:
    """The rate of each, checked."""
    (xs,), results, calls = buffers((elements // n, n), dtype), [], {}
    out, some = torch.empty_like(xs[0]), torch.linspace(0, elements // n - 1, 64, device="cuda").long()
    right = torch.softmax(xs[0][some].double(), -1)
    for shape in shapes:
        runs = [made(x, out, shape) for x in xs]
        out.fill_(torch.nan)
        runs[0][0]()
        wrong = ((out[some].double() - right).abs().max() / right.max()).item()
        demand(wrong <= 4 * torch.finfo(dtype).eps and not out.isnan().any(), f"{n}, {shape}: {wrong}")
        calls[f"{shape.rows} rows, {shape.slots} slots, {shape.warps} warps, {shape.registers} registers, {runs[0][1]} an SM"] = (
            lambda i, runs=runs: runs[i % len(runs)][0]())
    calls["copy"] = lambda i: out.copy_(xs[i % len(xs)])
    calls |= {name: (lambda i, f=f: f(xs[i % len(xs)])) for name, f in implementations().items() if name != "torch"}
    for name, us in sorted(timed(calls, repeats).items(), key=lambda one: one[1]):
        results.append({"n": n, "name": name, "us": round(us, 2), "tb_per_s": round(2 * out.nbytes / us / 1e6, 3)})
        print(f"  {results[-1]['tb_per_s']:.3f} TB/s {us:8.2f} µs  {name}", flush=True)
    return results


def main() -> None:
    """Compile side by side, time one by one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    names = "ROWS,SLOTS,WARPS,REGISTERS"
    parser.add_argument("--shapes", nargs="+", type=whole_numbers(names), metavar=names, help="0 registers: no limit")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--elements", type=int, default=2**27)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("benchmarks/softmax_ring.py needs a Hopper GPU")
    dtype, results = {**DTYPES, "fp16": torch.float16}[options.dtype], []
    jobs = [(n, Shape(*shape)) for n in options.widths for shape in options.shapes or SHAPES[n]]
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        reasons = dict(zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True), [dtype] * len(jobs)), strict=True))
    for n in options.widths:
        print(f"{options.dtype} {n}", flush=True)
        results += measure(n, [shape for at, shape in jobs if at == n and not reasons[at, shape]], dtype, options.elements, options.repeats)
        for (at, shape), reason in reasons.items():
            if at == n and reason:
                print(f"  {shape}: {reason}", flush=True)
        torch.cuda.empty_cache()
    keep(options, results)


if __name__ == "__main__":
    main()
