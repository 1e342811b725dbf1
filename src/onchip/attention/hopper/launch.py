"""From tensors and a `Spec` to a launch of the Hopper forward, with everything that can be remembered remembered.

A call costs the host an encoding of a tensor map for each tensor (11 µs each from Python) and Triton's own work on the arguments
(15–35 µs); an H200 computes a small one in less. So a *plan* keeps, for one set of shapes, strides and numbers, the compiled kernel and all
its arguments but the pointers, and tensor maps by address: in a loop the allocator hands out the same addresses again and again.
"""
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.attention.contract import Spec, empty_like_q
from onchip.attention.hopper import tiles
from onchip.attention.hopper.forward import forward_kernel
from onchip.attention.hopper.producer import FAR
from onchip.attention.hopper.split import Merge, cut
from onchip.attention.hopper.tiles import ROWS, Tile
from onchip.attention.problem import AttentionProblem
from onchip.launcher import Launcher, divisor, follows_others

LOG2E = math.log2(math.e)
WRAP, ORIGIN = 1 << 34, 0x7FFF0000  # stride of the wrap axis (less a row); extent of the wrap and origin axes
ALIGNED = 8  # elements of 2 bytes in the 16 bytes that TMA wants addresses and strides to be multiples of
LAST = 2  # tiles a thread block in the last section of a causal call
REMEMBERED = 1024  # plans, and tensor maps of one plan
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def why_not(problem: AttentionProblem) -> str | None:
    """What the fields of a capability cannot say: why this backend does not serve `problem`; None when it does."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "it needs a Hopper GPU (compute capability 9.0)"
    for name, dim in (("q and k", problem.head_dim), ("v", problem.head_dim_v)):
        if dim % ALIGNED:
            return f"the head dim of {name} is {dim}; TMA wants rows of a multiple of 16 bytes"
    if problem.softcap is None and problem.resolved_scale < 2.0**-100:
        return f"the scale is {problem.resolved_scale:g}; without a softcap it takes positive ones"
    if 0 in (problem.batch, problem.heads, problem.seq_q, problem.seq_k):
        return "there is nothing to compute"
    return None


class Rows:
    """A tensor as a descriptor sees it: strides of row and head in elements, `step` in rows from one batch to the next."""

    def __init__(self, t: Tensor) -> None:
        if t.dim() == 3:
            t = t.transpose(0, 1).unsqueeze(0)
        (batch, self.heads, length, self.dim), (s_batch, self.head, self.row, _) = t.shape, t.stride()
        if length == 1:  # strides of axes of size 1 mean nothing
            self.row = s_batch if batch > 1 else -(-self.dim // ALIGNED) * ALIGNED
        self.shared = self.head == 0 and self.heads > 1  # one head, expanded
        if self.shared or self.heads == 1:
            self.heads, self.head = 1, self.row
        s_batch = s_batch if batch > 1 else 0
        # The batch stride must be a whole number of rows: a descriptor has five axes, and two of them serve the clipping.
        self.takeable = (self.row > 0 and s_batch % self.row == 0 and self.row % ALIGNED == 0 and self.head % ALIGNED == 0
                         and length < FAR.value)
        self.step = s_batch // self.row if self.takeable else 0
        self.takeable &= (batch - 1) * self.step + length < ORIGIN


def constants(tile: Tile, *, packed: bool = False, top_left: bool = False, left: bool = False, right: bool = False, sinks: bool = False,
              softcap: bool = False, online: bool = False, split: bool = False) -> dict[str, Any]:
    """What a kernel is built for, beside the dtype: tile and features (`left`, `right`: the window is bounded there, as causal's is;
    `split`: tasks are parts of tiles)."""
    registers = (split and tile.split_registers) or tile.registers
    return {
        "NC": tile.consumers, "BN": tile.keys, "STAGES": tile.stages, "D0": tile.d0, "D1": tile.d1, "V0": tile.v0, "V1": tile.v1,
        "PACKED": packed, "TOP_LEFT": top_left, "LEFT": left, "RIGHT": right, "SINKS": sinks,
        "SOFTCAP": softcap, "ONLINE": online, "PING_PONG": tile.ping_pong, "QUERIES": tile.queries, "PIECES": tile.pieces,
        "SPLIT": split,
        "CONSUMER_REGISTERS": registers[0], "PRODUCER_REGISTERS": registers[1], "num_warps": 4,
    }


def options(tile: Tile) -> dict[str, Any]:
    """Triton's compiler options for a tile."""
    return {"num_warps": 4, "maxnreg": tile.max_registers, "enable_fp_fusion": True}  # scale·s − shift must be one FMA


