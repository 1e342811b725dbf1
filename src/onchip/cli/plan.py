"""``onchip plan``: which tile a fused attention kernel should use on a GPU, or what becomes of a given one."""
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from onchip.cli import options as opt
from onchip.cli.common import JsonOption, PlotOption, console, human_time, make_table, print_json, save_plot
from onchip.errors import InputError, require
from onchip.roofline.dtypes import parse_dtype
from onchip.roofline.hardware import GPU, parse_gpu
from onchip.roofline.planner import Plan, plan_tile, rank
from onchip.roofline.reasons import explain, hides_latency, parts
from onchip.roofline.shape import AttentionShape
from onchip.roofline.tiles import (
    MAX_THREADS,
    Footprint,
    Occupancy,
    TileConfig,
    footprint,
    launchable,
    needs_opt_in,
    occupancy,
    register_cap,
    spilled,
)

ONE = "One tile"  # panel of the help page


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="plan")(plan)


def plan(
    seq: opt.SeqOption = 4096, seq_k: opt.SeqKOption = None, head_dim: opt.HeadDimOption = 128, head_dim_v: opt.HeadDimVOption = None,
    heads: opt.HeadsOption = 16, kv_heads: opt.KvHeadsOption = None, batch: opt.BatchOption = 1, causal: opt.CausalOption = False,
    top_left: opt.TopLeftOption = False, window: opt.WindowOption = None, dtype: opt.DtypeOption = "bf16", gpu: opt.GpuOption = "h200",
    backward: Annotated[bool, typer.Option("--backward", help="Plan the backward: a block owns keys and walks the queries.")] = False,
    top: Annotated[int, typer.Option("--top", help="Tiles to list.")] = 8,
    tile: Annotated[str | None, typer.Option("--tile", metavar="BRxBC", rich_help_panel=ONE, show_default=False,
                                             help="Judge this tile of query rows × keys instead of ranking all.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", rich_help_panel=ONE, show_default="1",
                                               help="Buffers of K and V (backward: of Q and dO).")] = None,
    warps: Annotated[int | None, typer.Option("--warps", rich_help_panel=ONE, show_default="4", help="Warps of a uniform kernel.")] = None,
    consumers: Annotated[int | None, typer.Option("--consumers", rich_help_panel=ONE, show_default="none", help=(
        "Make the kernel specialised: 2 or 3 consumer warpgroups and a producer (Hopper)."))] = None,
    pad: Annotated[int | None, typer.Option("--pad", rich_help_panel=ONE, show_default="0, swizzled", help=(
        "Unused elements that end each row in shared memory (uniform kernels)."))] = None,
    p_in_smem: Annotated[bool, typer.Option("--p-in-smem", rich_help_panel=ONE, help=(
        "P goes through shared memory, not registers."))] = False,
    as_json: JsonOption = False, plot: PlotOption = None,
) -> None:
    """Plan the tile of a fused attention kernel: shared memory to the byte, registers, blocks an SM, predicted time.

    Two kinds of kernel are weighed. **Uniform**: all warps alike, mma.sync and cp.async, on every NVIDIA card. **Specialised**: a producer
    warpgroup that only copies (TMA) and 2 or 3 consumer warpgroups that only compute (wgmma), on Hopper. Tiles that cannot launch, or whose
    accumulators spill out of the registers, are left out; the others are ranked by predicted time: the highest roof of the busiest SM, what
    matmul and softmax lose by taking turns, and the load latency that still shows. Occupancy is shown but never ranked by: good attention
    kernels run at 12 to 25 %. Times are for ranking: they know neither power limits nor clocks below boost.

    With `--tile` the command judges that one tile: what it takes, what the card allows, how many blocks fit an SM. A tile that cannot
    launch is named with the reason, and the exit status is 2.

    **Examples**

    The best tiles for a shape; the same for the causal case, the backward, another card:

        onchip plan --seq 4096 --head-dim 128 --gpu h200
        onchip plan --seq 4096 --head-dim 128 --gpu h200 --causal
        onchip plan --seq 4096 --head-dim 128 --gpu h200 --backward
        onchip plan --seq 4096 --head-dim 64 --gpu rtx-4090 --dtype fp16 --top 3

    One tile. Padding by 8 takes 64×64 over the 48 KiB of static shared memory; 256×256 fails on an A100:

        onchip plan --gpu a100 --dtype fp16 --tile 64x64 --pad 8
        onchip plan --gpu a100 --dtype fp16 --tile 256x256 --warps 8

    A Hopper kernel's tile; ceilings you measured in place of the data sheet's; a picture of where the time goes; figures for a script:

        onchip plan --gpu h100 --tile 128x176 --consumers 2 --stages 2
        onchip plan --gpu h200,dram_gbps=4250,bf16_tflops=788
        onchip plan --gpu h200 --plot plan.svg
        onchip plan --gpu h200 --json
    """
    require(top >= 1, "--top", top, "a whole number ≥ 1")
    card = parse_gpu(gpu)
    shape = opt.build_shape(seq, seq_k, head_dim, head_dim_v, heads, kv_heads, batch, causal, top_left, window)
    if tile is None:
        for option, value in (("--stages", stages), ("--warps", warps), ("--consumers", consumers), ("--pad", pad)):
            require(value is None, option, f"{value} without --tile", "it beside --tile BRxBC")
        require(not p_in_smem, "--p-in-smem", "it without --tile", "it beside --tile BRxBC")
        _rank(shape, card, dtype, backward, top, as_json, plot)
    else:
        size = opt.parse_tile(tile)
        require(warps is None or warps >= 1, "--warps", warps, "a whole number ≥ 1")
        try:
            config = TileConfig(size.br, size.bc, stages=1 if stages is None else stages, warps=warps or 0, consumers=consumers or 0,
                                pad=pad or 0, p_in_smem=p_in_smem, backward=backward)
            taken = footprint(config, dtype, shape.head_dim, shape.head_dim_v)
        except InputError as error:
            raise InputError(f"--{error}") from None  # the model names its arguments as the options do
        _judge(taken, shape, card, dtype, as_json, plot)


