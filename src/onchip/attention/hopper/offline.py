"""The Hopper kernels compiled where there is no GPU: `python -m onchip.attention.hopper.offline` prints a JSON line for each configuration.

A configuration is a row of the tile table with a dtype and features. Every row is compiled plain and with each feature at least once; the
features meet where they press on the registers most. It must not run under the interpreter (``TRITON_INTERPRET`` unset), and it runs under
each Triton the library supports (`benchmarks/triton_versions.py`).
"""
import argparse
import json
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.attention.contract import Spec, empty_like_q
from onchip.attention.hopper import launch, tiles
from onchip.attention.hopper.forward import forward_kernel
from onchip.attention.hopper.split import merge_kernel
from onchip.attention.hopper.tiles import Tile
from onchip.bench.inspect import Compiled, compile_offline
from onchip.roofline.tiles import TileConfig, footprint

ARCH = 90

# (dtype, features); names as in `launch.constants`. `right` is the end of a causal mask, `left` and `right` those of a window.
FEATURES: tuple[tuple[torch.dtype, dict[str, bool]], ...] = (
    (torch.bfloat16, {}), (torch.bfloat16, {"right": True}), (torch.float16, {"right": True}),
    (torch.bfloat16, {"packed": True, "left": True, "right": True}),
    (torch.bfloat16, {"top_left": True, "right": True, "softcap": True, "sinks": True}),
    (torch.bfloat16, {"online": True, "right": True}),
    (torch.bfloat16, {"split": True}), (torch.float16, {"split": True, "left": True, "right": True}),
)


def configurations() -> list[tuple[Tile, torch.dtype, dict[str, bool]]]:
    """What is compiled: (tile, dtype, features)."""
    return [(tile, dtype, features) for tile in tiles.FORWARD for dtype, features in FEATURES]


def compile_forward(tile: Tile, dtype: torch.dtype, constants: Mapping[str, Any]) -> Compiled:
    """The forward kernel of `tile` for compute capability 9.0; `constants` as `launch.constants` makes them."""
    parts = iter(launch.boxes(tile, constants["SPLIT"]))
    args: dict[str, Any] = dict(constants)
    for name in forward_kernel.arg_names[: -len(constants)]:
        if name in ("q0", "q1", "k0", "k1", "v0", "v1", "o0", "o1"):
            box = next(parts)
            args[name] = None if box is None else TensorDescriptor.from_tensor(
                torch.empty(1, 1, 1, *box, dtype=dtype, device="meta"), [1, 1, 1, *box], launch.shared_layout(*box, dtype))
        elif name in ("lse", "sinks", "partial"):
            args[name] = torch.empty(1, device="meta")
        elif name in ("taken", "failed", "unsure", "chain", "cu_q", "cu_k"):
            args[name] = torch.empty(1, dtype=torch.int32, device="meta")
        else:  # no number is compiled in
            args[name] = 0.5 if name in ("scale", "cap") else 2
    return compile_offline(forward_kernel, args, ARCH, **launch.options(tile))


def compile_merge(tile: Tile, dim_v: int, dtype: torch.dtype, sinks: bool) -> Compiled:
    """The kernel that puts parts of `tile` together, for compute capability 9.0."""
    floats, out = torch.empty(1, device="meta"), torch.empty(1, dtype=dtype, device="meta")
    values = (floats, floats, floats, out, floats, *(2 for _ in range(7)), sinks, dim_v, tile.dim_v, triton.next_power_of_2(dim_v))
    return compile_offline(merge_kernel, dict(zip(merge_kernel.arg_names, values, strict=True)), ARCH, num_warps=1)


def compile_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None,
                 spec: Spec) -> tuple[launch.Plan, list[Compiled]]:
    """The kernels that `launch.forward` would run for tensors like these (on any device, 'meta' included), and its plan.

    The plan asks torch for the card's number of SMs.
    """
    sequences = None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    plan = launch.Plan(q, k, v, empty_like_q(q, v.shape[-1]), sequences, sinks is not None, spec, None, None)
    names = list(launch.constants(plan.tile))
    made = [compile_forward(plan.tile, q.dtype, dict(zip(names, plan.after_pointers[-len(names):], strict=True)))]
    if plan.parts > 1:
        made.append(compile_merge(plan.tile, v.shape[-1], q.dtype, sinks is not None))
    return plan, made


def planned_bytes(tile: Tile, dtype: str, split: bool = False) -> int:
    """The planner's shared memory of a block: q, k, v and barriers; then a second q, and o, which has memory of its own unless it leaves in
    parts, from the registers."""
    config = TileConfig(tile.rows, tile.keys, stages=tile.stages, consumers=tile.consumers)
    more = tile.dim * (tile.queries - 1) + (0 if split else tile.dim_v // tile.pieces)
    return footprint(config, dtype, tile.dim, tile.dim_v).smem + 2 * tile.rows * more


def main() -> None:
    """Compile every configuration of the forward, or every `--of`-th from `--start` on; or the merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--merge", action="store_true", help="instead, the kernel that puts parts together, for each tile's v")
    args = parser.parse_args()
    if args.merge:
        for tile, dtype in product({tile.dim_v: tile for tile in tiles.FORWARD}.values(), launch.DTYPES):
            for dim_v in (tile.dim_v, tile.dim_v - 8):
                made = compile_merge(tile, dim_v, dtype, dtype == torch.float16)
                print(json.dumps({"dim_v": dim_v, **made.figures()}), flush=True)  # noqa: T201
        return
    for tile, dtype, features in configurations()[args.start :: args.of]:
        made = compile_forward(tile, dtype, launch.constants(tile, **features))
        inner = sum(loop["LDL"] + loop["STL"] for loop in made.loops if loop["HGMMA"])
        name = str(dtype).removeprefix("torch.")
        planned = planned_bytes(tile, name, features.get("split", False))
        print(json.dumps({"triton": triton.__version__, "tile": tile._asdict(), "dtype": name, "features": features,  # noqa: T201
                          "planned_bytes": planned, "local_accesses_in_loops": inner, **made.figures()}), flush=True)


if __name__ == "__main__":
    main()
