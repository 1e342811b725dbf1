"""Starts compiled Triton kernels again without Triton's own work on their arguments.

Triton binds, specialises and hashes all arguments at each call and encodes every tensor map anew: 15–35 µs for a kernel of some sixty
arguments, of which the driver needs 3. What it computes is the same as long as the arguments' types, alignments and special values are, so
a caller that knows they are (`attention.ops.Route`) keeps a `Launcher`. One that also knows all arguments but the first two has them
written down once (`Launcher.bound`): a launch is then one call of the driver. What differs between Triton 3.6 and 3.9 is here.
"""
import ctypes
import inspect
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

PER_THREAD = 2  # CUDA's handle of the calling thread's default stream
PORTABLE_CLUSTER = 8  # thread blocks that every card with clusters runs together
NON_PORTABLE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: Hopper runs 16
FLOATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d"}  # Triton's types → how `struct` writes them
SIZES = {f"{sign}{bits}": -(-bits // 8) for sign in "iu" for bits in (1, 8, 16, 32, 64)} | {  # → bytes of a parameter
    "bf16": 2, **{kind: struct.calcsize(written) for kind, written in FLOATS.items()}}
BLOCK, BLOCK_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
CONFIG = struct.Struct("<3I3II4xQQI4x")  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, how many
STREAM, PARAMETERS = 32, 64  # in a launch's memory, where the stream is and the parameters begin
SCRATCH = 2  # pointers behind a kernel's own parameters: memory for itself and for Triton's profiler, which no kernel here wants


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
        self._compiled, self._plain = compiled, not (blocks * cluster > 1 or run.launch_cooperative_grid or run.launch_pdl)
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

    def bound(self, grid: int, args: Sequence[Any]) -> Callable[[int, int, int], None]:
        """`self(grid, stream, args)` as a function of the stream and of the first two arguments, addresses of x and y.

        It calls the driver at once (CUDA 12.4 or later), if that agrees on the parameters' number and sizes. Else, and for clusters,
        cooperative grids, programmatic launches and descriptors, Triton's launcher serves. Threads may call it at the same time.
        """
        def by_triton(stream: int, x: int, y: int) -> None:
            self(grid, stream, (x, y, *args[2:]))

        driver, parameters = _driver(), parameters_of(self._compiled.src.signature.values(), args)
        function = ctypes.c_void_p(self._compiled.function)
        offsets = driver.offsets(function, [p.size for p in parameters]) if driver and parameters and self._plain else None
        if driver is None or parameters is None or offsets is None or offsets[:2] != [0, 8]:
            return by_triton
        warps, _, shared, *_ = self._compiled.packed_metadata
        block = _packed(parameters, offsets)
        free: list[tuple[Any, ...]] = []  # a launch has one to itself, taken and put back in steps that no thread interrupts
        launch, write = driver.launch, struct.Struct(f"<Q{PARAMETERS - STREAM - 8}x2Q").pack_into

        def start(stream: int, x: int, y: int) -> None:  # of two by name: for any number it would take 0.1 µs more
            try:
                memory = free.pop()
            except IndexError:
                memory = _memory(grid, warps, shared, block)
            config, where, extra, _size = memory
            write(config, STREAM, stream, x, y)
            failed = launch(where, function, None, extra)
            free.append(memory)
            if failed:  # in a thread's first call there may be no context: Triton's path has one made, and names other errors
                by_triton(stream, x, y)

        return start


def follows_others(stream: int) -> bool:
    """Do this stream's launches follow each other, so that one piece of memory serves them all? A graph may be replayed on any stream, and
    one handle names the default streams of all threads: their launches get their own."""
    return stream != PER_THREAD and not torch.cuda.is_current_stream_capturing()


def divisor(d: int) -> tuple[int, int, int]:
    """d, m and s, by which a kernel divides: x // d = (2x · m >> 32) >> s for 0 ≤ x < 2³¹. m: 32 bits, as a signed number.

    s = ⌈log₂ d⌉ and m = ⌈2^(31 + s) / d⌉ (Granlund & Montgomery, "Division by invariant integers using multiplication", PLDI 1994). The
    compiler's own division is some 30 instructions that wait for each other, several hundred clocks.
    """
    s = (d - 1).bit_length()
    m = -(-(1 << 31 + s) // d)
    return d, m - (1 << 32) if m >= 1 << 31 else m, s


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    size: int  # bytes
    value: int  # its bits


def parameters_of(signature: Iterable[Any], args: Iterable[Any]) -> list[Parameter] | None:
    """Those of a kernel of Triton's, in order: what is compiled in is none, tuples are flattened, scratch memory comes last.

    `signature`: Triton's types, nested as `args` are. None if there is one that is no number and no pointer (a descriptor).
    """
    found: list[Parameter] = []
    for kind, value in zip(signature, args, strict=True):
        for leaf, item in _leaves(kind, value):
            size = 8 if leaf[0] == "*" else SIZES.get(leaf)
            if size is None:
                return None
            found.append(Parameter(size, _word(leaf, item) & (1 << 8 * size) - 1))
    return found + [Parameter(8, 0)] * SCRATCH


def _packed(parameters: Iterable[Parameter], offsets: Sequence[int]) -> bytes:
    """The parameters as a kernel finds them in its memory."""
    block = bytearray()
    for one, at in zip(parameters, offsets, strict=True):
        block[len(block):] = bytes(at - len(block)) + one.value.to_bytes(one.size, "little")
    return bytes(block)


def _leaves(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(kind, tuple):
        for pair in zip(kind, value, strict=True):
            yield from _leaves(*pair)
    elif kind != "constexpr":
        yield kind, value


def _word(kind: str, value: Any) -> int:
    """A value's bits, as the low bytes of a word."""
    if kind in FLOATS:
        return int.from_bytes(struct.pack(FLOATS[kind], value), "little")
    if kind == "bf16":
        return int.from_bytes(struct.pack("<f", value), "little") >> 16  # truncated, as Triton does
    if kind[0] == "*":
        return 0 if value is None else value if isinstance(value, int) else value.data_ptr()
    return int(value)


def _memory(grid: int, warps: int, shared: int, block: bytes) -> tuple[Any, ...]:
    """What a launch reads: its configuration and, behind it, the parameters; their address; where the parameters are and how many bytes.

    Behind each other, so that one call writes all that differs between launches: its stream, no attributes, the first parameters. Handed
    over as one block, 25 parameters take the driver 0.2 µs less than one by one.
    """
    memory = ctypes.create_string_buffer(CONFIG.pack(grid, 1, 1, 32 * warps, 1, 1, shared, 0, 0, 0).ljust(PARAMETERS, b"\0") + block)
    size = ctypes.c_size_t(len(block))
    extra = (ctypes.c_void_p * 5)(BLOCK, ctypes.addressof(memory) + PARAMETERS, BLOCK_SIZE, ctypes.addressof(size), None)
    return memory, ctypes.byref(memory), extra, size


class _Driver:
    """NVIDIA's, without Triton between."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")  # it lets other threads run meanwhile: a launch waits where the card's queue is full
        self.launch, self._parameter = library.cuLaunchKernelEx, library.cuFuncGetParamInfo

    def offsets(self, function: ctypes.c_void_p, sizes: list[int]) -> list[int] | None:
        """Where the kernel expects parameters of these bytes; None if it has others."""
        found, offset, size = [], ctypes.c_size_t(), ctypes.c_size_t()
        for at, expected in enumerate([*sizes, None]):
            error = self._parameter(function, ctypes.c_size_t(at), ctypes.byref(offset), ctypes.byref(size))
            if (None if error else size.value) != expected:
                return None
            found.append(offset.value)
        return found[:-1]


@cache
def _driver() -> _Driver | None:
    try:
        return _Driver()
    except (OSError, AttributeError):  # no driver, or one older than CUDA 12.4
        return None


@cache
def _encoder() -> tuple[Any, int]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)
