"""Reads a report of Nsight Compute, as a program of its own: ``python -m onchip.bench.report_reader READER REPORT ANSWER METRIC…``.

NVIDIA's reader (`ncu_report`) is compiled code; in a program that had torch, CUDA and a compiler loaded it ended that program by a
segmentation fault. Here nothing else is loaded and nothing else can be lost: `onchip.bench.counters` runs this and says what became of it.

What the reader hands out may be views of memory that the object they came from owns: ranges live as long as their domain, a domain as long
as its state. So every owner has a name until its values have been copied into Python's own, and no metric is asked for a value that it has
not got.
"""
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Launch = dict[str, Any]  # "kernel": its name; "within": NVTX ranges; "metrics": name → [value, unit]


def launches(reader: Any, report: Path, metrics: Sequence[str]) -> list[Launch]:
    """Every launch of a report that the module `reader` opens: its name, where it was launched, and of `metrics` what it has."""
    context = reader.load_report(str(report))
    found = []
    for group in range(context.num_ranges()):
        actions = context.range_by_idx(group)
        for index in range(actions.num_actions()):
            action = actions.action_by_idx(index)
            found.append({"kernel": str(action.name()), "within": _within(action), "metrics": _metrics(action, metrics)})
    return found


def _metrics(action: Any, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """[value, unit] of each that was counted; the unit of times alone, which versions give in different ones."""
    has = {str(name) for name in action.metric_names()}
    found = {}
    for name in wanted:
        metric = action.metric_by_name(name) if name in has else None
        if metric is not None and metric.has_value():
            found[name] = [float(metric.as_double()), str(metric.unit()) if "time" in name else ""]
    return found


def _within(action: Any) -> list[str]:
    """The NVTX ranges, those of each domain outermost first: libraries have domains of their own."""
    state = action.nvtx_state()
    names: list[str] = []
    for number in [] if state is None else list(state.domains()):
        domain = state.domain_by_id(number)
        names += [] if domain is None else [str(name) for name in domain.push_pop_ranges()]
    return names


def main(arguments: Sequence[str]) -> None:
    """Write the launches to ANSWER, whole or not at all: what happens to the reader afterwards does not matter."""
    reader, report, answer = map(Path, arguments[:3])
    sys.path.insert(0, str(reader.parent))  # it loads a library that lies beside it
    found = launches(importlib.import_module(reader.stem), report, arguments[3:])
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
