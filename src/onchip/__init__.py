"""Softmax and attention that never leave the chip.

Public names are resolved on first use, so ``import onchip`` needs neither torch nor a GPU and costs a few milliseconds.

`onchip.attention` and `onchip.softmax` are the functions; the rooms of the same names are reached by ``from onchip.attention import …``.
"""
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from onchip.errors import MissingExtra

__version__ = "0.1.0"

# name → the module that owns it
_PUBLIC: dict[str, str] = {
    **dict.fromkeys(("attention", "attention_varlen", "explain", "merge_attention", "scaled_dot_product_attention"), "onchip.attention"),
    **dict.fromkeys(("log_softmax", "logsumexp", "softmax", "softmax_topk"), "onchip.softmax"),
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'onchip' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(f"onchip.{name}", "torch", "torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a room binds it to its name here, which would hide the function of that name.
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
