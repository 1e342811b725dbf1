"""``onchip ladder``: every rung from naive attention up, predicted for a GPU, executed and counted here, timed on this machine."""
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from onchip.bench.torch_extra import load_torch
from onchip.cli import options as opt
from onchip.cli.common import JsonOption, PlotOption, console, human_bytes, human_time, make_table, print_json, save_plot, working
from onchip.cli.roofline import draw, problem_report, rung_report
from onchip.errors import InputError, MissingExtra, require
from onchip.ladder.climb import Step, climb
from onchip.ladder.inputs import Inputs, load_inputs, random_inputs
from onchip.ladder.measure import RUNGS as MEASURED
from onchip.ladder.measure import Report, measure_rungs
from onchip.ladder.measure_backward import measure_backward
from onchip.ladder.rungs import Ladder
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.hardware import GPU, find_gpu, parse_gpu
from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Array, Precision
from onchip.simulate.problem import Problem

if TYPE_CHECKING:
    from onchip.ladder.counted import Counted


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="ladder")(ladder)


def ladder(
    inputs: Annotated[Path | None, typer.Option("--inputs", metavar="FILE", rich_help_panel="Problem", show_default="random numbers", help=(
        "q, k and v from a .npz or .safetensors file, shaped (seq, dim), (heads, seq, dim) or (batch, heads, seq, dim); they set the sizes."
    ))] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="Sequence length N.", show_default="1024", rich_help_panel="Problem")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Dimension d.", show_default="64", rich_help_panel="Problem")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Query heads.", show_default="8", rich_help_panel="Problem")] = None,
    kv_heads: opt.KvHeadsOption = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Batch size.", show_default="1", rich_help_panel="Problem")] = None,
    causal: opt.CausalOption = False, dtype: Annotated[str | None, typer.Option("--dtype", show_default="bf16, or the file's", help=(
        "Format of Q, K, V and O, and of S and P where they go through memory."), rich_help_panel="Problem")] = None,
    gpu: opt.GpuOption = "h200", tile: opt.TileOption = "128x64",
    backward: Annotated[bool, typer.Option("--backward", help="Climb the backward's rungs instead.")] = False,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Time the rungs on this machine, where torch is installed."
                                          )] = True,
    counters: Annotated[bool, typer.Option("--counters", help=(
        "On a GPU: run its rungs under Nsight Compute as well and put counted bytes beside predicted ones."))] = False,
    ncu: Annotated[Path | None, typer.Option("--ncu", metavar="FILE", help="Nsight Compute's program.", show_default="found")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random numbers.")] = 0,
    as_json: JsonOption = False, plot: PlotOption = None,
) -> None:
    """Climb from naive attention to FlashAttention-2: what each step moves, why, and what it would take on a GPU.

    Each rung's tile schedule is **executed** on real numbers with every byte it asks of memory counted. The counts must equal the ledger's
    closed form to the byte, and the result is held against float64. From the same ledger come the bytes an L2 of the card's size lets
    through to DRAM, the roof that binds and the predicted time. Large problems execute a sample of query tiles and say so; counts stay
    exact.

    Where torch is installed the same ideas are then timed on **this** machine, beside what it could do at best: its own copy bandwidth and
    matmul rate, measured first. On a CPU they are plain torch (naive, tiled, online); on a GPU every rung is a kernel, from eager torch
    to the library's own, beside the time its ledger predicts for this very card.

    Examples:

    - `onchip ladder --inputs examples/data/minilm_qkv.npz` uses q, k and v of a real model reading real text (what `make ladder` runs).
    - `onchip ladder --seq 4096 --head-dim 128 --causal --gpu a100-80gb --tile 64x64` is any other problem, on random numbers.
    - `onchip ladder --seq 512 --backward` climbs the backward.
    - `onchip ladder --no-measure --json` prints numbers for a script.
    - `onchip ladder --seq 8192 --head-dim 128 --counters` on a GPU counts what each kernel moved. Should that fail, all the rest is printed
      before the reason, and the exit status is 2.
    """
    profiler = find_profiler(ncu) if counters else None
    card, causality = parse_gpu(gpu), "bottom-right" if causal else None
    sizes = {"--seq": seq, "--head-dim": head_dim, "--heads": heads, "--kv-heads": kv_heads, "--batch": batch}
    data = _inputs(inputs, sizes, causality, seed)
    formats = Formats(dtype or data.dtype, dtype or data.dtype)
    shape = data.shape(causality)
    top = Ladder(shape, check_tile(opt.parse_tile(tile, card), shape, formats, card), formats, card)
    problem = Problem(shape, Precision(formats.inputs), data.q, data.k, data.v, normal_like_out(shape, seed) if backward else None)
    with working("executing", len(top.rungs(backward=backward))) as step:
        steps = list(climb(top, problem, backward=backward, on_rung=lambda rung: step(rung.title)))
    timed = time_here(data, causality, backward) if measure else None
    if not as_json:  # before anything is counted: that may take minutes, and fail
        show(top, data, steps)
        if timed is not None:
            show_timed(timed)
    if plot:
        save_plot(plot, lambda figure: draw(figure, top, [(s.rung, s.pipeline, s.prediction) for s in steps]))
    counted, failure = None, None
    if profiler is not None:
        try:
            counted = count_here(top, profiler, backward)
        except InputError as error:
            failure = error
    if as_json:
        print_json({**problem_report(top), "inputs": data.source, "rungs": [step_report(s) for s in steps],
                    "this_machine": asdict(timed) if isinstance(timed, Report) else None,
                    "counted": None if counted is None else [asdict(c) for c in counted]})
    elif counted is not None:
        show_counted(counted)
    if failure is not None:
        raise failure