def boxes(tile: Tile, split: bool = False) -> list[tuple[int, int] | None]:
    """(rows, columns) of each of the kernel's descriptors: both parts of q, k, v and o; None for a part that is not there, as o is not with
    split keys."""
    heights = (ROWS, tile.keys, tile.keys, ROWS)
    widths = ((tile.d0, tile.d1), (tile.d0, tile.d1), (tile.v0, tile.v1), (0, 0) if split else (tile.v0 // tile.pieces, tile.v1))
    return [(rows, columns) if columns else None for rows, parts in zip(heights, widths, strict=True) for columns in parts]


@cache  # 9 µs, three quarters of what a descriptor takes
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How TMA lays a box out in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, 1, rows, columns], DTYPES[dtype])


def runs_on(t: Tensor) -> bool:
    """Does the next head of t (B, H, S, D) follow as another row would?"""
    return t.shape[2] == 1 or t.stride(1) == t.shape[2] * t.stride(2)


def folded(t: Tensor, group: int) -> Tensor:
    """(B, H, S, D) as (B, H / group, group · S, D), where heads follow each other as rows do."""
    return t.view(t.shape[0], t.shape[1] // group, group * t.shape[2], t.shape[3])


class Plan:
    """One kind of call: tile, grid, the kernel's arguments without the pointers, and what is remembered from call to call.

    `parts` of each tile's keys: what `split.parts_of` says unless given; packed sequences are never split.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sequences: int | None, sinks: bool, spec: Spec, tile: Tile | None,
                 online: bool | None, parts: int | None = None) -> None:
        packed = sequences is not None
        left, right = spec.window_left >= 0, spec.window_right >= 0
        # TMA cannot address every tensor in place: those are copied first.
        self.copies = [t.data_ptr() % 16 != 0 or not Rows(t).takeable for t in (q, k, v)]
        self.copies[0] |= Rows(q).shared
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        q, k, v = self.operands(q, k, v)
        self.rows = [Rows(t) for t in (q, k, v, out)]
        self.out = (out.shape, out.stride())
        self.lse = None if packed else (out.shape[:3], (out.shape[1] * out.shape[2], out.shape[2], 1))
        if packed:
            self.group, self.tile, self.parts = 1, tile or tiles.forward(q.shape[-1], v.shape[-1], spec.max_seqlen_q, right), 1
        else:
            kv_heads = max(rows.heads for rows in self.rows[1:3])
            self.group, self.tile, self.parts = cut(
                q.shape, kv_heads, v.shape[-1], spec, sms, joined=runs_on(q) and runs_on(out) and not sinks, tile=tile, parts=parts)
        self.merge = Merge(out, self.parts, self.tile.dim_v, self.group) if self.parts > 1 else None
        if self.group > 1:
            if not (runs_on(q) and Rows(folded(q, self.group)).takeable):
                q, self.copies[0] = q.contiguous(), True
            q, out = folded(q, self.group), folded(out, self.group) if self.merge is None else out
            self.rows[0], self.rows[3] = Rows(q), Rows(out)
        self.copied = any(self.copies)
        tile, parts = self.tile, self.parts
        len_q, len_k = (q.shape[0], k.shape[0]) if packed else (q.shape[2], k.shape[2])
        heads, all_heads = q.shape[1], q.shape[1] * (sequences if packed else q.shape[0])
        tiles_a_head = -(-spec.max_seqlen_q * self.group // tile.rows)
        self.total = tiles_a_head * all_heads * parts
        self.grid = min(sms, self.total)
        self.device, self.dim_v = q.device.index or 0, v.shape[-1]
        # Memory to work in: the counter of tasks, flags of tasks and of thread blocks, the chain of each thread block's tasks.
        self.failed = 1
        self.unsure = self.failed + self.total * tile.consumers
        self.chain = self.unsure + self.grid
        self.words = self.chain + self.total
        # Enough heads in the last section that its light tiles fill the gaps at the end.
        last_heads = min(all_heads, -(-LAST * self.grid // tiles_a_head)) if right else 1
        early_heads = all_heads - last_heads
        offset = 0 if packed or spec.causal == 2 else len_k - len_q
        scale, cap = spec.scale * LOG2E, 0.0
        if spec.softcap:
            scale, cap = spec.softcap * LOG2E, 2 * spec.scale * LOG2E / spec.softcap
        numbers = (*(rows.step for rows in self.rows), len_q, len_q, len_k, *divisor(heads), *divisor(heads // self.rows[1].heads),
                   *divisor(heads // self.rows[2].heads), *divisor(tiles_a_head), early_heads, early_heads * tiles_a_head,
                   *divisor(last_heads), *divisor(parts), self.total, offset - spec.window_left, offset + spec.window_right, scale, cap)
        self.after_pointers = (*numbers, *constants(
            tile, packed=packed, top_left=spec.causal == 2, left=left, right=right, sinks=sinks and parts == 1, softcap=spec.softcap != 0,
            online=bool(online), split=parts > 1).values())
        self.launcher: Launcher | None = None
        self.maps: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.scratch: Tensor | None = None

    def operands(self, *tensors: Tensor) -> list[Tensor]:
        """q, k and v as the descriptors expect them."""
        return [t.clone(memory_format=torch.contiguous_format) if copy else t for t, copy in zip(tensors, self.copies, strict=True)]

    def descriptors(self, which: int, t: Tensor) -> list[TensorDescriptor | None]:
        """Of both parts of `t` (0 q, 1 k, 2 v, 3 out); axes: wrap, origin, head, row, dim."""
        rows, first, made = self.rows[which], 0, []
        for box in boxes(self.tile, self.parts > 1)[2 * which : 2 * which + 2]:
            if box is None:
                made.append(None)
                continue
            there = rows.dim > first  # a part wholly past the head's end is all zeros: an extent of one row, never addressed
            made.append(TensorDescriptor(
                t[..., first:] if there else t,
                [ORIGIN, ORIGIN, rows.heads, FAR.value if there else 1, rows.dim - first if there else box[1]],
                [WRAP - rows.row, rows.row, rows.head, rows.row, 1], [1, 1, 1, *box], shared_layout(*box, t.dtype)))
            first += box[1]
        return made

    def encoded(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The launcher's arguments for the descriptors of q, k, v and out."""
        assert self.launcher is not None
        found: tuple[Any, ...] = ()
        described = 0
        for which, t in enumerate(tensors):
            for descriptor in self.descriptors(which, t):
                found += (None,) if descriptor is None else self.launcher.encode(described, descriptor)
                described += descriptor is not None
        return found

    def launch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, cu_q: Tensor | None,
               cu_k: Tensor | None) -> None:
        """Run the kernel, or with split keys both kernels, on the current stream."""
        if self.copied:
            q, k, v = self.operands(q, k, v)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.scratch = memory = _memory(self.device, stream, self.words)
        # Parts come from the allocator's pool of this stream, or of the graph being captured, and return to it after the call.
        partial = lse if self.merge is None else q.new_empty(self.merge.floats, dtype=torch.float32)
        before_logs = 0 if self.merge is None else self.merge.partial
        if self.launcher is None:
            args = [d for which, t in enumerate((q, k, v, out)) for d in self.descriptors(which, t)]
            args += [partial.view(-1)[before_logs:], lse if sinks is None else sinks]
            args += [memory[first:] for first in (0, self.failed, self.unsure, self.chain)]
            args += [memory if cu is None else cu for cu in (cu_q, cu_k)] + [partial]
            self.launcher = Launcher(forward_kernel[(self.grid,)](*args, *self.after_pointers[:-1], **options(self.tile)))
        else:
            pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr() if self.merge is None else 0
            maps = self.maps.get(pointers)
            if maps is None:
                if len(self.maps) >= REMEMBERED:
                    self.maps.clear()
                maps = self.maps[pointers] = self.encoded(q, k, v, out)
            base, parts = memory.data_ptr(), partial.data_ptr()
            self.launcher(self.grid, stream, (
                *maps, parts + 4 * before_logs, 0 if sinks is None else sinks.data_ptr(), base, base + 4 * self.failed,
                base + 4 * self.unsure, base + 4 * self.chain, 0 if cu_q is None else cu_q.data_ptr(),
                0 if cu_k is None else cu_k.data_ptr(), parts, *self.after_pointers))
        if self.merge is not None:
            self.merge(partial, sinks, out, lse, stream)

    def repeated(self) -> Tensor:
        """Which tasks of the last launch the anchored softmax had to repeat: (tasks, consumers) of 0 and 1, tiles in the order of
        `schedule.Call.place`, the parts of a tile together. Without meaning for online softmax, which repeats none."""
        assert self.scratch is not None
        return self.scratch[self.failed :][: self.total * self.tile.consumers].view(self.total, -1).clone()


