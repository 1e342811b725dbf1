"""The ladder's part of the page: a table, a roofline and the traffic of each problem; and one problem at growing lengths."""
from collections.abc import Sequence

from onchip.cli.common import human_bytes, human_time
from onchip.report import charts, html
from onchip.report.charts import Series
from onchip.report.gaps import explain, ratio
from onchip.report.html import Cell
from onchip.report.results import Climb, Step

COLUMNS = ("roof", "predicted", "measured", "time ratio", "speed-up", "DRAM predicted", "DRAM counted", "DRAM ratio", "issued",
           "L2 ↔ SMs counted", "issued ratio", "tensor pipe predicted", "tensor pipe", "occupancy predicted", "occupancy",
           "registers", "peak memory", "error")
TRAFFIC = (("compulsory", "compulsory"), ("issued", "issued"), ("DRAM predicted", "predicted"), ("DRAM counted", "counted"))


def ladder_section(climbs: Sequence[Climb]) -> str:
    """All problems, the first one open."""
    lead = ("Each rung's time is the highest of its roofs, summed over its kernels; its DRAM bytes are what an L2 of the card's size lets "
            "through. Ratios are measured or counted over predicted; where one is more than 10 % off, the list under the table names why.")
    parts = [html.text(lead)]
    parts += [html.fold(f"{climb.device}: {climb.name}", climb_parts(f"climb{i}", climb), opened=i == 0) for i, climb in enumerate(climbs)]
    return html.section("ladder", "The ladder", parts)


def climb_parts(ident: str, climb: Climb) -> list[str]:
    """One problem."""
    rows = [(f"{i + 1} {step.title}", _cells(step, climb)) for i, step in enumerate(climb.steps)]
    parts = [html.table(f"Rungs on the {climb.device}: {climb.name}", "rung", COLUMNS, rows)] if rows else []
    gaps = [f"{i + 1} {step.title}: {why}" for i, step in enumerate(climb.steps) if (why := explain(step, climb))]
    parts.append(html.bullets("Gaps over 10 %", gaps))
    pictures = [_roofline(f"{ident}-roofline", climb), _traffic(f"{ident}-traffic", climb)]
    if any(pictures):
        parts.append(f'<div class="pair">{"".join(pictures)}</div>')
    parts += [html.text(f"{key} was not run: {reason}.") for key, reason in climb.skipped.items()]
    return parts


def _cells(step: Step, climb: Climb) -> list[Cell | str | None]:
    first, timed = climb.steps[0], step.measured is not None
    speedup = ratio(first.measured, step.measured) if timed else ratio(first.predicted, step.predicted)
    return [
        step.roof, *(html.number(x, human_time(x or 0)) for x in (step.predicted, step.measured)),
        html.times(ratio(step.measured, step.predicted)), html.times(speedup),
        *(html.number(x, human_bytes(x or 0)) for x in (step.dram_predicted, step.dram_counted)),
        html.times(ratio(step.dram_counted, step.dram_predicted)),
        *(html.number(x, human_bytes(x or 0)) for x in (step.issued, step.sm_bytes)), html.times(ratio(step.sm_bytes, step.issued)),
        *(html.number(x, f"{x or 0:.0f} %") for x in (
            step.tensor_pipe_predicted, step.tensor_pipe, step.occupancy_predicted, step.occupancy)),
        html.number(step.registers, str(step.registers)),
        html.number(step.peak_bytes, human_bytes(step.peak_bytes or 0)), html.number(step.error, f"{step.error or 0:.1e}")]


def rooflined(climb: Climb) -> list[charts.Rung]:
    """Rungs as points under the roof; a measured time without counted bytes stands at the predicted intensity."""
    points = []
    for i, step in enumerate(climb.steps):
        counted = step.dram_counted or step.dram_predicted
        predicted = (climb.flops / step.dram_predicted, climb.flops / step.predicted) if step.dram_predicted and step.predicted else None
        measured = (climb.flops / counted, climb.flops / step.measured) if counted and step.measured else None
        if predicted or measured:
            points.append((str(i + 1), step.title, predicted, measured))
    return points


