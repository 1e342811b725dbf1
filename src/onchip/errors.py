"""The errors a caller can cause. Messages name the argument, what came and what is accepted."""


class InputError(ValueError):
    """An argument whose value is not accepted. The command line prints it as one line and exits with status 2."""


class MissingExtra(ImportError):
    """A feature whose optional dependency is not installed; the message says which extra brings it."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}, which is not installed: pip install 'onchip[{extra}]'")


def require(condition: bool, argument: str, got: object, accepted: str) -> None:
    """Raise `InputError` unless `condition` holds: ``argument: got X, accepted: Y``."""
    if not condition:
        raise InputError(f"{argument}: got {got}, accepted: {accepted}")
