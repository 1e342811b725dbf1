"""``onchip lab``: claims about the machine as experiments, each with a prediction, a measurement and a verdict."""
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onchip.cli.common import JsonOption, console, human_time, make_table, print_json, progress, whole_file, working
from onchip.cli.lab_tables import show_interval, show_number
from onchip.errors import InputError, MissingExtra
from onchip.lab.card import Card, find_card
from onchip.lab.compiler import Source, build, check_arch
from onchip.lab.experiment import Experiment, Sizes
from onchip.lab.experiments import EXPERIMENTS, pick, sources
from onchip.lab.run import Outcome, conduct, judge, report
from onchip.roofline.hardware import GPU, find_gpu, parse_gpu

if TYPE_CHECKING:
    from onchip.lab.compiler import Build

NamesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Experiments; all of them if left out.",
                                                           show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands to `app` as a group of their own; without a command the group lists the experiments."""
    group = typer.Typer(name="lab", rich_markup_mode="markdown")
    group.callback(invoke_without_command=True)(lab)
    group.command(name="run")(run)
    group.command(name="compile")(compile_)
    app.add_typer(group)


def lab(ctx: typer.Context) -> None:
    """CUDA C++ experiments: what a claim predicts, what the card does, and the verdict. Alone it lists them.

    Each kernel is small, has one idea, is compiled at run time (NVRTC; no toolkit is needed) and is checked against float64 before it is
    timed. Predictions come from the model behind `onchip roofline`, `plan` and `banks`.

    Examples:

    - `onchip lab` lists the experiments.
    - `onchip lab run` runs them all, or on a machine without a GPU says what it would measure.
    - `onchip lab compile --arch sm_80 --arch sm_90` compiles every kernel, with no GPU.
    """
    if ctx.invoked_subcommand:
        return
    for experiment in EXPERIMENTS.values():
        console.print(f"[bold]{experiment.name}[/bold]" + (f"  (pitfall: {experiment.pitfall})" if experiment.pitfall else ""))
        console.print(f"  {experiment.claim}")


def run(
    names: NamesArgument = None,
    counters: Annotated[bool, typer.Option("--counters", help="Count as well: each launch once more under Nsight Compute.")] = False,
    ncu: Annotated[Path | None, typer.Option("--ncu", metavar="FILE", help="Nsight Compute's program.", show_default="found")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The card predictions are made for: a name, or numbers as in `onchip roofline`.",
                                            show_default="this machine's; h200 where there is none")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write everything into FILE.")] = None,
) -> None:
    """Run experiments on this machine's GPU: prediction, measurement, verdict.

    A prediction is an interval made before anything runs; one that the measurement misses refutes the claim. A kernel whose result differs
    from float64 is not timed: its experiment fails, and the exit status is 1. Times are medians by events, L2 overwritten before each.

    With `--counters` the bank conflicts and the bytes of L2 and DRAM are counted by hardware and held against their predictions; without,
    those are left open.

    While it runs, what has been measured is in FILE.partial, which stays there if the run is cut short; FILE itself is replaced at the
    end. Where counting fails the measurements are shown and written all the same, what only counters can tell is left open, and the exit
    status is 1.

    On a machine without a GPU the kernels are compiled for the card of `--gpu` and the predictions shown: what would be measured.

    Examples:

    - `onchip lab run tiles layout --counters` counts bank conflicts.
    - `onchip lab run --counters --json lab.json` runs everything.
    - `onchip lab run oversized --gpu a100-80gb` says, anywhere, which tiles an A100 would refuse.
    """
    chosen, uncounted = pick(names), None
    card = _card()
    if isinstance(card, str):
        target = parse_gpu(gpu or "h200")
        outcomes = [judge(experiment, target, Sizes(), {}) for experiment in chosen]
        machine: dict[str, Any] = {"gpu": None}
        console.print(f"No GPU to measure on: {card}", markup=False)
        console.print(_compiled(chosen, target), markup=False)
        console.print(f"What would be measured on one {target.title}:")
    else:
        target = parse_gpu(gpu) if gpu else find_gpu(card.name)
        machine = {"gpu": card.name, "cuda_driver": card.driver_version}
        with working("experiments", len(chosen)) as step:
            def keep(so_far: list[Outcome]) -> None:
                if json_file:
                    _write(_partial(json_file), report(so_far, target, Sizes(), machine))

            counter = _Counter(ncu) if counters else None
            outcomes = conduct(chosen, card, target, count=counter, on_experiment=step, keep=keep)
        if counter and counter.failure:
            machine["uncounted"] = uncounted = counter.failure
    for outcome in outcomes:
        _show(outcome)
    if json_file:
        _write(json_file, report(outcomes, target, Sizes(), machine))
        _partial(json_file).unlink(missing_ok=True)
        typer.echo(f"wrote {json_file}", err=True)
    if uncounted:
        typer.echo(f"not counted: {uncounted}", err=True)
    if uncounted or any(outcome.problem for outcome in outcomes):
        raise typer.Exit(1)


def _write(file: Path, results: dict[str, Any]) -> None:
    with whole_file(file) as temporary:
        temporary.write_text(json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def _card() -> Card | str:
    """This machine's GPU, or why there is none to measure on."""
    try:
        return find_card()
    except MissingExtra as missing:
        return str(missing)


