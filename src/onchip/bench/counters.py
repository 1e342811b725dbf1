"""Nsight Compute's counters of the kernels a program launches: what the ledger's predictions are held against.

The program runs under `ncu`; kernels launched between ``torch.cuda.profiler.start()`` and ``stop()`` are counted, and each is filed under
the NVTX range it was launched in. The report is read through Nsight's own Python reader (`ncu_report`, beside `ncu`), not from printed
text. Clocks are left as they are and caches are flushed before every kernel: counts are those of a cold start.
"""
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from onchip.errors import InputError

SECTOR = 32  # bytes: what the L2 hands out at a time
# What is counted → Nsight's name of it, or names, the first that the card has: they differ from one architecture to the next.
METRICS: dict[str, tuple[str, ...]] = {
    "seconds": ("gpu__time_duration.sum",),
    "dram_read": ("dram__bytes_read.sum",),
    "dram_written": ("dram__bytes_write.sum",),
    "l2_read": ("lts__t_sectors_op_read.sum",),
    "l2_written": ("lts__t_sectors_op_write.sum",),
    "sm_read": ("l1tex__m_xbar2l1tex_read_bytes.sum",),
    "sm_written": ("l1tex__m_l1tex2xbar_write_bytes.sum",),
    "conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "tensor_pipe": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
}
SCALE = {"seconds": 1e-9, "l2_read": SECTOR, "l2_written": SECTOR}


@dataclass(frozen=True)
class Counters:
    """One launch. Bytes and seconds; `tensor_pipe` and `occupancy` in percent; None: this card or version has no such counter."""

    kernel: str
    within: str  # the NVTX range it was launched in
    seconds: float | None
    dram_read: float | None
    dram_written: float | None
    l2_read: float | None  # asked of the L2, by SMs and copy engines
    l2_written: float | None
    sm_read: float | None  # that crossed from the L2 to the SMs
    sm_written: float | None
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


def find_reader(ncu: Path) -> ModuleType:
    """`ncu_report`, which Nsight Compute keeps in extras/python of its folder; the program may be a script in a folder of links."""
    for home in (*ncu.resolve().parents, *_installed()):
        file = home / "extras" / "python" / "ncu_report.py"
        if file.is_file():
            return _load(file)
    raise InputError(f"ncu: got {ncu}, whose Python reader (extras/python/ncu_report.py) is nowhere; accepted: a whole Nsight Compute")


def _load(file: Path) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("ncu_report", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # it loads a library that lies beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def count(command: Sequence[str], ncu: Path) -> list[Counters]:
    """Run `command` under `ncu` and return its counted launches in order. Raises `InputError` where counting is not possible or fails."""
    reader = find_reader(ncu)
    known = _known(ncu)
    names = [name for name in (_first(candidates, known) for candidates in METRICS.values()) if name]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ncu-rep"
        done = subprocess.run(
            [str(ncu), "--profile-from-start", "off", "--nvtx", "--clock-control", "none", "--metrics", ",".join(names),
             "--export", str(report), *command], capture_output=True, text=True, check=False)
        if done.returncode or not report.is_file():
            raise InputError(f"ncu: {_reason(done.stdout + done.stderr)}")
        return read(report, reader)


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


def read(report: Path, reader: ModuleType) -> list[Counters]:
    """Every launch of a report."""
    context = reader.load_report(str(report))
    launches = []
    for group in range(context.num_ranges()):
        actions = context.range_by_idx(group)
        launches += [_counters(actions.action_by_idx(index)) for index in range(actions.num_actions())]
    return launches


def _counters(action: Any) -> Counters:
    names = set(action.metric_names())
    found = {key: next((name for name in candidates if name in names), None) for key, candidates in METRICS.items()}
    values = {key: None if name is None else action.metric_by_name(name).as_double() * SCALE.get(key, 1) for key, name in found.items()}
    return Counters(action.name(), _range(action.nvtx_state()), **values)


def _range(state: Any) -> str:
    """The innermost NVTX range; empty outside of any."""
    if state is None:
        return ""
    ranges = [name for domain in state.domains() for name in state.domain_by_id(domain).push_pop_ranges()]
    return ranges[-1] if ranges else ""
