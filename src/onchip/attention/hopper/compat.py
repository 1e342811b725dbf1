"""What differs between Triton 3.6 and 3.9 in the names of the Gluon dialect, absorbed in one place."""
import triton.language.core as _core
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["aggregate", "log2", "reinterpret", "stores_done", "thread_block", "tma_load", "tma_store"]

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


@builtin
def stores_done(_semantic=None):
    """Wait until the bulk stores of the calling thread are written, not only read from shared memory (`tma.store_wait`)."""
    _core.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=_core.int32, is_pure=False, pack=1,
                                 _semantic=_semantic)


@builtin
def log2(x, _semantic=None):
    """log₂ in one instruction, to 2⁻²² (absolute near 1, relative elsewhere); the library's is 40."""
    return _core.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=_core.float32, is_pure=True, pack=1,
                                        _semantic=_semantic)


@builtin
def here(x, _semantic=None):
    """x, moved where it is asked for: what follows from it is worked out there, not before the warps part."""
    return _core.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=_core.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def thread_block(_semantic=None):
    """The number of the thread block, read where it is asked for: `program_id` would be read before the warps part, and kept."""
    return _core.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=_core.int32, is_pure=False, pack=1, _semantic=_semantic)