DEFAULTS = {"--seq": 1024, "--head-dim": 64, "--heads": 8, "--kv-heads": None, "--batch": 1}


def _inputs(path: Path | None, sizes: dict[str, int | None], causal: str | None, seed: int) -> Inputs:
    """The file's q, k and v, or random ones of the sizes asked for."""
    if path is not None:
        given = [option for option, value in sizes.items() if value is not None]
        require(not given, ", ".join(given), "together with --inputs", "one or the other: the file sets the sizes")
        return load_inputs(path)
    seq, head_dim, heads, kv_heads, batch = (DEFAULTS[option] if value is None else value for option, value in sizes.items())
    assert seq is not None
    assert head_dim is not None
    assert heads is not None
    assert batch is not None
    shape = opt.build_shape(seq, None, head_dim, None, heads, kv_heads, batch, causal is not None, False, None)
    return replace(random_inputs(shape, seed), dtype="bfloat16")


def normal_like_out(shape: AttentionShape, seed: int) -> Array:
    """A gradient to send back: normally distributed, shaped as the output."""
    return np.random.default_rng(seed + 1).standard_normal((shape.batch, shape.heads, shape.seq_q, shape.head_dim_v))


def check_tile(tile: Tile, shape: AttentionShape, formats: Formats, card: GPU) -> Tile:
    """`tile` if a block of `card` can hold Q, K and V of it (single-buffered, unpadded); otherwise `InputError` with both figures."""
    rows, keys = min(tile.br, shape.seq_q), min(tile.bc, shape.seq_k)
    needed = (rows * shape.head_dim + keys * (shape.head_dim + shape.head_dim_v)) * formats.e
    require(needed <= card.smem_per_block, "--tile", f"{tile.br}x{tile.bc}, whose Q, K and V take {needed:,} B of shared memory",
            f"at most the {card.smem_per_block:,} B a block of the {card.title} may have")
    return tile


def step_report(step: Step) -> dict[str, Any]:
    """One rung's figures: those of ``onchip roofline`` and what the execution added."""
    result = step.result
    return {
        **rung_report(step.rung, step.pipeline, step.prediction), "counted_bytes": result.issued, "on_chip_peak_bytes": result.peak,
        "executed_share": result.executed, "tiles": dict(result.tiles),
        "error": {name: asdict(error) for name, error in result.errors.items()},
    }


def show(top: Ladder, data: Inputs, steps: list[Step]) -> None:
    """What a person reads: a row a rung, then what each rung changes."""
    console.print(f"[bold]{opt.describe(top.shape, top.formats.inputs, top.tile)}[/bold]; q, k, v: {data.source}")
    table = make_table(f"executed and counted here, times predicted for one {top.gpu.title}", ("rung", "roof"),
                       "rung", "issued", "DRAM", "FLOP/B", "roof", "SMs", "time", "speed-up", "on chip", "error")
    first = steps[0].prediction.time
    for step in steps:
        p, t = step.pipeline, step.prediction
        table.add_row(step.rung.title, human_bytes(step.result.issued), human_bytes(t.dram_bytes), f"{p.intensity:.1f}", t.binding,
                      str(min(top.gpu.sms, max(k.blocks for k in p.kernels))), human_time(t.time), f"{first / t.time:.2f}x",
                      human_bytes(step.result.peak), f"{step.error:.1e}")
    console.print(table)
    console.print(f"Every byte was counted while the tiles were executed, and equals the closed form; compulsory: "
                  f"{human_bytes(steps[-1].pipeline.compulsory)}. On chip: most bytes a thread block held at once, registers included. "
                  f"Error: ‖x − t‖/‖t‖ against float64 on the same {top.formats.inputs} inputs.")
    share = min(step.result.executed for step in steps)
    if share < 1:
        console.print(f"A sample of the query tiles was executed (at least {share:.2g} of the rows), the others walked and counted.")
    for step in steps:
        console.print(f"[bold]{step.rung.title}[/bold]: {step.rung.lesson}.")
    for note in opt.notes(top.gpu):
        console.print(note, style="dim")