def picture(climb: Climb) -> str:
    """The roofline as an SVG file of its own, rungs named."""
    roof = climb.roof
    return charts.standalone(charts.roofline("roofline", f"Rungs of attention under the roof of the {climb.device}, {climb.name}",
                                             rooflined(climb), (roof.bandwidth, roof.matmul) if roof else None, named=True))


def _roofline(ident: str, climb: Climb) -> str:
    points, roof = rooflined(climb), climb.roof
    if not points:
        return ""
    svg = charts.roofline(ident, f"Roofline, {climb.name}", points, (roof.bandwidth, roof.matmul) if roof else None)
    where = f"Roofline: {roof.source}" if roof else "Roofline, without a roof: this card's rates are not known"
    shown = [("s0 hollow", "predicted")] * any(p for _, _, p, _ in points) + [("s0", "measured")] * any(m for _, _, _, m in points)
    return html.figure(svg, f"{where}. Numbers are the rungs of the table.", shown)


def _traffic(ident: str, climb: Climb) -> str:
    """Bytes of each rung that has any beside the compulsory ones."""
    groups, least = [], float(climb.compulsory)
    for i, step in enumerate(climb.steps):
        found = zip(TRAFFIC, (least, step.issued, step.dram_predicted, step.dram_counted), strict=True)
        drawn = [(name, style, float(value)) for (name, style), value in found if value is not None]
        if len(drawn) > 1:
            groups.append((f"{i + 1} {step.title}", drawn))
    if not groups:
        return ""
    shown = {name for _, bars in groups for name, _, _ in bars}
    legend = [(f"bar {style}", name) for name, style in TRAFFIC if name in shown]
    return html.figure(charts.bars(ident, f"Traffic, {climb.name}", groups), "Traffic. Compulsory: inputs and outputs once. Issued: "
                       "what the thread blocks ask for. DRAM: what the L2 lets through.", legend)


def incident_section(incidents: Sequence[Sequence[Climb]]) -> str:
    """Naive against fused as N grows: time, memory, and where memory ends."""
    parts = []
    for number, climbs in enumerate(incidents):
        titles = {step.key: step.title for climb in climbs for step in climb.steps}
        series = []
        for i, (key, title) in enumerate(titles.items()):
            points = [(float(c.shape.seq_q), step.measured * 1e3) for c in climbs for step in c.steps if step.key == key and step.measured]
            series.append(Series(title, f"s{i}", tuple(sorted(points))))
        if any(s.points for s in series):
            svg = charts.lines(f"incident{number}", "Time as the sequence grows", series, "N", "ms", log_y=True)
            parts.append(html.figure(svg, f"Time as N grows, {climbs[0].device}. Both scales are logarithmic.", html.keys(series)))
        rows: list[html.Row] = []
        for climb in climbs:
            rows += [(f"N = {climb.shape.seq_q}, {step.title}", _growth(step, climb)) for step in climb.steps]
            rows += [(f"N = {climb.shape.seq_q}, {titles.get(key, key)}", [None] * 4 + [f"not run: {reason}"])
                     for key, reason in climb.skipped.items()]
        parts.append(html.table("As N grows", "rung", ("time", "peak memory", "DRAM busy", "tensor pipe", ""), rows))
    return html.section("incident", "2K to 32K: where naive attention ends", parts)


def _growth(step: Step, climb: Climb) -> list[Cell | str | None]:
    busy = None
    if step.dram_counted is not None and step.measured and climb.roof:
        busy = 100 * step.dram_counted / step.measured / climb.roof.bandwidth
    return [html.number(step.measured, human_time(step.measured or 0)), html.number(step.peak_bytes, human_bytes(step.peak_bytes or 0)),
            html.number(busy, f"{busy or 0:.0f} %"), html.number(step.tensor_pipe, f"{step.tensor_pipe or 0:.0f} %"), None]
