"""The page: one file that opens from disk, needs no network, no script and no font, in light and in dark, on a phone and on a desk."""
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from onchip import __version__
from onchip.errors import InputError
from onchip.report import charts, html
from onchip.report.lab import cost_section, lab_section
from onchip.report.ladders import incident_section, ladder_section
from onchip.report.results import Results, reason
from onchip.report.speed import forward_section, softmax_section, triton_section

# field of Results → (name in the list of contents, what makes the section); the order of the page
SECTIONS: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "ladders": ("ladder", "The ladder", ladder_section),
    "incidents": ("incident", "2K to 32K", incident_section),
    "forward": ("forward", "Attention forward", forward_section),
    "triton": ("triton", "Attention in Triton", triton_section),
    "softmax": ("softmax", "Softmax", softmax_section),
    "labs": ("lab", "The lab", lab_section),
    "costs": ("cost", "What climbing costs", cost_section),
}


def render(results: Results) -> str:
    """HTML of `results`: a section for each kind there is. Raises `InputError` for a file whose rows are not what they should be."""
    present = {name: getattr(results, name) for name in SECTIONS if getattr(results, name)}
    contents = "".join(f'<a href="#{SECTIONS[name][0]}">{escape(SECTIONS[name][1])}</a>' for name in present)
    body = "".join(_section(name, found) for name, found in present.items())
    sources = "".join(f"<li><code>{escape(file)}</code>: {escape(kind)}</li>" for file, kind in results.sources)
    left_out = html.text(f"Left out, of no known kind: {', '.join(results.left_out)}.") if results.left_out else ""
    style = charts.STYLE + Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>onchip: predicted, measured, counted</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="mark">onchip {escape(__version__)}</p>
<h1>Predicted, measured, counted</h1>
<nav aria-label="Contents">{contents}</nav>
</header>
<main>
{body}
</main>
<footer>
<p>Every figure comes from these files; rest the pointer on a mark to read its value.</p>
<ul>{sources}</ul>
{left_out}
</footer>
</body>
</html>
"""


def _section(name: str, found: Any) -> str:
    _, title, make = SECTIONS[name]
    try:
        return make(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        files = ", ".join(file for file, *_ in found) if name not in ("ladders", "incidents") else "a ladder"
        raise InputError(f"RESULTS: got {files}, broken results for “{title}”: {reason(error)}") from None
