"""``onchip simulate``: softmax block by block in any number format, and attention's schedules executed with every byte counted."""
import typer

from onchip.cli import simulate_attention, simulate_softmax


def register(app: typer.Typer) -> None:
    """Add the commands to `app` as a group of their own."""
    group = typer.Typer(
        name="simulate", no_args_is_help=True, rich_markup_mode="markdown",
        help="Execute a schedule step by step: **softmax** shows m, l and the error block by block, **attention** counts every byte.")
    group.command(name="softmax")(simulate_softmax.softmax)
    group.command(name="attention")(simulate_attention.attention)
    app.add_typer(group)