class _Counter:
    """Counts the experiments of the names it is given; says at once if there is no Nsight Compute."""

    def __init__(self, ncu: Path | None) -> None:
        from onchip.bench.counters import find_ncu, find_reader

        self.ncu = find_ncu(ncu)
        find_reader(self.ncu)
        self.failure: str | None = None  # why nothing was counted: what was timed by then is worth having without

    def __call__(self, names: list[str]) -> dict[str, float]:
        from onchip.lab.counters import count

        try:
            return count(names, self.ncu)
        except InputError as error:
            self.failure = str(error)
            return {}


def _compiled(chosen: list[Experiment], target: GPU) -> str:
    """Compiles what `chosen` would run; in words, what became of it."""
    if target.capability is None or target.capability < (8, 0):
        return f"Nothing was compiled: the kernels need compute capability 8.0, which the {target.title} has not."
    arch = "sm_{}{}".format(*target.capability)
    wanted = sources(chosen)
    try:
        made = [build(source, arch) for source in progress(wanted, len(wanted), "compiling")]
    except MissingExtra as missing:
        return str(missing)
    kernels = sum(len(one.kernels) for one in made)
    spilling = sum(kernel.spill_stores > 0 for one in made for kernel in one.kernels)
    return f"Compiled for {arch}: {kernels} kernels from {len(made)} sources, {spilling or 'none'} with spilled registers."


def _show(outcome: Outcome) -> None:
    console.print(f"\n[bold]{outcome.experiment.name}[/bold]: {outcome.experiment.claim}")
    table = make_table("", ("what", "from"), "what", "predicted", "measured", "holds", "from")
    for judgement in outcome.judgements:
        p = judgement.prediction
        mark = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "–"}[judgement.holds]
        measured = "–" if judgement.measured is None else show_number(judgement.measured, p.unit)
        table.add_row(p.what, show_interval(p.interval, p.unit), measured, mark, p.source)
    for column in (0, 4):
        table.columns[column].no_wrap = False
    console.print(table)
    console.print(f"{outcome.experiment.name}: {outcome.verdict}", style="bold", markup=False)


def compile_(
    names: NamesArgument = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", metavar="SM", help="Compute capability; repeat it for several.",
                                                   show_default="sm_80 and sm_90")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the experiments' kernels, with no GPU, and report registers, spills and shared memory as ptxas gives them.

    Examples:

    - `onchip lab compile` compiles everything for an A100 and for Hopper.
    - `onchip lab compile layout division --arch sm_89 --json` prints figures for a script.
    """
    wanted = sources(pick(names))
    targets = list(dict.fromkeys(check_arch(name, "--arch") for name in arch or ("sm_80", "sm_90")))
    jobs: list[tuple[Source, str]] = [(source, target) for source in wanted for target in targets]
    made = [build(*job) for job in progress(jobs, len(jobs), "compiling")]
    if as_json:
        print_json({"kernels": [_figures(one, kernel) for one in made for kernel in range(len(one.kernels))]})
        return
    table = make_table("", ("source", "kernel", "arch"), "source", "kernel", "arch", "regs", "spills", "smem", "compile")
    for one in made:
        for kernel in one.kernels:
            table.add_row(str(one.source), kernel.kernel, one.arch, str(kernel.registers), f"{kernel.spill_stores}+{kernel.spill_loads}",
                          str(kernel.shared), human_time(one.seconds))
    console.print(table)
    console.print("regs: a thread. spills: bytes a thread, stores+loads. smem: static bytes a block. compile: the source.", style="dim")


def _figures(one: "Build", index: int) -> dict[str, Any]:
    kernel = one.kernels[index]
    return {"source": one.source.file, "defines": dict(one.source.defines), "kernel": kernel.kernel, "arch": one.arch,
            "registers": kernel.registers, "spill_stores": kernel.spill_stores, "spill_loads": kernel.spill_loads,
            "shared_bytes": kernel.shared, "compile_s": round(one.seconds, 3)}
