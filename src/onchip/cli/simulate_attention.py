"""``onchip simulate attention``: a schedule executed tile by tile, every byte counted beside its closed form, the error against float64."""
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from onchip.cli import options as opt
from onchip.cli.common import JsonOption, PlotOption, console, human_bytes, make_table, print_json, save_plot
from onchip.cli.simulate_softmax import json_number
from onchip.errors import require
from onchip.ladder.climb import sample_size
from onchip.ladder.rungs import RUNGS, Choices
from onchip.roofline.attention import Formats
from onchip.roofline.ledger import Pipeline
from onchip.simulate.formats import Precision, parse_format
from onchip.simulate.problem import Problem, Result


def attention(
    schedule: Annotated[str, typer.Option("--schedule", help=f"One of {', '.join(RUNGS)}.")] = "fa2",
    seq: opt.SeqOption = 512, seq_k: opt.SeqKOption = None, head_dim: opt.HeadDimOption = 64, head_dim_v: opt.HeadDimVOption = None,
    heads: opt.HeadsOption = 1, kv_heads: opt.KvHeadsOption = None, batch: opt.BatchOption = 1, causal: opt.CausalOption = False,
    top_left: opt.TopLeftOption = False, window: opt.WindowOption = None,
    tile: opt.TileOption = "64x64",
    splits: Annotated[int, typer.Option("--splits", help="Parts the keys are split into (split_kv).")] = 4,
    sram: Annotated[int | None, typer.Option("--sram", metavar="BYTES", show_default="no bound",
                                             help="On-chip bytes of a thread block, registers included; more is an error.")] = None,
    inputs_format: Annotated[str, typer.Option("--inputs-format", help="Format of Q, K, V, O: fp64, fp32, fp16, bf16, e4m3 …",
                                               rich_help_panel="Formats")] = "bf16",
    p_format: Annotated[str | None, typer.Option("--p-format", help="Format of P as a matmul's operand, and of S and P in memory.",
                                                 rich_help_panel="Formats", show_default="as --inputs-format")] = None,
    state_format: Annotated[str | None, typer.Option("--state-format", help="Format of m, l, lse, unfinished sums and the arithmetic.",
                                                     rich_help_panel="Formats", show_default="fp32; fp64 for fp64 inputs")] = None,
    accumulation_format: Annotated[str | None, typer.Option("--accumulation-format", help="Format of the matmuls' accumulator.",
                                                            rich_help_panel="Formats", show_default="as --state-format")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the normally distributed Q, K, V (and dO).")] = 0,
    sample: Annotated[int | None, typer.Option("--sample", metavar="TILES", show_default="what computes 2²⁴ scores",
                                               help="Query tiles to execute; 0: count only. The counts are always those of all.")] = None,
    as_json: JsonOption = False, plot: PlotOption = None,
) -> None:
    """Execute an attention schedule on random tensors, tile by tile, and count every byte it moves.

    Each kernel's traffic is shown tensor by tensor beside the closed form of the ledger, which it must equal to the byte; then the tiles
    of S that were computed, masked and skipped, the most bytes a thread block held on chip, and the error against float64.

    - **naive_scaled**, **naive**: S and P through memory, with and without separate scale and mask kernels.
    - **tiled**, **online**: S on the chip; the softmax takes three passes over K, or two.
    - **fa1**: K/V outer, O, m and l through memory. **fa2**: Q outer, O on the chip, one division at the end.
    - **split_kv**: the keys in parts, merged by a second kernel; a K/V head's queries are packed into one tile where no mask forbids it.
    - **naive_backward**, **fa2_backward**: the gradients, through stored P and by recomputing it.

    Examples:

    - `onchip simulate attention --schedule fa2 --seq 512 --head-dim 64 --causal` skips the tiles above the diagonal.
    - `onchip simulate attention --schedule fa1 --seq 4096 --head-dim 128 --plot traffic.png` draws what its loop order costs.
    - `onchip simulate attention --schedule fa2 --sram 40000 --tile 128x64` is refused: the message says what does not fit.
    - `onchip simulate attention --inputs-format fp64 --seq 300 --seq-k 200` shows the schedule's own rounding, about 1e-16.
    - `onchip simulate attention --schedule split_kv --seq 1 --seq-k 8192 --heads 8 --kv-heads 1 --splits 16` is a decode step.
    """
    key = schedule.replace("-", "_")
    require(key in RUNGS, "--schedule", repr(schedule), ", ".join(RUNGS))
    shape = opt.build_shape(seq, seq_k, head_dim, head_dim_v, heads, kv_heads, batch, causal, top_left, window)
    require(splits >= 1, "--splits", splits, "a whole number ≥ 1")
    require(seed >= 0, "--seed", seed, "a whole number ≥ 0")
    require(sample is None or sample >= 0, "--sample", sample, "a whole number ≥ 0")
    require(sram is None or sram >= 1, "--sram", sram, "a whole number ≥ 1")
    blocks = opt.parse_tile(tile)
    inputs = parse_format(inputs_format, "--inputs-format").name
    state = parse_format(state_format or ("fp64" if inputs == "float64" else "fp32"), "--state-format")
    precision = Precision(inputs, p_format or "", state.name, accumulation_format or state.name)
    row = shape.seq_k * parse_format(precision.scores).itemsize + 2 * state.itemsize  # of S, with its m and l
    rung, choices = RUNGS[key], Choices(splits, sram is None or row <= sram)
    sample = sample_size(shape, blocks.br) if sample is None else sample
    problem = Problem(shape, precision) if sample == 0 else Problem.random(shape, precision, seed, grad=rung.grad)
    with Console(stderr=True).status(f"executing {key}"):
        result = rung.execute(problem, blocks, choices, sram=sram, sample=sample)
        errors = result.errors
    closed = rung.predict(shape, blocks, Formats(inputs, precision.scores, state.name), choices)
    lines = traffic(result, closed)
    if as_json:
        print_json({"schedule": key, "tile": [blocks.br, blocks.bc], "sram": sram, **_report(result, lines)})
    else:
        _show(result, closed, lines, sram)
        for name, error in errors.items():
            console.print(f"Error of {name} against float64: largest {error.max_abs:.2g}, {error.relative:.2g} of the largest value, "
                          f"rms {error.rms:.2g}.")
    if plot:
        save_plot(plot, lambda figure: _draw(figure, result.name, lines))
    if not all(line.equal for line in lines):
        raise typer.Exit(1)


# --- counted beside closed form


@dataclass(frozen=True)
class Line:
    """Bytes that one kernel reads from, or writes to, one tensor."""

    kernel: str
    tensor: str
    direction: str  # "read" or "written"
    counted: int
    closed_form: int

    @property
    def equal(self) -> bool:
        """To the byte."""
        return self.counted == self.closed_form


def traffic(result: Result, closed: Pipeline) -> list[Line]:
    """Every kernel's traffic, tensor by tensor."""
    lines = []
    for counted, ledger in zip(result.kernels, closed.kernels, strict=True):
        for tensor in dict.fromkeys([s.tensor for s in ledger.streams] + [*counted.reads, *counted.writes]):
            for direction in ("read", "written"):
                got, expected = (getattr(count, direction)(tensor) for count in (counted, ledger))
                if got or expected:
                    lines.append(Line(ledger.name, tensor, direction, got, expected))
    return lines


def _report(result: Result, lines: list[Line]) -> dict[str, Any]:
    """Every figure, unrounded, under stable names."""
    return {
        "title": result.name, "shape": asdict(result.problem.shape), "formats": asdict(result.problem.precision),
        "issued_bytes": result.issued, "equal": all(line.equal for line in lines),
        "traffic": [asdict(line) | {"equal": line.equal} for line in lines],
        "tiles": {kind: result.tiles[kind] for kind in ("full", "masked", "skipped")},
        "on_chip_peak_bytes": result.peak, "on_chip_peak_buffers": result.peak_buffers, "device_memory_bytes": result.memory,
        "executed": result.executed,
        "errors": {name: {key: json_number(value) for key, value in asdict(error).items()} for name, error in result.errors.items()},
    }


def _show(result: Result, closed: Pipeline, lines: list[Line], sram: int | None) -> None:
    """The table and the sentences under it."""
    table = make_table(f"{result.name}: bytes its thread blocks ask device memory for", ("kernel, tensor", "direction", "to the byte"),
                       "kernel, tensor", "direction", "counted", "closed form", "to the byte")
    for kernel in closed.kernels:
        table.add_row(f"[bold]{kernel.name}[/bold]")
        for line in lines:
            if line.kernel == kernel.name:
                table.add_row(f"  {line.tensor}", line.direction, f"{line.counted:,}", f"{line.closed_form:,}",
                              "equal" if line.equal else "[red]differs[/red]")
    console.print(table)
    times, flops = result.issued / closed.compulsory, closed.matmul_flops / result.issued
    console.print(f"Issued: {result.issued:,} B, {times:.3g} times the compulsory {human_bytes(closed.compulsory)}; "
                  f"{flops:.3g} matmul FLOP/B.")
    tiles, total = result.tiles, sum(result.tiles.values())
    console.print(f"Tiles of S: {total:,}, of which {tiles['skipped']:,} skipped; visited {100 * (1 - tiles['skipped'] / total):.1f} %: "
                  f"{tiles['full']:,} whole, {tiles['masked']:,} masked.")
    buffers = ", ".join(f"{name} {size:,}" for name, size in result.peak_buffers.items())
    console.print(f"On-chip peak of a thread block: {result.peak:,} B{f' of {sram:,}' if sram else ''} ({buffers}).")
    if result.executed < 1:
        console.print(f"Executed {100 * result.executed:.3g} % of the query rows; bytes and tiles are those of all of them.")


def _draw(figure: Any, title: str, lines: list[Line]) -> None:
    """Traffic by tensor, reads and writes, all kernels together."""
    tensors = list(dict.fromkeys(line.tensor for line in lines))
    axes = figure.add_subplot()
    left = [0.0] * len(tensors)
    for direction in ("read", "written"):
        widths = [sum(line.counted for line in lines if (line.tensor, line.direction) == (tensor, direction)) / 1e6 for tensor in tensors]
        axes.barh(tensors, widths, left=left, label=direction)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="MB the thread blocks ask for", title=title)
    axes.legend()
