"""The k largest of each row and log Σ exp of it, from one read: log Σ exp is online (Milakov & Gimelshein, arXiv 1805.02867, Alg. 4), and
sorting sees only a few elements of a row.

    part     a program reads a row, or a part of one, by chunks. Each thread keeps an (m, l) of its own and, of every chunk or of two
             or three, the largest of its elements: these are a *group*. The k groups with the largest maxima hold the k largest elements;
             they are read again
    merge    where rows are cut in parts: the k largest of what the parts found

Rows of up to 1024 elements are sorted whole, several by one program. A *key* is an integer in the order of the values, with the place
below it. A NaN need not be among the maxima, nor then among the largest: it makes l NaN, and so all values of its row.
"""
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from onchip.softmax.triton import topk_kernels as kernels
from onchip.softmax.triton.launch import Launch, kind, remembered
from onchip.softmax.triton.rows import fold
from onchip.softmax.triton.topk_keys import MAXIMA

WHOLE = 1024  # elements of the longest row that is sorted at once
WARPS = 4  # of a program. Two, with half the instructions a selection: 25000 columns 3 to 5 % slower, 50257 no faster
VECTORS = 8  # runs that a thread reads at once, at most; in float32 half as many
WIDER = 10  # the same where, with as many as VECTORS, a last round of few programs would follow: other programs, other rounds
STAGGER = 1200  # clocks between the starts of an SM's first programs, where these nearly fill it
REGISTERS_PER_SM = 2**16


