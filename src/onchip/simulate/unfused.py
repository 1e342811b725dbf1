"""Naive attention and its backward executed kernel by kernel: S, P and their gradients go through (counted) device memory.

Same arguments and same agreement with `onchip.roofline` as the fused schedules of `onchip.simulate.attention`. `tile` is the matmuls'
output tile; without one a single tile holds everything and each operand is loaded once: the textbook count.
"""
from typing import Any

from onchip.errors import require
from onchip.roofline.attention import Tile
from onchip.simulate.problem import Problem, Result
from onchip.simulate.run import Run, spans


def naive(problem: Problem, tile: Tile | None = None, *, scale_kernel: bool = False, mask_kernel: bool = False,
          row_on_chip: bool | None = None, sram: int | None = None, sample: int | None = None) -> Result:
    """S = QKᵀ, P = softmax(S), O = PV, and where asked a kernel that scales S and one that masks it in place.

    Without them the first kernel scales and the softmax masks. The softmax keeps whole rows on the chip, as many at once as `sram` holds,
    and reads S once; with ``row_on_chip=False``, and by default where `sram` cannot hold one row, it reads S twice: online (m, l), then P.
    """
    run = _start("naive" + " + scale kernel" * scale_kernel + " + mask kernel" * mask_kernel, problem, tile, sram, sample)
    require(not (mask_kernel and run.shape.masked and run.scores.saturates), "scores", run.scores.name,
            "a format with an infinity, which the separate mask kernel stores")
    chip = run.chip
    run.malloc_output()
    _scores(run, scaled=not scale_kernel)
    if scale_kernel:
        with chip.kernel("S · scale"):
            for head, rows, math in run.query_tiles():
                for keys in run.key_tiles:
                    chip.store("S", head, rows, math.scaled(chip.load("S", head, rows, keys)), keys)
    if mask_kernel:
        with chip.kernel("mask S"):
            for head, rows, math in run.query_tiles():
                for keys in run.key_tiles:
                    s = math.masked(chip.load("S", head, rows, keys), run.mask_array(rows, keys))
                    chip.store("S", head, rows, s, keys)
    _softmax(run, row_on_chip, mask=not mask_kernel)
    with chip.kernel("O = PV"):
        for head, rows, math in run.query_tiles():
            o = chip.alloc("O", rows.stop - rows.start, run.shape.head_dim_v)
            for keys in run.key_tiles:
                math.accumulate(o, chip.load("P", head, rows, keys), chip.load("V", run.kv(head), keys))
            chip.store("O", head, rows, o)
    return run.result(out="O")


def naive_backward(problem: Problem, tile: Tile | None = None, *, scale_kernel: bool = False, mask_kernel: bool = False,
                   sram: int | None = None, sample: int | None = None) -> Result:
    """dV = PᵀdO; dP = dO Vᵀ; dS = P ∘ (dP − rowsum(P ∘ dP)); dQ = scale · dS K; dK = scale · dSᵀ Q, with P as the naive forward left it.

    dK and dV are summed over the query heads that share them inside their kernels. Where asked a kernel masks dS in place, and one scales
    it, as eager autograd does; else the last two products are scaled.
    """
    name = "naive backward" + " + scale kernel" * scale_kernel + " + mask kernel" * mask_kernel
    run = _start(name, problem, tile, sram, sample, grad=True)
    chip, shape = run.chip, run.shape
    _scores(run, scaled=True)
    _softmax(run, None, mask=True)
    chip.forget()  # what the forward moved is not the backward's
    del chip.memory["S"]
    _malloc_scores(run, "dP", "dS")
    run.malloc_gradients()
    with chip.kernel("dV = PᵀdO"):
        for kv, heads, keys, _ in run.key_blocks():
            dv = chip.alloc("dV", keys.stop - keys.start, shape.head_dim_v)
            for head in heads:
                for rows, _, math in run.turns(head, run.all_rows):
                    math.accumulate_transposed(dv, chip.load("P", head, rows, keys), chip.load("dO", head, rows))
            chip.store("dV", kv, keys, dv)
    with chip.kernel("dP = dO Vᵀ"):
        for head, rows, math in run.query_tiles():
            for keys in run.key_tiles:
                do, v = chip.load("dO", head, rows), chip.load("V", run.kv(head), keys)
                run.alloc_scores(rows, "dP")
                chip.store("dP", head, rows, math.product(do, v), keys)
                chip.clear()
    with chip.kernel("dS = P ∘ (dP − D)"):
        for head, rows, math in run.query_tiles():
            for strip in _strips(run, rows, arrays=2):
                p, dp = chip.load("P", head, strip), chip.load("dP", head, strip)
                chip.alloc("D", strip.stop - strip.start, 1, fill=None)
                chip.store("dS", head, strip, math.score_gradient(p, dp, math.row_dot(p, dp)))
    for name in ["mask dS"] * mask_kernel + ["dS · scale"] * scale_kernel:
        with chip.kernel(name):
            for head, rows, math in run.query_tiles():
                for keys in run.key_tiles:
                    ds = chip.load("dS", head, rows, keys)  # P, and so dS, is 0 where the mask hides a key: masking changes no value
                    chip.store("dS", head, rows, math.scaled(ds) if name == "dS · scale" else ds, keys)
    with chip.kernel("dQ = dS K"):
        for head, rows, math in run.query_tiles():
            dq = chip.alloc("dQ", rows.stop - rows.start, shape.head_dim)
            for keys in run.key_tiles:
                math.accumulate(dq, chip.load("dS", head, rows, keys), chip.load("K", run.kv(head), keys))
            chip.store("dQ", head, rows, dq if scale_kernel else math.scaled(dq))
    with chip.kernel("dK = dSᵀ Q"):
        for kv, heads, keys, outer in run.key_blocks():
            dk = chip.alloc("dK", keys.stop - keys.start, shape.head_dim)
            for head in heads:
                for rows, _, math in run.turns(head, run.all_rows):
                    math.accumulate_transposed(dk, chip.load("dS", head, rows, keys), chip.load("Q", head, rows))
            chip.store("dK", kv, keys, dk if scale_kernel else outer.scaled(dk))
    return run.result(dq="dQ", dk="dK", dv="dV")


