"""The backward's rungs under the interpreter: each gives the gradients, to twice the error of eager autograd in the same dtype."""
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest
import torch

from onchip.bench.machine import Ceilings
from onchip.errors import InputError
from onchip.ladder import counted, gpu_backward, measure_backward
from onchip.ladder.gpu import GPU_RUNGS, problem_of
from onchip.ladder.gpu_backward import BACKWARD_RUNGS, true_gradients
from onchip.ladder.inputs import random_inputs
from onchip.ladder.kernels import backward, unfused
from onchip.ladder.measure import Budget
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.backward import apart_backward, naive_backward
from onchip.roofline.hardware import find_gpu
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = find_gpu("h200")
ROOFS = Ceilings("Abacus", "bfloat16", copy=10e9, matmul=50e9)
PROBLEM = problem_of(AttentionShape.square(4096, 128, heads=16), "bfloat16")
RUNGS = {rung.key: rung for rung in BACKWARD_RUNGS}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):  # Triton's interpreter computes in numpy, where infinities warn
        yield


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    b, h, h_kv, sq, sk, d, dv = shape
    torch.manual_seed(0)
    return [torch.randn(b, *size, device=DEVICE).to(dtype) for size in ((h, sq, d), (h_kv, sk, d), (h_kv, sk, dv), (h, sq, dv))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 2, 21, 34, 24, 40), (2, 1, 1, 34, 21, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", RUNGS)
@pytest.mark.usefixtures("small")
def test_a_rung_gives_the_gradients(key: str, dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> None:
    if causal and shape[3] > shape[4] and key == "eager_backward":
        pytest.skip("the eager snippet makes NaN of a row that sees nothing")
    q, k, v, dout = tensors(shape, dtype)
    truth = gradients(*(x.double() for x in (q, k, v, dout)), causal)
    yardstick = gradients(q, k, v, dout, causal)
    found = RUNGS[key].prepare(q, k, v, dout, causal)()
    for name, x, want, eager in zip(("dq", "dk", "dv"), found, truth, yardstick, strict=True):
        assert x.dtype == dtype
        allowed = 2 * (eager - want).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()
        assert allowed < want.abs().max() / 4, "zeros would pass"
        assert (x - want).abs().max() <= allowed, name


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(plain(*leaves, causal), leaves, dout)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention from its definition; a row that sees nothing is 0."""
    group, (rows, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(keys - rows)
    empty = ~seen.any(1)[:, None]
    p = torch.softmax(s.masked_fill(~seen & ~empty, -torch.inf), -1)
    return p.masked_fill(empty, 0.0) @ v.repeat_interleave(group, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 2, 21, 34, 24, 40), (2, 1, 1, 34, 21, 16, 16)], ids=str)
def test_the_truth_is_what_autograd_says(shape: tuple[int, ...], causal: bool) -> None:
    inputs = tensors(shape, torch.float64)
    for x, t in zip(true_gradients(*inputs, causal, rows=8), gradients(*inputs, causal), strict=True):
        torch.testing.assert_close(x, t, rtol=1e-11, atol=1e-11)


def test_rows_beyond_a_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = tensors((1, 1, 1, 16, 48, 16, 16), torch.float32)
    monkeypatch.setattr(backward, "ROW", 32)
    with pytest.raises(InputError, match="k: got 48 keys, accepted: at most 32"):
        RUNGS["naive_backward"].prepare(q, k, v, dout, False)()
    long = problem_of(AttentionShape.square(2 * unfused.ROW, 64), "bfloat16")
    assert "65536" in (RUNGS["naive_backward"].refusal(long) or "")


# --- measured


@pytest.mark.usefixtures("small")
def test_figures_follow_from_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_backward, "median_time", lambda call, device: 0.5)
    monkeypatch.setattr(gpu_backward, "why_not", lambda backend, problem: None)  # the interpreter runs what needs a GPU
    shape = AttentionShape(20, 24, 16, 8, 1, 4, 2, "bottom-right")
    report = measure_backward.measure_backward(random_inputs(shape), DEVICE, True, "bfloat16", ceilings=ROOFS)
    assert [m.key for m in report.measurements] == list(RUNGS)
    for m in report.measurements:
        assert m.flops == 2.5 * shape.pairs() * 4 * 2 * (16 + 8) / 0.5
        assert 1e-4 < m.error.rms < 2e-2
        assert m.predicted is None  # no such card
    everything = measure_backward.measure_backward(random_inputs(shape), DEVICE, True, "bfloat16", Budget(memory=10_000), ROOFS)
    assert (set(everything.skipped), [m.key for m in everything.measurements]) == (
        {"eager_backward", "naive_backward"}, ["apart_backward"]) if DEVICE == "cpu" else True


@pytest.mark.usefixtures("small")
def test_a_wrong_gradient_shows_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_backward, "median_time", lambda call, device: 0.5)
    right = backward.naive_backward
    monkeypatch.setattr(backward, "naive_backward", lambda *args: (*right(*args)[:2], torch.zeros_like(args[3])))
    (m,) = measure_backward.measure_backward(
        random_inputs(AttentionShape.square(16, 16)), DEVICE, ceilings=ROOFS, keys={"naive_backward"}).measurements
    assert m.error.rms == 1.0


@pytest.mark.usefixtures("small")
def test_the_program_that_is_profiled_can_launch_every_rung() -> None:
    job = {**asdict(AttentionShape.square(32, 16, heads=2, causal="bottom-right")), "dtype": "bfloat16"}
    keys = [rung.key for rung in (*GPU_RUNGS, *BACKWARD_RUNGS) if DEVICE == "cuda" or rung.key not in ("triton", "hopper_online", "hopper")]
    found = {key: call() for key, call in counted._calls({**job, "keys": keys}, DEVICE)}
    assert list(found) == keys
    assert all(x.isfinite().all() for out in found.values() for x in (out if isinstance(out, tuple) else (out,)))
    rows = dict(counted._calls({**asdict(Rows(2, 64)), "keys": ["eager", "online"]}, DEVICE))
    assert [call().shape for call in rows.values()] == [(2, 64)] * 2


# --- predictions


@pytest.mark.parametrize("causal", [None, "bottom-right"])
@pytest.mark.parametrize("key", RUNGS)
def test_no_rung_is_predicted_faster_than_the_tensor_cores(key: str, causal: str | None) -> None:
    shape = AttentionShape.square(4096, 128, heads=16, causal=causal)
    assert RUNGS[key].predict(problem_of(shape, "bfloat16"), H200).time > shape.pairs() * 16 * 4 * 256 / H200.matmul_rate("bf16")


def test_recomputing_is_predicted_faster_than_what_goes_through_memory() -> None:
    times = [rung.predict(PROBLEM, H200).time for rung in BACKWARD_RUNGS]
    assert times == sorted(times, reverse=True)
    assert times[1] > 1.5 * times[2]


def test_the_ledger_has_the_tiles_that_run() -> None:
    """Through descriptors 64 × 64 and 128 × 64 on an H200; every byte that a key tile or a query tile walks follows from them."""
    assert gpu_backward.recomputing_tiles(PROBLEM, H200) == ((64, 64), (128, 64))
    _, of_keys, of_rows = RUNGS["apart_backward"].pipeline(PROBLEM, H200).kernels
    one = 16 * 4096 * 128 * 2  # bytes of one of q, k, v, dout
    assert (of_keys.read("Q"), of_rows.read("K"), of_keys.read("K"), of_rows.read("dO")) == (64 * one, 32 * one, one, one)
    naive = RUNGS["naive_backward"].pipeline(PROBLEM, H200)
    assert [k.read("dO") // one for k in naive.kernels[:2]] == [32, 8]  # 128 keys a program of dV, 512 of dP


def test_two_tiles_are_two_walks() -> None:
    """The kernel of dQ is that of a ledger with its tile alone."""
    shape, formats = AttentionShape(300, 260, 32, 48, heads=4, kv_heads=2, causal="bottom-right"), Formats()
    both = apart_backward(shape, Tile(32, 64), formats, query_tile=Tile(128, 16))
    assert both.kernels[2] == apart_backward(shape, Tile(128, 16), formats).kernels[2]
    assert both.kernels[1] == apart_backward(shape, Tile(32, 64), formats).kernels[1]


def test_seven_matmuls_and_nine_squares() -> None:
    shape = AttentionShape.square(1024, 64)
    forward = 4 * 1024**2 * 64
    assert apart_backward(shape, Tile(64, 64)).matmul_flops == 3.5 * forward
    squares = {name: naive_backward(shape, scale_kernel=more, mask_kernel=more).textbook // (2 * 1024**2)
               for name, more in (("naive", False), ("eager", True))}
    assert squares == {"naive": 7, "eager": 11}  # textbook bytes; the operands are less than one square


def test_memory_is_known_before_it_is_asked_for() -> None:
    square, one = 16 * 4096**2 * 2, 16 * 4096 * 128 * 2
    assert [rung.needed_bytes(PROBLEM) for rung in BACKWARD_RUNGS] == [3 * square + 4 * one, 2 * square + 4 * one, 4 * one]