def _rank(shape: AttentionShape, gpu: GPU, dtype: str, backward: bool, top: int, as_json: bool, plot: PlotOption) -> None:
    ranking = rank(shape, gpu, dtype, backward=backward)
    plans = ranking.plans[:top]
    sentences = explain(ranking, gpu, dtype)
    if as_json:
        print_json(_header(shape, gpu, dtype) | {
            "plans": [_figures(p.footprint, gpu, p) for p in plans], "ranked": len(ranking.plans), "cannot_launch": len(ranking.refused),
            "spilling": len(ranking.spilling), "explanation": sentences})
    else:
        console.print(_ranked_table(plans, f"{gpu.title}, {opt.describe(shape, dtype)}{', backward' * backward}"))
        for sentence in sentences:
            console.print(sentence)
        for note in (LEGEND, *opt.notes(gpu)):
            console.print(note, style="dim")
    if plot:
        save_plot(plot, lambda figure: _draw(figure, plans, f"{gpu.title}, {opt.describe(shape, dtype)}"))


def _judge(taken: Footprint, shape: AttentionShape, gpu: GPU, dtype: str, as_json: bool, plot: PlotOption) -> None:
    reason = launchable(taken, gpu)
    planned = None if reason else plan_tile(taken.config, shape, gpu, dtype)
    if as_json:
        print_json(_header(shape, gpu, dtype) | {"tile": _figures(taken, gpu, planned), "launchable": reason is None, "reason": reason})
    else:
        console.print(f"[bold]{taken.config}[/bold] on {gpu.title}, {opt.describe(shape, dtype)}{', backward' * taken.config.backward}")
        console.print(_verdict_table(taken, gpu))
        for sentence in _verdict(taken, gpu, planned):
            console.print(sentence)
    if planned is None:
        raise InputError(f"--tile: {taken.config} cannot launch: {reason}")
    if plot:
        save_plot(plot, lambda figure: _draw(figure, (planned,), f"{gpu.title}, {opt.describe(shape, dtype)}"))


def _header(shape: AttentionShape, gpu: GPU, dtype: str) -> dict[str, Any]:
    return {"gpu": {"name": gpu.name, "source": gpu.source, "assumed": list(gpu.assumed), "measured": list(gpu.measured)},
            "shape": asdict(shape), "dtype": parse_dtype(dtype)}


