"""The GPU of this machine, through cuda.core: memory, launches, times by events. Nothing here knows an experiment."""
import os
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import numpy as np

from onchip.errors import MissingExtra
from onchip.lab.compiler import Build, Source, build

Grid = tuple[int, ...]
WARMUP, BUDGET, LEAST, MOST = 0.02, 0.1, 9, 300  # seconds before timing, and of timed calls; the fewest and the most


class LaunchError(RuntimeError):
    """The driver refused a launch or a kernel ended in an error; the message is the driver's name for it."""


@dataclass(frozen=True)
class Array:
    """Device memory with numpy's idea of its contents."""

    buffer: Any  # cuda.core.Buffer
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class Kernel:
    """A kernel on the card; its `build` says what ptxas gave it."""

    name: str
    build: Build
    handle: Any  # cuda.core.Kernel


class Card:
    """Device 0 of this machine. Raises `MissingExtra` without cuda-core; `find_card` says why there is none."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
            from cuda.core import Device, EventOptions
        except ImportError:
            raise MissingExtra("the lab", "cuda-core", "lab") from None
        self._driver, self._timed = driver, EventOptions(timing_enabled=True)
        self._device = Device(0)
        self._device.set_current()
        self._stream = self._device.create_stream()
        self.name = str(self._device.name)
        major, minor = self._device.compute_capability
        self.arch = f"sm_{major}{minor}"
        self.l2_bytes = int(self._device.properties.l2_cache_size)
        self._kernels: dict[tuple[Source, str], Kernel] = {}
        self._builds: dict[Source, Build] = {}
        self._flush: Array | None = None
        self._launches = 0

    def kernel(self, source: Source, name: str) -> Kernel:
        """The kernel `name` of `source`, compiled on first use."""
        if source not in self._builds:
            self._builds[source] = build(source, self.arch)
        if (source, name) not in self._kernels:
            made = self._builds[source]
            self._kernels[source, name] = Kernel(name, made, made.code.get_kernel(name))
        return self._kernels[source, name]

    def array(self, values: np.ndarray) -> Array:
        """A copy on the card."""
        values = np.ascontiguousarray(values)
        array = self._allocate(values.shape, values.dtype)
        self._check(self._driver.cuMemcpyHtoDAsync(self._pointer(array), values.ctypes.data, values.nbytes, self._stream.handle))
        self.wait()
        return array

    def empty(self, shape: Grid, dtype: "np.typing.DTypeLike") -> Array:
        """Memory that holds NaN (integers: −1), so that what a kernel leaves out shows."""
        array = self._allocate(shape, np.dtype(dtype))
        array.buffer.fill(0xFF, stream=self._stream)
        return array

    def numpy(self, array: Array) -> np.ndarray:
        """A copy on the host, after everything launched so far."""
        values = np.empty(array.shape, array.dtype)
        self._check(self._driver.cuMemcpyDtoHAsync(values.ctypes.data, self._pointer(array), array.nbytes, self._stream.handle))
        self.wait()
        return values

    def launch(self, kernel: Kernel, grid: Grid, block: Grid, *args: "Array | int | float | np.generic", shared: int = 0) -> None:
        """Start `kernel`. Python's int is passed as C's int, float as float; numpy's scalars as they are."""
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        with _driver_errors():
            launch(self._stream, config, kernel.handle, *map(_argument, args))
        self._launches += 1

    def allow_shared(self, kernel: Kernel, nbytes: int) -> None:
        """Raise the kernel's limit of dynamic shared memory: the opt-in beyond 48 KiB. Raises `LaunchError` beyond what the card has."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = self._driver.CUkernel(int(kernel.handle.handle))
        self._check(self._driver.cuKernelSetAttribute(attribute, nbytes, handle, self._driver.CUdevice(self._device.device_id)))

    def blocks_per_sm(self, kernel: Kernel, threads: int, shared: int) -> int:
        """Resident blocks an SM, as the driver counts them."""
        return int(kernel.handle.occupancy.max_active_blocks_per_multiprocessor(threads, shared))

    def wait(self) -> None:
        """Until all work is done. Raises `LaunchError` where a kernel failed."""
        with _driver_errors():
            self._stream.sync()

    def seconds(self, call: Callable[[], None]) -> float:
        """Median time of ``call()`` by events, L2 overwritten before each, after a warm-up by time."""
        end = perf_counter() + WARMUP
        while perf_counter() < end:
            self._once(call)
        times: list[float] = []
        while len(times) < LEAST or (sum(times) < BUDGET and len(times) < MOST):
            times.append(self._once(call))
        return statistics.median(times)

    def _once(self, call: Callable[[], None]) -> float:
        # Four times L2: while the card writes it, for some 80 µs on an H200, the host gets ahead and no launch is waited for in the time.
        if self._flush is None:
            self._flush = self._allocate((4 * self.l2_bytes,), np.dtype(np.uint8))
        self._flush.buffer.fill(0, stream=self._stream)
        start = self._stream.record(options=self._timed)
        call()
        end = self._stream.record(options=self._timed)
        self.wait()
        return float(end - start) / 1e3  # events answer in milliseconds

    def fault(self, source: Source, kernel: str, grid: Grid, block: Grid, *args: np.ndarray) -> str | None:
        """The error a launch on `args` ends in, None if it ends well; in a process of its own, as an error on the card ends its context."""
        context = get_context("spawn")
        answer, theirs = context.Pipe(duplex=False)
        alone = context.Process(target=_launch_alone, args=(theirs, source, kernel, grid, block, args))
        alone.start()
        theirs.close()
        try:
            return answer.recv()
        except EOFError:
            raise LaunchError("the process that launched it ended without an answer") from None
        finally:
            alone.join()

    def profile(self, call: Callable[[], None]) -> int:
        """``call()`` between a start and a stop of the profiler, all that a profiler told to wait for them sees; the launches it made."""
        self.wait()
        before = self._launches
        self._check(self._driver.cuProfilerStart())
        call()
        self.wait()
        self._check(self._driver.cuProfilerStop())
        return self._launches - before

    @property
    def driver_version(self) -> int:
        """13000: CUDA 13.0."""
        return int(self._check(self._driver.cuDriverGetVersion()))

    def _allocate(self, shape: Grid, dtype: np.dtype) -> Array:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        array = Array(self._device.allocate(nbytes, stream=self._stream), tuple(shape), dtype)
        self._stream.sync()
        return array

    def _pointer(self, array: Array) -> Any:
        return self._driver.CUdeviceptr(int(array.buffer.handle))

    def _check(self, result: tuple[Any, ...]) -> Any:
        """The driver's answer without its status, which must be success."""
        status, *values = result
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(status.name)
        return values[0] if values else None


