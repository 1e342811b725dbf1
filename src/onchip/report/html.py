"""The pieces a page is made of: cells that keep their exact numbers, tables that read aloud well, figures with a legend."""
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from onchip.report.charts import Series


class Cell(NamedTuple):
    """What stands in a table: a text, and the unrounded number behind it."""

    text: str
    value: float | None = None
    weak: bool = False  # set in a quieter colour


def number(value: "float | str | None", text: str) -> Cell | None:
    """A cell for `value`, JSON's ``"inf"`` and ``"nan"`` included; None where there is none."""
    return None if value is None else Cell(text, float(value))


def times(value: float | None, digits: int = 2) -> Cell | None:
    """A ratio: '1.13x'."""
    return None if value is None else Cell(f"{value:.{digits}f}x", value)


def _cell(cell: "Cell | str | None", column: str) -> str:
    name = escape(column, quote=True)
    if cell is None:
        return f'<td data-column="{name}" class="none">–</td>'
    if isinstance(cell, str):
        return f'<td data-column="{name}" class="words{" long" * (len(cell) > LONG)}">{escape(cell)}</td>'
    weak = ' class="weak"' if cell.weak else ""
    inner = escape(cell.text) if cell.value is None else f'<data value="{cell.value!r}">{escape(cell.text)}</data>'
    return f'<td data-column="{name}"{weak}>{inner}</td>'


LONG = 28  # letters of a cell from which on it may break into lines
Row = tuple[str, Sequence[Cell | str | None]]


def table(caption: str, corner: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A table of `rows`, (heading, cells); columns without any figure are dropped. It scrolls in its own box where it is too wide."""
    kept = [i for i in range(len(columns)) if any(cells[i] not in (None, "") for _, cells in rows)]
    words = {i for i in kept if all(cells[i] is None or isinstance(cells[i], str) for _, cells in rows)}
    head = "".join(f'<th scope="col"{" class=words" * (i in words)}>{escape(columns[i])}</th>' for i in kept)
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{"".join(_cell(cells[i], columns[i]) for i in kept)}</tr>'
                   for name, cells in rows)
    return (f'<div class="scroll" role="region" aria-label="{escape(caption, quote=True)}" tabindex="0"><table>'
            f'<caption><span>{escape(caption)}</span></caption>'
            f'<thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def figure(svg: str, caption: str, keys: Iterable[tuple[str, str]]) -> str:
    """A picture, what it shows, and what its colours mean: (class, name)."""
    legend = "".join(f'<span class="key {escape(style)}">{escape(name)}</span>' for style, name in keys)
    return f'<figure><figcaption>{escape(caption)}</figcaption>{svg}<div class="legend">{legend}</div></figure>'


def keys(series: Iterable[Series]) -> list[tuple[str, str]]:
    """The legend of a line picture."""
    return [(s.style, s.name) for s in series]


def section(ident: str, title: str, parts: Iterable[str]) -> str:
    """A part of the page under a heading of its own."""
    return f'<section aria-labelledby="{ident}"><h2 id="{ident}">{escape(title)}</h2>{"".join(parts)}</section>'


def fold(title: str, parts: Iterable[str], *, opened: bool) -> str:
    """A part that opens and closes."""
    return f'<details{" open" * opened}><summary>{escape(title)}</summary>{"".join(parts)}</details>'


def bullets(title: str, points: Sequence[str]) -> str:
    """A titled list; nothing where it is empty."""
    return f'<p class="title">{escape(title)}</p><ul>{"".join(f"<li>{escape(p)}</li>" for p in points)}</ul>' if points else ""


def text(words: str) -> str:
    """A paragraph."""
    return f"<p>{escape(words)}</p>"


def finite(value: object) -> bool:
    """A number that can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)