def topk(x: Tensor, k: int, dim: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, log Σ exp x) with `dim` < 0 moved last; float16, bfloat16 or float32 rows of `dispatch.LONGEST_TOPK` at most.

    Values are those of softmax, in `dtype`, or with `renormalise` over their sum; log Σ exp is float32.
    """
    leading = x.movedim(dim, -1).shape[:-1]
    values, indices = x.new_empty((*leading, k), dtype=dtype), x.new_empty((*leading, k), dtype=torch.int64)
    sums = x.new_empty((*leading, 1), dtype=torch.float32)
    if not sums.numel():
        return values, indices, sums
    key = ("topk", x.shape, *kind(x), k, dim, renormalise, dtype)
    launches = remembered(x.device, key, lambda: _launches(x, k, dim, renormalise))
    if launches is None:
        return topk(x.contiguous(), k, dim, renormalise, dtype)
    if len(launches) == 1:
        launches[0](x, values, indices, sums)
        return values, indices, sums
    part, merge = launches
    found = torch.empty(part.grid * k, dtype=torch.float32, device=x.device)
    places = torch.empty(part.grid * k, dtype=torch.int32, device=x.device)
    statistics = torch.empty(part.grid * 2, dtype=torch.float32, device=x.device)
    part(x, found, places, statistics)
    merge(found, places, statistics, values, indices, sums)
    return values, indices, sums


def chunks_of(runs: int, most: int) -> tuple[int, int]:
    """Runs that a thread reads at once, at most so many, and how often: what leaves the fewest of them empty. A chunk costs half a run."""
    return min(((v, triton.cdiv(runs, v)) for v in range(min(runs, most), most // 2, -1)), key=lambda vc: vc[1] * (vc[0] + 0.5),
               default=(runs, 1))


def parts_of(rows: int, chunks: int, most: int, programs: int) -> int:
    """Parts that rows of so many chunks are cut in: as few as have at most `most` each, and as leave no SM idle for long, where `programs`
    run at once.

    A last round of few programs takes as long as a full one. Where there are many rounds it hardly matters; else a merge is cheaper.
    """
    parts = triton.cdiv(chunks, most)
    while parts < chunks:
        rounds = rows * parts / programs
        if rounds >= 4 or 0.5 <= rounds <= 1 or (rounds > 1 and rounds % 1 >= 0.3):
            break
        parts = min(chunks, 2 * parts)
    return triton.cdiv(chunks, triton.cdiv(chunks, parts))


class Plan(NamedTuple):
    """How rows are read by programs of WARPS warps."""

    vectors: int  # runs that a thread reads at once: with those of all threads, a chunk
    chunks: int  # of a row
    parts: int  # that a row is cut in
    groups: int  # of a thread and a part, at most, without the one of the row's ends
    registers: int  # of a thread, which suffice: nothing is spilled

    def at_once(self, sms: int) -> int:
        """Programs that fit on so many SMs."""
        return REGISTERS_PER_SM // (32 * WARPS * self.registers) * sms


def plan_of(rows: int, n: int, edges: bool, wide: bool, most: int, sms: int) -> Plan:
    """The plan of so many rows of n elements, in float32 (`wide`) or 16 bits; `most`: k's power of two.

    2670 rows of 50257 columns in bf16: chunks of five runs and 48 registers make ten programs an SM, 2.02 rounds, and rows would be cut in
    two, to be merged. Ten runs and 72 registers make seven, 2.9 rounds, with 140 KB under way in place of 100.
    """
    few = most <= MAXIMA.value
    groups, runs = (8, 16) if few else (16, 8)  # of a thread, and of a group, at most: a register each, and candidates for each of k
    groups -= edges
    found = []
    for at_once in (VECTORS, WIDER) if few else (VECTORS,):
        vectors, chunks = chunks_of(triton.cdiv(n, 32 * WARPS * kernels.RUN.value), at_once // 2 if wide else at_once)
        registers = 96 if not few else 72 if at_once > VECTORS else 64 if wide or vectors > 5 or most > 8 else 48
        plan, longest = Plan(vectors, chunks, 1, groups, registers), groups * (runs // vectors)
        found.append(plan._replace(parts=parts_of(rows, chunks, longest, plan.at_once(sms))))
        if found[-1].parts == triton.cdiv(chunks, longest):
            return found[-1]
    return found[0]


def _launches(x: Tensor, k: int, dim: int, renormalise: bool) -> tuple[Any, ...] | None:
    """The launches of a call."""
    rows = fold({"x": x}, dim, wide=("x",))
    if rows is None:
        return None
    narrow = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[x.dtype]
    width, most = max(2, triton.next_power_of_2(rows.n)), max(2, triton.next_power_of_2(k))  # a sort leaves no tensor of one
    sorting = {"k": k, "K": most, "NARROW": narrow, "RENORMALISE": renormalise}
    place = {"strides_x": rows.strides["x"], "n": rows.n, "n0": rows.n0, "n1": rows.n1, "groups": rows.groups, "tiles_a_group": 1}
    if rows.n <= WHOLE:
        block_m = WHOLE // width
        return (Launch(kernels.whole, triton.cdiv(rows.count, block_m), 4, {**place, **sorting, "BLOCK_M": block_m, "BLOCK_N": width},
                       {"num_warps": 4}),)
    wide = narrow == "fp32"
    on_card = x.device.type in ("cuda", "meta") and torch.cuda.is_available()  # `onchip inspect` makes launches for meta tensors
    sms = torch.cuda.get_device_properties(x.device if x.device.type == "cuda" else None).multi_processor_count if on_card else 1
    plan = plan_of(rows.count, rows.n, rows.edges, wide, most, sms)
    vectors, chunks, parts = plan.vectors, plan.chunks, plan.parts
    a_part = triton.cdiv(chunks, parts)
    group = vectors * triton.cdiv(a_part, plan.groups)
    at_once = plan.at_once(sms)
    reach = (rows.n + 32 * WARPS * kernels.RUN.value * vectors) * max(1, rows.strides["x"][3])
    named = {**place, **sorting, "parts": parts, "chunks": chunks, "a_part": a_part, "sms": sms, "stagger": STAGGER,
             "first_round": at_once if rows.count * parts >= 0.75 * at_once else 0, "VECTOR": rows.vector, "EDGES": rows.edges,
             "WIDE": reach >= 2**31, "FLAT": rows.groups == 1, "WARPS": WARPS, "VECTORS": vectors, "GROUP": group,
             "GROUPS": max(triton.next_power_of_2(triton.cdiv(a_part * vectors, group) + rows.edges), most // 32),
             "Q": max(triton.next_power_of_2(group) * kernels.RUN.value, 32 * WARPS // most), "ALONE": parts == 1}
    options = {"num_warps": WARPS} | ({"maxnreg": plan.registers} if on_card else {})
    part = Launch(kernels.part, rows.count * parts, 4, named, options)
    if parts == 1:
        return (part,)
    candidates = max(WARPS * max(32, most), triton.next_power_of_2(parts * k))
    return part, Launch(kernels.merge, rows.count, 6, {**named, "PARTS": triton.next_power_of_2(parts), "CANDIDATES": candidates},
                        {"num_warps": WARPS})
