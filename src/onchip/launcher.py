"""Starts compiled Triton kernels again without Triton's own work on their arguments.

Triton binds, specialises and hashes all arguments at each call and encodes every tensor map anew: 15–35 µs for a kernel of some sixty
arguments, of which the driver needs 3. What it computes is the same as long as the arguments' types, alignments and special values are, so
a caller that knows they are (`attention.ops.Route`) keeps a `Launcher`. What differs between Triton 3.6 and 3.9 in reaching it is here.
"""
import ctypes
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton

PORTABLE_CLUSTER = 8  # thread blocks that every card with clusters runs together
NON_PORTABLE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: Hopper runs 16


class Launcher:
    """Launches one compiled kernel on NVIDIA cards, with arguments as the driver's launcher takes them.

    `cluster`: so many thread blocks after another run together, whatever Triton compiled the kernel for.
    """

    def __init__(self, compiled: Any, cluster: int = 1) -> None:
        run = compiled.run
        if not self.serves(compiled):
            raise NotImplementedError("the kernel wants scratch memory, or is none of an NVIDIA card")
        self._maps = getattr(compiled.metadata, "tensordesc_meta", None)
        self._together = hasattr(run, "arg_annotations")  # are the kernel's arguments one of the launcher's?
        # The Nones: launch metadata, hooks before and after (profilers of Triton's own), scratch memory of two kinds.
        fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        self._fixed: tuple[Any, ...]
        warps, blocks, *more = compiled.packed_metadata
        metadata, self._cluster = (warps, blocks * cluster, *more), cluster
        if cluster > PORTABLE_CLUSTER:
            ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(compiled.function), NON_PORTABLE_ALLOWED, 1)
        if self._together:  # since 3.7 one launcher serves all kernels
            self._launch = triton.runtime.driver.active.utils.launch
            self._fixed = (*fixed, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
        else:  # 3.6 compiles one for each, wrapped in the encoding of tensor maps if there are any
            self._launch = inspect.getclosurevars(run.launch).nonlocals.get("launcher", run.launch) if self._maps else run.launch
            self._fixed = (*fixed, None, None, metadata, None, None, None)

    @staticmethod
    def serves(compiled: Any) -> bool:
        """Can a kernel that Triton has started (None under its interpreter) be started from here?"""
        run = getattr(compiled, "run", None)
        return torch.version.cuda is not None and run is not None and not (run.global_scratch_size or run.profile_scratch_size)

    def encode(self, index: int, descriptor: Any) -> tuple[Any, ...]:
        """The launcher's arguments for the kernel's `index`-th tensor descriptor."""
        make, arity = _encoder()
        return tuple(make(*(descriptor, (self._maps or ())[index], None)[:arity]))

    def __call__(self, grid: int, stream: int, args: Sequence[Any]) -> None:
        """Launch `grid` thread blocks on `stream`. `args`: one for each parameter; pointers as tensors or integers, descriptors encoded."""
        grid //= self._cluster  # Triton's launcher multiplies
        if self._together:
            self._launch(grid, 1, 1, stream, *self._fixed, args)
        else:
            self._launch(grid, 1, 1, stream, *self._fixed, *args)


@cache
def _encoder() -> tuple[Any, int]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)
