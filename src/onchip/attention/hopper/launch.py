"""From tensors and a `Spec` to a launch of the Hopper forward, with everything that can be remembered remembered.

A call costs the host an encoding of a tensor map for each tensor (11 µs each from Python) and Triton's own work on the arguments
(15–35 µs); an H200 computes a small one in less. So a *plan* keeps, for one set of shapes, strides and numbers, the compiled kernel and all
its arguments but the pointers, and tensor maps by address: in a loop the allocator hands out the same addresses again and again.
"""
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.attention.contract import Spec, empty_like_q
from onchip.attention.hopper import tiles
from onchip.attention.hopper.forward import FAR, forward_kernel
from onchip.attention.hopper.tiles import ROWS, Tile
from onchip.attention.problem import AttentionProblem
from onchip.launcher import Launcher

LOG2E = math.log2(math.e)
WRAP, ORIGIN = 1 << 34, 0x7FFF0000  # stride of the wrap axis (less a row); extent of the wrap and origin axes
ALIGNED = 8  # elements of 2 bytes in the 16 bytes that TMA wants addresses and strides to be multiples of
IN_L2 = 24_000_000  # bytes of k and v that are sure to stay in an L2 of 50 MB while their heads are worked on
PER_THREAD = 2  # CUDA's handle of the calling thread's default stream
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
              softcap: bool = False, online: bool = False) -> dict[str, Any]:
    """What a kernel is built for, beside the dtype: tile and features (`left`, `right`: the window is bounded there, as causal's is)."""
    return {
        "NC": tile.consumers, "BN": tile.keys, "STAGES": tile.stages, "D0": tile.d0, "D1": tile.d1, "V0": tile.v0, "V1": tile.v1,
        "PACKED": packed, "TOP_LEFT": top_left, "LEFT": left, "RIGHT": right, "SINKS": sinks,
        "SOFTCAP": softcap, "ONLINE": online, "PING_PONG": tile.ping_pong, "OWN_O": tile.own_o, "CONSUMER_REGISTERS": tile.registers[0],
        "PRODUCER_REGISTERS": tile.registers[1], "num_warps": 4,
    }


def options(tile: Tile) -> dict[str, Any]:
    """Triton's compiler options for a tile."""
    return {"num_warps": 4, "maxnreg": tile.max_registers, "enable_fp_fusion": True}  # scale·s − shift must be one FMA


def boxes(tile: Tile) -> list[tuple[int, int] | None]:
    """(rows, columns) of each of the kernel's descriptors: both parts of q, k, v and o; None for a part that is not there."""
    heights = (ROWS, tile.keys, tile.keys, ROWS)
    widths = ((tile.d0, tile.d1), (tile.d0, tile.d1), (tile.v0, tile.v1), (tile.v0, tile.v1))
    return [(rows, columns) if columns else None for rows, parts in zip(heights, widths, strict=True) for columns in parts]


def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How TMA lays a box out in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, 1, rows, columns], DTYPES[dtype])


