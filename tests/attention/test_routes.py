"""A call of a kind met before takes the route of the first: which calls are of one kind, and that nothing of their data is remembered."""
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import onchip
from onchip.attention import api, ops
from onchip.testing.attention import Case, Target, check


def kinds() -> int:
    """How many kinds of calls have been met; some are known by two names."""
    return len({id(route.memo) for route in ops._ROUTES.values()})


DIFFERENT: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "another length": lambda q: {"k": q[:, :, :7], "v": q[:, :, :7]},
    "another stride": lambda q: {"q": q.transpose(1, 2).contiguous().transpose(1, 2)},
    "another dtype": lambda q: {name: q.half() for name in "qkv"},
    "an address off by one element": lambda q: {"q": torch.cat([q.flatten(), q.flatten()])[1 : q.numel() + 1].view(q.shape)},
    "a mask": lambda q: {"mask": torch.ones(8, 8, dtype=torch.bool)},
    "causal": lambda q: {"causal": True},
    "a scale": lambda q: {"scale": 0.5},
    "another backend": lambda q: {"backend": "reference"},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_of_another_kind_have_a_route_of_their_own(name: str) -> None:
    q = torch.randn(1, 2, 8, 16)
    same = {"q": q, "k": q, "v": q}
    onchip.attention(**same)
    onchip.attention(**{key: torch.randn(1, 2, 8, 16) for key in same})
    assert kinds() == 1
    onchip.attention(**{**same, **DIFFERENT[name](q)})
    assert kinds() == 2


