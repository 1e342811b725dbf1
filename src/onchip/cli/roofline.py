"""``onchip roofline``: bytes, FLOPs and predicted time of every rung on a GPU, in closed form."""
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from onchip.cli import options as opt
from onchip.cli.common import JsonOption, PlotOption, console, human_bytes, human_time, make_table, print_json, save_plot
from onchip.ladder.rungs import Ladder, Rung
from onchip.roofline.attention import Formats, naive
from onchip.roofline.hardware import parse_gpu
from onchip.roofline.ledger import Pipeline
from onchip.roofline.roofs import ROOFS, Prediction, naive_to_fused, predict, speedup_limit

# The two ledgers of naive attention by name: is there a separate scale kernel, and how often a score then crosses the memory bus.
LEDGERS = {"8N^2+8Nd": (False, 4), "12N^2+8Nd": (True, 6)}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="roofline")(roofline)


def roofline(
    seq: opt.SeqOption = 4096, seq_k: opt.SeqKOption = None, head_dim: opt.HeadDimOption = 128, head_dim_v: opt.HeadDimVOption = None,
    heads: opt.HeadsOption = 1, kv_heads: opt.KvHeadsOption = None, batch: opt.BatchOption = 1, causal: opt.CausalOption = False,
    top_left: opt.TopLeftOption = False, window: opt.WindowOption = None, dtype: opt.DtypeOption = "bf16",
    scores_dtype: Annotated[str | None, typer.Option("--scores-dtype", help="Format of S and P where they go through memory.",
                                                     show_default="as --dtype", rich_help_panel="Problem")] = None,
    gpu: opt.GpuOption = "h200", tile: opt.TileOption = "128x64",
    backward: Annotated[bool, typer.Option("--backward", help="The backward's rungs instead of the forward's.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also show every kernel of every rung with all its roofs.")] = False,
    as_json: JsonOption = False, plot: PlotOption = None,
) -> None:
    """What attention costs on a GPU, rung by rung, in closed form: nothing is executed.

    Three byte counts are kept apart: **issued** (what the thread blocks ask for, tile by tile), **DRAM** (what an L2 of the card's size
    lets through) and **compulsory** (inputs and outputs once). A kernel takes as long as the highest of its roofs (DRAM, L2, shared
    memory, tensor cores, exp unit, fp32 pipe); a rung is the sum of its kernels. FLOP/B counts matmul FLOPs a byte issued; SMs is how
    many of the card's the largest grid can keep busy.

    Examples:

    - `onchip roofline --gpu a100-80gb --seq 32768 --head-dim 128` is the famous 32K case: naive → fused 2.400.
    - `onchip roofline --seq 1 --seq-k 65536 --heads 32 --kv-heads 8 --tile 16x128` is a decode step.
    - `onchip roofline --seq 8192 --causal --kernels` shows each kernel's roofs.
    - `onchip roofline --seq 8192 --backward --json` prints numbers for a script.
    """
    card = parse_gpu(gpu)
    shape = opt.build_shape(seq, seq_k, head_dim, head_dim_v, heads, kv_heads, batch, causal, top_left, window)
    ladder = Ladder(shape, opt.parse_tile(tile, card), Formats(dtype, scores_dtype or dtype), card)
    rows = []
    for rung in ladder.rungs(backward=backward):
        pipeline = ladder.pipeline(rung)
        rows.append((rung, pipeline, predict(pipeline, card, ladder.formats.inputs)))
    if as_json:
        print_json(report(ladder, rows))
    else:
        show(ladder, rows, kernels, backward)
    if plot:
        save_plot(plot, lambda figure: draw(figure, ladder, rows))


Row = tuple[Rung, Pipeline, Prediction]


def report(ladder: Ladder, rows: list[Row]) -> dict[str, Any]:
    """Every figure, unrounded, under stable names: bytes, seconds, FLOPs."""
    speedups = classic(ladder)
    return {
        **problem_report(ladder),
        "naive_to_fused": {name: now for name, (now, _) in speedups.items()},
        "naive_to_fused_limit": {name: limit for name, (_, limit) in speedups.items()},
        "naive_textbook_bytes": naive(ladder.shape, formats=ladder.formats).textbook,
        "rungs": [rung_report(*row) for row in rows],
    }


def problem_report(ladder: Ladder) -> dict[str, Any]:
    """The GPU and the problem."""
    card, formats = ladder.gpu, ladder.formats
    return {
        "gpu": {"name": card.name, "knee_flop_per_byte": card.knee(formats.inputs), "source": card.source,
                "assumed": list(card.assumed), "measured": list(card.measured)},
        "shape": asdict(ladder.shape) | {"inputs": formats.inputs, "scores": formats.scores, "tile": [ladder.tile.br, ladder.tile.bc]},
    }


