"""Nsight Compute's counters of the kernels a program launches: what the ledger's predictions are held against.

The program runs under `ncu`; kernels launched between ``torch.cuda.profiler.start()`` and ``stop()`` are counted, and each is filed under
the NVTX ranges it was launched in, and under those of the `mark` before it. The report is read through Nsight's own Python reader
(`ncu_report`, beside `ncu`), not from printed text, and by a process of its own, so that a crash of the reader is an error like any other
(`onchip.bench.report_reader`). Clocks are left as they are. A kernel runs once for every few counters, with the memory it writes put back
and the caches flushed before each time: counts are those of a cold start, and a kernel that counts its own tiles in memory finds the
counter as it left it.

What each counter sees of Hopper's engines: TMA's loads and stores cross the same crossbar as other ones and are in `sm_read`, `sm_written`
and the L2's; wgmma is in `tensor_pipe`; the shared memory that wgmma and TMA touch goes past the load-store pipe, so `conflicts` are those
of ordinary loads and stores alone.
"""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onchip.errors import InputError

MARK = "onchip: what follows"  # the range that `mark` launches in
SECTOR = 32  # bytes: what the L2 hands out at a time
# What is counted → Nsight's name of it, or names, the first that the card has: they differ from one architecture to the next.
METRICS: dict[str, tuple[str, ...]] = {
    "seconds": ("gpu__time_duration.sum",),
    "dram_read": ("dram__bytes_read.sum",),
    "dram_written": ("dram__bytes_write.sum",),
    "l2_read": ("lts__t_sectors_srcunit_tex_op_read.sum",),
    "l2_written": ("lts__t_sectors_srcunit_tex_op_write.sum",),
    "l2_fabric": ("lts__t_sectors_srcunit_ltcfabric.sum",),
    "sm_read": ("l1tex__m_xbar2l1tex_read_bytes.sum",),
    "sm_written": ("l1tex__m_l1tex2xbar_write_bytes.sum",),
    "spilled": ("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",),
    "conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "tensor_pipe": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
}
SCALE = dict.fromkeys(("l2_read", "l2_written", "l2_fabric", "spilled"), SECTOR)
SECONDS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0, "second": 1.0}


@dataclass(frozen=True)
class Counters:
    """One launch. Bytes and seconds; `tensor_pipe` and `occupancy` in percent; None: this card or version has no such counter."""

    kernel: str
    within: tuple[str, ...]  # the NVTX ranges it was launched in, outermost first
    seconds: float | None
    dram_read: float | None
    dram_written: float | None
    l2_read: float | None  # sectors that SMs asked of the L2
    l2_written: float | None
    l2_fabric: float | None  # sectors that one half of the L2 asked of the other
    sm_read: float | None  # that crossed from the L2 to the SMs
    sm_written: float | None
    spilled: float | None  # registers written to memory
    conflicts: float | None  # extra cycles shared memory took because lanes met in a bank
    tensor_pipe: float | None
    occupancy: float | None
    registers: float | None


def find_ncu(named: str | Path | None = None) -> Path:
    """The profiler: the one named, the one on the PATH, or one of an installed CUDA toolkit. Raises `InputError` if there is none."""
    if named is not None:
        found = shutil.which(str(named))
        if found is None:
            raise InputError(f"ncu: got {named}, accepted: the path of Nsight Compute's command line program")
        return Path(found)
    found = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, _installed())]))
    if found is None:
        raise InputError("ncu: found none, accepted: Nsight Compute on the PATH (it comes with the CUDA toolkit), or --ncu FILE")
    return Path(found)


def _installed() -> list[Path]:
    """Folders where NVIDIA's packages put Nsight Compute, newest first."""
    homes = [*Path("/opt/nvidia/nsight-compute").glob("*"), *Path("/usr/local/cuda").glob("nsight-compute-*")]
    return sorted(homes, key=lambda home: home.name, reverse=True)


def find_reader(ncu: Path) -> Path:
    """`ncu_report`, which Nsight Compute keeps in extras/python of its folder; the program may be a script in a folder of links."""
    for home in (*ncu.resolve().parents, *_installed()):
        file = home / "extras" / "python" / "ncu_report.py"
        if file.is_file():
            return file
    raise InputError(f"ncu: got {ncu}, whose Python reader (extras/python/ncu_report.py) is nowhere; accepted: a whole Nsight Compute")


def record(name: str, call: Callable[[], object]) -> None:
    """To be called in the program that is profiled: `call` once, its launches counted and filed under `name`."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the profiler saves all that is allocated, for every kernel
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(name)
    mark()
    call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.stop()


def mark() -> None:
    """A launch that says: what follows belongs to the ranges around me. Ranges are a thread's own, and autograd works in another."""
    import torch

    torch.cuda.nvtx.range_push(MARK)
    torch.ones(1, device="cuda")
    torch.cuda.nvtx.range_pop()