@contextmanager
def _driver_errors() -> Iterator[None]:
    """What the driver says becomes a `LaunchError`; any other exception stays what it is."""
    try:
        yield
    except Exception as error:
        name = re.match(r"CUDA_ERROR_\w+", str(error))
        if name is None:
            raise
        raise LaunchError(name[0]) from error


def _argument(value: "Array | int | float | np.generic") -> Any:
    if isinstance(value, Array):
        return value.buffer
    if isinstance(value, np.generic):
        return value
    return np.float32(value) if isinstance(value, float) else np.int32(value)


def _launch_alone(answer: Any, source: Source, kernel: str, grid: Grid, block: Grid, args: tuple[np.ndarray, ...]) -> None:
    card, error = Card(), None
    arrays = [card.array(values) for values in args]
    try:
        card.launch(card.kernel(source, kernel), grid, block, *arrays)
        card.wait()
    except LaunchError as caught:
        error = str(caught)
    answer.send(error)
    os._exit(0)  # nothing can be freed in a context that an error has ended


def find_card() -> Card | str:
    """This machine's GPU, or why there is none to be used, in words. Raises `MissingExtra` without cuda-core."""
    try:
        return Card()
    except MissingExtra:
        raise
    except Exception as error:  # no driver, no device, a driver too old: cuda.core has a class of its own for each
        return str(error).splitlines()[0] if str(error) else type(error).__name__
