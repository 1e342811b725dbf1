"""From tensors and a `Spec` to kernel launches: the arguments every attention kernel takes, worked out once a call."""
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.attention.contract import Spec, empty_like_q, empty_lse
from onchip.attention.triton import tiles
from onchip.attention.triton.tiles import Tile
from onchip.launcher import Launcher

# Arguments Triton must not specialise on: a new length or stride never compiles a new kernel (common.py says how alignment is kept).
# The strides of a bias or mask are left out: whether their rows are contiguous and aligned decides how they are loaded.
RUNTIME = [
    *(f"{tensor}_{axis}" for tensor in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for axis in "bhs"),
    *("slopes_b", "len_q", "len_k", "pitch", "heads", "group", "tile_count", "left", "right", "threshold"),
    *("size_b", "size_h", "tiles_i", "tiles_j", "sum_b", "sum_h", "sum_i", "sum_j", "parts"),
]

# fp32 products up to this head dim are made of six bf16 ones (three parts an operand): nearer to float64 than chains of fp32 FMAs, and 4 to
# 6 times as fast on an H200. Beyond it the parts do not fit the registers.
SPLIT_DIM = 128
TMA_PAIRS = 2**27  # (row, key) pairs from which on tensor-memory-accelerator descriptors are made


class Layout:
    """What the kernels of a call are told beside its tensors, worked out once for all calls of one kind (`ops.Route`).

    `others` are more tensors laid out as q is; their strides join the arguments.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, slopes: Tensor | None,
                 cu_q: Tensor | None, spec: Spec, others: dict[str, Tensor | None]) -> None:
        packed = cu_q is not None
        self.device, self.heads, self.kv_heads = q.device, q.shape[1], k.shape[1]
        self.sequences = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        self.steps = {name: _strides(t, packed) for name, t in {"q": q, "k": k, "v": v, **others}.items() if t is not None}
        absent = {name: (0, 0, 0) for name in others if name not in self.steps}
        unit = 16 // q.element_size()
        if any(stride % unit for steps in self.steps.values() for stride in steps):
            unit = 1
        capability = tiles.capability(self.device)
        self.accelerated = unit > 1 and accelerates(
            capability, q.element_size(), self.sequences * self.heads * spec.max_seqlen_q * spec.max_seqlen_k)
        d, dv = q.shape[-1], v.shape[-1]
        self.numbers: dict[str, Any] = {
            "len_q": q.shape[0 if packed else 2], "len_k": k.shape[0 if packed else 2],
            "pitch": (q.shape[0] + 4 * self.sequences if packed else q.shape[2]) + 3 & -4,  # see `common.statistics`
            "heads": self.heads, "group": self.heads // self.kv_heads,
            "slopes_b": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            "D": d, "DV": dv, "BD": block(d), "BDV": block(dv, 64 if q.dtype == torch.float32 and d > 32 else 32), "UNIT": unit,
            "WGMMA": capability[0] == 9,
            **_numbers(spec, q.dtype, bias is None and slopes is None, capability >= (8, 0) and max(d, dv) <= SPLIT_DIM),
        }
        for name, steps in (self.steps | absent).items():
            for axis, stride in zip("bhs", steps, strict=True):
                self.numbers[f"{name}_{axis}"] = stride // unit
        for name, t in (("bias", bias), ("mask", mask)):
            for axis, stride in zip("bhij", (0, 0, 0, 0) if t is None else t.stride(), strict=True):
                self.numbers[f"{name}_{axis}"] = stride
        self.tiles: dict[tuple[str, bool], Tile] = {}  # (kernel, by descriptors) → tile
        self.again: dict[str, tuple[Launcher, list[Any], list[tuple[int, str]]]] = {}  # kernels launched before, see `Call.__call__`


class Call:
    """One attention call, ready for any of its kernels. `memo` belongs to calls of this very kind (`ops.Route`)."""

    def __init__(self, memo: dict[str, Any] | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
                 slopes: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, seed: Tensor | None, spec: Spec,
                 **others: Tensor | None) -> None:
        layout = memo.get("layout") if memo else None
        if layout is None:
            layout = Layout(q, k, v, bias, mask, slopes, cu_q, spec, others)
            if memo is not None:
                memo["layout"] = layout
        self.layout: Layout = layout
        self.device, self.heads, self.kv_heads, self.sequences = layout.device, layout.heads, layout.kv_heads, layout.sequences
        self.numbers = layout.numbers
        self.tensors = {"q": q, "k": k, "v": v, **others, "bias": bias, "mask": mask, "slopes": slopes, "cu_q": cu_q, "cu_k": cu_k,
                        "seed": seed}

    def tile(self, kernel: str, described: bool = False) -> Tile:
        """The tile `kernel` runs for this call on this card. `described`: all it reads in whole blocks has descriptors."""
        tile = self.layout.tiles.get((kernel, described))
        if tile is None:
            args = self.tensors | self.numbers
            extra = any(args[name] is not None for name in ("bias", "mask", "seed", "softcap", "slopes"))
            tile = tiles.choose(kernel, self.device, args["q"].dtype, max(args["BD"], args["BDV"]), extra, described)
            self.layout.tiles[kernel, described] = tile
        return tile

    def __call__(self, kernel: Any, tile: Tile, programs: int, **more: Any) -> None:
        """Launch `kernel` on the tensors' device and its current stream. The second time only its tensors are filled in."""
        if not programs:
            return
        tensors = {**self.tensors, **more}
        again = self.layout.again.get(kernel.__name__)
        with on(self.device):
            if again is not None:
                launcher, values, holes = again
                values = values.copy()
                for at, name in holes:
                    values[at] = tensors[name]
                launcher(programs, torch._C._cuda_getCurrentRawStream(self.device.index), values)
                return
            args = {**self.numbers, **tensors, "BM": tile.bm, "BN": tile.bn}
            compiled = launch(kernel, programs, [args[name] for name in kernel.arg_names], tile)
        if not self.layout.accelerated and Launcher.serves(compiled):
            holes = [(at, name) for at, name in enumerate(kernel.arg_names) if isinstance(args[name], Tensor)]
            values = [None if isinstance(args[name], Tensor) else args[name] for name in kernel.arg_names]
            self.layout.again[kernel.__name__] = Launcher(compiled), values, holes

    def describable(self, *names: str) -> bool:
        """Can these tensors have descriptors? Not in a small call or on an older card, nor with odd alignment or a stride of 0."""
        return self.layout.accelerated and not any(
            self.tensors[name].data_ptr() % 16 or any(n > 1 and not step for n, step in zip(
                self._shape(name), self.layout.steps[name], strict=False)) for name in names)

    def tma(self, name: str, rows: int) -> TensorDescriptor | None:
        """Descriptor for tiles of `rows` rows of tensor `name`; None where it cannot have one."""
        if not self.describable(name):
            return None
        t = self.tensors[name]
        strides = [step or 16 // t.element_size() for step in self.layout.steps[name]]  # an axis of size 1 takes any legal stride
        return TensorDescriptor(t, list(self._shape(name)), [*strides, 1], [1, 1, rows, block(t.shape[-1])])

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.tensors[name].shape
        return shape if len(shape) == 4 else (1, shape[1], shape[0], shape[2])

    def tma_rows(self, statistic: Tensor, rows: int) -> TensorDescriptor | None:
        """Descriptor for `rows` values of a row statistic; None where it cannot have one."""
        return TensorDescriptor(statistic, [statistic.numel()], [1], [rows]) if self.layout.accelerated else None


def launch(kernel: Any, programs: int, args: list[Any], tile: Tile) -> Any:
    """The one place where kernels compile. FP fusion is asked for by name: the softmax counts on x · factor − m being one FMA."""
    return kernel[(programs,)](*args, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)


def accelerates(capability: tuple[int, int], size: int, pairs: int) -> bool:
    """Do the kernels of a call of so many (row, key) pairs, elements of `size` bytes, read through descriptors where alignment lets them?

    Encoding one costs the host about 10 µs: only where the kernels run for some 100 µs. fp32 tiles are taken apart in registers, so they
    gain nothing: the forward runs at the same speed, dQ a tenth slower.
    """
    return capability >= (9, 0) and size == 2 and pairs >= TMA_PAIRS


@lru_cache(maxsize=4096)
def _numbers(spec: Spec, dtype: torch.dtype, plain: bool, split: bool) -> dict[str, Any]:
    """The arguments that `spec` alone decides. `plain`: nothing is added to the scores; `split`: fp32 products from bf16 parts."""
    return {
        "left": None if spec.window_left < 0 else spec.window_left,
        "right": None if spec.window_right < 0 else spec.window_right,
        "scale": float(spec.scale), "softcap": spec.softcap or None,
        "threshold": min(round(spec.dropout_p * 2**32), 2**32 - 1), "keep_scale": 1.0 / (1.0 - spec.dropout_p),
        "TOP_LEFT": spec.causal == 2, "FOLD": plain and not spec.softcap and spec.scale > 0,
        "PRECISION": "tf32" if spec.tf32 else "bf16x6" if split else "ieee",
    }


def _strides(t: Tensor, packed: bool) -> tuple[int, ...]:
    """Strides of (batch, head, row). An axis of size 1 counts as 0: torch lets it hold any number, which would spoil the alignment."""
    sizes, strides = t.shape, t.stride()
    axes = (1, 0) if packed else (0, 1, 2)
    return (0,) * packed + tuple(strides[a] if sizes[a] > 1 else 0 for a in axes)


def block(dim: int, least: int = 32) -> int:
    """Columns of the tile that holds `dim` of them: a power of two, at least 32.

    Two warpgroups share the columns of a product, 16 each at least: with 16 in all, Triton 3.6 lets the second one read past the buffer.
    fp32 wants 64 for v where q and k have more than 32: with tiles of 64 and 32 columns ptxas (Triton 3.6, 3.7) loses values of the
    descriptors of its six products, which then read what is not theirs (`bench.inspect.unwritten`).
    """
    return max(least, triton.next_power_of_2(dim))


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current for a launch: Triton launches on the current one, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():  # torch.cuda.current_device() asks whether CUDA is there, too
        return nullcontext()
    return torch.cuda.device(device)


def outputs(q: Tensor, dim: int, packed: bool) -> tuple[Tensor, Tensor]:
    """(out, lse), uninitialised; packed, zeros and −∞, because rows past the last sequence belong to no program."""
    out = empty_like_q(q, dim)
    if packed:
        return out.zero_(), torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    return out, empty_lse(q)


def gradient(t: Tensor, packed: bool) -> Tensor:
    """Room for the gradient of `t`, in its memory order; zeros when packed, for the rows that belong to no sequence."""
    grad = empty_like_q(t, t.shape[-1])
    return grad.zero_() if packed else grad
