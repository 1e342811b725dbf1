"""torch, asked for where it is first needed: measuring is optional, and so is torch."""
from types import ModuleType
from typing import TYPE_CHECKING

from onchip.errors import InputError, MissingExtra
from onchip.roofline.dtypes import parse_dtype

if TYPE_CHECKING:
    import torch

MATMUL_DTYPES = ("float64", "float32", "float16", "bfloat16")  # formats torch.matmul takes on any device


def load_torch(feature: str) -> ModuleType:
    """The torch module. Raises `MissingExtra`, naming `feature`, where it is not installed."""
    try:
        import torch
    except ImportError:
        raise MissingExtra(feature, "torch", "torch") from None
    return torch


def parse_device(device: "str | torch.device") -> "torch.device":
    """The device, if this machine has it: ``'cpu'``, ``'cuda'``, ``'cuda:1'`` … Raises `InputError` otherwise."""
    torch = load_torch("a device")
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device: got {str(device)!r}, accepted: a device torch can use here ({str(error).splitlines()[0]})") from None
    return found


def parse_torch_dtype(name: str) -> "torch.dtype":
    """``'bf16'`` → ``torch.bfloat16``. Raises `InputError` for a format torch cannot multiply everywhere."""
    key = parse_dtype(name)
    if key not in MATMUL_DTYPES:
        raise InputError(f"dtype: got {name!r}, accepted: {', '.join(MATMUL_DTYPES)}")
    dtype: torch.dtype = getattr(load_torch("a dtype"), key)
    return dtype
