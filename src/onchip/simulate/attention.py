"""Attention's fused schedules executed tile by tile with counted memory: tiled → online softmax → FlashAttention-1 → -2 → split-KV.

Each takes a `Problem` and a `Tile` of br query rows × bc keys and returns a `Result`; each counts, kernel by kernel and tensor by tensor,
the bytes that the ledger of the same name in `onchip.roofline.attention` derives in closed form (there statistics are fp32, as they are
here with the default `state`). `sram` bounds a thread block's on-chip bytes (`OutOfSram` beyond it); `sample` executes that many query
tiles and only counts the others (see `Run`).

Sources: FlashAttention (arXiv 2205.14135, Alg. 1), FlashAttention-2 (arXiv 2307.08691, Alg. 1), Flash-Decoding (2023),
Milakov & Gimelshein (arXiv 1805.02867).
"""
from onchip.errors import require
from onchip.roofline.attention import Tile
from onchip.roofline.shape import count_blocks
from onchip.simulate.problem import Problem, Result
from onchip.simulate.run import Run


def tiled(problem: Problem, tile: Tile, *, sram: int | None = None, sample: int | None = None) -> Result:
    """Q outer, S never leaves the chip, safe softmax in three passes, each recomputing S: m; l; O = Σ (exp(s − m) / l) V."""
    run = Run("tiled, three passes", problem, tile, sram, sample)
    chip = run.chip
    run.malloc_output()
    with chip.kernel(run.name):
        for head, rows, math in run.query_tiles():
            visible, kv = run.visible_keys(rows), run.kv(head)
            o, m, l = run.alloc_state(rows)
            run.alloc_scores(rows, "S")
            q = chip.load("Q", head, rows) if visible else None
            for keys, mask in visible:
                math.maximum(math.scores(q, chip.load("K", kv, keys), mask), m)
            for keys, mask in visible:
                s = math.scores(q, chip.load("K", kv, keys), mask)
                math.add_rows(math.exp(s, m), l)
            for keys, mask in visible:
                s = math.scores(q, chip.load("K", kv, keys), mask)
                math.accumulate(o, math.probabilities(s, m, l), chip.load("V", kv, keys))
            chip.store("O", head, rows, o)
            run.keep_lse(head, rows, math.lse(m, l))
    return run.result(out="O")


def online(problem: Problem, tile: Tile, *, sram: int | None = None, sample: int | None = None) -> Result:
    """Q outer, two passes: m and l together by the online recurrence; then O = Σ (exp(s − m) / l) V. K loaded twice."""
    run = Run("online softmax, two passes", problem, tile, sram, sample)
    chip = run.chip
    run.malloc_output()
    with chip.kernel(run.name):
        for head, rows, math in run.query_tiles():
            visible, kv = run.visible_keys(rows), run.kv(head)
            o, m, l = run.alloc_state(rows)
            run.alloc_scores(rows, "S")
            q = chip.load("Q", head, rows) if visible else None
            for keys, mask in visible:
                math.online(math.scores(q, chip.load("K", kv, keys), mask), m, l)
            for keys, mask in visible:
                s = math.scores(q, chip.load("K", kv, keys), mask)
                math.accumulate(o, math.probabilities(s, m, l), chip.load("V", kv, keys))
            chip.store("O", head, rows, o)
            run.keep_lse(head, rows, math.lse(m, l))
    return run.result(out="O")


def fa1(problem: Problem, tile: Tile, *, sram: int | None = None, sample: int | None = None) -> Result:
    """FlashAttention-1: K/V outer, Q inner, one thread block a head; O, m, l in device memory, read and written at every visited tile.

    O is normalised at every step, and rounded to the inputs' format as it is stored.
    """
    run = Run("FlashAttention-1", problem, tile, sram, sample)
    chip = run.chip
    run.malloc_output()
    for name in ("m", "l"):
        chip.malloc(name, run.state, run.heads, run.shape.seq_q, 1)
    with chip.kernel(run.name):
        for head, _ in run.head_blocks():
            for rows, _, math in run.turns(head, run.all_rows):
                o, m, l = run.alloc_state(rows)
                for name, values in (("O", o), ("m", m), ("l", l)):
                    chip.store(name, head, rows, values)
                run.keep_lse(head, rows, math.lse(m, l))
            for keys in run.key_tiles:
                visible = run.visible_rows(keys)
                if not visible:
                    continue
                k, v = chip.load("K", run.kv(head), keys), chip.load("V", run.kv(head), keys)
                for rows, mask, math in run.turns(head, visible):
                    q, o, m, l = (chip.load(name, head, rows) for name in ("Q", "O", "m", "l"))
                    run.alloc_scores(rows, "S")
                    chip.alloc("PV", rows.stop - rows.start, run.shape.head_dim_v, run.accumulation, fill=None)
                    math.online_normalised(math.scores(q, k, mask), v, m, l, o)
                    for name, values in (("O", o), ("m", m), ("l", l)):
                        chip.store(name, head, rows, values)
                    run.keep_lse(head, rows, math.lse(m, l))
    return run.result(out="O")


