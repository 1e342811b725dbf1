"""Results as the page shows them: files recognised by what they hold, a ladder's figures under one set of names.

Bytes, seconds and FLOPs throughout, unrounded; None: not predicted, not measured or not counted in this file.
"""
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from onchip.errors import InputError, require
from onchip.roofline.attention import Formats, Sizes, useful_flops
from onchip.roofline.hardware import find_gpu
from onchip.roofline.shape import AttentionShape


@dataclass(frozen=True)
class Launch:
    """One kernel as Nsight Compute counted it."""

    kernel: str
    seconds: float | None = None
    dram_read: float | None = None
    dram_written: float | None = None
    spilled: float | None = None


@dataclass(frozen=True)
class Expected:
    """One kernel of the rung's ledger: seconds by its highest roof, and what its counters should say."""

    kernel: str
    seconds: float
    roof: str
    dram_read: float
    dram_written: float
    l2_own: float = 0.0  # looked up in L2, but for what blocks share
    l2_shared: float = 0.0


@dataclass(frozen=True)
class Step:
    """One rung: what the model said, what the clock said, what the counters said."""

    key: str
    title: str
    predicted: float | None = None  # seconds
    roof: str | None = None
    measured: float | None = None  # seconds
    issued: float | None = None  # bytes, by the ledger
    sm_bytes: float | None = None  # counted between L2 and SMs
    dram_predicted: float | None = None
    dram_counted: float | None = None
    tensor_pipe: float | None = None  # percent
    occupancy: float | None = None  # percent
    registers: int | None = None
    conflicts: float | None = None  # clocks, over all SMs
    peak_bytes: int | None = None  # beyond q, k and v
    error: float | None = None  # ‖x − t‖/‖t‖ against float64
    launches: tuple[Launch, ...] = ()
    expected: tuple[Expected, ...] = ()
    l2_bytes: float | None = None  # counted as looked up in L2
    tensor_pipe_predicted: float | None = None  # percent
    occupancy_predicted: float | None = None  # percent, by the planner

    @property
    def merged(self) -> float | None:
        """Requests for what blocks share that became one lookup; None where they share nothing, or nothing was counted."""
        own, shared = (sum(getattr(x, name) for x in self.expected) for name in ("l2_own", "l2_shared"))
        return shared / (self.l2_bytes - own) if self.l2_bytes is not None and shared and self.l2_bytes > own else None

    @property
    def pairs(self) -> tuple[tuple[Expected, Launch], ...]:
        """Each kernel of the ledger with its launch; empty where another number of kernels ran."""
        return tuple(zip(self.expected, self.launches, strict=True)) if len(self.expected) == len(self.launches) else ()

    @property
    def expected_sum(self) -> Expected:
        """The ledger's kernels together."""
        seconds, read, written = (sum(getattr(x, name) for x in self.expected) for name in ("seconds", "dram_read", "dram_written"))
        return Expected("all kernels", seconds, self.roof or "", read, written)

    @property
    def launch_sum(self) -> Launch:
        """What was counted, all launches together."""
        return Launch("all kernels", *(sum(getattr(x, name) or 0.0 for x in self.launches)
                                       for name in ("seconds", "dram_read", "dram_written", "spilled")))


@dataclass(frozen=True)
class Roof:
    """The two roofs of the classic picture, and where they come from."""

    bandwidth: float  # bytes/s
    matmul: float  # FLOP/s
    source: str
    sms: int | None = None
    clock: float | None = None  # Hz
    l2_bytes: int | None = None


@dataclass(frozen=True)
class Climb:
    """The rungs of one problem."""

    shape: AttentionShape
    dtype: str
    device: str
    steps: tuple[Step, ...]
    roof: Roof | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)  # rung → why it was not run
    backward: bool = False

    @property
    def name(self) -> str:
        """The problem in a few words."""
        s = self.shape
        size = f"N = {s.seq_q}" if s.seq_q == s.seq_k else f"{s.seq_q} queries × {s.seq_k} keys"
        heads = f"{s.query_heads} head" + "s" * (s.query_heads > 1) + f", {s.kv_pairs} of K and V" * (s.group > 1)
        width = f"d = {s.head_dim}" + f" and {s.head_dim_v}" * (s.head_dim_v != s.head_dim)
        return f"{size}, {heads}, {width}, {short(self.dtype)}, {mask_name(s)}" + ", backward" * self.backward

    @property
    def flops(self) -> float:
        """Matmul FLOPs the job needs: visible pairs only; of a backward 2.5 times the forward's."""
        return (2.5 if self.backward else 1) * useful_flops(self.shape)

    @property
    def compulsory(self) -> int:
        """Bytes of its inputs and outputs, each once."""
        return self.sizes.backward if self.backward else self.sizes.forward

    @property
    def sizes(self) -> Sizes:
        """Bytes of its tensors."""
        return Sizes(self.shape, Formats(self.dtype, self.dtype))


