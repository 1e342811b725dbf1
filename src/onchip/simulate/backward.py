"""The backward that recomputes P from Q, K and lse, executed tile by tile: no N² byte is moved. In one kernel, or dQ apart.

    P = exp(S − lse)    dV = PᵀdO    dP = dO Vᵀ    dS = P ∘ (dP − D), D = rowsum(dO ∘ O)    dQ = scale · dS K    dK = scale · dSᵀ Q

Source: FlashAttention-2 (arXiv 2307.08691, Alg. 2). The backward through stored scores is `onchip.simulate.unfused.naive_backward`.
"""
from typing import Any

from onchip.roofline.attention import Tile
from onchip.simulate.attention import fa2
from onchip.simulate.problem import Problem, Result
from onchip.simulate.run import Run


def fa2_backward(problem: Problem, tile: Tile, *, sram: int | None = None, sample: int | None = None) -> Result:
    """dQ, dK, dV (see the module) from Q, K, V, dO and from O and lse as `fa2` in the same precision leaves them.

    Three kernels: D, and zeros into the dQ accumulator; K/V outer and Q inner, the query heads of a group inside the thread block, the
    accumulator (in the state's format, in device memory) read and written at every visited tile; the accumulator into dQ.
    """
    run = _start("FlashAttention-2 backward", problem, tile, sram, sample)
    chip, shape = run.chip, run.shape
    chip.malloc("dQ acc", run.state, run.heads, shape.seq_q, shape.head_dim)

    with chip.kernel("D = rowsum(dO ∘ O)"):
        for head, rows, math in run.query_tiles():
            _store_delta(run, head, rows, math)
            chip.store("dQ acc", head, rows, chip.alloc("dQ acc", rows.stop - rows.start, shape.head_dim))

    with chip.kernel("dK, dV, dQ"):
        _keys_outside(run, "lse", dq="dQ acc")

    with chip.kernel("dQ to its format"):
        for head, rows, math in run.query_tiles():
            chip.store("dQ", head, rows, math.scaled(chip.load("dQ acc", head, rows)))
    return run.result(dq="dQ", dk="dK", dv="dV")


def apart_backward(problem: Problem, tile: Tile, *, sram: int | None = None, sample: int | None = None) -> Result:
    """The same gradients without an accumulator in memory: S and dP are recomputed once for dK and dV, and once more for dQ.

    Three kernels: D, and lse in the units of the exponential; K/V outer and Q inner for dK and dV; Q outer and K/V inner for dQ.
    """
    run = _start("recomputing backward, dQ apart", problem, tile, sram, sample)
    chip, shape = run.chip, run.shape
    chip.malloc("lse2", run.state, run.heads, shape.seq_q, 1)

    with chip.kernel("D = rowsum(dO ∘ O)"):
        for head, rows, math in run.query_tiles():
            _store_delta(run, head, rows, math)
            chip.store("lse2", head, rows, chip.load("lse", head, rows))

    with chip.kernel("dK, dV"):
        _keys_outside(run, "lse2")

    with chip.kernel("dQ"):
        for head, rows, math in run.query_tiles():
            visible, kv = run.visible_keys(rows), run.kv(head)
            dq = chip.alloc("dQ", rows.stop - rows.start, shape.head_dim)
            run.alloc_scores(rows, "S", "dP")
            q, do, lse, delta = (chip.load(name, head, rows) if visible else None for name in ("Q", "dO", "lse2", "D"))
            for keys, mask in visible:
                k, v = chip.load("K", kv, keys), chip.load("V", kv, keys)
                p = math.exp(math.scores(q, k, mask), lse)
                math.accumulate(dq, math.score_gradient(p, math.product(do, v), delta), k)
            chip.store("dQ", head, rows, math.scaled(dq))
    return run.result(dq="dQ", dk="dK", dv="dV")


def _store_delta(run: Run, head: int, rows: slice, math: Any) -> None:
    """D of a tile of queries."""
    delta = math.row_dot(run.chip.load("dO", head, rows), run.chip.load("O", head, rows))
    run.chip.alloc("D", rows.stop - rows.start, 1, fill=None)
    run.chip.store("D", head, rows, delta)


def _keys_outside(run: Run, lse: str, dq: str | None = None) -> None:
    """dK and dV, K/V outer and Q inner; with `dq` its tensor in memory is read, added to and written at every visited tile."""
    chip, shape = run.chip, run.shape
    for kv, heads, keys, outer in run.key_blocks():
        dk = chip.alloc("dK", keys.stop - keys.start, shape.head_dim)
        dv = chip.alloc("dV", keys.stop - keys.start, shape.head_dim_v)
        visible = run.visible_rows(keys, len(heads))
        k, v = (chip.load(name, kv, keys) if visible else None for name in ("K", "V"))
        for head in heads:
            for rows, mask, math in run.turns(head, visible):
                q, do, lse_rows, delta = (chip.load(name, head, rows) for name in ("Q", "dO", lse, "D"))
                run.alloc_scores(rows, "S", "dP")
                p = math.exp(math.scores(q, k, mask), lse_rows)
                ds = math.score_gradient(p, math.product(do, v), delta)
                math.accumulate_transposed(dv, p, do)
                math.accumulate_transposed(dk, ds, q)
                if dq:
                    dq_rows = chip.load(dq, head, rows)
                    math.accumulate(dq_rows, ds, k)
                    chip.store(dq, head, rows, dq_rows)
        chip.store("dK", kv, keys, outer.scaled(dk))
        chip.store("dV", kv, keys, dv)


def _start(name: str, problem: Problem, tile: Tile, sram: int | None, sample: int | None) -> Run:
    """Device memory as the forward left it: O and lse of `fa2`; room for D and the gradients."""
    run = Run(name, problem, tile, sram, sample, grad=True)
    chip = run.chip
    run.malloc_output()
    for tensor in ("lse", "D"):
        chip.malloc(tensor, run.state, run.heads, run.shape.seq_q, 1)
    run.malloc_gradients()
    forward = fa2(problem, tile, sample=sample)
    if forward.tensors:
        chip.memory["O"].fill(forward.out.reshape(run.heads, run.shape.seq_q, -1))
        chip.memory["lse"].fill(forward.lse.reshape(run.heads, run.shape.seq_q, 1))
    return run