def fa2(problem: Problem, tile: Tile, *, lse: bool = True, sram: int | None = None, sample: int | None = None) -> Result:
    """FlashAttention-2: Q outer, one pass; O stays on the chip unnormalised and is divided by l once. With `lse`, lse is stored too."""
    run = Run("FlashAttention-2", problem, tile, sram, sample)
    chip = run.chip
    run.malloc_output()
    if lse:
        chip.malloc("lse", run.state, run.heads, run.shape.seq_q, 1)
    with chip.kernel(run.name):
        for head, rows, math in run.query_tiles():
            visible, kv = run.visible_keys(rows), run.kv(head)
            o, m, l = run.alloc_state(rows)
            run.alloc_scores(rows, "S")
            q = chip.load("Q", head, rows) if visible else None
            for keys, mask in visible:
                k, v = chip.load("K", kv, keys), chip.load("V", kv, keys)
                p = math.online(math.scores(q, k, mask), m, l, o)
                math.accumulate(o, p, v)
            chip.store("O", head, rows, math.normalised(o, l))
            run.keep_lse(head, rows, math.lse(m, l))
            if lse:
                chip.store("lse", head, rows, math.lse(m, l))
    return run.result(out="O")


def split_kv(problem: Problem, tile: Tile, splits: int, *, pack_gqa: bool = False, sram: int | None = None,
             sample: int | None = None) -> Result:
    """Flash-Decoding: split i of a query tile walks key tiles [i·c, (i + 1)·c), c = ⌈Tk / splits⌉, as FlashAttention-2 does.

    It leaves a partial O and lse in the state's format, zeros and −∞ where it saw nothing; a second kernel merges them. `pack_gqa` stacks
    the query heads that share a K/V head as rows of one tile, so that K and V are loaded once a group (unmasked problems only).
    """
    require(splits >= 1, "splits", splits, "an integer ≥ 1")
    run = Run(f"split-KV, {splits} splits", problem, tile, sram, sample, shape=problem.shape.packed() if pack_gqa else None)
    chip, share = run.chip, count_blocks(len(run.key_tiles), splits) * tile.bc  # keys of a split
    run.malloc_output()
    chip.malloc("partial O", run.state, run.heads * splits, run.shape.seq_q, run.shape.head_dim_v)
    chip.malloc("partial lse", run.state, run.heads * splits, run.shape.seq_q, 1)
    with chip.kernel("split walk"):
        for head, rows, math in run.query_tiles():
            tiles, kv = run.visible_keys(rows), run.kv(head)
            for split in range(splits):
                visible = [(keys, mask) for keys, mask in tiles if keys.start // share == split]
                o, m, l = run.alloc_state(rows)
                run.alloc_scores(rows, "S")
                q = chip.load("Q", head, rows) if visible else None
                for keys, mask in visible:
                    k, v = chip.load("K", kv, keys), chip.load("V", kv, keys)
                    p = math.online(math.scores(q, k, mask), m, l, o)
                    math.accumulate(o, p, v)
                chip.store("partial O", head * splits + split, rows, math.normalised(o, l))
                chip.store("partial lse", head * splits + split, rows, math.lse(m, l))
                chip.clear()
    with chip.kernel("merge"):
        for head, rows, math in run.query_tiles():
            o, m, l = run.alloc_state(rows)
            for part in range(head * splits, (head + 1) * splits):
                math.merge(chip.load("partial O", part, rows), chip.load("partial lse", part, rows), m, l, o)
            chip.store("O", head, rows, math.normalised(o, l))
            run.keep_lse(head, rows, math.lse(m, l))
    return run.result(out="O")