def test_deterministic_mode_is_read_at_every_call() -> None:
    q = torch.randn(1, 2, 8, 16)
    onchip.attention(q, q, q)
    torch.use_deterministic_algorithms(True)
    try:
        onchip.attention(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kinds() == 2


def test_routes_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_MOST_ROUTES", 3)
    for keys in range(1, 9):
        onchip.attention(torch.randn(1, 1, 4, 8), *torch.randn(2, 1, 1, keys, 8))
        assert len(ops._ROUTES) <= 3


@pytest.mark.parametrize("case", [
    Case(heads=4, seq_q=33, seq_k=40, causal=True, sinks=True), Case(seq_q=9, seq_k=20, bias=(1, 2, 9, 20), mask=(1, 1, 9, 20)),
    Case(lengths=((5, 9), (0, 3), (7, 1)), tail=2, alibi=1), Case(seq_q=17, seq_k=17, dropout_p=0.3, softcap=5.0)], ids=str)
def test_the_second_call_of_a_kind_is_right_too(case: Case, target: Target) -> None:
    """Forward and backward: what the first call left for the second holds nothing of its tensors."""
    for seed in range(3):
        check(Case(**{**case.__dict__, "seed": seed}), target)


class _Function(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def _off_by_one(x: Tensor) -> Tensor:
    return torch.cat([x.flatten(), x.flatten()])[1 : x.numel() + 1].view(x.shape)


class _Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


# Beside a call attention(q, q, q, causal=True, window=(1, 0), scale=1.0, softcap=1.0): what differs by itself, by the argument that does.
Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
BASE = {"q": Q, "k": Q, "v": Q, "causal": True, "window": (1, 0), "scale": 1.0, "softcap": 1.0}
_TENSORS = {
    "longer": Q.repeat(1, 1, 2, 1), "shorter": Q[:, :, :7], "more heads": Q.repeat(1, 2, 1, 1), "another batch": Q.repeat(2, 1, 1, 1),
    "narrower": Q[..., :8], "other strides": Q.mT.contiguous().mT, "heads inside": Q.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": Q[:, :1].expand(Q.shape), "of doubles": Q.double(), "of bf16": Q.bfloat16(), "of integers": Q.int(),
    "elsewhere": Q.to("meta"), "off by an element": _off_by_one(Q), "a negative view": torch._neg_view(Q), "sparse": Q.to_sparse(),
    "no tensor": Q.tolist(), "none": None, "three-dimensional": Q[0], "a subclass": Q.as_subclass(_Subclass), "a parameter": Parameter(Q),
    "nested": torch.nested.nested_tensor([Q[0, 0], Q[0, 1, :5]], layout=torch.jagged)}
DIFFERING: dict[str, dict[str, Any]] = {
    "q": _TENSORS, "k": _TENSORS, "v": _TENSORS,
    "causal": {"off": False, "by name": "bottom-right", "from the top": "top-left", "one": 1, "numpy": np.True_, "a word": "left",
               "list": []},
    "window": {"none": None, "wider": (2, 0), "unbounded": (None, 0), "list": [1, 0], "bool": (True, 0), "float": (1.0, 0),
               "negative": (-1, 0), "one width": (1,), "three": (1, 0, 0), "number": 1, "numpy": (np.int64(1), 0), "lists": ([1], 0),
               "endless": iter(int, 1)},
    "scale": {"none": None, "two": 2.0, "one": 1, "bool": True, "zero": 0.0, "numpy": np.float64(1.0), "array": np.array(1.0),
              "nan": np.nan, "infinite": float("inf"), "tensor": torch.tensor(1.0), "text": "1"},
    "softcap": {"none": None, "two": 2.0, "one": 1, "bool": True, "zero": 0.0, "numpy": np.float32(1.0), "tensor": torch.tensor(1.0),
                "negative": -1.0},
    "bias": {"a row": torch.randn(8), "wrong": torch.zeros(7), "list": [0.0]},
    "mask": {"a row": torch.arange(8) > 3, "of floats": torch.zeros(8)},
    "alibi_slopes": {"some": torch.ones(2), "wrong": torch.ones(3)},
    "sinks": {"some": torch.ones(2), "wrong": torch.ones(3)},
    "dropout_p": {"half": 0.5, "all": 1.0, "negative": -0.5, "bool": False, "tensor": torch.tensor(0.0), "nan": np.nan},
    "dropout_seed": {},  # without dropout it says nothing
    "return_lse": {},  # what is returned is chosen in the end
    "deterministic": {"on": True, "one": 1},
    "backend": {"named": "reference", "impossible": "torch-cpu", "unknown": "cuda", "absent": None},
}
SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "deterministic mode": _Deterministic, "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "a torch function mode": _Function,
    "a dispatch mode": _Dispatch, "forward mode": forward_ad.dual_level}


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the words it refuses in."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a == b
    return (type(a) is type(b) and a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and a.stride() == b.stride()
            and a.requires_grad == b.requires_grad and (a.is_meta or torch.equal(a, b)))


def checks_of(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one at each call that is checked."""
    made: list[None] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        return check_dense(*args, **kwargs)

    check_dense = api.check_dense
    monkeypatch.setattr(api, "check_dense", watched)
    return made


def test_every_argument_is_varied() -> None:
    assert list(DIFFERING) == list(inspect.signature(onchip.attention).parameters)


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, values in DIFFERING.items() for how in values])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_call_that_differs_is_answered_or_refused_as_if_none_had_come_before(
        name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every argument alone. Where dropout draws, both draw the same."""
    made = checks_of(monkeypatch)
    onchip.attention(**BASE)
    onchip.attention(**BASE)
    assert len(made) == 1
    call = {**BASE, name: DIFFERING[name][how]}
    torch.manual_seed(1)
    known = outcome(lambda: onchip.attention(**call))
    assert len(made) == 2
    ops._ROUTES.clear()
    torch.manual_seed(1)
    assert equal(known, outcome(lambda: onchip.attention(**call)))


@pytest.mark.parametrize("name", SWITCHES)
def test_under_a_switch_a_known_call_is_checked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks_of(monkeypatch)
    onchip.attention(**BASE)
    with SWITCHES[name]():
        under = onchip.attention(**BASE)
        assert len(made) == 2
        ops._ROUTES.clear()
        assert equal(under, onchip.attention(**BASE))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, when dynamo is first imported
def test_transforms_and_traces_of_a_known_call_are_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks_of(monkeypatch)
    right = onchip.attention(**BASE)

    def function(x: Tensor) -> Tensor:
        return onchip.attention(**{**BASE, "q": x, "k": x, "v": x})

    assert torch.allclose(torch.vmap(function)(Q[None])[0], right)
    assert torch.func.grad(lambda q: function(q).sum())(Q).any()
    assert torch.func.jvp(function, (Q,), (Q,))[1].any()
    with FakeTensorMode() as mode:
        assert function(mode.from_tensor(Q)).shape == Q.shape
    assert len(made) == 5  # what was known and vmap, grad, jvp, and fakes
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(Q), right)


PLAIN: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "from the top": {"causal": "top-left"}, "window": {"window": (2, None)},
    "negative": {"scale": -0.5}, "integers": {"scale": 2, "softcap": 3}, "deterministic": {"deterministic": True},
    "named": {"backend": "reference"}, "of other sizes": {"k": Q[:, :1, :5], "v": Q[:, :1, :5, :8]}, "none": {"q": Q[:, :, :0]}}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_known_call_is_not_checked_and_computes_the_same(
        name: str, context: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other data."""
    made = checks_of(monkeypatch)
    dtype = torch.bfloat16 if target.device == "cuda" else torch.float32
    first = {name: x.to(target.device, dtype) if isinstance(x, Tensor) else x
             for name, x in {"q": Q, "k": Q, "v": Q, "backend": target.backend, **PLAIN[name]}.items()}
    onchip.attention(**first)
    other = {name: torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device).copy_(x + 1) if isinstance(x, Tensor) else x
             for name, x in first.items()}
    with context():
        out, lse = onchip.attention(**other, return_lse=True)
        assert equal(onchip.attention(**other), out)
        assert len(made) == 1
        ops._ROUTES.clear()
        for got, want in zip((out, lse), onchip.attention(**other, return_lse=True), strict=True):
            assert equal(got, want)
            assert got.is_inference() == want.is_inference()


@pytest.mark.parametrize("wanted", ["qkv", "q", "kv"])
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_a_known_call_has_all_its_derivatives(wanted: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First and second ones, equal to those of the same call when it is new."""
    made = checks_of(monkeypatch)

    def derivatives() -> list[Tensor]:
        leaves = {name: (Q + n).requires_grad_(name in wanted) for n, name in enumerate("qkv")}
        out, lse = onchip.attention(**leaves, causal=True, return_lse=True)
        loss = (out.square().sum() if of != "lse" else 0) + (lse.sin().sum() if of != "out" else 0)
        inputs = [leaves[name] for name in wanted]
        first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs, materialize_grads=True)
        return [out, lse, *first, *second]

    want = derivatives()
    got = derivatives()
    assert len(made) == 1
    assert type(got[0].grad_fn).__name__ == "_KnownBackward"
    for a, b in zip(got, want, strict=True):
        assert equal(a, b)


