"""Which backend runs, why another does not, and what `explain` makes of it."""
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from onchip.attention import attention, dispatch, explain, ops
from onchip.attention.dispatch import CAPABILITIES, DTYPES, choose, implementation, why_not
from onchip.attention.explain import explain_problem
from onchip.attention.hopper import tiles as hopper_tiles
from onchip.attention.problem import FEATURES, AttentionProblem
from onchip.errors import InputError
from onchip.roofline.attention import Formats, Tile, fa2
from onchip.roofline.hardware import find_gpu
from onchip.roofline.roofs import predict
from onchip.testing.attention import Case, Target, check

PLAIN = AttentionProblem(1, 2, 2, 8, 8, 16, 16, dtype="float32", device="cpu")

# a problem that asks for one feature and nothing else
ASKING = {
    "causal": {"causal": "top-left"}, "window": {"window": (2, None)}, "softcap": {"softcap": 3.0}, "bias": {"bias": True},
    "mask": {"mask": True}, "alibi": {"alibi": True}, "sinks": {"sinks": True}, "dropout": {"dropout_p": 0.5}, "varlen": {"varlen": True},
    "gqa": {"kv_heads": 1}, "cross": {"seq_q": 4}, "dv": {"head_dim_v": 8}}
CASES = {
    "causal": {"causal": "top-left"}, "window": {"window": (2, None)}, "softcap": {"softcap": 3.0}, "bias": {"bias": (1, 2, 8, 8)},
    "mask": {"mask": (1, 1, 8, 8)}, "alibi": {"alibi": 1}, "sinks": {"sinks": True}, "dropout": {"dropout_p": 0.5},
    "varlen": {"lengths": ((3, 3), (5, 5))}, "gqa": {"kv_heads": 1}, "cross": {"seq_q": 4}, "dv": {"dim_v": 8}}


def test_every_feature_has_a_problem_that_asks_for_it_alone() -> None:
    assert list(ASKING) == list(CASES) == list(FEATURES)
    assert PLAIN.features == ()
    for name, fields in ASKING.items():
        assert replace(PLAIN, **fields).features == (name,)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", [name for name in CAPABILITIES if why_not(name, PLAIN) is None])
