"""Compile the lab's CUDA C++ for a card, present or not: NVRTC through cuda.core, with ptxas's own report of registers and spills.

Nothing is compiled at install. What is made is a cubin, machine code for one compute capability, so that a driver older than the compiler
can load it.
"""
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.errors import InputError, MissingExtra, require

KERNELS = Path(__file__).parent / "kernels"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")  # the kernels use mma.sync, ldmatrix, cp.async and bf16: 8.0 on


@dataclass(frozen=True)
class Source:
    """A file of `kernels/` with the macros that choose its variant."""

    file: str
    defines: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.file.removesuffix(".cu"), *(f"{name}={value}" for name, value in self.defines)])


def source(name: str, **defines: int) -> Source:
    """``source("attention_fa2", PAD=0)``: kernels/attention_fa2.cu with PAD defined as 0."""
    return Source(f"{name}.cu", tuple(sorted(defines.items())))


@dataclass(frozen=True)
class Resources:
    """What ptxas gave one kernel: 32-bit registers a thread; bytes a thread, and of static shared memory a block."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Build:
    """A compiled source."""

    source: Source
    arch: str
    code: Any  # cuda.core.ObjectCode
    kernels: tuple[Resources, ...]
    seconds: float

    def resources(self, kernel: str) -> Resources:
        """Of the kernel of that name."""
        return next(one for one in self.kernels if one.kernel == kernel)


def check_arch(name: str, argument: str = "arch") -> str:
    """``'90'``, ``'SM_90'``, ``'sm_90a'`` → ``'sm_90'``. Raises `InputError` for one the kernels are not written for."""
    arch = re.sub(r"^(?:sm_?)?(\d+)a?$", r"sm_\1", name.strip().lower())
    require(arch in ARCHITECTURES, argument, repr(name), ", ".join(ARCHITECTURES))
    return arch


def build(source: Source, arch: str) -> Build:
    """Compile `source` for `arch` (``'sm_90'``). No GPU is needed.

    Raises `MissingExtra` without cuda-core or NVRTC, `InputError` with the compiler's first error where the source does not compile.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:
        raise MissingExtra("compiling the lab's kernels", "cuda-core", "lab") from None
    text = (KERNELS / source.file).read_text()
    options = ProgramOptions(
        arch=check_arch(arch), name=source.file, include_path=str(KERNELS), ptxas_options=["-v"],
        define_macro=[("ONCHIP_LAB", "1"), *((name, str(value)) for name, value in source.defines)])
    log, start = io.StringIO(), time.perf_counter()
    try:
        code = Program(text, "c++", options).compile("cubin", logs=log)
    except Exception as error:
        if "DynamicLibNotFound" in type(error).__name__:
            raise MissingExtra("compiling the lab's kernels", "NVRTC (nvidia-cuda-nvrtc)", "lab") from None
        first = next((line for line in str(error).splitlines() if "error" in line.lower() and "(" in line), str(error).splitlines()[0])
        raise InputError(f"{source} for {arch}: {first.strip()}") from error
    return Build(source, arch, code, read_report(log.getvalue()), time.perf_counter() - start)


def read_report(log: str) -> tuple[Resources, ...]:
    """Kernel by kernel, what ``ptxas -v`` says."""
    found = []
    for part in re.split(r"Compiling entry function ", log)[1:]:
        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found.append(Resources(
            part.split("'")[1], number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores"),
            number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes smem")))
    return tuple(found)