File = tuple[str, dict[str, Any]]  # its name, and what it holds


@dataclass
class Results:
    """All that the files held; the page has a section for each that is not empty."""

    ladders: list[Climb] = field(default_factory=list)
    incidents: list[list[Climb]] = field(default_factory=list)  # one problem at growing lengths
    forward: list[File] = field(default_factory=list)  # attention_forward.json
    triton: list[File] = field(default_factory=list)  # attention_triton.json
    softmax: list[File] = field(default_factory=list)  # softmax.json
    labs: list[File] = field(default_factory=list)
    costs: list[File] = field(default_factory=list)  # of running the instruments
    sources: list[tuple[str, str]] = field(default_factory=list)  # (file, what it is)
    left_out: list[str] = field(default_factory=list)  # files of a folder that are none of these


def short(dtype: str) -> str:
    """'bfloat16' → 'bf16'."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)


def mask_name(shape: AttentionShape) -> str:
    """'full', 'causal', or what window there is."""
    if shape.window == (None, None):
        return "full" if shape.causal is None else "causal" if shape.causal == "bottom-right" else f"causal, {shape.causal}"
    return f"window {shape.window[0]}, {shape.window[1]}"


def _shape(found: Mapping[str, Any]) -> AttentionShape:
    names = AttentionShape.__dataclass_fields__
    left, right = found.get("window", (None, None))
    return AttentionShape(**{k: v for k, v in found.items() if k in names and k != "window"}, window=(left, right))


def _roof(ceilings: Mapping[str, Any]) -> Roof:
    """As measured; what the roofline knows of the card beside it."""
    rates = float(ceilings["copy"]), float(ceilings["matmul"])
    source = f"copy and {short(ceilings['dtype'])} matmul as measured on the {ceilings['device']}"
    try:
        card = find_gpu(ceilings["device"])
    except InputError:
        return Roof(*rates, source)
    return Roof(*rates, source, card.sms, card.clock_ghz * 1e9, card.l2_bytes)


def _climb(shape: AttentionShape, ceilings: Mapping[str, Any], measured: Iterable[Mapping[str, Any]], counted: Iterable[Mapping[str, Any]],
           skipped: Mapping[str, str], *, backward: bool = False) -> Climb:
    """Rungs that were timed on one device, each joined with its counters."""
    by_key = {c["key"]: c for c in counted}
    steps = []
    for m in measured:
        c = by_key.get(m["key"], {})
        launches, expected = _made(Launch, c.get("kernels", ())), _made(Expected, c.get("expected", ()))
        steps.append(Step(
            m["key"], m["title"], m["predicted"], m["roof"], m["seconds"], c.get("issued"), c.get("sm_bytes"), c.get("dram_predicted"),
            c.get("dram_bytes"), c.get("tensor_pipe"), c.get("occupancy"), c.get("registers"), c.get("conflicts"), m["peak_bytes"],
            m["error"]["rms"], launches, expected, c.get("l2_bytes"), c.get("tensor_pipe_predicted"),
            c.get("occupancy_predicted")))
    return Climb(shape, ceilings["dtype"], ceilings["device"], tuple(steps), _roof(ceilings), dict(skipped), backward)


T = TypeVar("T", Launch, Expected)


def _made(kind: type[T], found: Iterable[Mapping[str, Any]]) -> tuple[T, ...]:
    """One of `kind` for each, by the names of its fields; what is not there is as it is by default."""
    return tuple(kind(**{name: x[name] for name in kind.__dataclass_fields__ if name in x}) for x in found)


def _gpu_ladder(into: Results, name: str, data: dict[str, Any]) -> None:
    def read(part: str) -> list[Climb]:
        return [_climb(_shape(c["shape"]), data["ceilings"], c["measured"], c["counted"], c["skipped"], backward=part == "backward")
                for c in data.get(part, ())]

    into.ladders += read("ladder") + read("backward")
    if data["incident"]:
        into.incidents.append(read("incident"))


def _cli_ladder(into: Results, name: str, data: dict[str, Any]) -> None:
    """Predicted for one card and executed here; then what this machine was timed at, if it was."""
    shape = _shape(data["shape"])
    try:
        card = find_gpu(data["gpu"]["name"])
    except InputError:
        roof, title = None, data["gpu"]["name"]
    else:
        title = card.title
        roof = Roof(card.dram_rate, card.matmul_rate(data["shape"]["inputs"]), f"data sheet of the {title}", card.sms, card.clock_ghz * 1e9,
                    card.l2_bytes)
    steps = tuple(Step(r["rung"], r["title"], r["predicted_s"], r["binding"], issued=r["issued_bytes"], dram_predicted=r["dram_bytes"],
                       error=r.get("error", {}).get("out", {}).get("rms")) for r in data["rungs"])
    backward = any("backward" in step.key for step in steps)
    into.ladders.append(Climb(shape, data["shape"]["inputs"], title, steps, roof, backward=backward))
    here = data.get("this_machine")
    if here:
        into.ladders.append(_climb(_shape(here["shape"]), here["ceilings"] | {"dtype": here["dtype"]}, here["measurements"],
                                   data.get("counted") or (), here["skipped"], backward=backward))


def _kept(part: str) -> "Reader":
    """As it is: the section reads it."""
    return lambda into, name, data: getattr(into, part).append((name, data))


# What a file must hold to be one of a kind; the kind's name; how it is read.
Reader = Callable[[Results, str, dict[str, Any]], None]
KINDS: tuple[tuple[frozenset[str], str, Reader], ...] = (
    (frozenset({"ceilings", "ladder", "incident"}), "ladder on a GPU (benchmarks/ladder_gpu.py)", _gpu_ladder),
    (frozenset({"gpu", "shape", "rungs"}), "ladder (onchip ladder --json)", _cli_ladder),
    (frozenset({"machine", "cells"}), "attention forward (benchmarks/attention_forward.py)", _kept("forward")),
    (frozenset({"device", "rows", "packed"}), "attention in Triton (benchmarks/attention_triton.py)", _kept("triton")),
    (frozenset({"device", "versions", "results"}), "softmax (benchmarks/softmax.py)", _kept("softmax")),
    (frozenset({"predicted_for", "experiments"}), "lab (onchip lab)", _kept("labs")),
    (frozenset({"make_ladder_s", "machine"}), "what climbing costs (benchmarks/ladder.py)", _kept("costs")),
)
ACCEPTED = "JSON of " + ", ".join(name for _, name, _ in KINDS)


def read_results(paths: Iterable[Path]) -> Results:
    """Read `paths`, files or folders of ``*.json`` (sub-folders too). A folder's other files are left out and listed.

    Raises `InputError` for a path that is not there, a file that is not JSON or of no known kind, and where nothing is left to show.
    """
    results = Results()
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                if not _read(results, file):
                    results.left_out.append(str(file))
        else:
            require(path.is_file(), "RESULTS", f"{path}, which does not exist", "JSON files that onchip wrote, or folders of them")
            require(_read(results, path), "RESULTS", f"{path}, of an unknown kind", ACCEPTED)
    require(bool(results.sources), "RESULTS", "no file of a known kind in " + ", ".join(map(str, paths)), ACCEPTED)
    return results


def _read(results: Results, file: Path) -> bool:
    """Add what `file` holds; False if it is of no known kind."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"RESULTS: got {file}, which is not readable JSON ({error}); accepted: {ACCEPTED}") from None
    return add(results, file, data)


def add(results: Results, file: Path, data: object) -> bool:
    """Add `data`, which `file` held; False if it is of no known kind."""
    for keys, name, reader in KINDS:
        if isinstance(data, dict) and keys <= data.keys():
            try:
                reader(results, file.name, data)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InputError(f"RESULTS: got {file}, a broken result of {name}: {reason(error)}") from None
            results.sources.append((str(file), name))
            return True
    return False


def reason(error: Exception) -> str:
    """What a broken file lacks, or what else is wrong with it."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)
