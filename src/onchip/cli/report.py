"""``onchip report``: results as one page to look at."""
from pathlib import Path
from typing import Annotated

import typer

from onchip.cli.common import whole_file
from onchip.errors import require


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="report")(report)


def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", show_default=False, help=(
        "JSON files that onchip or its benchmarks wrote, or folders of them."))],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained page of results: opens from disk, without network, script or font; light and dark; readable on a phone.

    Files are recognised by what they hold: the ladder (`onchip ladder --json`, or the GPU's from `benchmarks/ladder_gpu.py`), the speed of
    attention and softmax beside their peers, the lab's verdicts. The page has a section for each: what was predicted, measured and
    counted, with the term behind every gap over 10 %; the roofline; the traffic; speed over sequence length. Each cell keeps its
    unrounded number.

    Examples:

    - `onchip report benchmarks/results/h200` shows a card's results.
    - `onchip ladder --json > ladder.json`, then `onchip report ladder.json -o ladder.html`, shows a climb of your own.
    """
    from onchip.report.page import render
    from onchip.report.results import read_results

    require(output.suffix in (".html", ".htm"), "-o", output, "a name ending in .html")
    found = read_results(results)
    page = render(found)
    with whole_file(output) as temporary:
        temporary.write_text(page, encoding="utf-8")
    typer.echo(f"wrote {output}")
    if found.left_out:
        typer.echo(f"left out, of no known kind: {', '.join(found.left_out)}", err=True)
