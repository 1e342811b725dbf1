"""Softmax kernels: `rows` says where a row lies in memory, `plan` which kernel and tile serves it, `launch` starts it.

    addresses                        what a tile has of its rows, and how it reads it
    tile_forward, tile_backward      Triton: whole rows in registers (of a `cluster`, some of it `held` in shared memory), or in two passes
    scores                           what the forward kernels read, and hide
    parts_forward, parts_backward    Gluon: long rows in the shared memory of several thread blocks, which exchange through `words`
"""
from onchip.softmax.triton.launch import backward, forward

__all__ = ["backward", "forward"]
