"""Compile Triton and Gluon kernels for a card that is not here, and read what the compiler made of them.

`offline` makes every launch inside it compile for the card named, by the very path a launch takes, and start nothing: a kernel's own host
code, given tensors on device 'meta', says what a call would run there. No GPU is needed: Triton brings `ptxas`, whose report gives
registers and spills, and as a rule `cuobjdump`; without that, instructions are counted in the PTX. It cannot work under the interpreter
(``TRITON_INTERPRET``), where kernels are plain Python.
"""
import io
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import count as numbers
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from onchip.errors import InputError, require


class Instruction(NamedTuple):
    """What tells fast code from slow: patterns that find it, and what it is."""

    sass: str
    ptx: str
    what: str


# As many waits for wgmma as wgmma mean that ptxas serialised them. Registers are spilled by ptxas: PTX does not show it.
INSTRUCTIONS = {
    "HGMMA": Instruction(r"\bHGMMA", r"\bwgmma\.mma_async", "wgmma"),
    "DEPBAR": Instruction(r"\bWARPGROUP\.DEPBAR", r"\bwgmma\.wait_group", "waits for wgmma"),
    "UTCMMA": Instruction(r"\bUTC\w*MMA", r"\btcgen05\.mma", "tcgen05.mma"),
    "HMMA": Instruction(r"\bHMMA", r"\bmma\.sync", "mma.sync"),
    "FFMA": Instruction(r"\bFFMA", r"\bfma\.rn(?:\.ftz)?\.f32", "fp32 multiply-add"),
    "MUFU": Instruction(r"\bMUFU", r"\b(?:ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.approx", "exp2, 1/x, …"),
    "EX2": Instruction(r"\bMUFU\.EX2", r"\bex2\.approx", "of these exp2"),
    "SHFL": Instruction(r"\bSHFL", r"\bshfl\.sync", "shuffles"),
    "BAR": Instruction(r"\bBAR\.SYNC", r"\bbar(?:rier)?\.sync", "barriers of warps"),
    "SYNCS": Instruction(r"\bSYNCS", r"\bmbarrier\.", "mbarriers"),
    "UTMALDG": Instruction(r"\bUTMALDG", r"\bcp\.async\.bulk\.tensor\S*shared::\w+\.global", "TMA loads"),
    "UTMASTG": Instruction(r"\bUTMASTG", r"\bcp\.async\.bulk\.tensor\S*global\.shared", "TMA stores"),
    "LDGSTS": Instruction(r"\bLDGSTS", r"\bcp\.async\.c[ag]", "cp.async"),
    "LDSM": Instruction(r"\bLDSM", r"\bldmatrix", "ldmatrix"),
    "LDG": Instruction(r"\bLDG\b", r"\bld(?:\.volatile)?\.global", "global loads"),
    "STG": Instruction(r"\bSTG\b", r"\bst(?:\.volatile)?\.global", "global stores"),
    "LDS": Instruction(r"\bLDS\b", r"\bld(?:\.volatile)?\.shared", "shared loads"),
    "STS": Instruction(r"\bSTS\b", r"\bst(?:\.volatile)?\.shared", "shared stores"),
    "LDL": Instruction(r"\bLDL", r"\bld\.local", "local loads"),
    "STL": Instruction(r"\bSTL", r"\bst\.local", "local stores"),
    "RED": Instruction(r"\b(?:RED|ATOM|UTMAREDG)", r"\b(?:red|atom)\.", "atomics"),
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. Bytes are per block (`shared`) or per thread (`stack`, `spill_…`); `counts` is static, by `INSTRUCTIONS`."""

    name: str
    constants: Mapping[str, Any]  # what is compiled in by name, and Triton's options
    threads: int  # a block
    registers: int  # a thread; with warp specialisation, before the warps trade them
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    counts: Mapping[str, int]
    counted_in: str  # 'SASS', or 'PTX' where there is no disassembler
    notes: tuple[str, ...]  # ptxas's remarks on performance, such as serialised wgmma
    seconds: float  # to compile
    ptx: str
    sass: str  # '' where there is no disassembler

    @property
    def loops(self) -> list[dict[str, int]]:
        """The counts of each innermost loop, in program order; none without SASS."""
        code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", self.sass)]
        jumps = [(int(target[1], 16), at) for at, text in code if (target := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text))]
        bodies = [(first, last) for first, last in jumps if first < last]
        inner = [body for body in bodies if not any(other != body and body[0] <= other[0] and other[1] <= body[1] for other in bodies)]
        return [count("\n".join(text for at, text in code if first <= at <= last)) for first, last in sorted(inner)]

    @property
    def unwritten(self) -> list[str]:
        """Uniform registers that an instruction reads and none before it, in program order, writes; empty without SASS."""
        return unwritten(self.sass)

    def figures(self) -> dict[str, Any]:
        """As JSON takes them."""
        return {
            "kernel": self.name, "threads": self.threads, "registers": self.registers, "spill_stores": self.spill_stores,
            "spill_loads": self.spill_loads, "stack_bytes": self.stack, "shared_bytes": self.shared, "wgmma": self.counts["HGMMA"],
            "mma": self.counts["HMMA"], "instructions": dict(self.counts), "counted_in": self.counted_in, "ptxas_notes": list(self.notes),
            "unwritten": self.unwritten,
            "compile_s": round(self.seconds, 3),
        }


def count(text: str, language: str = "SASS") -> dict[str, int]:
    """Instructions of each kind in a disassembly, or in PTX."""
    return {name: len(re.findall(one.sass if language == "SASS" else one.ptx, text)) for name, one in INSTRUCTIONS.items()}


def unwritten(sass: str) -> list[str]:
    """Uniform registers of a disassembly that are read before anything wrote them: what ptxas lost.

    Seen with the ptxas of Triton 3.6 and 3.7, which dropped the first value of wgmma descriptors where two products in a loop have tiles of
    different width and uniform registers ran short: the product then read shared memory that was not its own.
    """
    written: set[int] = set()
    lost: dict[str, None] = {}
    for name, operands in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", sass):
        first, *others = [operand.strip() for operand in operands.split(",")]
        wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        target = re.fullmatch(r"UR(\d+)", first)
        writes = target is not None and name.startswith(("U", "R2UR", "S2UR", "VOTEU", "LDCU")) and not name.startswith(("UTMA", "UBLK"))
        read: list[int] = []
        for at, operand in enumerate([first, *others]):
            if writes and at == 0:
                continue
            for kind, number in re.findall(r"(g?desc\[)?\bUR(\d+)\b", operand):
                a = int(number)
                if kind == "gdesc[":  # the first factor in two of them, unless it stands before in registers, the second in two more
                    read += range(a + 2 * (at > 1), a + 4)
                else:
                    read += range(a, a + (2 if kind or (writes and wide == 2 and "64" in name) else 1))
        lost.update({f"UR{a} in {name}": None for a in read if a not in written})
        if target is not None and writes:
            written.update(range(int(target[1]), int(target[1]) + wide))
    return list(lost)


class _Card:
    """Stands for the driver of a card. Each has a device number of its own, because kernels keep what they compiled by device."""

    unused = numbers(1 << 20)

    def __init__(self, arch: int) -> None:
        self.target, self.device = GPUTarget("cuda", arch, 32), next(self.unused)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def offline(arch: int) -> Iterator[list[Compiled]]:
    """While open, a launch of a Triton or Gluon kernel compiles it for compute capability `arch` (90 = 9.0) and does nothing else.

    Gives the list that every kernel is added to when it is first compiled. A launch returns None, as under the interpreter. Raises
    `InputError` under the interpreter, and for a kernel that Triton cannot compile for that architecture.
    """
    require(not knobs.runtime.interpret, "TRITON_INTERPRET", "1", "unset or 0: kernels do not compile under the interpreter")
    made: dict[int, Any] = {}
    launched: list[Compiled] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        log, start = io.StringIO(), time.perf_counter()
        try:
            with redirect_stdout(log):
                compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        except (triton.CompilationError, triton.runtime.errors.PTXASError, RuntimeError) as error:
            raise InputError(f"arch: got sm_{arch}, which Triton {triton.__version__} cannot compile {kernel.fn.__name__} for: "
                             f"{_last_line(error)}") from error
        seconds = time.perf_counter() - start
        if id(compiled) not in made:
            runtime = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}
            constants = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
            constants = {name: value for name, value in constants.items() if name not in runtime}
            made[id(compiled)] = compiled  # kept, so that no other takes its place in memory
            launched.append(_read(compiled, log.getvalue(), constants, seconds))

    with ExitStack() as stack:
        for part in (knobs.compilation, knobs.nvidia):
            stack.enter_context(part.scope())
        knobs.compilation.always_compile = True  # a kernel from the cache comes without ptxas's report
        knobs.nvidia.dump_ptxas_log = True
        stack.enter_context(patch.object(triton.runtime.driver, "_active", _Card(arch)))
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        yield launched


def compile_offline(kernel: Any, args: Mapping[str, Any], arch: int, **options: Any) -> Compiled:
    """Compile `kernel` as a launch with `args` (by name) would on compute capability `arch` (90 = Hopper, 80 and 86 = Ampere).

    Tensors may be on any device, 'meta' included: only dtype and alignment count. `options` are Triton's (num_warps, num_stages, …).
    """
    with offline(arch) as launched:
        kernel[(1,)](**{name: args[name] for name in kernel.arg_names if name not in options}, **options)
    return launched[0]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _read(compiled: Any, log: str, constants: Mapping[str, Any], seconds: float) -> Compiled:
    def reported(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    ptx, sass = compiled.asm["ptx"], _disassemble(compiled.asm["cubin"])
    threads = re.search(r"^\.(?:req|max)ntid (\d+)", ptx, re.MULTILINE)
    return Compiled(
        name=compiled.metadata.name, constants=constants,
        threads=int(threads[1]) if threads else 32 * compiled.metadata.num_warps,
        registers=reported(r"Used (\d+) registers"), stack=reported(r"(\d+) bytes stack frame"),
        spill_stores=reported(r"(\d+) bytes spill stores"), spill_loads=reported(r"(\d+) bytes spill loads"),
        shared=compiled.metadata.shared + reported(r"(\d+) bytes smem"),  # Triton's own, and what inline PTX declares
        counts=count(_code(sass)) if sass else count(ptx, "PTX"), counted_in="SASS" if sass else "PTX",
        notes=tuple(line.split(": ", 1)[1].strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line)),
        seconds=seconds, ptx=ptx, sass=sass)


def _code(sass: str) -> str:
    """The instructions of a disassembly without their encodings, which are most of the text."""
    return "\n".join(re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);", sass))


def _disassemble(cubin: bytes) -> str:
    """SASS by the `cuobjdump` that Triton brings; '' where that is missing."""
    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
