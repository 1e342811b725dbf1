"""The kernels of a call to an operator, compiled for a card that is not here: what `onchip inspect` reports.

The operator's own host code runs, on tensors without memory (device 'meta'), and says which kernels and tiles a call would start there.
"""
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from onchip.attention.dispatch import CAPABILITIES, choose, implementation, why_not
from onchip.attention.problem import AttentionProblem
from onchip.bench.inspect import Compiled, offline
from onchip.errors import InputError, require
from onchip.roofline.hardware import GPU
from onchip.roofline.tiles import Occupancy, TileConfig, footprint, resident

BACKENDS = ("auto", "hopper", "triton")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call, and what the planner says of it."""

    compiled: Compiled
    rows: int  # of a tile
    columns: int | None  # of a tile: keys, or elements of a softmax row; None for a kernel that has rows only
    planned: int | None  # bytes of shared memory a block; None for a kernel the planner has no model of
    occupancy: Occupancy
    sharing: int = 1  # thread blocks that share a tile's rows, each with so many columns of them

    def figures(self) -> dict[str, Any]:
        """As JSON takes them."""
        blocks = self.occupancy.blocks
        return {**self.compiled.figures(), "tile_rows": self.rows, "tile_columns": self.columns, "blocks_a_row": self.sharing,
                "planned_shared_bytes": self.planned,
                "blocks_per_sm": blocks, "warps_per_sm": blocks * self.occupancy.threads // 32, "occupancy": self.occupancy.fraction,
                "occupancy_limited_by": self.occupancy.limited_by}


@contextmanager
def machine_with(card: GPU) -> Iterator[None]:
    """Host code that asks about the GPU is told of `card`."""
    from onchip.attention.triton import tiles

    properties = SimpleNamespace(multi_processor_count=card.sms, shared_memory_per_block_optin=card.smem_per_block)
    answers = ((torch.cuda, "is_available", True), (torch.cuda, "get_device_capability", card.capability),
               (torch.cuda, "get_device_properties", properties), (tiles, "capability", card.capability),
               (tiles, "shared_memory", card.smem_per_block))
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(patch.object(owner, name, lambda *_, answer=answer: answer))
        yield


def _arch(card: GPU) -> int:
    assert card.capability is not None
    return 10 * card.capability[0] + card.capability[1]


def _kernel(compiled: Compiled, card: GPU, rows: int, columns: int | None, planned: int | None, sharing: int = 1) -> Kernel:
    return Kernel(compiled, rows, columns, planned, resident(compiled.threads, compiled.registers, compiled.shared, card), sharing)


def attention(problem: AttentionProblem, backend: str, direction: str, card: GPU) -> tuple[str, list[Kernel]]:
    """The backend that serves `problem` on `card`, and the kernels of its 'forward' or 'backward'.

    Raises `InputError` for a call that the backend named cannot run, or that no kernel serves.
    """
    require(backend in BACKENDS, "backend", repr(backend), ", ".join(BACKENDS))
    require(direction in DIRECTIONS, "direction", repr(direction), ", ".join(DIRECTIONS))
    with machine_with(card):
        chosen = choose(problem, backend)
        if chosen not in BACKENDS:
            reasons = "; ".join(f"{name}: {why_not(name, problem)}" for name in BACKENDS[1:])
            raise InputError(f"backend: got {backend!r}, and no kernel serves this call ({reasons})")
        if getattr(CAPABILITIES[chosen], direction).startswith("onchip.attention.hopper"):
            return chosen, _hopper(problem, card)
        run, (inputs, spec) = implementation(chosen, direction), (_operands(problem), problem.spec)
        with offline(_arch(card)) as launched:
            if direction == "forward":
                run(*inputs, spec)
            else:
                q, _, v, bias, _, _, sinks, *_ = inputs
                out = q.new_empty(*q.shape[:-1], v.shape[-1])
                lse = torch.empty(out.shape[:-1] if out.dim() == 4 else (out.shape[1], out.shape[0]), device="meta")
                needs = (True, True, True, bias is not None, sinks is not None)
                run(out, None, *inputs[:3], out, lse, *inputs[3:], spec, needs)
    return chosen, [_kernel(made, card, made.constants["BM"], made.constants.get("BN"), _planned(made, problem)) for made in launched]


def _hopper(problem: AttentionProblem, card: GPU) -> list[Kernel]:
    from onchip.attention.hopper.offline import compile_call, planned_bytes

    q, k, v, _, _, _, sinks, cu_q, *_ = _operands(problem)
    plan, (forward, *merges) = compile_call(q, k, v, sinks, cu_q, problem.spec)
    planned = planned_bytes(plan.tile, problem.dtype, plan.parts > 1)
    return [_kernel(forward, card, plan.tile.rows, plan.tile.keys, planned), *(_kernel(merge, card, 1, None, None) for merge in merges)]


def _operands(p: AttentionProblem) -> tuple[Any, ...]:
    """What a backend's forward takes before the spec, without memory."""
    def empty(*shape: int, dtype: torch.dtype = getattr(torch, p.dtype)) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def operand(heads: int, length: int, dim: int) -> Tensor:
        return empty(p.batch * length, heads, dim) if p.varlen else empty(p.batch, heads, length, dim)

    scores = (p.batch, p.heads, p.seq_q, p.seq_k)
    ends = empty(p.batch + 1, dtype=torch.int32) if p.varlen else None
    return (
        operand(p.heads, p.seq_q, p.head_dim), operand(p.kv_heads, p.seq_k, p.head_dim), operand(p.kv_heads, p.seq_k, p.head_dim_v),
        empty(*scores) if p.bias else None, empty(*scores, dtype=torch.bool) if p.mask else None,
        empty(p.heads, dtype=torch.float32) if p.alibi else None, empty(p.heads, dtype=torch.float32) if p.sinks else None,
        ends, ends, empty(1, dtype=torch.int64) if p.dropout_p else None,
    )


def _planned(made: Compiled, problem: AttentionProblem) -> int | None:
    """The planner knows the forward, and the backward in which a block owns keys."""
    if made.name not in ("forward_kernel", "keys_kernel"):
        return None
    built = made.constants
    config = TileConfig(built["BM"], built["BN"], stages=built["num_stages"], warps=built["num_warps"], backward=made.name == "keys_kernel")
    return footprint(config, problem.dtype, built["BD"], built["BDV"]).smem


def softmax(rows: int, columns: int, dtype: str, card: GPU, direction: str = "forward", *, log: bool = False, across: bool = False,
            masked: bool = False, causal: bool = False, scale: float | None = None) -> list[Kernel]:
    """The kernels of a softmax over `columns` elements of each of `rows` rows; `across`: the elements of a row lie `rows` apart."""
    require(direction in DIRECTIONS, "direction", repr(direction), ", ".join(DIRECTIONS))
    from onchip.softmax import triton as kernels
    from onchip.softmax.contract import check

    shape = (columns, rows) if across else (rows, columns)
    x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    mask = torch.empty(shape, dtype=torch.bool, device="meta") if masked else None
    x, mask, spec = check(x, 0 if across else -1, None, scale, mask, causal, log)
    with machine_with(card), offline(_arch(card)) as launched:
        if direction == "forward":
            kernels.forward(x, mask, spec)
        else:
            kernels.backward(x, x, replace(spec, causal=False), x.dtype)
    return [_kernel(made, card, made.constants["BLOCK_M"], made.constants["BLOCK_N"] * made.constants.get("PIECES", 1), None,
                    made.constants.get("PARTS", made.constants.get("GROUP", 1))) for made in launched]