def filed(launches: Sequence[Counters]) -> list[Counters]:
    """Without the marks, each launch within the ranges of the mark before it, whatever thread it came from."""
    found: list[Counters] = []
    around: tuple[str, ...] = ()
    for launch in launches:
        if MARK in launch.within:
            around = tuple(name for name in launch.within if name != MARK)
        else:
            found.append(replace(launch, within=(*around, *(name for name in launch.within if name not in around))))
    return found


def count(command: Sequence[str], ncu: Path, seconds: float | None = None) -> list[Counters]:
    """Run `command` under `ncu` and return its counted launches in order.

    Raises `InputError` where counting is not possible, fails, or takes more than `seconds`.
    """
    reader = find_reader(ncu)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ncu-rep"
        names = [candidates[0] for candidates in METRICS.values()]
        output = _profile(command, ncu, names, report, seconds)
        if output is not None and "metric" in output:  # a name this card has not; the list takes Nsight up to a minute to make
            known = _known(ncu)
            able = [name for name in (_first(candidates, known) for candidates in METRICS.values()) if name]
            if able != names:
                output = _profile(command, ncu, able, report, seconds)
        if output is not None:
            raise InputError(f"ncu: {_reason(output)}")
        return read(report, reader, seconds)


def _profile(command: Sequence[str], ncu: Path, names: Sequence[str], report: Path, seconds: float | None) -> str | None:
    """Write `report`; what was printed where that failed."""
    try:
        done = subprocess.run(
            [str(ncu), "--profile-from-start", "off", "--nvtx", "--clock-control", "none", "--metrics", ",".join(names),
             "--force-overwrite", "--export", str(report), *command], capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise InputError(f"ncu: counting took more than {seconds:.0f} s; accepted: smaller problems, or fewer") from None
    return done.stdout + done.stderr if done.returncode or not report.is_file() else None


def _known(ncu: Path) -> set[str]:
    """Metrics of the card at hand, without the suffix that says how they are summed up; empty where the profiler does not list them."""
    done = subprocess.run([str(ncu), "--query-metrics"], capture_output=True, text=True, check=False)
    return {line.split()[0] for line in done.stdout.splitlines() if "__" in line} if done.returncode == 0 else set()


def _first(candidates: tuple[str, ...], known: set[str]) -> str | None:
    """The first that the card has. What describes a launch is always there, and nothing is ruled out by an empty list."""
    able = (name for name in candidates if not known or name.startswith("launch__") or name.partition(".")[0] in known)
    return next(able, None)


def _reason(output: str) -> str:
    """Why nothing was counted, in a line."""
    if "ERR_NVGPUCTRPERM" in output:
        return ("the driver lets only administrators read the counters; accepted: running as root, or the driver's module option "
                "NVreg_RestrictProfilingToAdminUsers=0")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "==ERROR==" in line or "Error" in line]
    return "counted nothing: " + (telling or lines or ["it said nothing"])[-1]


def read(report: Path, reader: Path, seconds: float | None = None) -> list[Counters]:
    """Every launch of a report, in order, by the `ncu_report.py` named; raises `InputError` where that fails, and where it crashes."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "launches.json"
        names = [name for candidates in METRICS.values() for name in candidates]
        command = [sys.executable, "-X", "faulthandler", "-m", "onchip.bench.report_reader",
                   *map(str, (reader, report, answer)), *names]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise InputError(f"ncu: reading the report took more than {seconds:.0f} s; accepted: fewer launches") from None
        if not answer.is_file():
            raise InputError(f"ncu: the report was written, but Nsight's Python reader {reader} {_end(done.returncode, done.stderr)}")
        return filed([_counters(launch) for launch in json.loads(answer.read_text())])


def _end(code: int, said: str) -> str:
    """How a program came to its end, in words: the signal and the innermost calls, or the exception."""
    if code >= 0:
        return "failed: " + (said.strip().splitlines() or [f"exit status {code}"])[-1]
    calls = [f"{name} ({Path(file).name}:{line})" for file, line, name in re.findall(r'File "(.*)", line (\d+) in (\S+)', said)]
    return f"died of {signal.Signals(-code).name}" + (" in " + ", called by ".join(calls[:3]) if calls else "")


def _counters(launch: dict[str, Any]) -> Counters:
    """From what `report_reader` found."""
    metrics = launch["metrics"]
    found = {key: next((metrics[name] for name in candidates if name in metrics), None) for key, candidates in METRICS.items()}
    return Counters(launch["kernel"], tuple(launch["within"]), **{key: one and _value(key, *one) for key, one in found.items()})


def _value(key: str, value: float, unit: str) -> float | None:
    """In bytes, seconds or as it is; None where the card had no answer."""
    scale = SECONDS.get(unit, 1e-9) if key == "seconds" else SCALE.get(key, 1)
    return value * scale if math.isfinite(value) else None
