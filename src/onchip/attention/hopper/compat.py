"""What differs between Triton 3.6 and 3.9, absorbed in one place: names of the Gluon dialect, and the way to its launcher."""
import inspect
from functools import cache
from typing import Any

import triton
import triton.language.core as _core
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["Launcher", "aggregate", "reinterpret", "tma_load", "tma_store"]

# 3.8 made it public.
aggregate = getattr(gluon, "aggregate", None) or _core._aggregate
# 3.9 renamed the copies and left behind names that raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def reinterpret(buffer, shape, layout, _semantic=None):
    """The same shared memory with another shape and layout. 3.9 made the method public."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return method(buffer.dtype, shape, layout, _semantic=_semantic)


class Launcher:
    """Launches one compiled kernel, with arguments already in the form the driver's launcher takes.

    Triton's own path binds, specialises and hashes all arguments and encodes every tensor map anew at each call; what it computes is the
    same as long as the arguments' types are, so it is computed once, here.
    """

    def __init__(self, compiled: Any) -> None:
        self._function, self._metadata, run = compiled.function, compiled.packed_metadata, compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise NotImplementedError("the kernel wants scratch memory")
        self._flags = (run.launch_cooperative_grid, run.launch_pdl)
        self._maps = compiled.metadata.tensordesc_meta
        self._described = (run.arg_annotations, run.kernel_signature) if hasattr(run, "arg_annotations") else None
        if self._described:  # since 3.7 one launcher serves all kernels
            self._launch = triton.runtime.driver.active.utils.launch
        else:  # 3.6 compiles one for each, wrapped in the encoding of tensor maps
            self._launch = inspect.getclosurevars(run.launch).nonlocals["launcher"]

    def encode(self, index: int, descriptor: Any) -> tuple[Any, ...]:
        """The launcher's arguments for the kernel's `index`-th tensor descriptor."""
        make, arity = _encoder()
        return tuple(make(*(descriptor, self._maps[index], None)[:arity]))

    def __call__(self, grid: int, stream: int, args: tuple[Any, ...]) -> None:
        """Launch `grid` thread blocks on `stream`. `args`: one for each parameter, descriptors encoded, pointers as integers."""
        # The Nones: launch metadata, hooks before and after (profilers of Triton's own), scratch memory of two kinds.
        head = (grid, 1, 1, stream, self._function, *self._flags)
        if self._described:
            self._launch(*head, self._metadata, None, None, None, None, None, *self._described, args)
        else:
            self._launch(*head, None, None, self._metadata, None, None, None, *args)


@cache
def _encoder() -> tuple[Any, int]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)
