"""This machine's own ceilings, measured: how fast it copies memory and how fast it multiplies matrices.

What a kernel reaches is held against these, not against a data sheet. torch is imported when something is measured; without it,
`MissingExtra` says which extra brings it.
"""
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onchip.bench.timing import median_time
from onchip.bench.torch_extra import load_torch, parse_device, parse_torch_dtype

if TYPE_CHECKING:
    import torch

# Bytes of the array copied: 256 MiB, beyond the last cache of any machine with less than half a gigabyte of it.
COPY_BYTES = 1 << 28
# The matmul grows until one call takes LONG seconds, which hides any launch and ends soon where a CPU emulates the format.
MATMUL_SIZES, LONG = (256, 512, 1024, 2048, 4096, 8192), 0.03


@dataclass(frozen=True)
class Ceilings:
    """Measured roofs of one device, medians of repeated calls."""

    device: str  # what it is, e.g. "NVIDIA H200" or "AMD EPYC, 2 threads"
    dtype: str  # the matmul's format
    copy: float  # bytes/s, each byte copied counted twice: read and written
    matmul: float  # FLOP/s of an n × n × n product, 2n³ of them, for the fastest n tried
    copy_bytes: int = COPY_BYTES
    matmul_size: int = MATMUL_SIZES[0]  # n

    def __str__(self) -> str:
        return (f"{self.device}: copy {_rate(self.copy, 'B/s')} (read + written, {self.copy_bytes >> 20} MiB), "
                f"{self.dtype} matmul {_rate(self.matmul, 'FLOP/s')} ({self.matmul_size}³)")


def _rate(value: float, unit: str) -> str:
    """4.123e12 → '4.12 TB/s'."""
    return f"{value / 1e12:.3g} T{unit}" if value >= 1e12 else f"{value / 1e9:.3g} G{unit}"


def measure_ceilings(device: "str | torch.device" = "cpu", dtype: str = "float32", *, copy_bytes: int = COPY_BYTES,
                     timer: Callable[..., float] = median_time) -> Ceilings:
    """Measure copy bandwidth and matmul FLOP/s of `device`, in a second or two.

    A CPU that reads a cache line before it overwrites it moves half as many bytes again as are counted here. `timer` is
    `median_time` or a function like it. Raises `InputError` for a device this machine has not or a format torch cannot multiply.
    """
    torch_device, torch_dtype = parse_device(device), parse_torch_dtype(dtype)
    copy = _copy_rate(torch_device, copy_bytes, timer)
    matmul, size = _matmul_rate(torch_device, torch_dtype, timer)
    return Ceilings(device_name(torch_device), str(torch_dtype).removeprefix("torch."), copy, matmul, copy_bytes, size)


def device_name(device: "torch.device") -> str:
    """The GPU's name, or the CPU's with the number of threads torch uses."""
    torch = load_torch("naming the device")
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def cpu_name() -> str:
    """The processor as the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _copy_rate(device: "torch.device", nbytes: int, timer: Callable[..., float]) -> float:
    torch = load_torch("measuring the machine")
    source, target = (torch.full((nbytes,), i, dtype=torch.uint8, device=device) for i in range(2))  # written: every page is there
    return 2 * nbytes / timer(lambda: target.copy_(source), device)


def _matmul_rate(device: "torch.device", dtype: "torch.dtype", timer: Callable[..., float]) -> tuple[float, int]:
    """(FLOP/s, n) of the fastest size."""
    torch = load_torch("measuring the machine")
    best = (0.0, 0)
    for n in MATMUL_SIZES:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = timer(partial(torch.mm, a, b, out=torch.empty_like(a)), device)
        best = max(best, (2 * n**3 / seconds, n))
        if seconds >= LONG:
            break
    return best
