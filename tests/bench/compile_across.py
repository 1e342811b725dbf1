"""Compiles benchmarks/softmax_across.py's kernel for sm_90 without a GPU; TRITON_INTERPRET must not be set."""
import re
import sys
from pathlib import Path

import torch

from onchip.bench.inspect import compile_offline


def main(cases: list[tuple[int, tuple[int, ...]]]) -> list[dict]:
    """(length, shape) → spilled bytes, registers, and accesses of memory by their widths."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import softmax_across

    found = []
    for n, shape in cases:
        shape, x = softmax_across.Shape(*shape), torch.empty(2, n, 4096, dtype=torch.bfloat16, device="meta")
        made = compile_offline(softmax_across.across, softmax_across.arguments(x, x, shape), 90, num_warps=softmax_across.WARPS,
                               maxnreg=shape.registers)
        found.append({"spills": made.spill_stores + made.spill_loads, "registers": made.registers,
                      "accesses": re.findall(r"(?:ld|st)\.global\S*", made.ptx), "sends": made.ptx.count("st.async")})
    return found
