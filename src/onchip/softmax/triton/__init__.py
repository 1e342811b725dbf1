"""Softmax kernels in Triton: `rows` says where a row lies in memory, `plan` which tile serves it, `forward` and `backward` do the work."""
from onchip.softmax.triton.backward import backward
from onchip.softmax.triton.forward import forward

__all__ = ["backward", "forward"]
