"""Compiles the softmax kernels for sm_90 through their own host code, without a GPU, and prints what came out.

`python -m tests.softmax.compile_plans '[[shape, dim], …]'`; TRITON_INTERPRET must not be set.
"""
import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from onchip.softmax.contract import Spec

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Card:
    """Stands for the driver of a Hopper card: kernels compile for it and are not launched."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def read(compiled):
    """Bytes of spilled registers a thread; global accesses, and those of 16 bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", compiled.asm["ptx"])
    return {"stack": int(re.search(r"STACK:(\d+)", usage)[1]), "accesses": len(accesses), "wide": sum(".v4.b32" in a for a in accesses)}


def main(cases):
    triton.runtime.driver.set_active(Card())
    seen = []
    for name in ("forward", "backward"):
        module = import_module(f"onchip.softmax.triton.{name}")
        for kernel in (module._resident, module._streamed):
            def run(*args, name=name, compile_only=kernel.run, **options):
                compiled = compile_only(*args, **options | {"warmup": True})
                seen.append({"name": name, "columns": options["BLOCK_N"]} | read(compiled))

            kernel.run = run
        for shape, dim in cases:
            for dtype in (torch.bfloat16, torch.float32):
                x, spec = torch.empty(shape, dtype=dtype), Spec(dim, False, 1.0, False, False, dtype)
                getattr(module, name)(*((x, None, spec) if name == "forward" else (x, x, spec, dtype)))
    return seen


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
