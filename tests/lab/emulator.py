"""The lab's kernels on a CPU: compiled by g++ behind `emulator.h` and run thread by thread. `EmulatedCard` stands in for a card, so that an
experiment's whole measurement runs where there is no GPU, each kernel against float64."""
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from onchip.lab.card import LaunchError
from onchip.lab.compiler import KERNELS, Source
from onchip.roofline.hardware import find_gpu
from onchip.roofline.tiles import resident

HEADER = Path(__file__).with_name("emulator.h")
COMPILER = shutil.which("g++")
BUILT = Path(tempfile.gettempdir()) / f"onchip-lab-emulator-{os.getuid()}"
MISALIGNED = 3  # the status emulator.h exits with


@cache
def library(source: Source) -> ctypes.CDLL:
    """`source` compiled for this machine; kept on disk by what went into it."""
    flags = [f"-D{name}={value}" for name, value in source.defines]
    flags += ["-DDYNAMIC_SHARED"] if "extern __shared__" in (KERNELS / source.file).read_text() else []
    inputs = [KERNELS / source.file, HEADER, *sorted(KERNELS.glob("*.cuh"))]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + " ".join([source.file, *flags]).encode()).hexdigest()[:16]
    made = BUILT / f"{key}.so"
    if not made.exists():
        BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            fresh = Path(folder) / "made.so"
            options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-x", "c++", "-include", HEADER]
            subprocess.run([COMPILER, *options, *flags, inputs[0], "-o", fresh], check=True)
            fresh.replace(made)
    loaded = ctypes.CDLL(str(made))
    loaded.request_count.restype = ctypes.c_int64
    loaded.request_at.restype = ctypes.POINTER(ctypes.c_int64)
    return loaded


def launch(source, kernel, grid, block, *args):
    """Run a kernel on numpy arrays, in place. As for the card: int is C's int, float its float, numpy's scalars are themselves."""
    loaded = library(source)
    integers = [x.ctypes.data if isinstance(x, np.ndarray) else int(x) for x in args if not isinstance(x, float)]
    real = next((x for x in args if isinstance(x, float)), 0.0)
    sizes = [(ctypes.c_uint * 3)(*dims, *(1,) * (3 - len(dims))) for dims in (grid, block)]
    loaded.launch(ctypes.cast(getattr(loaded, kernel), ctypes.c_void_p), *sizes,
                  (ctypes.c_int64 * 8)(*integers, *(0,) * (8 - len(integers))), ctypes.c_float(real))


def requests(source):
    """(bytes a lane, the addresses of the lanes that read, transposed or not) of each load_shared and ldmatrix of the last launch."""
    found = []
    for i in range(library(source).request_count()):
        width, *addresses, transposed = library(source).request_at(i)[:34]
        found.append((width, [a for a in addresses if a >= 0], bool(transposed)))
    return found


class EmulatedCard:
    """An H200 by its limits, this CPU by its arithmetic. Times are made up: every call takes a second."""

    def __init__(self):
        self.gpu = find_gpu("h200")
        self.launched = []
        self._shared_limit = {}

    def kernel(self, source, name):
        return source, name

    def array(self, values):
        return np.array(values, order="C")

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # NaN
        return array

    def numpy(self, array):
        return array.copy()

    def launch(self, kernel, grid, block, *args, shared=0):
        if shared > self._shared_limit.get(kernel, self.gpu.smem_static_limit):
            raise LaunchError("CUDA_ERROR_INVALID_VALUE")
        self.launched.append(kernel)
        launch(*kernel, grid, block, *args)

    def allow_shared(self, kernel, nbytes):
        if nbytes > self.gpu.smem_per_block:
            raise LaunchError("CUDA_ERROR_INVALID_VALUE")
        self._shared_limit[kernel] = nbytes

    def blocks_per_sm(self, kernel, threads, shared):
        return resident(threads, 16, shared, self.gpu).blocks

    def wait(self):
        pass

    def seconds(self, call):
        return 1.0

    def profile(self, call):
        before = len(self.launched)
        call()
        return len(self.launched) - before

    def fault(self, source, kernel, grid, block, *args):
        library(source)
        alone = get_context("fork").Process(target=launch, args=(source, kernel, grid, block, *args))
        alone.start()
        alone.join()
        return {0: None, MISALIGNED: "CUDA_ERROR_MISALIGNED_ADDRESS"}[alone.exitcode]