def _figures(taken: Footprint, gpu: GPU, planned: Plan | None) -> dict[str, Any]:
    """One tile's figures, unrounded: bytes, seconds, registers a thread."""
    config, resident = taken.config, occupancy(taken, gpu)
    figures = asdict(config) | {
        "threads": taken.threads, "smem_bytes": taken.smem, "buffers": dict(taken.buffers), "needs_opt_in": needs_opt_in(taken, gpu),
        "registers": taken.registers, "register_cap": register_cap(taken, gpu), "spilled_registers": spilled(taken, gpu),
        "blocks_per_sm": resident.blocks, "block_limits": dict(resident.limits), "occupancy": resident.fraction,
    }
    if planned:
        figures |= {
            "predicted_s": planned.time, "useful_tflops": planned.tflops, "binding": planned.binding, "roofs_s": planned.roofs,
            "taking_turns_s": planned.turns, "latency_s": planned.latency, "other_kernels_s": planned.other, "grid_blocks": planned.blocks,
            "balance": planned.balance, "warps_per_scheduler": planned.streams, "dram_bytes": planned.dram_bytes,
        }
    return figures


def _kernel(config: TileConfig) -> str:
    who = f"{config.consumers}+1wg" if config.specialised else f"{config.warps}w"
    return f"{who} ×{config.stages}{', P' * config.p_in_smem}"


LEGEND = ("kernel: warps (w) or consumer + producer warpgroups (wg), × stages; P: goes through shared memory. smem: bytes a block. "
          "regs: a thread. occup.: resident threads of an SM's maximum.")


def _ranked_table(plans: tuple[Plan, ...], title: str) -> Table:
    table = make_table(title, ("tile", "kernel", "roof"), "tile", "kernel", "smem", "regs", "occup.", "roof", "time", "TFLOP/s")
    for p in plans:
        table.add_row(f"{p.config.br}×{p.config.bc}", _kernel(p.config), str(p.footprint.smem), str(p.footprint.registers),
                      f"{p.occupancy.fraction:.2%}", p.binding, human_time(p.time), f"{p.tflops:.{0 if p.tflops >= 100 else 1}f}")
    return table


def _verdict_table(taken: Footprint, gpu: GPU) -> Table:
    table = make_table("", ("a block takes",), "a block takes", "amount", "allowed")
    for name, nbytes in taken.buffers:
        table.add_row(f"  {name}", f"{nbytes} B", "")
    table.add_row("shared memory", f"{taken.smem} B", f"{gpu.smem_per_block} B")
    for name, registers in taken.accumulators:
        table.add_row(f"  {name} in registers", f"{registers:g}", "")
    table.add_row("registers a thread", str(taken.registers), str(register_cap(taken, gpu)))
    table.add_row("threads", str(taken.threads), str(MAX_THREADS))
    return table


def _verdict(taken: Footprint, gpu: GPU, planned: Plan | None) -> list[str]:
    """Sentences on one tile; what the table cannot say."""
    lines = []
    if needs_opt_in(taken, gpu):
        lines.append(f"Over the {gpu.smem_static_limit} B of static shared memory: the kernel must raise its limit (cudaFuncSetAttribute).")
    if spilled(taken, gpu):
        lines.append(f"{spilled(taken, gpu)} registers a thread too many: they would spill to local memory, which no time here counts.")
    if planned:
        resident: Occupancy = planned.occupancy
        allowed = ", ".join(f"{name} {blocks}" for name, blocks in resident.limits)
        lines += [
            f"Launches with {resident.blocks} of these blocks an SM, by {resident.limited_by} ({allowed}).",
            f"{hides_latency(planned, gpu)}.",
            f"Predicted {human_time(planned.time)}, {planned.tflops:.1f} TFLOP/s of useful work, bound by {planned.binding}: "
            + ", ".join(f"{term} {human_time(seconds)}" for term, seconds in parts(planned).items()) + ".",
        ]
    return lines


def _draw(figure: Any, plans: tuple[Plan, ...], title: str) -> None:
    """A bar a tile, stacked from the terms that add up to its time; a tick for each roof."""
    axes = figure.add_subplot()
    colours: dict[str, str] = {}
    for row, planned in enumerate(plans):
        left = 0.0
        for term, seconds in parts(planned).items():
            colour = colours.setdefault(term, f"C{len(colours)}")
            axes.barh(row, seconds * 1e6, left=left * 1e6, color=colour)
            left += seconds
        axes.plot([s * 1e6 for s in planned.roofs.values()], [row] * len(planned.roofs), "|", color="black", markersize=12)
    axes.set_yticks(range(len(plans)), [str(p.config) for p in plans])
    axes.invert_yaxis()
    axes.set(xlabel="predicted µs (black ticks: every roof)")
    figure.suptitle(title, fontsize=10)
    for term, colour in colours.items():
        axes.barh(0, 0, color=colour, label=term)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
