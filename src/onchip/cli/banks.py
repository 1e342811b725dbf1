"""``onchip banks``: bank conflicts of a shared-memory layout as a table, in words, as a map and as a picture."""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from onchip.cli.common import JsonOption, PlotOption, console, make_table, print_json, save_plot
from onchip.errors import InputError, require
from onchip.roofline import banks as model
from onchip.roofline.banks import BANKS, Layout, Phase, Remedy, Request, best_padding, conflicts
from onchip.roofline.dtypes import BYTES, parse_dtype

# A wavefront's number in one character: a map of 32 banks then fits 80 columns, and reads without colours.
TURNS = "123456789abcdefghijklmnopqrstuvw"
LEGEND = "A mark is the wavefront that serves the lane in that bank: 1 … 9, a = 10 … w = 32."
LAYOUT, ACCESS, OUTPUT = "Layout", "Access", "Output"  # panels of the help page


@dataclass(frozen=True)
class Counted:
    """One line of the report: a pattern (or a list of addresses, which no layout can remedy) and what it costs."""

    name: str
    request: Request
    remedy: Remedy | None


def register(app: typer.Typer) -> None:
    """Add the command ``banks`` to `app`."""
    app.command("banks")(banks)


def banks(
    ctx: typer.Context,
    rows: Annotated[int, typer.Option(help="Rows of the tile.", rich_help_panel=LAYOUT)] = 64,
    cols: Annotated[int, typer.Option(help="Elements in a row, padding apart.", rich_help_panel=LAYOUT)] = 64,
    dtype: Annotated[str, typer.Option(help=f"Element format: {', '.join(BYTES)}, or short (fp16).", rich_help_panel=LAYOUT)] = "fp16",
    pad: Annotated[int, typer.Option(help="Unused elements that end each row.", rich_help_panel=LAYOUT)] = 0,
    swizzle: Annotated[str, typer.Option(metavar="|".join(model.SWIZZLES), rich_help_panel=LAYOUT, help=(
        "Permutation of 16-byte chunks: **xor** with the row, or as a TMA copy of that mode writes them."))] = "none",
    pattern: Annotated[list[str] | None, typer.Option(metavar="NAME", rich_help_panel=ACCESS, help=(
        "A pattern named above; repeat it for several. All of them if left out."))] = None,
    addresses: Annotated[str | None, typer.Option(metavar="LIST", rich_help_panel=ACCESS, help=(
        "In place of a tile: up to 32 lanes' byte addresses, numbers and start:stop:step ranges, commas between."))] = None,
    width: Annotated[int | None, typer.Option(rich_help_panel=ACCESS, help=(
        "With --addresses: bytes a lane accesses, 1 to 16 (4 if left out)."))] = None,
    show_table: Annotated[bool, typer.Option("--table", rich_help_panel=OUTPUT, help=(
        "Only print the table of the usual fp16 leading dimensions."))] = False,
    show_map: Annotated[bool, typer.Option("--map", rich_help_panel=OUTPUT, help=(
        "Show which lane meets which bank, and its turn there."))] = False,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the shared-memory bank conflicts of an access pattern on a layout.

    Shared memory answers through 32 banks of 4-byte words. A warp's access is served in phases of at most 128 bytes: 32 lanes × 4 bytes,
    16 × 8, 8 × 16, or the 8 rows of one ldmatrix matrix. Within a phase, lanes that want the *same* word share it, while *different* words
    of one bank queue up. A longest queue of n words is an **n-way conflict**: n wavefronts instead of one, 1/n of the bandwidth.
    An address that is not a multiple of the access's size is **misaligned**: the hardware refuses it, so there is no number.

    For each pattern the table also names the smallest padding, and the first swizzle, that frees it of conflicts.

    **Patterns**

    * **column**, **row**: one element a lane, from (0, 0), on into the next column or row where the tile ends.
    * **column-4B**, **row-4B**, **column-8B**, **row-8B**, **column-16B**, **row-16B**: a vector of so many bytes a lane.
    * **ldmatrix.x1**, **ldmatrix.x2**, **ldmatrix.x4** (or just **ldmatrix**): 8, 16 or 32 rows of 16 bytes. stmatrix and .trans
      use the same addresses.

    **Examples**

    The padded tile of many a tutorial, as the tensor cores' ldmatrix reads it:

        onchip banks --rows 64 --cols 64 --dtype fp16 --pad 8 --pattern ldmatrix

    All patterns on the layout TMA writes and wgmma reads; one of them lane by lane:

        onchip banks --swizzle 128B
        onchip banks --swizzle 128B --pattern column --map

    Is there one padding for two patterns?

        onchip banks --dtype fp32 --pattern column --pattern ldmatrix

    Any other access, by its addresses (here 16 lanes of 8 bytes, 136 bytes apart):

        onchip banks --addresses 0:2176:136 --width 8

    The usual leading dimensions; a picture; figures for a script:

        onchip banks --table
        onchip banks --pad 8 --pattern column --plot banks.svg
        onchip banks --pad 8 --json
    """
    if show_table:
        _refuse_others(ctx, "show_table", "as_json")
        _show_table(as_json)
        return
    layout: Layout | None = None
    left_out: list[str] = []
    if addresses is not None:
        _refuse_others(ctx, "addresses", "width", "show_map", "plot", "as_json")
        with _option_names():
            counted = [Counted("addresses", model.request(_parse_addresses(addresses), 4 if width is None else width), None)]
    else:
        require(width is None, "--width", f"{width} without --addresses", "both or neither")
        with _option_names():
            layout = Layout(rows, cols, BYTES[parse_dtype(dtype)], pad, swizzle)
            counted = [_count(layout, name) for name in dict.fromkeys(map(model.parse_pattern, pattern or ()))]
        if not counted:
            counted, left_out = _count_all(layout)
    if plot:
        save_plot(plot, lambda figure: _draw(figure, layout, counted), (8.0, 4.5) if len(counted) == 1 else (13.0, 9.0))
    if as_json:
        print_json(_as_json(layout, counted, show_map))
        return
    console.print(_as_table(layout, counted))
    for sentence in chain(left_out, _in_words(layout, counted, chosen=bool(pattern or addresses))):
        console.print(sentence)
    if show_map:
        _print_maps(counted)


@contextmanager
def _option_names() -> Iterator[None]:
    """The model names its arguments as the options do, without the dashes."""
    try:
        yield
    except InputError as error:
        raise InputError(f"--{error}") from None


def _refuse_others(ctx: typer.Context, chosen: str, *company: str) -> None:
    """An option that would be ignored is a mistake worth telling."""
    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in (chosen, *company) and source is not None and source.name == "COMMANDLINE":
            accepted = ", ".join(flags[other] for other in company)
            raise InputError(f"{flags[name]}: got it beside {flags[chosen]}, accepted there: {accepted}")


def _parse_addresses(text: str) -> list[int]:
    """``'0,4,0x80:0x100:16'`` → numbers; at most 33 of a range are made, for 32 are the limit."""
    def numbers(part: str) -> list[int]:
        bounds = [int(number, 0) for number in part.split(":")]
        return bounds if len(bounds) == 1 else list(islice(range(*bounds), 33))

    try:
        return list(chain.from_iterable(map(numbers, text.split(","))))
    except (ValueError, TypeError):
        raise InputError(f"addresses: got {text!r}, accepted: integers and start:stop:step ranges, commas between") from None


def _count(layout: Layout, pattern: str) -> Counted:
    return Counted(pattern, conflicts(layout, pattern), best_padding(layout, [pattern]))


def _count_all(layout: Layout) -> tuple[list[Counted], list[str]]:
    """Every pattern that differs on these elements and fits the tile; and a sentence for each that does not fit."""
    counted, left_out = [], []
    for name, walk in model.PATTERNS.items():
        if 0 < walk.width <= layout.element_bytes:
            continue  # an element does not fit in, or the vector is the scalar once more
        try:
            counted.append(_count(layout, name))
        except InputError as error:
            left_out.append(f"Left out ({error}).")
    return counted, left_out


def _written(layout: Layout) -> str:
    """The layout as its declaration: [64][64+8]."""
    swizzle = "" if layout.swizzle == "none" else f" swizzled {layout.swizzle}"
    return f"[{layout.rows}][{layout.cols}{f'+{layout.pad}' if layout.pad else ''}]{swizzle}"


def _style(degree: int | None) -> str:
    return "magenta" if degree is None else "green" if degree == 1 else "yellow" if degree <= 4 else "red"


def _as_table(layout: Layout | None, counted: list[Counted]) -> Table:
    title = ""
    if layout:
        size = f"{layout.nbytes:,} B, {layout.extra_bytes:,} of them unused"
        title = f"{_written(layout)}, {layout.element_bytes} B an element: rows {layout.pitch} B apart, {size}"
    grid = make_table(title, ("pattern", "degree", "freeing\nswizzle"),
                      "pattern", "access", "wave-\nfronts\n(ideal)", "degree", "width\nleft", "freeing\npad", "freeing\nswizzle")
    for item in counted:
        count, remedy = item.request, item.remedy
        padded, swizzled = (remedy.padded, remedy.swizzled) if remedy else (None, None)
        none = "none" if remedy else "–"
        wavefronts = "–" if count.misaligned else f"{count.wavefronts} ({count.ideal})"
        left = "–" if count.bandwidth_left is None else f"{100 * count.bandwidth_left:.3g} %"
        grid.add_row(item.name, f"{len(count.addresses)} × {count.width} B", wavefronts, Text(count.verdict, _style(count.degree)), left,
                     str(padded.pad) if padded else none, swizzled.swizzle if swizzled else none)
    return grid


def _in_words(layout: Layout | None, counted: list[Counted], chosen: bool) -> Iterator[str]:
    """What the degrees mean: a sentence for each pattern asked for, the general one when all are shown, and the trap of padded tiles."""
    if not chosen:
        yield "n-way: in the worst phase one bank holds n of the words asked for and delivers them one after another."
    for item in counted if chosen else ():
        yield f"{item.name}: {_meaning(layout, item.request)}"
        if item.remedy and item.request.degree != 1:
            yield f"  To free it: {_price(item.remedy)}."
    if layout and chosen and len(counted) > 1:
        yield f"To free all of them at once: {_price(best_padding(layout, [item.name for item in counted]))}."
    # what the last sentence derives needs 32 rows, and elements that stay within a word
    if layout and layout.rows >= 32 and layout.cols * layout.element_bytes >= 32 and layout.element_bytes <= 4:
        column = conflicts(layout, "column")
        if conflicts(layout, "ldmatrix").degree == 1 and column.degree != 1:
            yield (f"{_written(layout)}: ldmatrix is clean, while the scalar column stays {column.verdict}. Rows of a multiple of 16 bytes "
                   "start in one of 8 groups of 4 banks, so of 32 rows at least 4 meet in a bank: no padding that ldmatrix accepts, and "
                   "no swizzle of 16-byte chunks, brings the column below 4-way.")


def _meaning(layout: Layout | None, count: Request) -> str:
    if count.misaligned:
        lane = next((lane for lane, address in enumerate(count.addresses) if address % count.width), 0)
        where = f"rows start {layout.pitch} B apart" if layout else f"lane {lane} is at byte {count.addresses[lane]}"
        return f"misaligned, as {where} and an access needs a multiple of its {count.width} B: the hardware raises an error."
    if count.degree == 1:
        return "conflict-free. In every phase the lanes' words lie in different banks or are one and the same: full bandwidth."
    return (f"{count.verdict} conflict. In the worst phase one bank holds {count.degree} of the words asked for and delivers them one "
            f"after another: {count.wavefronts} wavefronts where {count.ideal} would do.")


def _price(remedy: Remedy) -> str:
    padded, swizzled = remedy.padded, remedy.swizzled
    padding = f"--pad {padded.pad} ({padded.extra_bytes:,} B more)" if padded else "no padding does"
    return f"{padding}; " + (f"--swizzle {swizzled.swizzle} ({swizzled.extra_bytes:,} B more)" if swizzled else "no swizzle does")


def _turns(phase: Phase) -> list[list[int]]:
    """Lane by lane and bank by bank: the wavefront that serves the lane there, 0 where it touches nothing."""
    grid = [[0] * BANKS for _ in phase.words]
    for line, words in zip(grid, phase.words, strict=True):
        for word in words:
            line[word % BANKS] = phase.queues[word % BANKS].index(word) + 1
    return grid


def _print_maps(counted: list[Counted]) -> None:
    console.print(f"\n{LEGEND}")
    for item in counted:
        phases = item.request.phases
        if not phases:
            console.print(f"\n{item.name}: misaligned, so there is no map")
        for number, phase in enumerate(phases, 1):
            plural = "s" if phase.wavefronts > 1 else ""
            text = Text(f"\n{item.name}, phase {number} of {len(phases)}: {phase.wavefronts} wavefront{plural}\n")
            text.append("bank   " + "".join(f"{bank:<8}" for bank in range(0, BANKS, 4)) + "\n", "dim")
            for lane, line in enumerate(_turns(phase), phase.first_lane):
                text.append(f"{lane:4}   ", "dim")
                for turn in line:
                    text.append(*((f"{TURNS[turn - 1]} ", f"bold {_style(turn)}") if turn else ("· ", "dim")))
                text.append("\n")
            text.append("words  " + "".join(f"{TURNS[n - 1]} " if n else "· " for n in map(len, phase.queues)))
            console.print(text)


def _draw(figure: Any, layout: Layout | None, counted: list[Counted]) -> None:
    """One panel a request, lanes × banks, coloured by wavefront; a line between phases."""
    across = min(4, len(counted))
    axes = list(figure.subplots(-(-len(counted) // across), across, squeeze=False, sharex=True, sharey=True).flat)
    worst = max(item.request.degree or 1 for item in counted)
    image = None
    for axis, item in zip(axes, counted, strict=False):
        axis.set(title=f"{item.name}: {item.request.verdict}", xlabel="bank", ylabel="lane")
        axis.label_outer()
        lanes = [[turn or float("nan") for turn in line] for phase in item.request.phases for line in _turns(phase)]
        if lanes:
            image = axis.imshow(lanes, aspect="auto", cmap="plasma", vmin=1, vmax=max(worst, 2), interpolation="nearest")
        axis.set(xticks=range(0, BANKS, 8), yticks=range(0, 32, 8), xlim=(-0.5, BANKS - 0.5), ylim=(31.5, -0.5))
        for phase in item.request.phases[1:]:
            axis.axhline(phase.first_lane - 0.5, color="0.5", linewidth=0.8)
    for axis in axes[len(counted):]:
        axis.remove()
    if layout:
        figure.suptitle(f"{_written(layout)}, {layout.element_bytes} B an element")
    if image is not None:
        figure.colorbar(image, ax=figure.axes, label="wavefront that serves the lane", ticks=range(1, worst + 1, max(1, worst // 8)))


def _as_json(layout: Layout | None, counted: list[Counted], with_map: bool) -> dict[str, Any]:
    def remedy(item: Counted) -> dict[str, Any]:
        if item.remedy is None:
            return {}
        padded, swizzled = item.remedy.padded, item.remedy.swizzled
        return {"freeing_pad": padded and padded.pad, "freeing_pad_bytes": padded and padded.extra_bytes,
                "freeing_swizzle": swizzled and swizzled.swizzle, "freeing_swizzle_bytes": swizzled and swizzled.extra_bytes}

    def phases(count: Request) -> list[dict[str, Any]]:
        return [{"first_lane": phase.first_lane, "wavefronts": phase.wavefronts, "lane_banks": phase.banks, "bank_words": phase.queues}
                for phase in count.phases]

    figures = ("width", "addresses", "verdict", "degree", "wavefronts", "ideal", "bandwidth_left")
    return {
        **({"layout": asdict(layout) | {name: getattr(layout, name) for name in ("pitch", "nbytes", "extra_bytes")}} if layout else {}),
        "patterns": [{"pattern": item.name, **{name: getattr(item.request, name) for name in figures}, **remedy(item),
                      **({"phases": phases(item.request)} if with_map else {})} for item in counted],
    }


def _show_table(as_json: bool) -> None:
    entries = list(model.table())
    if as_json:
        print_json([{"cols": layout.cols, "pad": layout.pad, "swizzle": layout.swizzle, "extra_bytes": layout.extra_bytes,
                     "column": column.verdict, "ldmatrix": matrix.verdict} for layout, column, matrix in entries])
        return
    headings = "leading\ndimension", "scalar down a column,\n32 rows", "ldmatrix,\n8 rows × 16 B", "bytes\nmore"
    grid = make_table("A float16 tile of 64 rows", headings[:3], *headings)
    for layout, column, matrix in entries:
        change = f" (+{layout.pad})" if layout.pad else f" {layout.swizzle}" if layout.swizzle != "none" else ""
        verdicts = (Text(count.verdict, _style(count.degree)) for count in (column, matrix))
        grid.add_row(f"{layout.cols + layout.pad}{change}", *verdicts, f"{layout.extra_bytes:,}")
    console.print(grid)
