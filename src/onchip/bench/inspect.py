"""Compile a Triton kernel for a card that is not here, and read what the compiler made of it: registers, spills, shared memory, SASS.

No GPU is needed: Triton carries `ptxas` and `cuobjdump`. It must not run under the interpreter (``TRITON_INTERPRET`` unset when Triton is
first imported), where kernels are plain Python.
"""
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}

# What tells fast code from slow in a disassembly. HGMMA: Hopper's asynchronous matmul; WARPGROUP.DEPBAR: a wait for one (as many waits as
# HGMMA means ptxas serialised them); HMMA: the older matmul; UTMALDG: a bulk tensor load; LDGSTS: a load straight into shared memory.
INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA", "DEPBAR": r"\bWARPGROUP\.DEPBAR", "HMMA": r"\bHMMA", "FFMA": r"\bFFMA", "EX2": r"\bMUFU\.EX2", "SHFL": r"\bSHFL",
    "UTMALDG": r"\bUTMALDG", "LDGSTS": r"\bLDGSTS", "LDG": r"\bLDG\b", "STG": r"\bSTG\b", "LDS": r"\bLDS\b", "STS": r"\bSTS\b",
    "LDL": r"\bLDL", "STL": r"\bSTL", "BAR": r"\bBAR\.SYNC", "RED": r"\b(?:RED|ATOM|UTMAREDG)",
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. Bytes are per block (`shared`) or per thread (`stack`); `counts` is static, by the names in `INSTRUCTIONS`."""

    shared: int
    registers: int
    stack: int
    counts: Mapping[str, int]
    notes: tuple[str, ...]  # ptxas's remarks on performance, such as serialised wgmma
    sass: str

    @property
    def loops(self) -> list[dict[str, int]]:
        """The counts of each innermost loop, in program order."""
        code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", self.sass)]
        jumps = [(int(target[1], 16), at) for at, text in code if (target := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text))]
        bodies = [(first, last) for first, last in jumps if first < last]
        inner = [body for body in bodies if not any(other != body and body[0] <= other[0] and other[1] <= body[1] for other in bodies)]
        return [count("\n".join(text for at, text in code if first <= at <= last)) for first, last in sorted(inner)]


def count(sass: str) -> dict[str, int]:
    """Instructions of each kind in a disassembly."""
    return {name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()}


def compile_offline(kernel: Any, args: Mapping[str, Any], capability: int, **options: Any) -> Compiled:
    """Compile `kernel` as a launch with `args` (by name) would on compute capability `capability` (90 = Hopper, 80 and 86 = Ampere).

    Tensors may be on any device, 'meta' included: only dtype and alignment count. `options` are Triton's (num_warps, num_stages, …).
    """
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = args[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if value.is_meta or value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
        else:
            signature[parameter.name] = parameter.annotation_type or ("fp32" if isinstance(value, float) else "i32")
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared)


def _read(cubin: bytes, ptx: str, shared: int) -> Compiled:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        binary, assembly = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        binary.write_bytes(cubin)
        assembly.write_text(ptx)
        sass = _run(tools / "cuobjdump", "--dump-sass", binary)
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", binary)
        arch = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
        remarks = _run(tools / "ptxas", "-v", "--gpu-name", arch[1], assembly, "-o", Path(folder, "again.cubin")) if arch else ""
    registers, stack = (int(found[1]) if (found := re.search(rf"{name}:(\d+)", usage)) else 0 for name in ("REG", "STACK"))
    notes = tuple(line.split(": ", 1)[1].strip() for line in remarks.splitlines() if re.search(r"\(C75\d\d\)", line))
    return Compiled(shared, registers, stack, count(sass), notes, sass)


def _run(*command: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