def test_each_yes_of_the_table_runs_and_each_no_raises_its_reason(backend: str, feature: str) -> None:
    case = Case(**CASES[feature])
    reason = why_not(backend, replace(PLAIN, **ASKING[feature]))
    if reason is None:
        check(case, Target(backend, "cpu"))
    else:
        with pytest.raises(InputError, match=f"backend: got '{backend}', which cannot run this call: .*{FEATURES[feature]}"):
            check(case, Target(backend, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [name for name in CAPABILITIES if why_not(name, PLAIN) is None])
def test_each_dtype_runs_or_is_refused(backend: str, dtype: str) -> None:
    if dtype in CAPABILITIES[backend].dtypes:
        check(Case(seq_q=9, seq_k=9, dtype=dtype, causal=True), Target(backend, "cpu"))
    else:
        with pytest.raises(InputError, match=f"the dtype is {dtype}"):
            check(Case(dtype=dtype), Target(backend, "cpu"))


@pytest.mark.parametrize(("fields", "says"), [
    ({"device": "cuda"}, "the tensors are on cuda; it runs on cpu"), ({"head_dim": 0}, "the head dim of q and k is 0; it takes 1"),
    ({"causal": "bottom-right", "seq_q": 4}, "for equal lengths only, and 4 queries meet 8 keys"),
    ({"causal": "top-left", "scale": -1.0}, "NaN for scale -1 ≤ 0"), ({"seq_q": 0}, "nothing to compute"),
    ({"bias": True, "softcap": 1.0}, "it has no softcap, no bias")])
def test_torchs_cpu_kernel_is_asked_only_for_what_it_does_rightly(fields: dict, says: str) -> None:
    assert says in why_not("torch-cpu", replace(PLAIN, **fields))
    assert choose(replace(PLAIN, **fields, device="cpu") if "device" not in fields else PLAIN) in ("reference", "torch-cpu")


def test_auto_takes_the_first_that_can() -> None:
    assert choose(PLAIN) == "torch-cpu"
    assert choose(replace(PLAIN, causal="bottom-right")) == "torch-cpu"
    assert choose(replace(PLAIN, sinks=True)) == "reference"
    assert choose(replace(PLAIN, device="mps")) == "reference"
    on_gpu = replace(PLAIN, device="cuda")
    assert choose(on_gpu) == next(name for name in CAPABILITIES if why_not(name, on_gpu) is None)
    assert choose(replace(on_gpu, dtype="float64")) == "reference"
    assert choose(replace(on_gpu, head_dim=513)) == "reference"


def test_the_interpreter_runs_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not("triton", PLAIN) is None
    assert choose(PLAIN) == "torch-cpu"
    assert choose(PLAIN, "triton") == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in why_not("triton", PLAIN)


def test_without_triton_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert "pip install 'onchip[torch]'" in why_not("triton", replace(PLAIN, device="cuda"))


def test_what_runs_is_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's function is really called: no other one answers in its place."""
    called = []

    def watched(backend: str, direction: str) -> Callable[..., object]:
        called.append((backend, direction))
        return implementation(backend, direction)

    monkeypatch.setattr(ops, "implementation", watched)
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    attention(q, q, q).sum().backward()
    attention(q, q, q, backend="reference").sum().backward()
    assert called == [(name, direction) for name in ("torch-cpu", "reference") for direction in ("forward", "backward")]


def test_explain_names_the_choice_and_every_other_reason() -> None:
    q, k = torch.zeros(1, 8, 64, 32), torch.zeros(1, 2, 64, 32)
    answer = explain(q, k, k, causal=True, sinks=torch.zeros(8), return_lse=True)
    assert answer.backend == "reference"
    assert set(answer.reasons) == set(CAPABILITIES) - {"reference"}
    assert answer.reasons["torch-cpu"] == "it has no sinks"
    text = str(answer)
    for part in ("heads 8/2", "seq 64×64", "causal mask, sinks, grouped heads", "runs on:  reference", "not torch-cpu: it has no sinks"):
        assert part in text
    refused = explain(q, k, k, sinks=torch.zeros(8), backend="torch-cpu")
    assert refused.backend is None
    assert "runs on:  nothing" in str(refused)
    with pytest.raises(InputError, match="softcap"):
        explain(q, k, k, softcap=-1)


def test_explain_packed_and_on_a_card_that_is_not_there() -> None:
    q, cu = torch.zeros(64, 8, 128, device="meta", dtype=torch.bfloat16), torch.tensor([0, 10, 64])
    answer = explain(q, q, q, cu, cu, gpu="h200")
    assert answer.problem.device == "cuda"
    assert (answer.problem.batch, answer.problem.seq_q) == (2, 54)
    assert answer.backend == choose(answer.problem)


def test_the_prediction_is_the_roofline_rooms() -> None:
    problem = AttentionProblem(2, 16, 16, 4096, 4096, 128, 128)
    answer = explain_problem(problem, gpu=find_gpu("h200"))
    assert answer.prediction == predict(fa2(problem.shape, Tile(*answer.tile, 64), Formats()), find_gpu("h200"), "bfloat16")
    useful = 4 * 2 * 16 * 4096**2 * 128 / 989.4e12  # the tensor peak alone
    assert useful <= answer.prediction.time < 2 * useful
    assert "bound by" in str(answer)
    empty = explain_problem(replace(problem, seq_q=0), gpu=find_gpu("h200"))
    assert (empty.tile, empty.prediction) == (None, None)


@pytest.mark.parametrize(("card", "fields", "tile"), [
    ("h200", {}, (128, 64)), ("h200", {"head_dim": 256, "head_dim_v": 256}, (128, 64)), ("a100", {"bias": True}, (128, 64)),
    ("h200", {"dtype": "float32"}, (64, 32)), ("a100", {"head_dim": 192}, (64, 64)), ("l4", {"head_dim": 192}, (64, 32)),
    ("l4", {"head_dim": 192, "alibi": True}, (32, 32)), ("mi300x", {}, (64, 32))])
def test_the_prediction_is_for_the_tile_triton_runs_on_that_card(
        monkeypatch: pytest.MonkeyPatch, card: str, fields: dict, tile: tuple[int, int]) -> None:
    monkeypatch.setitem(CAPABILITIES, "triton", replace(CAPABILITIES["triton"], limits=lambda problem: None))
    answer = explain_problem(replace(AttentionProblem(2, 16, 16, 4096, 4096, 128, 128), **fields), "triton", find_gpu(card))
    assert answer.tile == tile
    assert f"tiles of {tile[0]}×{tile[1]}" in str(answer)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_the_prediction_is_for_the_tile_hopper_runs(monkeypatch: pytest.MonkeyPatch, dim: int, dim_v: int) -> None:
    monkeypatch.setitem(CAPABILITIES, "hopper", replace(CAPABILITIES["hopper"], limits=lambda problem: None))
    problem, card = AttentionProblem(2, 16, 16, 4096, 4096, dim, dim_v), find_gpu("h200")
    answer, row = explain_problem(problem, gpu=card), hopper_tiles.forward(dim, dim_v, 4096)
    assert answer.backend == "hopper"
    assert answer.tile == (row.rows, row.keys)
    assert answer.prediction == predict(fa2(problem.shape, Tile(row.rows, row.keys, 64), Formats()), card, "bfloat16")


def test_fp32_is_predicted_with_the_products_triton_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of bf16 each where the head is narrow; else, and on older cards, the CUDA cores'."""
    monkeypatch.setitem(CAPABILITIES, "triton", replace(CAPABILITIES["triton"], limits=lambda problem: None))
    peaks = find_gpu("h200").matmul_tflops
    for dim, card, rate in ((128, "h200", peaks["bfloat16"] / 6), (256, "h200", peaks["float32"])):
        problem = AttentionProblem(1, 64, 64, 8192, 8192, dim, dim, dtype="float32")
        prediction = explain_problem(problem, "triton", find_gpu(card)).prediction
        assert prediction is not None
        flops = 4 * 64 * 8192**2 * dim
        assert prediction.kernels[0].seconds["tensor cores"] == pytest.approx(flops / rate / 1e12)


def test_where_nothing_runs_nothing_is_predicted() -> None:
    answer = explain_problem(AttentionProblem(1, 1, 1, 8, 8, 16, 16, dtype="float8_e4m3"), gpu=find_gpu("h200"))
    assert (answer.backend, answer.tile, answer.prediction) == (None, None, None)
    assert set(answer.reasons) == set(CAPABILITIES)
    with pytest.raises(InputError, match="dtype: got float8_e4m3, accepted: bfloat16"):
        choose(answer.problem)
