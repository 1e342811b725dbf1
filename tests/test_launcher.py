"""A launch that skips Triton hands the driver what Triton would: every parameter of real kernels, filled in, also by threads at once."""
import ctypes
import re
import struct
import time
from collections.abc import Callable
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from onchip import launcher
from onchip.launcher import Launcher, parameters_of
from tests import fresh

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
SIGNATURE = {"x": "*bf16", "y": "*fp32", "steps": ("i32", "i64", "constexpr"), "scale": "fp32", "half": "fp16", "round": "bf16",
             "wide": "fp64", "flag": "i1", "BLOCK": "constexpr", "tag": "i32", "mask": "*i8"}
ARGS = (0, 0, (-3, -(1 << 40), 1), 0.5, -2.0, 1.5, 0.1, True, 128, 7, None)


def compared() -> list[tuple[str, list[int], list[int] | None, list[str]]]:
    """Of every kernel that a softmax launches: its name, parameters' bytes in its PTX and by `parameters_of`, and floats by value."""
    from triton.runtime.jit import JITFunction

    from onchip.bench.inspect import offline
    from onchip.bench.kernels import machine_with
    from onchip.roofline.hardware import GPUS
    from onchip.softmax.contract import Spec
    from onchip.softmax.triton import backward, forward

    found, run = [], JITFunction.run

    def watched(kernel: Any, *args: Any, **options: Any) -> Any:
        made = run(kernel, *args, **options)
        declared = re.findall(r"^\.?\s*\.param\s+(?:\.align \d+ )?\.([a-z])(\d+)[^\n]*_param_\d+(\[\d+\])?", made.asm["ptx"], re.MULTILINE)
        assert not any(array for *_, array in declared)
        parameters = parameters_of(made.src.signature.values(), args)
        words = [] if parameters is None else [p.value for p, (kind, *_) in zip(parameters, declared, strict=True) if kind == "f"]
        floats = [struct.unpack("<f", word.to_bytes(4, "little"))[0] for word in words]
        found.append((made.metadata.name, [BYTES[bits] for _, bits, _ in declared], parameters and [p.size for p in parameters], floats))
        return made

    with patch.object(JITFunction, "run", watched), machine_with(GPUS["h100"]), offline(90):
        for shape, dim, scale, dtype in (((512, 128), -1, 1.0, torch.bfloat16), ((3, 1, 7, 40), 2, -0.75, torch.float32),
                                         ((1, 1001), -1, 0.1, torch.float16), ((2, 270_000), -1, 1.0, torch.bfloat16)):
            x, spec = torch.empty(shape, dtype=dtype, device="meta"), Spec(dim, False, scale, False, False, dtype)
            forward(x, None, spec)
            backward(x, x, spec, dtype)
    return found


def test_parameters_are_those_of_the_compiled_kernels():
    kernels = fresh.call(compared)
    assert {name for name, *_ in kernels} >= {"_resident", "parts_forward", "parts_backward"}
    for name, declared, sizes, floats in kernels:
        assert len(declared) > 10, name
        assert sizes == declared, name
        assert set(floats) <= {1.0, -0.75, struct.unpack("<f", struct.pack("<f", 0.1))[0]}, name
    assert {value for *_, floats in kernels for value in floats} >= {1.0, -0.75}


def test_values_are_little_endian_words():
    sizes = [8, 8, 4, 8, 4, 2, 2, 8, 1, 4, 8, 8, 8]
    found = parameters_of(SIGNATURE.values(), ARGS)
    assert [p.size for p in found] == sizes
    raw = b"".join(p.value.to_bytes(p.size, "little") for p in found[2:])
    assert raw == (struct.pack("<iqfe", -3, -(1 << 40), 0.5, -2.0) + struct.pack("<f", 1.5)[2:]
                   + struct.pack("<d?iqqq", 0.1, True, 7, 0, 0, 0))
    t = torch.zeros(3)
    assert parameters_of(["*fp32"], [t])[0].value == t.data_ptr()
    assert parameters_of(["tensordesc<fp16[64, 64]>"], [None]) is None
    with pytest.raises(ValueError, match="shorter"):
        parameters_of(["i32", "i32"], [1])


