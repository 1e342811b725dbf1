"""Compiles kernels for long and odd rows, and for selections, for an H200 that is not here, and prints what came out.

`python -m tests.softmax.compile_parts '[[columns, dtype], [columns, dtype, rows], …, "topk"]'`; TRITON_INTERPRET must not be set.
"""
import json
import re
import sys

import torch

from onchip.bench.inspect import Compiled, offline
from onchip.bench.kernels import machine_with
from onchip.roofline.hardware import find_gpu
from onchip.roofline.tiles import resident
from onchip.softmax.contract import Spec
from onchip.softmax.triton import backward, forward, plan
from onchip.softmax.triton.topk import topk

CARD = find_gpu("h200")


def read(made: Compiled, rows: int) -> dict:
    """Spilled bytes, accesses by width, and what the plan counts on."""
    copies = re.findall(r"cp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", made.ptx)
    stores = re.findall(r"st\.global\S*", made.ptx)
    found = {"name": made.name, "spills": made.spill_stores + made.spill_loads, "copies": len(copies),
             "wide_copies": sum(int(size, 0) == 16 for size in copies), "stores": len(stores),
             "wide_stores": sum(".v4" in s for s in stores), "wide": len(re.findall(r"\b(?:ld|st)\.global\S*v4", made.ptx))}
    if made.constants.get("PARTS", 1) > 1:
        held = made.constants.get("HELD", 0) * made.constants["BLOCK_N"] * 4
        found |= {"parts": made.constants["PARTS"], "held": held, "beside": made.shared - held,
                  "cluster_waits": made.ptx.count("barrier.cluster.wait"), "sends": made.ptx.count("st.async")}
    if made.name.startswith("parts"):
        vector, slots = made.constants["VECTOR"], made.constants["BLOCK_N"] // made.constants["VECTOR"]
        inputs = 2 if made.name == "parts_backward" else 1
        found |= {"edges": made.constants["EDGES"], "shared": made.shared, "planned": inputs * slots * 16 + plan.BESIDE_SLOTS - 1024,
                  "blocks": resident(made.threads, made.registers, made.shared, CARD).blocks,
                  "blocks_per_sm": plan.choose_parts(rows, made.constants["GROUP"] * made.constants["BLOCK_N"] - 7, vector, True, CARD.sms,
                                                     CARD.smem_per_block, inputs == 2).blocks_per_sm}
    return found


def main(cases: list) -> list[dict]:
    """One entry for each kernel."""
    seen = []
    for case in cases:
        columns, kind, rows = (0, "", 0) if case == "topk" else (*case, 9999)[:3]
        with machine_with(CARD), offline(90) as launched:
            if case == "topk":
                for count, n, k, dtype in ((9999, 256, 8, torch.bfloat16), (9999, 131072, 8, torch.bfloat16),
                                           (2670, 50257, 8, torch.bfloat16), (9999, 50257, 16, torch.float32)):
                    topk(torch.empty(count, n, dtype=dtype, device="meta"), k, -1, False, torch.float32)
            else:
                dtype = getattr(torch, kind)
                x, spec = torch.empty(rows, columns, dtype=dtype, device="meta"), Spec(-1, False, 1.0, False, False, dtype)
                forward(x, None, spec)
                backward(x, x, spec, dtype)
        seen += [read(made, rows) for made in launched]
    return seen


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
