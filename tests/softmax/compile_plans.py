"""Compiles the softmax kernels for sm_90 through their own host code, without a GPU, and prints what came out.

`python -m tests.softmax.compile_plans '[[shape, dim], …]'`; TRITON_INTERPRET must not be set.
"""
import json
import re
import sys
from importlib import import_module

import torch

from onchip.bench.inspect import Compiled, offline
from onchip.bench.kernels import machine_with
from onchip.roofline.hardware import GPUS
from onchip.softmax.contract import Spec
from onchip.softmax.triton import backward, forward, rows
from onchip.softmax.triton.plan import Plan


def read(name: str, made: Compiled) -> dict:
    """Bytes of local memory a thread; global accesses, and those of 16 bytes; exponentials and terms; parts, and bulk copies to them."""
    built = made.constants
    elements = built["BLOCK_M"] * built["BLOCK_N"] * built.get("PIECES", 1) // made.threads
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", made.ptx)
    return {"name": name, "kernel": made.name, "columns": made.constants["BLOCK_N"], "stack": made.stack, "accesses": len(accesses),
            "wide": sum(".v4.b32" in access for access in accesses), "late": late(made.sass), "exponentials": made.counts["EX2"],
            "parts": built.get("PARTS", 1), "sends": made.ptx.count("cp.async.bulk"), "terms": elements * (1 + built.get("NARROW", False))}


def late(sass: str) -> int:
    """Loads that come after the first instruction which reads what one before them brought: they wait for it, a turn of memory more."""
    brought, waiting, found = set(), False, 0
    for name, target, others in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^,;]*),?([^;]*);", sass):
        if name == "EXIT":  # what follows is another path through the kernel
            brought, waiting = set(), False
        elif name.startswith("LDG."):
            found += waiting
            first = int(target.strip()[1:])
            brought |= set(range(first, first + (4 if ".128" in name else 2 if ".64" in name else 1)))
        else:
            read = others + target * name.startswith("ST")
            waiting |= not brought.isdisjoint(int(register) for register in re.findall(r"\bR(\d+)\b", read))
    return found


def main(cases: list) -> list[dict]:
    seen = []
    for name in ("forward", "backward"):
        run = getattr(import_module("onchip.softmax.triton"), name)
        with machine_with(GPUS["h100"]), offline(90) as launched:
            for shape, dim in cases:
                for dtype in (torch.bfloat16, torch.float32):
                    x, spec = torch.empty(shape, dtype=dtype, device="meta"), Spec(dim, False, 1.0, False, False, dtype)
                    run(*((x, None, spec) if name == "forward" else (x, x, spec, dtype)))
        seen += [read(name, made) for made in launched]
    return seen


def hidden(cases: list) -> list[dict]:
    """Of rows under a triangle, or with a mask that groups share: what `read` tells, how many programs an SM's registers hold, and how
    many loads are `late`."""
    seen = []
    for n, dtype, causal in cases:
        with machine_with(GPUS["h100"]), offline(90) as launched:
            rows = -(-n // 8) * 8  # groups begin in a vector as the mask does
            x = torch.empty((8, rows, n), dtype=getattr(torch, dtype), device="meta")
            mask = None if causal else torch.empty((rows, n), dtype=torch.bool, device="meta").expand(x.shape)
            forward(x, mask, Spec(-1, False, 1.0, causal, True, x.dtype))
        seen += [{**read(made.name, made), "programs": 65536 // (-(-made.registers // 8) * 8 * made.threads),
                  "bytes": len(re.findall(r"\bld\.global\S*8\b", made.ptx)), "barriers": made.counts["BAR"],
                  "late": late(made.sass)} for made in launched]
    return seen


def streamed(columns: list) -> list[bool]:
    """Whether rows had edges, of every kernel that two passes over rows of so many columns take: all compile."""
    rows.plans.choose = lambda *_: Plan(False, 1, 64, 4, 1)
    rows.plans.choose_parts = rows.plans.choose_cluster = lambda *_: None
    with machine_with(GPUS["h100"]), offline(90) as launched:
        for n in columns:
            for log in (False, True):
                x, spec = torch.empty((5, n), dtype=torch.float32, device="meta"), Spec(-1, log, 1.0, False, False, torch.float32)
                forward(x, None, spec)
                backward(x, x, spec, torch.float32)
    return [made.constants["EDGES"] for made in launched if made.name == "_streamed"]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
