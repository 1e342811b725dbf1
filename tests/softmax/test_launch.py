"""What is remembered of a call, what launches exchange through, and when the short way is taken."""
from threading import Lock

import pytest
import torch

from onchip import launcher
from onchip.softmax import api, ops
from onchip.softmax.api import softmax
from onchip.softmax.contract import Spec
from onchip.softmax.triton import launch, words
from onchip.testing.softmax import DEVICE
from tests.softmax.conftest import forget

INTERPRETED = pytest.mark.skipif(DEVICE != "cpu", reason="stands a CPU tensor in for one on a GPU; tests/gpu has the real ones")
PLAIN = -1, None, None, False, "auto"  # a call's options
NOTHING = (lambda x: False), 0, None  # is like this
SPEC = Spec(-1, False, 1.0, False, False, torch.float32)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    forget()
    monkeypatch.setattr(words, "_EXCHANGES", {})
    monkeypatch.setattr(api, "_KNOWN", {})
    monkeypatch.setattr(api, "_LATEST", {})
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
    monkeypatch.setattr(words._Exchange, "__init__", lambda self, device: self.__dict__.update(words=torch.zeros(4), tag=1, lock=Lock()))
    ours, first = words.exchange(device, 7, 10)
    same, second = words.exchange(device, 7, 5)
    assert same is ours
    assert (first, second) == (1, 11)
    assert words.exchange(device, 7, 1)[1] == 16
    other, tag = words.exchange(device, 8, 5)
    assert other is not ours
    assert tag == 1
    ours.fill_(3.0)
    words._EXCHANGES[device, 7].tag = 2**31 - 3
    assert words.exchange(device, 7, 3) == (ours, 1)  # from the start, with clean words
    assert not ours.any()


@pytest.mark.parametrize("captured", [True, False])
def test_graphs_and_threads_get_words_of_their_own(monkeypatch, captured):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(words._Exchange, "__init__", lambda self, device: self.__dict__.update(words=torch.zeros(4), tag=1, lock=Lock()))
    device = type("Device", (), {"type": "cuda"})()
    stream = 9 if captured else launcher.PER_THREAD
    assert words.exchange(device, stream, 4)[0] is not words.exchange(device, stream, 4)[0]
    assert words._EXCHANGES == {}
    assert words.exchange(device, stream, 0) == ()


@pytest.fixture(params=[(True, True), (True, False), (False, True)], ids=["like the latest", "like one before", "without Dynamo's guard"])
def known(request, monkeypatch):
    """Every call with a tensor like this one that may take the short way does, and says so."""
    guard, latest = request.param
    if not guard:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    monkeypatch.setattr(api, "Tensor", OnCard)  # type(x) is Tensor
    x = torch.randn(3, 5).as_subclass(OnCard)
    this = api._alike(x), x.data_ptr() % 16, lambda x, address: "short"

    class All(dict):
        def __bool__(self):
            return True

        def get(self, key, default=None):
            hash(key)
            return (this,)

    monkeypatch.setattr(api, "_LATEST", {False: (*PLAIN, *(this if latest else NOTHING))})
    monkeypatch.setattr(api, "_KNOWN", {} if latest else All())
    monkeypatch.setattr(api, "_run", lambda *a, **k: "long")
    return x


def test_a_plain_call_takes_the_short_way(known):
    assert softmax(known) == "short"
    others = softmax(known.clone(), 0, scale=0.5, causal=False, dtype=torch.float32)
    assert others == ("short" if api._KNOWN else "long")
    with torch.no_grad():
        assert softmax(known) == "short"


def test_what_a_launch_raises_is_raised_at_once(known, monkeypatch):
    def full(x, address):
        raise torch.OutOfMemoryError

    this = (lambda x: True), known.data_ptr() % 16, full
    monkeypatch.setattr(api, "_KNOWN", {(known.shape, False, *PLAIN): (this,)})
    for latest in (this, NOTHING):
        monkeypatch.setattr(api, "_LATEST", {False: (*PLAIN, *latest)})
        with pytest.raises(torch.OutOfMemoryError):
            softmax(known)