def time_here(data: Inputs, causal: str | None, backward: bool = False) -> Report | str | None:
    """The rungs timed on this machine's GPU or CPU, a backward's on a GPU alone; without torch, the sentence that says how to get it."""
    with working("timing on this machine", 1 + len(MEASURED)) as step:
        try:
            device = "cuda" if load_torch("timing the rungs on this machine").cuda.is_available() else "cpu"
            if not backward:
                return measure_rungs(data, device, causal, on_rung=step)
            return measure_backward(data, device, causal, on_rung=step) if device == "cuda" else None
        except MissingExtra as error:
            return str(error)


def find_profiler(named: Path | None) -> Path:
    """Nsight Compute, on a machine that it can count on: asked before anything runs."""
    torch = load_torch("counting what kernels move")
    require(torch.cuda.is_available(), "--counters", "a machine without an NVIDIA GPU", "a GPU, whose counters Nsight Compute reads")
    from onchip.bench.counters import find_ncu, find_reader

    ncu = find_ncu(named)
    find_reader(ncu)
    find_gpu(torch.cuda.get_device_name())
    return ncu


def count_here(top: Ladder, ncu: Path, backward: bool = False) -> "list[Counted]":
    """The GPU's rungs under Nsight Compute, against the card they run on."""
    torch = load_torch("counting what kernels move")
    from onchip.ladder.counted import count_rungs
    from onchip.ladder.gpu import GPU_RUNGS, needed_bytes, problem_of
    from onchip.ladder.gpu_backward import BACKWARD_RUNGS

    problem, free = problem_of(top.shape, top.formats.inputs), torch.cuda.mem_get_info()[0]
    if backward:
        keys = [rung.key for rung in BACKWARD_RUNGS if rung.refusal(problem) is None and rung.needed_bytes(problem) < free]
    else:
        keys = [rung.key for rung in GPU_RUNGS if rung.refusal(problem) is None and needed_bytes(rung, problem) < free]
    with working("counting", 1) as step:
        step("Nsight Compute")
        return count_rungs(top.shape, top.formats.inputs, keys, find_gpu(torch.cuda.get_device_name()), ncu)


def beside(counted: float, predicted: float | None) -> str:
    """'86 % (73 %)'."""
    return f"{counted:.0f} %" + ("" if predicted is None else f" ({predicted:.0f} %)")


def show_counted(counted: "list[Counted]") -> None:
    """Counted beside predicted; in brackets what was predicted of the tensor pipe and the occupancy."""
    table = make_table("counted by Nsight Compute, caches cold", ("rung",), "rung", "DRAM", "predicted", "ratio", "L2 ↔ SMs", "issued",
                       "ratio", "tensor pipe", "occupancy", "registers", "conflicts")
    for c in counted:
        table.add_row(c.title, human_bytes(c.dram_bytes), human_bytes(c.dram_predicted), f"{c.dram_ratio:.2f}", human_bytes(c.sm_bytes),
                      human_bytes(c.issued), f"{c.issued_ratio:.2f}", beside(c.tensor_pipe, c.tensor_pipe_predicted),
                      beside(c.occupancy, c.occupancy_predicted), str(c.registers), f"{c.conflicts:.3g}")
    console.print(table)


def show_timed(timed: Report | str) -> None:
    """What this machine made of the same ideas."""
    if isinstance(timed, str):
        console.print(timed, markup=False)  # it has brackets of its own
        return
    on_gpu = any(m.predicted is not None for m in timed.measurements)
    what = "the kernels, timed on this GPU" if on_gpu else "the same ideas in plain torch, timed on this machine"
    table = make_table(f"{what} in {timed.dtype}", ("rung", "roof"), "rung", "time", *("predicted", "roof", "speed-up") * on_gpu, "GFLOP/s",
                       "of matmul", "of copy", "peak memory", "error")
    first = timed.measurements[0].seconds if timed.measurements else 0.0
    for m in timed.measurements:
        predicted = ("" if m.predicted is None else human_time(m.predicted), m.roof or "", f"{first / m.seconds:.2f}x")
        table.add_row(m.title, human_time(m.seconds), *predicted * on_gpu, f"{m.flops / 1e9:.3g}", f"{m.matmul_share:.0%}",
                      f"{m.copy_share:.0%}", human_bytes(m.peak_bytes), f"{m.error.rms:.1e}")
    console.print(table)
    if any(max(m.matmul_share, m.copy_share) > 1 for m in timed.measurements):
        console.print("A share above 100 %: the machine was busy while its ceilings were measured, or the data stays in its cache.")
    for key, reason in timed.skipped.items():
        console.print(f"{MEASURED.get(key, key)} was not run: {reason}.")
    console.print(f"Measured first, on the {timed.ceilings}. Peak memory: most bytes alive beyond q, k and v.")