_MEMORY: dict[tuple[int, int], Tensor] = {}


def _memory(device: int, stream: int, words: int) -> Tensor:
    """At least so many int32 for a launch to work in. The first, the counter of tiles taken, is 0 before and after every launch, and no
    other need be anything, so that one piece serves all launches of a stream that follow each other."""
    if not follows_others(stream):
        return torch.zeros(words, dtype=torch.int32, device=torch.device("cuda", device))
    found = _MEMORY.get((device, stream))
    if found is None or found.numel() < words:
        found = _MEMORY[device, stream] = torch.zeros(2 * words, dtype=torch.int32, device=torch.device("cuda", device))
    return found


_PLANS: dict[tuple[Any, ...], Plan] = {}


def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, *,
        tile: Tile | None = None, online: bool = False, parts: int | None = None) -> tuple[Tensor, Tensor, Plan]:
    """(out, lse, the plan that made them): `forward`, with another tile, with online softmax, or in so many parts on request."""
    key = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16, q.dtype,
           q.device.index, spec, None if sinks is None else sinks.dtype, None if cu_q is None else cu_q.shape, tile, online, parts)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= REMEMBERED:
            _PLANS.clear()
        plan = _PLANS[key] = _make(q, k, v, sinks, cu_q, spec, tile, online, parts)
    return *_follow(plan, q, k, v, sinks, cu_q, cu_k), plan