def test_other_arguments_do_not(known):
    assert softmax(torch.randn(3, 5)) == "long"  # another class: a parameter, a fake tensor
    for arguments in ({"mask": True}, {"bias": True}, {"inplace": True}, {"dim": True}, {"causal": 1}, {"dtype": ["no", "hash"]},
                      {"scale": True}, {"dim": 1.0}):
        assert softmax(known, **arguments) == "long"
    for x in ([[1.0]], None, torch.eye(2).to_sparse()):
        assert softmax(x) == "long"


def test_other_tensors_do_not(known):
    room, both = torch.zeros(64), torch.randn(3, 5, dtype=torch.complex64)
    for x in (known.half(), known[:, :4], known.t().contiguous().t(), known.clone().requires_grad_(), both.conj().imag,
              room[1:16].view(3, 5), known.to("meta")):
        assert softmax(x.as_subclass(OnCard)) == "long"
    with torch.no_grad():
        assert softmax(known.clone().requires_grad_()) == "long"
    with torch.inference_mode():
        found = softmax(known.clone())
    assert found == ("long" if hasattr(torch._C._dynamo.guards, "TensorGuards") else "short")  # dispatched otherwise, to the same end


def test_nor_do_calls_that_others_take_part_in(known):
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(softmax(known))
    with torch.autograd.forward_ad.dual_level():
        seen.append(softmax(known))
    with torch.utils._python_dispatch.TorchDispatchMode():
        seen.append(softmax(known))
    with torch.overrides.TorchFunctionMode():
        seen.append(softmax(known))
    torch.func.vmap(lambda y: seen.append(softmax(known)) or y)(torch.zeros(2))
    torch.func.functionalize(lambda y: seen.append(softmax(known)) or y)(torch.zeros(2))
    torch.func.grad(lambda y: seen.append(softmax(known)) or y)(torch.zeros(()))
    torch.compile(lambda y: seen.append(softmax(known)) or y, backend="eager")(torch.zeros(2))
    assert seen == ["long"] * 8
    assert softmax(known) == "short"


@INTERPRETED
def test_calls_that_alternate_are_all_known(monkeypatch):
    monkeypatch.setattr(api, "_plain", lambda x: True)
    monkeypatch.setattr(launch, "quick", lambda x, spec: lambda x, address: (tuple(x.shape), spec.log))
    tensors = torch.randn(3, 5), torch.randn(4, 7)
    for x in tensors:
        softmax(x, backend="triton")
        api.log_softmax(x, backend="triton")
    for x in (*tensors, *tensors, tensors[1]):
        assert softmax(x, backend="triton") == (tuple(x.shape), False)
        assert api.log_softmax(x, backend="triton") == (tuple(x.shape), True)
    assert (len(api._KNOWN), len(api._LATEST)) == (4, 2)
    monkeypatch.setattr(api, "REMEMBERED", 4)
    softmax(torch.randn(1, 2), backend="triton")
    assert (len(api._KNOWN), len(api._LATEST)) == (1, 1)


@INTERPRETED
def test_only_plain_calls_are_learnt(monkeypatch):
    learnt = []
    monkeypatch.setattr(api, "_learn", lambda *call: learnt.append(call[:-1]))
    x = torch.randn(3, 5)
    softmax(x, backend="triton")
    assert not learnt  # not on a GPU
    monkeypatch.setattr(api, "_plain", lambda x: True)
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
    class Started:
        def bound(self, grid, args):
            return lambda stream, x, y: started.append((grid, stream, (x, y, *args[2:])))

    one.launcher = Started()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU tensor's device
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    run = launch.quick(x, SPEC)
    other = torch.randn(3, 40)
    results = [run(x, x.data_ptr()), run(other, other.data_ptr())]
    assert [(y.shape, y.stride(), y.dtype) for y in results] == [(x.shape, x.stride(), x.dtype)] * 2
    assert [(grid, stream, args[0], args[1]) for grid, stream, args in started] == [
        (one.grid, 77, t.data_ptr(), y.data_ptr()) for t, y in zip((x, other), results, strict=True)]
    assert all(args[2:4] == (0, 0) and args[4:] == one.rest for *_, args in started)
    assert launch.quick(torch.randn(3, 80)[:, :40], SPEC) is None  # other strides, not seen yet
