"""The application: gathers the commands, turns a caller's mistake into one line and exit status 2."""
import sys
from importlib import import_module

import typer

from onchip import __version__
from onchip.errors import InputError, MissingExtra

app = typer.Typer(
    name="onchip",
    help="Softmax and attention that never leave the chip: run, predict and measure every step from naive to the hardware's limit.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

# In the order a newcomer would want them; each module defines `register(app)`.
COMMANDS = ("ladder", "roofline", "plan", "banks", "simulate", "explain", "inspect", "lab", "report", "verify")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        typer.echo(f"onchip {__version__}")
        raise typer.Exit()


for _name in COMMANDS:
    import_module(f"onchip.cli.{_name}").register(app)


def main() -> None:
    """Entry point of the ``onchip`` script."""
    try:
        app()
    except (InputError, MissingExtra) as error:
        typer.echo(f"onchip: {error}", err=True)
        sys.exit(2)
