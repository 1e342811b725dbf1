"""The lab's verdicts, and what running the instruments costs."""
from collections.abc import Mapping, Sequence
from typing import Any

from onchip.cli.common import human_time
from onchip.cli.lab_tables import show_interval, show_number
from onchip.lab.experiment import Interval
from onchip.report import html
from onchip.report.results import File


def lab_section(files: Sequence[File]) -> str:
    """A verdict a claim, and the numbers it rests on."""
    parts = []
    for _, data in files:
        found = data["experiments"]
        device = data.get("gpu") or f"predicted for one {data['predicted_for']}, no GPU measured"
        verdicts: list[html.Row] = [(e["name"], [e["verdict"], e["claim"], e["pitfall"]]) for e in found]
        parts.append(html.table(f"Claims and verdicts, {device}", "experiment", ("verdict", "claim", "pitfall"), verdicts))
        rows: list[html.Row] = [(f"{e['name']}: {p['what']}", _prediction(p)) for e in found for p in e["predictions"]]
        table = html.table(f"Predictions and measurements, {device}", "quantity", ("predicted", "measured", "holds", "source"), rows)
        parts.append(html.fold("The numbers", [table], opened=False))
    return html.section("lab", "The lab", parts)


def _prediction(p: Mapping[str, Any]) -> list[html.Cell | str | None]:
    measured = p["measured"]
    return [show_interval(Interval(float(p["low"]), float(p["high"])), p["unit"]),
            None if measured is None else html.number(measured, show_number(float(measured), p["unit"])),
            {True: "yes", False: "no", None: "not measured"}[p["holds"]], p["source"]]


def cost_section(files: Sequence[File]) -> str:
    """Seconds and memory of the climb on a CPU."""
    rows: list[html.Row] = []
    for _, data in files:
        rows.append((f"{data['machine']}: make ladder", [html.number(data["make_ladder_s"], human_time(data["make_ladder_s"])), None]))
        rows.append(("FA2 executed and counted, N = 4096, d = 128, 64×64 tiles",
                     [html.number(data["fa2_64x64_n4096_d128_s"], human_time(data["fa2_64x64_n4096_d128_s"])), None]))
        rows += [(f"{rung}: peak memory, N from 2048 to 8192", [None, html.times(growth)])
                 for rung, growth in data["peak_growth_2048_to_8192"].items()]
    return html.section("cost", "What climbing costs without a GPU", [
        html.text("The simulator's memory grows with N, not with N²: four times the length, four times the memory."),
        html.table("Time and memory", "what", ("seconds", "growth"), rows)])
