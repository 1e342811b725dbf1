"""``onchip verify``: are the operators right on this machine?"""
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from onchip.bench.torch_extra import load_torch, parse_device
from onchip.cli.common import JsonOption, console, make_table, print_json, working


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="verify")(verify)


def verify(
    device: Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1 …", show_default="cuda where there is one")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="One dtype (bfloat16) instead of three.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every backend this machine can run against float64, forward and backward, over shapes and features.

    A check is one problem (causal, windows, masks, bias, ALiBi, sinks, dropout, packed sequences, head dims …) in one dtype on one backend.
    It passes when every result and gradient is within twice the error of an eager run of the same dtype, plus rounding. What a backend
    cannot do is skipped, and the reason shown. The exit status is 1 if anything failed.

    Examples:

    - `onchip verify --quick` takes seconds on a CPU.
    - `onchip verify --device cuda` checks the card's kernels; the first run compiles them.
    """
    torch = load_torch("onchip verify")
    where = str(parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    from onchip.testing.verify import checks, planned

    with working("checking", planned(quick)) as step:
        done = []
        for check in checks(where, quick):
            step(f"{check.operator}, {check.backend}")
            done.append(check)
    if as_json:
        print_json({"device": where, "torch": torch.__version__, "checks": [asdict(check) for check in done]})
    else:
        table = make_table(f"against float64 on {where}, torch {torch.__version__}", ("operator", "backend"),
                           "operator", "backend", "passed", "failed", "skipped")
        for operator, backend in dict.fromkeys((check.operator, check.backend) for check in done):
            own = [check for check in done if (check.operator, check.backend) == (operator, backend)]
            count = Counter(check.outcome for check in own)
            table.add_row(operator, backend, *(str(count[outcome]) for outcome in ("passed", "failed", "skipped")))
        console.print(table)
        skipped = {(check.operator, check.backend, check.detail): None for check in done if check.outcome == "skipped"}
        for operator, backend, reason in skipped:
            console.print(f"skipped, {operator} on {backend}: {reason}", style="dim", markup=False)
        for check in done:
            if check.outcome == "failed":
                console.print(f"FAILED {check.operator} on {check.backend}, {check.problem}, {check.dtype}: {check.detail}", markup=False)
    if any(check.outcome == "failed" for check in done):
        raise typer.Exit(1)
