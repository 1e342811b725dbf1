"""Pictures as inline SVG: lines over sequence length, the roofline, bars. Colours come from the page's style sheet, by class.

Each picture is 460 units wide, so that its 12-unit type stays readable at the 330 pixels a phone leaves it. It carries a title and a
description for those who cannot see it, and its exact numbers as ``data-x`` and ``data-y`` on every point.
"""
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from onchip.cli.common import human_bytes

STYLE = Path(__file__).with_name("chart.css").read_text(encoding="utf-8")
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 460.0, 46.0, 14.0, 26.0, 38.0


Point = tuple[float, float]
Rung = tuple[str, str, Point | None, Point | None]  # number, name, predicted, measured


@dataclass(frozen=True)
class Series:
    """Points under one name. `style` is its class: ``s0`` is ours, ``s1`` … the peers', ``limit`` a dashed bound."""

    name: str
    style: str
    points: tuple[tuple[float, float], ...]
    line: bool = True
    hollow: bool = False  # predicted rather than measured


@dataclass(frozen=True)
class Axis:
    """A scale from numbers to units of the picture."""

    label: str
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` lies."""
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (x - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers: powers of ten on a logarithmic scale, with 2 and 5 of each between them where that is few; else round steps."""
        if not self.log:
            step = _round_step((self.high - self.low) / 5)
            return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = [factor * 10.0**i for i in tens for factor in (1, 2, 5) if self.low <= factor * 10.0**i <= self.high]
        return fine if len(fine) <= 8 else [value for value in fine if math.log10(value).is_integer()]


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 · 10ⁿ."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def tick_text(value: float) -> str:
    """1024 → '1K', 0.001 → '0.001', 20000 → '20k'."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}K"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _frame(x: Axis, y: Axis, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    parts = []
    for value in y_ticks:
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
                     f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{tick_text(value)}</text>')
    parts += [f'<text x="{x.at(value):.1f}" y="{y.start + 17}" text-anchor="middle">{tick_text(value)}</text>' for value in x_ticks]
    parts.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>'
                 f'<text class="label" x="{x.end}" y="{y.start + 33}" text-anchor="end">{escape(x.label)}</text>'
                 f'<text class="label" x="2" y="14">{escape(y.label)}</text>')
    return parts


def _mark(series: Series, x: float, y: float, at: tuple[float, float], title: str) -> str:
    kind = f"{series.style} hollow" if series.hollow else series.style
    return (f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" data-x="{x!r}" data-y="{y!r}"><title>{escape(title)}</title>'
            '</circle>')


def _draw(series: Series, x: Axis, y: Axis) -> str:
    at = [(x.at(a), y.at(b)) for a, b in series.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    line = f'<polyline class="{series.style}" points="{path}"/>' if series.line and len(at) > 1 else ""
    if series.style == "limit":
        return line
    return line + "".join(_mark(series, *point, where, f"{series.name}: {point[1]:.4g} at {tick_text(point[0])}")
                          for point, where in zip(series.points, at, strict=True))


def _tag(words: str, x: float, y: float, *, beside: bool) -> str:
    """What a mark is called: beside it, on its left where it would run out of the picture on the right; or above it."""
    dx, dy, anchor = (6, -6, "start") if not beside else (-9, 4, "end") if x > WIDTH / 2 else (9, 4, "start")
    return f'<text class="tag" x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(ident: str, title: str, description: str, height: float, parts: Iterable[str]) -> str:
    return (f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="{ident}-t {ident}-d">'
            f'<title id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(description)}</desc>{"".join(parts)}</svg>')


def standalone(svg: str, width: int = 720) -> str:
    """A picture as a file of its own, with its colours and a ground."""
    head, rest = svg.split(">", 1)
    return (f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}"><style>\n{STYLE}</style>'
            f'<rect class="ground" width="100%" height="100%"/>{rest}\n')


def describe(series: Iterable[Series], unit: str) -> str:
    """The picture in words: each series from end to end."""
    return "; ".join(f"{s.name} from {s.points[0][1]:.4g} at {tick_text(s.points[0][0])} to {s.points[-1][1]:.4g} {unit} at "
                     f"{tick_text(s.points[-1][0])}" for s in series if s.points)


def lines(ident: str, title: str, series: Sequence[Series], x_label: str, y_label: str, *, log_y: bool = False, height: float = 250) -> str:
    """Values over lengths that double: x logarithmic with a tick at every length or every other, y from zero or logarithmic."""
    xs = sorted({a for s in series for a, _ in s.points})
    ys = [b for s in series for _, b in s.points]
    x = Axis(x_label, xs[0] / 1.12, xs[-1] * 1.12, LEFT, WIDTH - RIGHT, log=True)
    low = min(ys) / 1.5 if log_y else 0.0
    y = Axis(y_label, low, max(ys) * (1.5 if log_y else 1.08), height - BOTTOM, TOP, log=log_y)
    frame = _frame(x, y, xs if len(xs) < 9 else xs[::2], y.ticks())
    return _svg(ident, title, describe(series, y_label), height, [*frame, *(_draw(s, x, y) for s in series)])


def roofline(ident: str, title: str, points: Sequence[Rung],
             roof: tuple[float, float] | None, *, named: bool = False) -> str:
    """Rungs: (number, name, predicted, measured), a point being (FLOP/byte, FLOP/s), under a roof (bytes/s, FLOP/s); hollow: predicted.

    A rung is tagged with its number, or with its name.
    """
    height = 300.0
    both = [p for _, _, *pair in points for p in pair if p]
    xs, ys = [a for a, _ in both], [b / 1e12 for _, b in both]
    knee, peak = ([roof[1] / roof[0]], [roof[1] / 1e12]) if roof else ([], [])
    x = Axis("useful FLOP / DRAM byte", min(xs + knee) / 2.2, max(xs + knee) * 2.2, LEFT, WIDTH - RIGHT, log=True)
    y = Axis("useful TFLOP/s", min(ys) / 2, max(ys + peak) * 1.7, height - BOTTOM, TOP, log=True)
    parts = _frame(x, y, x.ticks(), y.ticks())
    if roof:
        left = max(x.low, y.low * 1e12 / roof[0])
        path = " ".join(f"{x.at(a):.1f},{y.at(min(roof[0] * a, roof[1]) / 1e12):.1f}" for a in (left, knee[0], x.high))
        parts.append(f'<polyline class="roof" points="{path}"/>')
    for number, name, predicted, measured in points:
        if predicted and measured:
            (x1, y1), (x2, y2) = ((x.at(a), y.at(b / 1e12)) for a, b in (predicted, measured))
            parts.append(f'<line class="tie" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        for point, what in ((predicted, "predicted"), (measured, "measured")):
            if point:
                at = x.at(point[0]), y.at(point[1] / 1e12)
                style = Series(name, "s0", (), hollow=what == "predicted")
                parts.append(_mark(style, *point, at, f"{name}, {what}: {point[1] / 1e12:.4g} TFLOP/s at {point[0]:.4g} FLOP/B"))
        last = measured or predicted
        if last:
            parts.append(_tag(name if named else number, x.at(last[0]), y.at(last[1] / 1e12), beside=named))
    words = "; ".join(f"{number} {name}: " + ", ".join(f"{what} {point[1] / 1e12:.4g} TFLOP/s at {point[0]:.4g} FLOP/B" for point, what in
                                                       ((predicted, "predicted"), (measured, "measured")) if point)
                      for number, name, predicted, measured in points)
    return _svg(ident, title, words, height, parts)


def bars(ident: str, title: str, groups: Sequence[tuple[str, Sequence[tuple[str, str, float]]]]) -> str:
    """Bytes on one linear scale from zero: (group, its bars: (name, class, bytes)), each with its figure at its end."""
    longest = max(value for _, bars_ in groups for _, _, value in bars_)
    scale, at, parts = (WIDTH - 74) / (longest or 1.0), 0.0, []
    for group, bars_ in groups:
        at += 16
        parts.append(f'<text class="head" x="0" y="{at:.0f}">{escape(group)}</text>')
        at += 6
        for name, style, value in bars_:
            width, text = max(1.0, value * scale), human_bytes(value)
            parts.append(f'<rect class="{style}" x="0" y="{at:.0f}" width="{width:.1f}" height="10" data-bytes="{value!r}">'
                         f'<title>{escape(f"{group}, {name}: {text}")}</title></rect>'
                         f'<text class="value" x="{width + 5:.1f}" y="{at + 9.5:.1f}">{text}</text>')
            at += 15
        at += 6
    words = "; ".join(f"{group}: " + ", ".join(f"{name} {human_bytes(value)}" for name, _, value in bars_) for group, bars_ in groups)
    return _svg(ident, title, words, at + 2, parts)