def _make(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor | None, spec: Spec, tile: Tile | None = None,
          online: bool = False, parts: int | None = None) -> Plan:
    sequences = None if cu_q is None else cu_q.shape[0] - 1
    return Plan(q, k, v, empty_like_q(q, v.shape[-1]), sequences, sinks is not None, spec, tile, online, parts)


def _follow(plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor | None,
            cu_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call of the plan's kind."""
    out = torch.empty_strided(*plan.out, dtype=q.dtype, device=q.device)
    if plan.lse is not None:
        lse = torch.empty_strided(*plan.lse, dtype=torch.float32, device=q.device)
    else:  # rows past the last sequence belong to no tile
        out.zero_()
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    if plan.device == torch._C._cuda_getDevice():
        plan.launch(q, k, v, out, lse, sinks, cu_q, cu_k)
    else:
        with torch.cuda.device(plan.device):
            plan.launch(q, k, v, out, lse, sinks, cu_q, cu_k)
    return out, lse


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
            cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, dropout_seed: Tensor | None, spec: Spec,
            memo: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that `why_not` accepts, without bias, mask, ALiBi and dropout: out in q's dtype and memory order, lse fp32,
    (B, Hq, Sq) or packed (Hq, total).

    A key or value is read only by query tiles (`Tile.rows` rows) with a row that sees it. Within such a tile a value is multiplied by
    p = 0 for the other rows, so a NaN or infinity in it reaches them too; NaN in a key reaches exactly the rows that see it.

    Dense calls with fewer tiles than SMs may have each tile's keys split (`split.parts_of`: by batch, heads, lengths, head dims, window and
    the card's SMs), and rows of heads that share keys put into one tile; packed ones never have. A row's last bits then depend on how many
    rows come with it, but the same call repeats bit for bit.
    """
    memo = {} if memo is None else memo
    plan = memo.get("plan")
    if plan is None:
        plan = memo["plan"] = made = _make(q, k, v, sinks, cu_seqlens_q, spec)
        memo["again"] = lambda q, k, v: _follow(made, q, k, v, None, None, None)  # `ops.Route.again`
    return _follow(plan, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