def test_a_mutable_scale_is_read_at_every_call() -> None:
    scale = torch.tensor(1.0)
    first = onchip.attention(Q, Q, Q, scale=scale)
    scale.fill_(2.0)
    assert equal(onchip.attention(Q, Q, Q, scale=scale), onchip.attention(Q, Q, Q, scale=2.0))
    assert not torch.equal(first, onchip.attention(Q, Q, Q, scale=2.0))


def test_an_implementation_may_leave_the_short_way_through_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        rest[-1]["again"] = lambda q, k, v: (q + k, v)
        return q, q[..., 0]

    monkeypatch.setattr(ops, "implementation", lambda backend, direction: forward)
    assert onchip.attention(Q, Q, Q) is Q
    assert torch.equal(onchip.attention(Q, Q, Q), 2 * Q)
    assert onchip.attention(Q, Q, Q, sinks=torch.ones(2)) is Q


def test_a_negative_view_is_what_it_stands_for(target: Target) -> None:
    """Its memory holds the opposite: kernels that read memory need it worked out first, on the way back too."""
    x = torch.randn(1, 2, 8, 16, device=target.device)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    grads = [torch.autograd.grad(onchip.attention(*leaves, backend=target.backend), leaves, dout) for dout in (torch._neg_view(x), -x)]
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)
    for n in range(3):
        q, k, v = (torch._neg_view(x) if n == at else x for at in range(3))
        want = onchip.attention(*(t.resolve_neg() for t in (q, k, v)), backend=target.backend)
        assert torch.equal(onchip.attention(q, k, v, backend=target.backend), want)
    backend = "auto" if target.backend == "hopper" else target.backend  # not all of these are Hopper's
    for name, shape in {"bias": (1, 2, 8, 8), "sinks": (2,), "alibi_slopes": (2,)}.items():
        y = torch._neg_view(torch.randn(shape, device=target.device))
        found = [onchip.attention(x, x, x, backend=backend, **{name: z}) for z in (y, y.resolve_neg())]
        assert torch.equal(*found), name
