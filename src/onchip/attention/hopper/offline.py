"""Compile the Hopper kernels where there is no GPU: `python -m onchip.attention.hopper.offline` prints a JSON line for each configuration.

A configuration is a tile of the table with features; every tile is compiled full and causal. It must not run under the interpreter
(``TRITON_INTERPRET`` unset). Run it under each installed Triton.
"""
import argparse
import json
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from onchip.attention.hopper import launch, tiles
from onchip.attention.hopper.forward import forward_kernel
from onchip.attention.hopper.tiles import Tile
from onchip.bench.inspect import TYPES, Compiled, _read

# Features beyond plain and causal, by head dim: the tile used most, and the one with the fewest registers to spare.
_FEATURES: dict[int, tuple[dict[str, bool], ...]] = {
    64: ({"left": True, "right": True}, {"packed": True, "right": True}),
    128: ({"left": True}, {"packed": True}, {"packed": True, "left": True, "right": True}, {"softcap": True, "sinks": True, "right": True},
          {"online": True, "right": True}),
}


def configurations() -> list[tuple[Tile, torch.dtype, dict[str, bool]]]:
    """What is compiled: (tile, dtype, features)."""
    found = []
    for tile in tiles.FORWARD:
        found += [(tile, torch.bfloat16, features) for features in ({}, {"right": True}, *_FEATURES.get(tile.dim, ()))]
    return [*found, (tiles.forward(128, 128), torch.float16, {"right": True})]


def compile_forward(tile: Tile, dtype: torch.dtype = torch.bfloat16, **features: bool) -> Compiled:
    """The forward kernel of `tile` for compute capability 9.0; `features` as in `launch.constants`."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = launch.constants(tile, **features)
    parts = iter(launch.boxes(tile))
    for parameter in forward_kernel.params:
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("q0", "q1", "k0", "k1", "v0", "v1", "o0", "o1"):
            box = next(parts)
            if box is None:
                signature[name], constants[name] = "constexpr", None
            else:
                signature[name] = f"tensordesc<{TYPES[dtype]}{[1, 1, 1, *box]},{launch.shared_layout(*box, dtype)!r}>"
        elif name in ("lse", "sinks"):
            signature[name] = "*fp32"
        elif name in ("taken", "failed", "chain", "cu_q", "cu_k"):
            signature[name] = "*i32"
        else:
            signature[name] = parameter.annotation_type or ("fp32" if name in ("scale", "cap") else "i32")
    names = list(signature)
    source = GluonASTSource(forward_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options(tile))
    return _read(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared)


def main() -> None:
    """Compile every configuration, or every `--of`-th from `--start` on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    args = parser.parse_args()
    for tile, dtype, features in configurations()[args.start :: args.of]:
        start = time.perf_counter()
        made = compile_forward(tile, dtype, **features)
        spills = made.counts["LDL"] + made.counts["STL"]
        inner = sum(loop["LDL"] + loop["STL"] for loop in made.loops if loop["HGMMA"])
        print(json.dumps({"tile": tile._asdict(), "dtype": str(dtype).removeprefix("torch."), "features": features,  # noqa: T201
                          "triton": triton.__version__, "shared": made.shared, "registers": made.registers, "spills": spills,
                          "spills_in_loops": inner, "counts": dict(made.counts), "notes": made.notes,
                          "seconds": round(time.perf_counter() - start, 2)}), flush=True)


if __name__ == "__main__":
    main()