class Driver:
    """Takes launches and reads what they hand over, as the driver's own does."""

    def __init__(self, sizes: list[int], error: int = 0) -> None:
        self.sizes, self.error, self.read = sizes, error, []

    def offsets(self, function: ctypes.c_void_p, sizes: list[int]) -> list[int] | None:
        return OFFSETS if sizes == self.sizes else None

    def launch(self, config: Any, function: ctypes.c_void_p, pointers: None, extra: Any) -> int:
        time.sleep(0)  # another thread may run now
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)  # CUlaunchConfig
        assert (pointers, extra[0], extra[2], extra[4]) == (None, 1, 2, None)
        block = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        self.read.append((*struct.unpack("<3I3II4xQQI4x", raw), function.value, block))
        return self.error


SIZES = [p.size for p in parameters_of(SIGNATURE.values(), ARGS)]
LAYOUT = "<QQ i4x q f e H d ?3x i QQQ"  # as SIGNATURE, scratch memory last: each at a multiple of its size
OFFSETS = [0, 8, 16, 24, 32, 36, 38, 40, 48, 52, 56, 64, 72]


def bound(monkeypatch, driver: Driver | None, **properties: bool) -> tuple[Callable[..., None], list[Any]]:
    """A launch of 24 blocks of 2 warps with 512 bytes of shared memory, and what goes by Triton's launcher."""
    by_triton: list[Any] = []
    run = SimpleNamespace(launch=lambda *args: by_triton.append(args), global_scratch_size=0, profile_scratch_size=0,
                          **{"launch_cooperative_grid": False, "launch_pdl": False} | properties)
    compiled = SimpleNamespace(run=run, function=99, packed_metadata=(2, 1, 512), metadata=None, src=SimpleNamespace(signature=SIGNATURE))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(launcher, "_driver", lambda: driver)
    return Launcher(compiled).bound(24, ARGS), by_triton


def test_a_bound_launch_hands_the_driver_everything(monkeypatch):
    driver = Driver(SIZES)
    start, by_triton = bound(monkeypatch, driver)
    start(77, 2**40, 5)
    start(0, 1, 2**63 + 1)
    assert not by_triton
    for (*config, block), stream, pointers in zip(driver.read, (77, 0), ((2**40, 5), (1, 2**63 + 1)), strict=True):
        assert config == [24, 1, 1, 64, 1, 1, 512, stream, 0, 0, 99]
        rounded = int.from_bytes(struct.pack("<f", 1.5)[2:], "little")
        assert struct.unpack(LAYOUT, block) == (*pointers, -3, -(1 << 40), 0.5, -2.0, rounded, 0.1, True, 7, 0, 0, 0)
    with pytest.raises(TypeError, match="missing 1 required"):
        start(0, 1)


@pytest.mark.parametrize(("driver", "properties"), [
    (None, {}), (Driver(SIZES[:-1]), {}), (Driver(SIZES, error=201), {}), (Driver(SIZES), {"launch_cooperative_grid": True}),
    (Driver(SIZES), {"launch_pdl": True})], ids=["no driver", "other parameters", "an error", "cooperative", "programmatic"])
def test_everything_else_goes_by_triton(monkeypatch, driver, properties):
    start, by_triton = bound(monkeypatch, driver, **properties)
    start(77, 2**40, 5)
    (args,) = by_triton
    assert args[:5] == (24, 1, 1, 77, 99)
    assert args[-len(ARGS):] == (2**40, 5, *ARGS[2:])
    assert driver is None or len(driver.read) == (driver.error != 0)


def test_threads_launch_at_once_with_values_of_their_own(monkeypatch):
    driver = Driver(SIZES)
    start, _ = bound(monkeypatch, driver)
    barrier = Barrier(4)

    def many(thread: int) -> None:
        barrier.wait()
        for i in range(200):
            start(thread, thread << 40 | i, thread << 40 | i)

    threads = [Thread(target=many, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = set()
    for *config, block in driver.read:
        x, y = struct.unpack_from("<QQ", block)
        assert x == y
        assert x >> 40 == config[7]
        seen.add(x)
    assert len(seen) == len(driver.read) == 800


def test_the_driver_is_asked_for_every_parameter():
    driver = launcher._Driver.__new__(launcher._Driver)

    def parameter(function: ctypes.c_void_p, at: ctypes.c_size_t, offset: Any, size: Any) -> int:
        if at.value >= len(SIZES):
            return 1
        offset._obj.value, size._obj.value = OFFSETS[at.value], SIZES[at.value]
        return 0

    driver._parameter = parameter
    assert driver.offsets(ctypes.c_void_p(1), SIZES) == OFFSETS
    for other in (SIZES[:-1], [*SIZES, 8], [4, *SIZES[1:]]):
        assert driver.offsets(ctypes.c_void_p(1), other) is None


def test_where_there_is_no_driver_triton_serves(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert launcher._driver.__wrapped__() is None
