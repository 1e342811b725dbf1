"""``onchip inspect``: what the compiler makes of the kernels of a call, on a machine without a GPU."""
import os
import re
import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from onchip.bench.torch_extra import load_torch
from onchip.cli import options as opt
from onchip.cli.common import JsonOption, console, human_time, make_table, print_json
from onchip.errors import MissingExtra, require
from onchip.roofline.dtypes import parse_dtype
from onchip.roofline.hardware import GPU, GPUS

if TYPE_CHECKING:
    from onchip.bench.kernels import Kernel

# compute capability → a card that has it; Triton's kernels want 8.0
CARDS: dict[str, GPU] = {}
for _gpu in GPUS.values():
    if _gpu.capability and _gpu.capability >= (8, 0):
        CARDS.setdefault("sm_{}{}".format(*_gpu.capability), _gpu)

ArchOption = Annotated[str, typer.Option("--arch", help=f"Compute capability to compile for: {', '.join(CARDS)}.")]
DirectionOption = Annotated[str, typer.Option("--direction", help="forward or backward.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app` as a group of their own."""
    group = typer.Typer(
        name="inspect", no_args_is_help=True, rich_markup_mode="markdown",
        help="Compile the kernels of a call, with no GPU, and report registers, spills, shared memory, occupancy and instructions: "
             "**attention** or **softmax**.")
    group.command(name="attention")(attention)
    group.command(name="softmax")(softmax)
    app.add_typer(group)


def attention(
    seq: opt.SeqOption = 4096, seq_k: opt.SeqKOption = None, head_dim: opt.HeadDimOption = 128, head_dim_v: opt.HeadDimVOption = None,
    heads: opt.HeadsOption = 16, kv_heads: opt.KvHeadsOption = None, batch: opt.BatchOption = 1, causal: opt.CausalOption = False,
    top_left: opt.TopLeftOption = False, window: opt.WindowOption = None, dtype: opt.DtypeOption = "bf16",
    softcap: opt.SoftcapOption = None, dropout: opt.DropoutOption = 0.0, bias: opt.BiasOption = False, mask: opt.MaskOption = False,
    alibi: opt.AlibiOption = False, sinks: opt.SinksOption = False, varlen: opt.VarlenOption = False,
    backend: Annotated[str, typer.Option("--backend", help="hopper, triton, or auto: what that card would run.")] = "auto",
    direction: DirectionOption = "forward", arch: ArchOption = "sm_90", as_json: JsonOption = False,
) -> None:
    """Compile the kernels that a call to `onchip.attention` would start, and report what the compiler made of them.

    For each kernel: its tile, threads a block, registers a thread (of a warp-specialised kernel: at the start), bytes spilled to local
    memory as ptxas counts them, shared memory beside the planner's figure, blocks and warps an SM, and how often the telling instructions
    stand in its code. A fast kernel spills nothing in its loops, has the matmul instruction of its card (wgmma on sm_90) and as few waits
    for it as its source. Compiling takes 1 to 10 s a kernel. Needs Triton, but no GPU.

    With `--json` the spills, matmuls and times of all kernels are also added up, and the largest registers and shared memory given.

    **Examples**

        onchip inspect attention --head-dim 128 --arch sm_90
        onchip inspect attention --head-dim 64 --causal --window 1024,0 --json
        onchip inspect attention --head-dim 128 --direction backward --dtype fp16
        onchip inspect attention --head-dim 128 --arch sm_80 --backend triton
    """
    arch = _ready(arch)
    from onchip.bench import kernels

    shape = opt.build_shape(seq, seq_k, head_dim, head_dim_v, heads, kv_heads, batch, causal, top_left, window)
    problem = opt.build_problem(shape, _dtype(dtype), "cuda", softcap, dropout, bias, mask, alibi, sinks, varlen)
    require(backend in kernels.BACKENDS, "--backend", repr(backend), ", ".join(kernels.BACKENDS))
    require(direction in kernels.DIRECTIONS, "--direction", repr(direction), ", ".join(kernels.DIRECTIONS))
    chosen, made = kernels.attention(problem, backend, direction, CARDS[arch])
    _report(made, arch, f"{opt.describe(shape, dtype)}, {direction} by {chosen}", as_json,
            {"operator": "attention", "backend": chosen, "direction": direction, "problem": asdict(problem)})


def softmax(
    columns: Annotated[int, typer.Option("--columns", help="Elements a row: what is summed over.")] = 4096,
    rows: Annotated[int, typer.Option("--rows", help="Rows.")] = 4096,
    dtype: Annotated[str, typer.Option("--dtype", help="Format of x and the result: bf16, fp16, fp32.")] = "bf16",
    log: Annotated[bool, typer.Option("--log", help="log_softmax.")] = False,
    across: Annotated[bool, typer.Option("--across", help="Softmax over dim 0: neighbours in memory belong to different rows.")] = False,
    mask: Annotated[bool, typer.Option("--mask", help="A boolean mask.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Row i sees the columns up to i + columns − rows.")] = False,
    scale: Annotated[float | None, typer.Option("--scale", help="Factor on x.", show_default="none")] = None,
    direction: DirectionOption = "forward", arch: ArchOption = "sm_90", as_json: JsonOption = False,
) -> None:
    """Compile the kernel that a call to `onchip.softmax` would start, and report what the compiler made of it.

    The same report as of `onchip inspect attention`; a tile is rows × columns, of each of the blocks that share a row. Needs Triton, but
    no GPU.

    **Examples**

        onchip inspect softmax --columns 32768
        onchip inspect softmax --columns 100000 --dtype fp32 --direction backward --json
        onchip inspect softmax --columns 512 --across --arch sm_80
    """
    arch = _ready(arch)
    from onchip.bench import kernels

    for option, value in (("--columns", columns), ("--rows", rows)):
        require(value >= 1, option, value, "a whole number ≥ 1")
    key = _dtype(dtype)
    require(direction in kernels.DIRECTIONS, "--direction", repr(direction), ", ".join(kernels.DIRECTIONS))
    require(not (causal and across), "--causal", "it with --across", "one of the two")
    made = kernels.softmax(rows, columns, key, CARDS[arch], direction, log=log, across=across, masked=mask, causal=causal, scale=scale)
    _report(made, arch, f"{rows} rows of {columns}{' (dim 0)' * across}, {key}, {'log_' * log}softmax {direction}", as_json,
            {"operator": "log_softmax" if log else "softmax", "backend": "triton", "direction": direction,
             "problem": {"rows": rows, "columns": columns, "dtype": key, "across": across, "mask": mask, "causal": causal, "scale": scale}})


def _ready(arch: str) -> str:
    """The name of that compute capability; torch and Triton are there, and Triton compiles."""
    if "triton" not in sys.modules:
        os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is first imported; here kernels are to be compiled
    load_torch("onchip inspect")
    if find_spec("triton") is None:
        raise MissingExtra("onchip inspect", "Triton", "torch")
    name = re.sub(r"^sm_?(\d+)a?$", r"sm_\1", arch.strip().lower())
    require(name in CARDS, "--arch", repr(arch), ", ".join(CARDS))
    return name


def _dtype(name: str) -> str:
    key = parse_dtype(name)
    require(key in ("bfloat16", "float16", "float32"), "--dtype", repr(name), "bf16, fp16, fp32")
    return key


def _report(made: "list[Kernel]", arch: str, what: str, as_json: bool, header: dict[str, Any]) -> None:
    import triton

    if as_json:
        figures = [kernel.figures() for kernel in made]
        added = ("wgmma", "mma", "spill_stores", "spill_loads", "compile_s")
        print_json(header | {"arch": arch, "triton": triton.__version__}
                   | {name: sum(one[name] for one in figures) for name in added}
                   | {name: max(one[name] for one in figures) for name in ("registers", "shared_bytes")} | {"kernels": figures})
        return
    console.print(f"[bold]{what}[/bold] on {arch}, Triton {triton.__version__}")
    table = make_table("", ("kernel",), "kernel", "tile", "threads", "regs", "spills", "smem", "planned", "an SM", "compile")
    for kernel in made:
        one = kernel.compiled
        blocks = kernel.occupancy.blocks
        table.add_row(
            _name(kernel), f"{f'{kernel.sharing} of ' * (kernel.sharing > 1)}{kernel.rows}×{kernel.columns or 'all'}", str(one.threads),
            str(one.registers), f"{one.spill_stores}+{one.spill_loads}", str(one.shared), str(kernel.planned or "–"),
            f"{blocks}×{kernel.occupancy.threads // 32}", human_time(one.seconds))
    console.print(table)
    console.print(LEGEND, style="dim")
    console.print(_instructions(made))
    for kernel in made:
        one = kernel.compiled
        if not kernel.occupancy.blocks:
            console.print(f"{one.name} does not fit an SM of {arch}: {kernel.occupancy.limited_by}.")
        for note in one.notes:
            console.print(f"ptxas on {one.name}: {note}", markup=False)
    if any(kernel.compiled.counted_in == "PTX" for kernel in made):
        console.print("No disassembler (cuobjdump) in this Triton: the instructions are PTX's, before ptxas schedules and spills. "
                      "Registers and spills are ptxas's own.")


LEGEND = ("regs: a thread. spills: bytes a thread, stores+loads. smem: bytes a block; planned: the planner's figure, – for none. "
          "an SM: resident blocks × their warps. n of a tile: n blocks share its rows.")


def _instructions(made: "list[Kernel]") -> Table:
    """A row an instruction that occurs, a column a kernel."""
    from onchip.bench.inspect import INSTRUCTIONS

    table = make_table(f"instructions in the {made[0].compiled.counted_in}", ("instruction", "what"), "instruction", "what",
                       *map(_name, made))
    for name, instruction in INSTRUCTIONS.items():
        counts = [kernel.compiled.counts[name] for kernel in made]
        if any(counts) or name in ("LDL", "STL"):
            table.add_row(name, instruction.what, *map(str, counts))
    return table


def _name(kernel: "Kernel") -> str:
    return kernel.compiled.name.removesuffix("_kernel").removeprefix("_")