def _start(name: str, problem: Problem, tile: Tile | None, sram: int | None, sample: int | None, *, grad: bool = False) -> Run:
    run = Run(name, problem, tile or Tile(problem.shape.seq_q, problem.shape.seq_k), sram, sample, grad=grad)
    _malloc_scores(run, "S", "P")
    return run


def _malloc_scores(run: Run, *names: str) -> None:
    for name in names:
        run.chip.malloc(name, run.scores, run.heads, run.shape.seq_q, run.shape.seq_k, page=run.tile.br)


def _scores(run: Run, *, scaled: bool) -> None:
    """S = QKᵀ, times the scale if `scaled`; one thread block a tile, nothing skipped."""
    chip = run.chip
    with chip.kernel("S = QKᵀ") as count:
        for head, rows, math in run.query_tiles():
            count.tiles["full"] += len(run.key_tiles) * chip.times
            for keys in run.key_tiles:
                q, k = chip.load("Q", head, rows), chip.load("K", run.kv(head), keys)
                run.alloc_scores(rows, "S")
                chip.store("S", head, rows, math.scores(q, k, None) if scaled else math.product(q, k), keys)
                chip.clear()


def _softmax(run: Run, row_on_chip: bool | None, *, mask: bool) -> None:
    """P = softmax(S), S masked here if `mask`; P overwrites S on the chip."""
    chip = run.chip
    if row_on_chip is None:
        row_on_chip = chip.sram is None or _row_bytes(run, arrays=1) <= chip.sram

    def load(head: int, rows: slice, keys: slice, math: Any) -> Any:
        return math.masked(chip.load("S", head, rows, keys), run.mask_array(rows, keys) if mask else None)

    with chip.kernel("P = softmax(S)"):
        for head, rows, math in run.query_tiles():
            if row_on_chip:
                for strip in _strips(run, rows, arrays=1):
                    m, l = run.alloc_statistics(strip)
                    s = load(head, strip, slice(0, run.shape.seq_k), math)
                    math.online(s, m, l)
                    chip.store("P", head, strip, math.probabilities(s, m, l))
                    run.keep_lse(head, strip, math.lse(m, l))
            else:
                m, l = run.alloc_statistics(rows)
                for keys in run.key_tiles:
                    math.online(load(head, rows, keys, math), m, l)
                for keys in run.key_tiles:
                    chip.store("P", head, rows, math.probabilities(load(head, rows, keys, math), m, l), keys)
                run.keep_lse(head, rows, math.lse(m, l))


def _row_bytes(run: Run, arrays: int) -> int:
    """On-chip bytes of a row: `arrays` of the scores' format and two statistics."""
    return arrays * run.shape.seq_k * run.scores.itemsize + 2 * run.state.itemsize


def _strips(run: Run, rows: slice, arrays: int) -> list[slice]:
    """A query tile cut so that whole rows of `arrays` arrays fit the chip: at least one row, at most the tile."""
    height = rows.stop - rows.start
    if run.chip.sram is not None:
        height = max(1, min(height, run.chip.sram // _row_bytes(run, arrays)))
    return [slice(rows.start + strip.start, rows.start + strip.stop) for strip in spans(rows.stop - rows.start, height)]
