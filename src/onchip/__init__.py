"""Softmax and attention that never leave the chip.

Public names are resolved on first use, so ``import onchip`` needs neither torch nor a GPU and costs a few milliseconds.
"""
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name → the module that owns it.
_PUBLIC: dict[str, str] = {}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'onchip' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
