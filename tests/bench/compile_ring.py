"""Compiles benchmarks/softmax_ring.py's kernel for sm_90 without a GPU; TRITON_INTERPRET must not be set."""
import sys
from pathlib import Path

import torch

from onchip.bench.inspect import compile_offline


def main(cases: list[tuple[int, tuple[int, ...], str]]) -> list[dict]:
    """(columns, shape, dtype) → spilled bytes, registers and shared memory, and the bulk copies in the machine code."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import softmax_ring

    found = []
    for n, shape, dtype in cases:
        shape, x = softmax_ring.Shape(*shape), torch.empty(64, n, dtype=getattr(torch, dtype), device="meta")
        named = softmax_ring.arguments(x, x, shape)
        options = {"num_warps": named.pop("num_warps"), "maxnreg": named.pop("maxnreg")}
        made = compile_offline(softmax_ring.ring, named, 90, **options)
        counts = {"loads": "UTMALDG", "stores": "UTMASTG", "exponentials": "MUFU.EX2"}
        found.append({"spills": made.spill_stores + made.spill_loads, "registers": made.registers, "shared": made.shared,
                      **{name: made.sass.count(instruction) for name, instruction in counts.items()}})
    return found