class Plan:
    """One kind of call: tile, grid, the kernel's arguments without the pointers, and what is remembered from call to call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sequences: int | None, sinks: bool, spec: Spec, tile: Tile | None,
                 online: bool | None) -> None:
        self.tile = tile = tile or tiles.forward(q.shape[-1], v.shape[-1])
        # TMA cannot address every tensor in place: those are copied first.
        self.copies = [t.data_ptr() % 16 != 0 or not Rows(t).takeable for t in (q, k, v)]
        self.copies[0] |= Rows(q).shared
        self.rows = [Rows(t) for t in (*self.operands(q, k, v), out)]
        packed = sequences is not None
        len_q, len_k = (q.shape[0], k.shape[0]) if packed else (q.shape[2], k.shape[2])
        heads, all_heads = q.shape[1], q.shape[1] * (sequences if packed else q.shape[0])
        left, right = spec.window_left >= 0, spec.window_right >= 0
        tiles_a_head = -(-spec.max_seqlen_q // tile.rows)
        self.total = tiles_a_head * all_heads
        self.grid = min(torch.cuda.get_device_properties(q.device).multi_processor_count, self.total)
        section, last_section = 1, all_heads - 1
        if right:  # tiles of one head differ in work: mix those of as many heads as find their k and v in L2 …
            of_a_kv_head = 2 * spec.max_seqlen_k * (q.shape[-1] + v.shape[-1])
            section = max(1, min(IN_L2 // of_a_kv_head * (heads // k.shape[1]), all_heads))
            # … and for the end keep enough of them that its light tiles fill the gaps: without, up to 13 % were lost (simulated).
            last_section = max(0, all_heads - -(-4 * self.grid // tiles_a_head)) // section
        offset = 0 if packed or spec.causal == 2 else len_k - len_q
        scale, cap = spec.scale * LOG2E, 0.0
        if spec.softcap:
            scale, cap = spec.softcap * LOG2E, 2 * spec.scale * LOG2E / spec.softcap
        numbers = (*(rows.step for rows in self.rows), len_q, len_q, len_k, heads, heads // self.rows[1].heads, heads // self.rows[2].heads,
                   tiles_a_head, section, section * tiles_a_head, last_section, all_heads - last_section * section, self.total,
                   offset - spec.window_left, offset + spec.window_right, scale, cap)
        self.after_pointers = (*numbers, *constants(
            tile, packed=packed, top_left=spec.causal == 2, left=left, right=right, sinks=sinks, softcap=spec.softcap != 0,
            online=_rather_online(q, spec) if online is None else online).values())
        self.launcher: Launcher | None = None
        self.maps: dict[tuple[int, int], tuple[Any, ...]] = {}

    def operands(self, *tensors: Tensor) -> list[Tensor]:
        """q, k and v as the descriptors expect them."""
        return [t.clone(memory_format=torch.contiguous_format) if copy else t for t, copy in zip(tensors, self.copies, strict=True)]

    def descriptors(self, which: int, t: Tensor) -> list[TensorDescriptor | None]:
        """Of both parts of `t` (0 q, 1 k, 2 v, 3 out); axes: wrap, origin, head, row, dim."""
        rows, first, made = self.rows[which], 0, []
        for box in boxes(self.tile)[2 * which : 2 * which + 2]:
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

    def encoded(self, which: int, t: Tensor) -> tuple[Any, ...]:
        """The launcher's arguments for both descriptors of `t`, remembered by address."""
        key = (which, t.data_ptr())
        found = self.maps.get(key)
        if found is None and self.launcher is not None:
            if len(self.maps) >= REMEMBERED:
                self.maps.clear()
            start = sum(box is not None for box in boxes(self.tile)[: 2 * which])
            found = ()
            for index, descriptor in enumerate(self.descriptors(which, t), start):
                found += (None,) if descriptor is None else self.launcher.encode(index, descriptor)
            self.maps[key] = found
        return found or ()

    def launch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, cu_q: Tensor | None,
               cu_k: Tensor | None) -> Tensor:
        """Run the kernel on the current stream; returns its scratch memory: flags of tiles that were repeated (one for each consumer), and
        the chain of each thread block's tiles."""
        flags = self.total * self.tile.consumers
        scratch = torch.empty(flags + self.total, dtype=torch.int32, device=q.device)
        stream = torch._C._cuda_getCurrentRawStream(q.device.index)
        taken = _counter(q.device.index, stream)
        if self.launcher is None:
            args = [d for which, t in enumerate((q, k, v, out)) for d in self.descriptors(which, t)]
            args += [lse, lse if sinks is None else sinks, taken, scratch, scratch[flags:]]
            args += [scratch if cu is None else cu for cu in (cu_q, cu_k)]
            self.launcher = Launcher(forward_kernel[(self.grid,)](*args, *self.after_pointers[:-1], **options(self.tile)))
        else:
            base = scratch.data_ptr()
            pointers = (*self.encoded(0, q), *self.encoded(1, k), *self.encoded(2, v), *self.encoded(3, out), lse.data_ptr(),
                        0 if sinks is None else sinks.data_ptr(), taken.data_ptr(), base, base + 4 * flags,
                        0 if cu_q is None else cu_q.data_ptr(), 0 if cu_k is None else cu_k.data_ptr())
            self.launcher(self.grid, stream, pointers + self.after_pointers)
        return scratch


def _rather_online(q: Tensor, spec: Spec) -> bool:
    """fp16's p may not pass 65504, so that a row's sum over very many keys would leave the range for no other reason than their number."""
    return q.dtype == torch.float16 and spec.max_seqlen_k > 1 << 17


_COUNTERS: dict[tuple[int, int], Tensor] = {}


def _counter(device: int, stream: int) -> Tensor:
    """The counter of tiles taken: 0 before and after every launch, so that one serves all launches of a stream, which follow each other.
    A graph may be replayed on any stream, and one handle names the default streams of all threads: their launches get their own."""
    if stream == PER_THREAD or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _COUNTERS.get((device, stream))
    if found is None:
        found = _COUNTERS[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


_PLANS: dict[tuple[Any, ...], Plan] = {}


def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, *,
        tile: Tile | None = None, online: bool | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, scratch of `Plan.launch`): `forward`, with another tile or with online softmax on request."""
    key = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16, q.dtype,
           q.device.index, spec, None if sinks is None else sinks.dtype, None if cu_q is None else cu_q.shape, tile, online)
    out = empty_like_q(q, v.shape[-1])
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= REMEMBERED:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(q, k, v, out, None if cu_q is None else cu_q.shape[0] - 1, sinks is not None, spec, tile, online)
    if cu_q is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    else:  # rows past the last sequence belong to no tile
        out.zero_()
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
    if any(plan.copies):
        q, k, v = plan.operands(q, k, v)
    with nullcontext() if q.device.index == torch.cuda.current_device() else torch.cuda.device(q.device):
        scratch = plan.launch(q, k, v, out, lse, sinks, cu_q, cu_k)
    return out, lse, scratch


def repeated(scratch: Tensor, tile: Tile) -> Tensor:
    """Which tiles of a call that `run` made the anchored softmax had to repeat: (tiles, consumers) of 0 and 1, in the order of
    `schedule.Call.place`. Without meaning for online softmax, which repeats none."""
    total = scratch.numel() // (tile.consumers + 1)
    return scratch[: total * tile.consumers].view(total, tile.consumers)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
            cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, dropout_seed: Tensor | None, spec: Spec,
            memo: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that `why_not` accepts, without bias, mask, ALiBi and dropout: out in q's dtype and memory order, lse fp32,
    (B, Hq, Sq) or packed (Hq, total).

    A key or value is read only by query tiles (`Tile.rows` rows) with a row that sees it. Within such a tile a value is multiplied by
    p = 0 for the other rows, so a NaN or infinity in it reaches them too; NaN in a key reaches exactly the rows that see it.
    """
    out, lse, _ = run(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, spec)
    return out, lse
