"""The lab's results as Markdown tables, from what ``onchip lab run --json`` writes, and numbers as people read them."""
import json
import math
from pathlib import Path
from typing import Any

from onchip.cli.common import human_bytes, human_time
from onchip.lab.experiment import Interval, Sizes
from onchip.lab.experiments import EXPERIMENTS
from onchip.lab.run import judge, report
from onchip.roofline.hardware import find_gpu


def show_number(value: float, unit: str) -> str:
    """A number with its unit, three or four digits."""
    if unit == "s":
        return human_time(value)
    if unit in ("B", "B/s"):
        return human_bytes(value) + unit[1:]
    if unit == "yes/no":
        return "yes" if value else "no"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:.4g}"


def show_interval(interval: Interval, unit: str) -> str:
    """``'= 4'``, ``'≤ 5 ms'``, ``'≥ 2'`` or ``'20 … 25 clocks'``."""
    low, high = interval
    suffix = "" if unit in ("", "s", "B", "B/s", "yes/no") else f" {unit}"
    if low == high:
        return f"{'' if unit == 'yes/no' else '= '}{show_number(low, unit)}{suffix}"
    if high == math.inf:
        return f"≥ {show_number(low, unit)}{suffix}"
    if low <= 0:
        return f"≤ {show_number(high, unit)}{suffix}"
    return f"{show_number(low, unit)} … {show_number(high, unit)}{suffix}"


def results(file: Path, gpu: str = "h200") -> dict[str, Any]:
    """What `file` holds; where there is none yet, the predictions for `gpu`, nothing measured."""
    if file.is_file():
        return dict(json.loads(file.read_text()))
    card = find_gpu(gpu)
    return report([judge(one, card, Sizes(), {}) for one in EXPERIMENTS.values()], card, Sizes(), {"gpu": None})


def verdicts(results: dict[str, Any]) -> str:
    """A row an experiment: what it claims, how many of its predictions hold, the verdict."""
    rows: list[tuple[str, ...]] = []
    for one in results["experiments"]:
        holds = [p["holds"] for p in one["predictions"]]
        count = f"{holds.count(True)} of {len(holds)}" if any(h is not None for h in holds) else f"– of {len(holds)}"
        rows.append((one["name"], one["claim"], one["pitfall"] or "", count, one["verdict"]))
    return _table(("experiment", "claim", "pitfall", "hold", "verdict"), rows)


def predictions(results: dict[str, Any]) -> str:
    """A row a prediction, its measurement beside it."""
    rows: list[tuple[str, ...]] = []
    for one in results["experiments"]:
        for p in one["predictions"]:
            interval = Interval(float(p["low"]), float(p["high"]))
            measured = "–" if p["measured"] is None else show_number(float(p["measured"]), p["unit"])
            holds = {True: "yes", False: "no", None: "–"}[p["holds"]]
            rows.append((one["name"], p["what"], show_interval(interval, p["unit"]), measured, holds, p["source"]))
    return _table(("experiment", "what", "predicted", "measured", "holds", "from"), rows)


def _table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |" for cells in lines)
