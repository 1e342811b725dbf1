"""What every command shares: output as a table or as JSON, files written whole or not at all, progress bars."""
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from onchip.errors import InputError, MissingExtra

# Off a terminal (a pipe, a log) there is no width to fit: 120 columns hold every table.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables: exact numbers, stable field names.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the picture into FILE (.png or .svg; needs onchip[plot]).")
]


def print_json(value: Any) -> None:
    """Print `value` as JSON on standard output, without colours or wrapping."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def json_number(value: float) -> float | str:
    """JSON has no infinity and no NaN: they become strings that float() reads."""
    return value if math.isfinite(value) else str(value)


def make_table(title: str, left: tuple[str, ...], *headings: str) -> Table:
    """A table in the house's form: the columns named in `left` are words, the others numbers; eight columns fit 80 characters."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it onto `path` when the block succeeds, remove it when it fails."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=f".tmp{path.suffix}", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_plot(path: Path, draw: Callable[[Any], None], size: tuple[float, float] = (8.0, 4.5)) -> None:
    """Call ``draw(figure)`` on a fresh matplotlib figure and write it to `path` (.png or .svg)."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"--plot: got {path.name}, accepted: a name ending in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("--plot", "matplotlib", "plot") from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150)
    typer.echo(f"wrote {path}", err=True)  # standard output is for the answer


@contextmanager
def working(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error for work in `total` steps; call the value with the name of each step as it starts.

    The bar vanishes when done and is not drawn off a terminal.
    """
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(label, total=total, completed=-1)
        yield lambda step: bar.update(task, advance=1, description=f"{label}: {step}")


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield `items` under the bar of `working`."""
    with working(label, total) as step:
        for item in items:
            step(str(item))
            yield item


def human_bytes(count: float) -> str:
    """Decimal units, three digits: 8623489024 → '8.62 GB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def human_time(seconds: float) -> str:
    """'123 ns', '4.56 µs', '7.89 ms', '1.23 s'."""
    for scale, unit in ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms")):
        if seconds < 999.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"
