import sys

import pytest
import torch

from onchip.bench import machine
from onchip.bench.torch_extra import load_torch, parse_device, parse_torch_dtype
from onchip.errors import InputError, MissingExtra


def steady(seconds: float):
    """A timer that runs the call once and says it took `seconds`."""

    def timer(fn, device, **_):
        fn()
        return seconds

    return timer


def test_rates_from_times():
    c = machine.measure_ceilings(copy_bytes=1 << 20, timer=steady(machine.LONG))
    assert c.copy == 2 * (1 << 20) / machine.LONG  # read and written
    assert c.matmul == 2 * 256**3 / machine.LONG  # long enough at the first size
    assert (c.copy_bytes, c.matmul_size, c.dtype) == (1 << 20, 256, "float32")


def test_the_matmul_grows_and_the_fastest_size_counts(monkeypatch):
    monkeypatch.setattr(machine, "MATMUL_SIZES", (8, 16, 32, 64))
    times = {8: 1e-6, 16: 1e-6, 32: 1.0, 64: 1e-9}  # 16 is faster than 8; 32 is slow, and long enough to end it

    def timer(fn, device):
        out = fn()
        return times.get(len(out), 1.0)

    c = machine.measure_ceilings(copy_bytes=8, timer=timer)
    assert (c.matmul_size, c.matmul) == (16, 2 * 16**3 / 1e-6)


def test_measures_for_real():
    c = machine.measure_ceilings("cpu", "fp32", copy_bytes=1 << 20)
    assert 1e7 < c.copy < 1e14  # a floppy drive and a hundred HBM stacks: only a wrong unit falls outside
    assert 1e7 < c.matmul < 1e16
    assert "threads" in c.device


def test_prints_what_was_measured():
    c = machine.Ceilings("Abacus, 2 threads", "float32", 13.44e9, 51.38e9, 1 << 28, 1024)
    assert str(c) == "Abacus, 2 threads: copy 13.4 GB/s (read + written, 256 MiB), float32 matmul 51.4 GFLOP/s (1024³)"
    assert "copy 4.12 TB/s" in str(machine.Ceilings("H200", "bfloat16", 4.123e12, 7.186e14))
    assert "matmul 719 TFLOP/s" in str(machine.Ceilings("H200", "bfloat16", 4.123e12, 7.186e14))


@pytest.mark.parametrize("device", ["tpu-pod", "cpu:x", "meta"])
def test_devices_there_are_not(device):
    with pytest.raises(InputError, match="device: got"):
        machine.measure_ceilings(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said_in_one_line():
    with pytest.raises(InputError, match=r"device: got 'cuda', accepted: .*\)$"):
        parse_device("cuda")


def test_formats_torch_cannot_multiply():
    assert parse_torch_dtype("bf16") is torch.bfloat16
    with pytest.raises(InputError, match="dtype: got 'e4m3', accepted: float64"):
        parse_torch_dtype("e4m3")
    with pytest.raises(InputError, match="int8"):
        parse_torch_dtype("int8")


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"counting sheep needs torch, .*onchip\[torch\]"):
        load_torch("counting sheep")
    with pytest.raises(MissingExtra):
        machine.measure_ceilings()
