"""The ``onchip`` command. One file a command; each registers itself on `app`."""
from onchip.cli.app import main

__all__ = ["main"]
