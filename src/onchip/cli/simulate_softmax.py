"""``onchip simulate softmax``: how m, l and the error of a row evolve, block by block, under four ways to choose the shift."""
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.numpy
import typer
from rich.table import Table

from onchip.cli.common import JsonOption, PlotOption, console, json_number, make_table, print_json, progress, save_plot
from onchip.errors import InputError, require
from onchip.ladder.inputs import reading
from onchip.simulate.formats import Array, parse_format
from onchip.simulate.trace import MODES, Trace, block_order, exp_limit, trace

SHOWN = 16  # blocks in a table; of more, the first and the last half of these

# Rows of the given length, each of unit size; --scale multiplies them.
DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "spike": lambda rng, n: np.where(np.arange(n) == 3 * n // 4, 20.0, rng.standard_normal(n)),
    "ramp": lambda rng, n: np.linspace(0, 20, n),
}


def softmax(
    values: Annotated[str | None, typer.Option("--values", metavar="X,X,…", help="The row itself; -inf marks a masked element.",
                                               rich_help_panel="Row", show_default=False)] = None,
    inputs: Annotated[Path | None, typer.Option("--inputs", metavar="FILE", rich_help_panel="Row", show_default=False,
                                                help="A row from a .npy, .npz or .safetensors file of one 1-D or 2-D array.")] = None,
    row: Annotated[int, typer.Option("--row", help="Which row of a 2-D array.", rich_help_panel="Row")] = 0,
    n: Annotated[int, typer.Option("--n", help="Elements of a generated row.", rich_help_panel="Row")] = 4096,
    distribution: Annotated[str, typer.Option("--distribution", rich_help_panel="Row",
                                              help="normal (σ = 1), uniform (−1 … 1), spike (normal, and a 20 three quarters along), "
                                                   "ramp (0 … 20).")] = "normal",
    scale: Annotated[float, typer.Option("--scale", help="Multiplies a generated row.", rich_help_panel="Row")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of a generated row.", rich_help_panel="Row")] = 0,
    block: Annotated[int | None, typer.Option("--block", help="Elements of a block; the last one may be ragged.",
                                              show_default="an eighth of the row")] = None,
    order: Annotated[str, typer.Option("--order", help="Blocks as visited: forward, reverse, or their numbers, e.g. 2,0,1.")] = "forward",
    dtype: Annotated[str, typer.Option("--format", help="Format of x, the exponentials and y: fp64, fp32, fp16, bf16, e4m3 …")] = "fp32",
    state: Annotated[str | None, typer.Option("--state-format", help="Format of m, l and the arithmetic.",
                                              show_default="fp32, fp64 where --format is")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="One of naive, safe, online, anchored, in more detail.",
                                             show_default="all, side by side")] = None,
    as_json: JsonOption = False, plot: PlotOption = None,
) -> None:
    """Softmax of one row, block by block: m, l, the rescale factor and the error against float64, in any number format.

    Four ways to choose the shift of exp(x − shift) run side by side:

    - **naive**: none. Overflows once x exceeds ln(largest finite value): 11.09 in fp16, 88.7 in fp32.
    - **safe**: the row's maximum, found by a pass of its own.
    - **online**: the running maximum m; what l holds is rescaled by e^(m_old − m) when it grows.
    - **anchored**: the first visited block's maximum, kept. At the end one check of the range says whether the result stands or `online`
      must redo the row.

    (m, l) takes a single pass over the row (safe: two). The probabilities take one more: no mode computes them in a single pass.

    Examples:

    - `onchip simulate softmax --values 1,3,2,4 --block 2` is the textbook merge: l = 1.1353, rescaled 0.41767, then 1.553.
    - `onchip simulate softmax --distribution spike --format fp16` shows where naive and anchored overflow.
    - `onchip simulate softmax --values=-inf,-inf,2,4 --block 2 --mode online` begins with a masked block.
    - `onchip simulate softmax --distribution ramp --order reverse --format bf16 --plot trace.png` draws m and l.
    """
    x, source = _row(values, inputs, row, n, distribution, scale, seed)
    fmt = parse_format(dtype, "--format")
    require(mode is None or mode in MODES, "--mode", repr(mode), ", ".join(MODES))
    block = -(-x.size // 8) if block is None else block
    require(block >= 1, "--block", block, "a whole number ≥ 1")
    block_order(order, x.size, block)  # refuse before the progress bar
    modes = list(MODES) if mode is None else [mode]
    traces = [trace(x, block, each, order=order, dtype=fmt.name, state=state or "") for each in progress(modes, len(modes), "softmax")]
    title = (f"Softmax of {x.size:,} {fmt.name} values ({source}) in {len(traces[0].steps):,} blocks of {block:,}, visited {order}; "
             f"m and l in {traces[0].state}")
    if as_json:
        print_json({"n": x.size, "source": source, "block": block, "order": [s.block for s in traces[0].steps], "format": fmt.name,
                    "state_format": traces[0].state, "exp_overflows_above": exp_limit(fmt), "modes": {t.mode: _report(t) for t in traces}})
    else:
        console.print(title, markup=False)
        console.print(_summary(traces))
        console.print(_side_by_side(traces) if mode is None else _detail(traces[0]))
        for line in _in_words(traces, exp_limit(fmt), fmt.name):
            console.print(line)
    if plot:
        save_plot(plot, lambda figure: _draw(figure, traces, title), (8.0, 6.0))


# --- the row


def _row(values: str | None, inputs: Path | None, row: int, n: int, distribution: str, scale: float, seed: int) -> tuple[Array, str]:
    """The row and where it comes from, in words."""
    require(values is None or inputs is None, "--values", f"{values} and --inputs {inputs}", "one of the two")
    if values is not None:
        try:
            return np.array([float(value) for value in values.split(",")]), "given"
        except ValueError:
            raise InputError(f"--values: got {values!r}, accepted: numbers with commas between, e.g. 1,3,-inf,4") from None
    if inputs is not None:
        return _read(inputs, row), f"{inputs.name}, row {row}"
    require(n >= 1, "--n", n, "a whole number ≥ 1")
    require(distribution in DISTRIBUTIONS, "--distribution", repr(distribution), ", ".join(DISTRIBUTIONS))
    require(math.isfinite(scale), "--scale", scale, "a finite number")
    require(seed >= 0, "--seed", seed, "a whole number ≥ 0")
    return scale * DISTRIBUTIONS[distribution](np.random.default_rng(seed), n), f"{distribution} × {scale:g}, seed {seed}"


def _read(path: Path, row: int) -> Array:
    """One row of the single array in a file."""
    require(path.suffix in (".npy", ".npz", ".safetensors"), "--inputs", path.name, "a name ending in .npy, .npz or .safetensors")
    with reading(path):
        if path.suffix == ".safetensors":
            arrays = list(safetensors.numpy.load_file(path).values())
        else:
            with path.open("rb") as file:
                loaded = np.load(file, allow_pickle=False)
                arrays = [loaded] if isinstance(loaded, np.ndarray) else list(loaded.values())
    require(len(arrays) == 1, "--inputs", f"{len(arrays)} arrays in {path.name}", "a file of one array")
    matrix = np.atleast_2d(arrays[0])
    require(matrix.ndim == 2 and matrix.size > 0, "--inputs", f"shape {arrays[0].shape} in {path.name}", "(n,) or (rows, n)")
    require(np.can_cast(matrix.dtype, np.float64, "same_kind"), "--inputs", f"{matrix.dtype} in {path.name}", "real numbers")
    require(0 <= row < len(matrix), "--row", row, f"0 … {len(matrix) - 1}")
    return matrix[row].astype(np.float64)


# --- what is shown


def _report(t: Trace) -> dict[str, Any]:
    error = t.error
    return {
        "passes_for_m_and_l": MODES[t.mode], "passes_for_probabilities": 1, "m": json_number(t.m), "l": json_number(t.l),
        "max_abs_error": json_number(error.max_abs), "relative_error": json_number(error.relative), "rms_error": json_number(error.rms),
        "breakdown": asdict(t.breakdown) if t.breakdown else None, "redo": t.redo,
        "steps": [{key: json_number(value) for key, value in asdict(step).items()} for step in t.steps],
    }


def _figure(value: float) -> str:
    text = f"{value:.5g}"
    return f"{value:.2e}" if "e" in text else text  # at most eight characters, so that a table's eight columns fit a terminal


def _error(value: float) -> str:
    return f"{value:.1e}"


def _summary(traces: list[Trace]) -> Table:
    table = make_table("", ("mode", "verdict"), "mode", "passes:\nm, l + y", "m", "l", "largest\n|error|", "largest\n/ max y", "rms\nerror",
                       "verdict")
    for t in traces:
        verdict = f"breaks in block {t.breakdown.block}" if t.breakdown else "redo" if t.redo else "stands"
        table.add_row(t.mode, f"{MODES[t.mode]} + 1", _figure(t.m), _figure(t.l), _error(t.error.max_abs), _error(t.error.relative),
                      _error(t.error.rms), verdict)
    return table


def _shown(count: int) -> list[int | None]:
    """Indices of the steps a table shows; None stands for those left out."""
    if count <= SHOWN:
        return list(range(count))
    return [*range(SHOWN // 2), None, *range(count - SHOWN // 2, count)]


def _side_by_side(traces: list[Trace]) -> Table:
    table = make_table("After each block: l of every mode, and what online does to reach it", (),
                       "block", *(f"{t.mode}\nl" for t in traces if t.mode != "online"), "online\nm", "e^Δm", "l · e^Δm", "l")
    online = next(t for t in traces if t.mode == "online")
    for index in _shown(len(online.steps)):
        if index is None:
            table.add_row("…")
            continue
        step = online.steps[index]
        others = (_figure(t.steps[index].l) for t in traces if t is not online)
        table.add_row(str(step.block), *others, *map(_figure, (step.m, step.factor, step.carried, step.l)))
    return table


def _detail(t: Trace) -> Table:
    table = make_table(f"{t.mode}, block by block", (), "block", "max x", "m", "e^Δm", "l · e^Δm", "l", "|error|\nof l", "|error|\n/ l")
    for index in _shown(len(t.steps)):
        if index is None:
            table.add_row("…")
            continue
        s = t.steps[index]
        table.add_row(str(s.block), *map(_figure, (s.block_max, s.m, s.factor, s.carried, s.l)), _error(s.abs_error), _error(s.rel_error))
    return table


def _in_words(traces: list[Trace], limit: float, name: str) -> list[str]:
    lines = []
    for t in traces:
        redone = "; online must redo the row" if t.redo else ""
        if t.breakdown:
            where = f"block {t.breakdown.block}" + (f", element {t.breakdown.element}" if t.breakdown.element is not None else "")
            lines.append(f"[bold]{t.mode}[/bold] breaks at {where}: {t.breakdown.message}{redone}.")
        elif t.redo:
            lines.append(f"[bold]{t.mode}[/bold]: {t.redo}{redone}.")
    if all(step.block_max == -math.inf for step in traces[0].steps):
        lines.append("Every element is −inf: every probability is NaN, as in torch.")
    passes = "two passes" if [t.mode for t in traces] == ["safe"] else "a single pass" + (" (safe: two)" if len(traces) > 1 else "")
    if len(traces[0].steps) > SHOWN:
        lines.append(f"{len(traces[0].steps) - SHOWN:,} blocks are left out of the table; --json has them all.")
    return [
        *lines,
        f"(m, l) took {passes} over the row; the probabilities y = exp(x − m) / l took one more.",
        f"Errors are distances from float64 on the row as {name} stores it; exp overflows {name} above {limit:.2f}.",
    ]


def _draw(figure: Any, traces: list[Trace], title: str) -> None:
    """m above, l below, one line a mode; a vertical line where a mode breaks."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=9)
    for colour, line, t in zip(("C0", "C1", "C2", "C3"), ("-", "--", "-.", ":"), traces, strict=False):
        for axes, values in ((upper, [s.m for s in t.steps]), (lower, [s.l for s in t.steps])):
            axes.plot([value if math.isfinite(value) else math.nan for value in values], line, marker=".", color=colour, label=t.mode)
        if t.breakdown:
            at = [s.block for s in t.steps].index(t.breakdown.block)
            for axes in (upper, lower):
                axes.axvline(at, color=colour, linestyle=line, alpha=0.4, label=f"{t.mode} breaks")
    positive = any(0 < s.l < math.inf for t in traces for s in t.steps)
    upper.set(ylabel="shift m")
    lower.set(ylabel="sum l", xlabel="blocks visited", yscale="log" if positive else "linear")
    upper.legend(fontsize=8)
    for axes in (upper, lower):
        axes.grid(True, alpha=0.2)
