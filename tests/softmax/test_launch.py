"""What is remembered of a call, what launches exchange through, and when the short way is taken."""
from threading import Lock

import pytest
import torch

from onchip.softmax import api, ops
from onchip.softmax.api import softmax
from onchip.softmax.contract import Spec
from onchip.softmax.triton import launch
from onchip.testing.softmax import DEVICE
from tests.softmax.conftest import forget

INTERPRETED = pytest.mark.skipif(DEVICE != "cpu", reason="stands a CPU tensor in for one on a GPU; tests/gpu has the real ones")
SPEC = Spec(-1, False, 1.0, False, False, torch.float32)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    forget()
    monkeypatch.setattr(launch, "_EXCHANGES", {})
    monkeypatch.setattr(api, "_KNOWN", {})
    yield
    forget()


class OnCard(torch.Tensor):
    """Says it is on a GPU."""

    is_cuda = True


def test_one_launch_for_each_kind_of_call():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for x in (torch.randn(3, 40, device=device), torch.randn(3, 40, device=device), torch.randn(3, 80, device=device)[:, :40]):
        softmax(x, backend="triton")
    assert len(launch._LAUNCHES) == 2
    softmax(torch.randn(3, 40, device=device), backend="triton", scale=0.5)
    assert len(launch._LAUNCHES) == 3


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(launch, "REMEMBERED", 2)
    cpu = torch.device("cpu")
    made = [launch.remembered(cpu, (i,), lambda i=i: object() if i != 1 else None) for i in range(5)]
    assert made[1] is None
    assert len(launch._LAUNCHES) <= 2
    assert launch.remembered(cpu, (4,), lambda: None) is made[4]
    assert launch.remembered(torch.device("meta"), (4,), lambda: 7) == 7
    assert launch.remembered(torch.device("meta"), (4,), lambda: 8) == 8


def test_tags_of_a_stream_are_never_used_twice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Device:
        type = "cuda"

    device = Device()
    monkeypatch.setattr(launch._Exchange, "__init__", lambda self, device: self.__dict__.update(words=torch.zeros(4), tag=1, lock=Lock()))
    words, first = launch.exchange(device, 7, 10)
    same, second = launch.exchange(device, 7, 5)
    assert same is words
    assert (first, second) == (1, 11)
    assert launch.exchange(device, 7, 1)[1] == 16
    other, tag = launch.exchange(device, 8, 5)
    assert other is not words
    assert tag == 1
    words.fill_(3.0)
    launch._EXCHANGES[device, 7].tag = 2**31 - 3
    assert launch.exchange(device, 7, 3) == (words, 1)  # from the start, with clean words
    assert not words.any()


@pytest.mark.parametrize("captured", [True, False])
def test_graphs_and_threads_get_words_of_their_own(monkeypatch, captured):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(launch._Exchange, "__init__", lambda self, device: self.__dict__.update(words=torch.zeros(4), tag=1, lock=Lock()))
    device = type("Device", (), {"type": "cuda"})()
    stream = 9 if captured else launch.PER_THREAD
    assert launch.exchange(device, stream, 4)[0] is not launch.exchange(device, stream, 4)[0]
    assert launch._EXCHANGES == {}
    assert launch.exchange(device, stream, 0) == ()


@pytest.fixture
def known(monkeypatch):
    """Every call that may take the short way does, and says so."""
    class All(dict):
        def get(self, key):
            hash(key)
            return lambda x: "short"

    monkeypatch.setattr(api, "_KNOWN", All())
    monkeypatch.setattr(api, "Tensor", OnCard)  # type(x) is Tensor
    return torch.randn(3, 5).as_subclass(OnCard)


def test_a_plain_call_takes_the_short_way(known):
    assert softmax(known) == "short"
    assert softmax(known, 0, scale=0.5, causal=False, dtype=torch.float32) == "short"
    with torch.no_grad():
        assert softmax(known.clone().requires_grad_()) == "short"


def test_any_other_call_does_not(known, monkeypatch):
    ways = []
    monkeypatch.setattr(api, "_run", lambda *a, **k: ways.append("long") or "long")
    assert softmax(torch.randn(3, 5)) == "long"  # another class: a parameter, a fake tensor, a CPU tensor
    for arguments in ({"mask": True}, {"bias": True}, {"inplace": True}, {"dim": True}, {"causal": 1}, {"dtype": ["no", "hash"]}):
        assert softmax(known, **arguments) == "long"
    assert softmax(known.clone().requires_grad_()) == "long"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert softmax(known) == "long"
    monkeypatch.setattr(ops, "alone", lambda: False)
    assert softmax(known) == "long"


@INTERPRETED
def test_only_plain_calls_are_learnt(monkeypatch):
    learnt = []
    monkeypatch.setattr(api, "_learn", lambda call, spec: learnt.append(call))
    x = torch.randn(3, 5)
    softmax(x, backend="triton")
    assert not learnt  # not on a GPU
    monkeypatch.setattr(api, "_plain", lambda call: True)
    softmax(x, 1, scale=0.5, backend="triton")
    softmax(x, mask=x > 0, backend="triton")
    softmax(x, bias=x, backend="triton")
    softmax(x, dtype=torch.float16, backend="triton")  # cast first
    softmax(x.clone(), inplace=True, backend="triton")
    softmax(x, backend="reference")
    assert [call[2:] for call in learnt] == [(1, None, 0.5, False, "triton")]


def test_alone_means_that_nobody_watches():
    assert ops.alone()
    seen = []
    torch.func.vmap(lambda x: seen.append(ops.alone()) or x)(torch.zeros(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(ops.alone())
    with torch.utils._python_dispatch.TorchDispatchMode():
        seen.append(ops.alone())
    with torch.overrides.TorchFunctionMode():
        seen.append(ops.alone())
    torch.compile(lambda x: seen.append(ops.alone()) or x, backend="eager")(torch.zeros(2))
    assert not any(seen)
    assert ops.alone()


@INTERPRETED
def test_the_short_way_starts_the_kernel_that_was_started_before(monkeypatch):
    """Same grid, same arguments but the pointers; a new result each time."""
    x, started = torch.randn(3, 40), []
    launch.forward(x, None, SPEC)
    one, = launch._LAUNCHES.values()
    assert launch.quick(x, SPEC) is None  # nothing to start it with, under the interpreter or before the first call
    one.launcher = lambda grid, stream, args: started.append((grid, stream, args))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU tensor's device
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    run = launch.quick(x, SPEC)
    other = torch.randn(3, 40)
    results = [run(x), run(other)]
    assert [(grid, stream, args[0], args[1]) for grid, stream, args in started] == [
        (one.grid, 77, t.data_ptr(), y.data_ptr()) for t, y in zip((x, other), results, strict=True)]
    assert all(args[2:4] == (0, 0) and args[4:] == one.rest for *_, args in started)
    assert launch.quick(torch.randn(3, 80)[:, :40], SPEC) is None  # other strides, not seen yet
