"""From tensors and a `Spec` to launches.

Shapes, strides, alignment and options decide everything about a call but its pointers. So what a kind of call needs is worked out once and
remembered, and Triton's own work on a kernel's arguments (15–35 µs) is skipped from the second call on.
"""
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.launcher import Launcher
from onchip.softmax.contract import Spec
from onchip.softmax.triton import plan as plans
from onchip.softmax.triton import tile_backward, tile_forward
from onchip.softmax.triton.rows import NARROW_VECTOR, Rows, fold
from onchip.softmax.triton.words import exchange, pointers

REMEMBERED = 4096  # kinds of calls


class Launch:
    """A kernel, its grid and all its arguments but the `tensors` first ones and, for parts of rows, what they exchange through."""

    def __init__(self, kernel: Any, grid: int, tensors: int, named: dict[str, Any], options: dict[str, Any], rounds: int = 0,
                 cluster: int = 1) -> None:
        self.kernel, self.grid, self.tensors, self.options = kernel, grid, tensors, options
        self.cluster = cluster  # thread blocks after another that run together
        self.rounds = rounds  # rows that a group works through; 0 for other kernels
        self.rest = tuple(named[name] for name in kernel.arg_names if name in named)
        self.launcher: Launcher | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the first tensor's device."""
        device, tensors = tensors[0].device, tensors[: self.tensors]
        if device.type != "cuda":
            self._first(*tensors, *exchange(device, 0, self.rounds))
            return
        with nullcontext() if device.index == torch._C._cuda_getDevice() else torch.cuda.device(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            through = exchange(device, stream, self.rounds)
            if self.launcher is None:
                self._first(*tensors, *through)
            else:
                self.launcher(self.grid, stream, (*[t.data_ptr() for t in tensors], *pointers(through), *self.rest))

    def _first(self, *arguments: Any) -> None:
        """By Triton's own path, which compiles; from then on by its launcher, where there is one. It alone knows clusters."""
        if self.cluster > 1 and arguments[0].is_cuda:
            compiled = self.kernel.warmup(*arguments, *self.rest, grid=(self.grid,), **self.options)
            self.launcher = Launcher(compiled, self.cluster)
            self(*arguments)
            return
        compiled = self.kernel[(self.grid,)](*arguments, *self.rest, **self.options)
        if Launcher.serves(compiled):
            self.launcher = Launcher(compiled)


_LAUNCHES: dict[tuple[Any, ...], Any] = {}


def remembered(device: torch.device, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` gave for `key`, unless it was None. Nothing is kept of meta tensors: their card is imagined, another one each time."""
    key = (device, *key)
    found = _LAUNCHES.get(key)
    if found is None:
        found = make()
        if len(_LAUNCHES) >= REMEMBERED:
            _LAUNCHES.clear()
        if found is not None and device.type != "meta":
            _LAUNCHES[key] = found
    return found


def kind(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What decides how tensors of one shape are read and written."""
    return tuple(t if t is None else (t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors)


def forward(x: Tensor, mask: Tensor | None, spec: Spec, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`onchip.softmax.reference.forward` for float16, bfloat16 and float32; into `out`, which may be x, where it is given.

    `mask` and `bias` have x's shape. A spec of sums gives log Σ exp s, of size 1 along the dimension.
    """
    y = torch.empty(spec.shape(x), dtype=spec.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return y.fill_(-torch.inf)  # no element, or sums of none
    mask = None if mask is None else mask.view(torch.uint8)
    launch = remembered(x.device, (x.shape, spec, *kind(x, y, mask, bias)), lambda: _forward(x, y.expand(x.shape), mask, bias, spec))
    if launch is None:  # strides that need more than three row dimensions are rare enough for copies
        mask, bias = (None if t is None else t.contiguous() for t in (mask, bias))
        y = forward(x.contiguous(), mask, spec, bias)
        return y if out is None else out.copy_(y)
    launch(x, y, x if mask is None else mask, x if bias is None else bias)
    return y


def _forward(x: Tensor, y: Tensor, mask: Tensor | None, bias: Tensor | None, spec: Spec) -> Launch | None:
    tensors = {name: t for name, t in (("x", x), ("y", y), ("mask", mask), ("bias", bias)) if t is not None}
    rows = fold(tensors, spec.dim, spec.causal, ("x",) if spec.summed else ("x", "y"))
    if rows is None:
        return None
    named = {"scale": spec.scale, "WANTED": 2 if spec.summed else int(spec.log), "MASKED": mask is not None, "CAUSAL": spec.causal,
             "SCALED": 0 if spec.scale == 1.0 else -1 if spec.scale < 0.0 else 1}
    rows = _clustered(rows, x, False, rows.narrow, spec)
    parts = _parts(rows, x, False) if bias is None and spec.scale != 0.0 else None
    if parts:
        from onchip.softmax.triton.parts_forward import parts_forward

        one = parts.one and not (spec.log or spec.summed)
        return _launch_parts(parts_forward, rows, parts, 3, {**named, "ONE": one}, x.device)
    absent = dict.fromkeys({"strides_mask", "strides_bias"} - rows.arguments.keys(), (0, 0, 0, 0))
    if rows.plan.narrow and spec.scale == 0.0:  # what is hidden or does not exist waits as −∞, which times 0 is NaN
        rows = replace(rows, plan=plans.ACROSS_STREAMED if rows.side_by_side > 1 else plans.STREAMED)
    alone = rows.plan.block_m == rows.plan.parts == rows.plan.pieces == 1 and not rows.packed
    more = {"BIASED": bias is not None, "NARROW": rows.plan.narrow, "HALVES": spec.causal and alone, "SHARED": rows.shared}
    return _launch_tiles(tile_forward, rows, 4, {**named, **absent, **more}, x.device)


def backward(dy: Tensor, y: Tensor, spec: Spec, into: torch.dtype) -> Tensor:
    """`onchip.softmax.reference.backward` for float16, bfloat16 and float32; the gradient's type is `into`."""
    dx = torch.empty(y.shape, dtype=into, device=y.device)
    if dx.numel() == 0:
        return dx
    launch = remembered(y.device, (y.shape, spec, *kind(dy, y, dx)), lambda: _backward(dy, y, dx, spec))
    if launch is None:
        return backward(dy.contiguous(), y.contiguous(), spec, into)
    launch(dy, y, dx)
    return dx


def _backward(dy: Tensor, y: Tensor, dx: Tensor, spec: Spec) -> Launch | None:
    rows = fold({"dy": dy, "y": y, "dx": dx}, spec.dim, False, ("dy", "y", "dx"))
    if rows is None:
        return None
    named = {"scale": spec.scale, "LOG": spec.log, "SCALED": spec.scale != 1.0, "HIDING": spec.hiding}
    rows = _clustered(rows, y, True, rows.narrow and dy.dtype == y.dtype, spec)
    parts = _parts(rows, y, True) if dy.dtype == y.dtype else None
    if parts:
        from onchip.softmax.triton.parts_backward import parts_backward

        return _launch_parts(parts_backward, rows, parts, 3, named, y.device)
    return _launch_tiles(tile_backward, rows, 3, {**named, "NARROW": rows.plan.narrow, "HELD": rows.plan.held}, y.device)


def _launch_tiles(module: Any, rows: Rows, tensors: int, named: dict[str, Any], device: torch.device) -> Launch:
    kernel = module._resident if rows.plan.resident else module._streamed
    options = {"num_warps": rows.plan.warps} | ({"maxnreg": rows.plan.registers} if rows.plan.registers and device.type != "cpu" else {})
    return Launch(kernel, rows.programs(device), tensors, {**rows.arguments, **named}, options, cluster=rows.plan.parts)


def _clustered(rows: Rows, x: Tensor, backward: bool, waits: bool, spec: Spec) -> Rows:
    """`rows` on clusters of thread blocks, where those serve them better and, along the rows, fill the card; `waits`: in 16 bits."""
    card = _card(x.device, (9, 0))
    if card and rows.side_by_side > 1 and not ({"mask", "bias"} & rows.strides.keys() or spec.causal):
        stripe = plans.choose_stripe(rows.n, rows.n0, backward, rows.side_by_side == NARROW_VECTOR)
        return replace(rows, plan=stripe) if stripe else rows
    if card is None or rows.plan.block_m > 1 or (rows.plan.resident and spec.causal and not backward):
        return rows
    plan = plans.choose_cluster(rows.n, backward, waits, not (rows.edges or spec.summed))
    if plan and plan.held and rows.vector != plans.HELD_VECTOR:
        return rows
    return replace(rows, plan=plan) if plan and rows.count * plan.parts >= card.multi_processor_count else rows


def _parts(rows: Rows, x: Tensor, backward: bool) -> plans.Parts | None:
    """How the rows are cut, where parts serve them."""
    card = _card(x.device, (8, 0))
    if card is None or rows.vector == 1 or rows.plan.narrow or rows.plan.parts > 1:
        return None
    return plans.choose_parts(rows.count, rows.n, rows.vector, rows.edges, card.multi_processor_count, card.shared_memory_per_block_optin,
                              backward)


def _card(device: torch.device, least: tuple[int, int]) -> Any:
    """NVIDIA's card that launches go to, if it has compute capability `least`; of meta tensors too, which `onchip inspect` makes."""
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available() or torch.version.hip:
        return None
    real = device if device.type == "cuda" else None
    return torch.cuda.get_device_properties(real) if torch.cuda.get_device_capability(real) >= least else None


def _launch_parts(kernel: Any, rows: Rows, parts: plans.Parts, tensors: int, named: dict[str, Any], device: torch.device) -> Launch:
    groups = parts.groups(rows.count, _card(device, (8, 0)).multi_processor_count)
    strides = {f"{name}{2 - at}": steps[at] for name, steps in rows.strides.items() for at in range(3)}
    absent = dict.fromkeys({"mask2", "mask1", "mask0", "mask_step"}, 0)
    shape = {**absent, "rows": rows.count, "n": rows.n, "n0": rows.n0, "n1": rows.n1, **strides}
    shape |= {f"{name}_extent": rows.extent(name) for name in rows.strides}
    if "mask" in rows.strides:
        shape["mask_step"] = rows.strides["mask"][3]
    constants = {"VECTOR": rows.vector, "EDGES": rows.edges, "GROUP": parts.group, "VECTORS": parts.vectors, "BLOCK_M": 1,
                 "BLOCK_N": parts.columns(rows.vector)}
    options = {"num_warps": plans.PARTS_WARPS, "maxnreg": parts.registers, "launch_cooperative_grid": parts.group > 1}
    return Launch(kernel, groups * parts.group, tensors, {**shape, **constants, **named}, options, -(-rows.count // groups))


def quick(x: Tensor, spec: Spec) -> Callable[[Tensor, int], Tensor] | None:
    """`forward` for tensors just like `x`, which has been through it, with nothing left to decide; None where that cannot be.

    A function of the tensor and its address.
    """
    y = torch.empty(spec.shape(x), dtype=spec.dtype, device=x.device)
    launch = _LAUNCHES.get((x.device, x.shape, spec, *kind(x, y, None, None)))
    if launch is None or launch.launcher is None:
        return None
    device, index, rounds, grid, launcher = x.device, x.device.index, launch.rounds, launch.grid, launch.launcher
    absent = (0,) * (launch.tensors - 2)
    start = launcher.bound(grid, (0, 0, *absent, *launch.rest)) if not rounds else None
    empty, shape, strides, dtype = _empty(device), tuple(y.shape), y.stride(), y.dtype
    current, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    several = torch.cuda.device_count() > 1

    def run(x: Tensor, address: int) -> Tensor:
        if several and current() != index:
            return forward(x, None, spec)
        y, stream = empty(shape, strides, dtype), stream_of(index)
        if start:
            start(stream, address, y.data_ptr())
        else:
            launcher(grid, stream, (address, y.data_ptr(), *absent, *pointers(exchange(device, stream, rounds)), *launch.rest))
        return y

    return run


def _empty(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """`torch.empty_strided` on `device`, which is the current one: as Inductor's programs call it, in 0.6 µs instead of 1.4 (`empty_like`
    1.5), without arguments to parse and without the dispatcher. (Deterministic mode does not fill it; every element is written.)"""
    direct = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    return direct or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))