def classic(ladder: Ladder) -> dict[str, tuple[float, float]]:
    """Naive → fused by the two classic roofs, for each ledger: (at this shape, limit for N → ∞ unmasked)."""
    shape, formats, card = ladder.shape, ladder.formats, ladder.gpu
    return {name: (naive_to_fused(shape, card, formats, scale_kernel=scale),
                   speedup_limit(card, formats.inputs, shape.head_dim, passes * formats.es)) for name, (scale, passes) in LEDGERS.items()}


def rung_report(rung: Rung, pipeline: Pipeline, prediction: Prediction) -> dict[str, Any]:
    """One rung's figures."""
    return {
        "rung": rung.key, "title": rung.title, "issued_bytes": pipeline.issued, "textbook_bytes": pipeline.textbook,
        "compulsory_bytes": pipeline.compulsory, "dram_bytes": prediction.dram_bytes, "matmul_flops": pipeline.matmul_flops,
        "useful_flops": pipeline.useful_flops, "exps": pipeline.exps, "flop_per_issued_byte": pipeline.intensity,
        "predicted_s": prediction.time, "binding": prediction.binding,
        "kernels": [{"kernel": k.name, "issued_bytes": k.issued, "dram_bytes": t.dram_bytes, "predicted_s": t.time, "roofs_s": t.seconds}
                    for k, t in zip(pipeline.kernels, prediction.kernels, strict=True)],
    }


def show(ladder: Ladder, rows: list[Row], kernels: bool, backward: bool) -> None:
    """The tables a person reads."""
    card, formats = ladder.gpu, ladder.formats
    table = make_table(f"{card.title}, {opt.describe(ladder.shape, ladder.formats.inputs, ladder.tile)}", ("rung", "roof"),
                       "rung", "issued", "DRAM", "FLOP/B", "roof", "SMs", "time", "speed-up")
    first = rows[0][2].time
    for rung, pipeline, prediction in rows:
        table.add_row(rung.title, human_bytes(pipeline.issued), human_bytes(prediction.dram_bytes), f"{pipeline.intensity:.1f}",
                      prediction.binding, str(min(card.sms, max(k.blocks for k in pipeline.kernels))), human_time(prediction.time),
                      f"{first / prediction.time:.2f}x")
    console.print(table)
    for rung, _, _ in rows:
        console.print(f"[bold]{rung.title}[/bold]: {rung.lesson}.")
    if kernels:
        console.print(kernel_table(rows))
    console.print(f"Compulsory: {human_bytes(rows[-1][1].compulsory)}. "
                  f"Knee of the {card.title}: {card.knee(formats.inputs):.1f} FLOP/B in {formats.inputs}.")
    if not backward:
        for name, (now, limit) in classic(ladder).items():
            console.print(f"Naive → fused by the classic two roofs, ledger {name}: {now:.3f}x (N → ∞, unmasked: {limit:.3f}x)")
    for note in opt.notes(card):
        console.print(note, style="dim")


def kernel_table(rows: list[Row]) -> Table:
    """Every kernel with what each roof asks of it; the one that binds is bold."""
    table = make_table("Kernels and their roofs", ("rung", "kernel"), "rung", "kernel", *ROOFS)
    for rung, _, prediction in rows:
        for k in prediction.kernels:
            cells = ["–" if roof not in k.seconds else human_time(k.seconds[roof]) for roof in ROOFS]
            table.add_row(rung.title, k.name, *(f"[bold]{c}[/bold]" if r == k.binding else c for r, c in zip(ROOFS, cells, strict=True)))
    return table


def draw(figure: Any, ladder: Ladder, rows: list[Row]) -> None:
    """The roofline: the card's roof, and each rung where its DRAM intensity and predicted speed put it."""
    card, dtype = ladder.gpu, ladder.formats.inputs
    axes = figure.add_subplot()
    knee, peak = card.knee(dtype), card.matmul_rate(dtype)
    points = [(p.useful_flops / t.dram_bytes, p.useful_flops / t.time / 1e12, rung.title) for rung, p, t in rows]
    low, high = min(10.0, *(x for x, _, _ in points)) / 2, max(10 * knee, *(2 * x for x, _, _ in points))
    axes.plot([low, knee, high], [low * card.dram_rate / 1e12, peak / 1e12, peak / 1e12], color="black", label=f"roof of the {card.title}")
    for index, (x, y, title) in enumerate(points):
        axes.plot(x, y, "o", color=f"C{index}", label=title)
    axes.set(xscale="log", yscale="log", xlabel="useful FLOP / DRAM byte", ylabel="useful TFLOP/s, predicted")
    axes.set_title(opt.describe(ladder.shape, ladder.formats.inputs, ladder.tile), loc="left", fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
