"""The capability table: every "yes" runs and is right, every "no" is refused with its reason, and the page says what the code says."""
from dataclasses import replace

import pytest
import torch

from onchip.attention.dispatch import CAPABILITIES, why_not
from onchip.attention.problem import FEATURES, AttentionProblem
from onchip.errors import InputError
from onchip.testing.attention import Case, Target, build, check, run

PLAIN = Case(batch=1, heads=2, kv_heads=2, seq_q=24, seq_k=24, dim=16, dim_v=16)
# the plain problem with one feature more
WITH = {
    "causal": {"causal": True}, "window": {"window": (5, 3)}, "softcap": {"softcap": 2.0}, "bias": {"bias": (1, 2, 24, 24)},
    "mask": {"mask": (1, 1, 24, 24)}, "alibi": {"alibi": 1}, "sinks": {"sinks": True}, "dropout": {"dropout_p": 0.25},
    "varlen": {"lengths": ((9, 9), (15, 15))}, "gqa": {"kv_heads": 1}, "cross": {"seq_k": 40}, "dv": {"dim_v": 32},
}


def test_every_feature_has_its_problem() -> None:
    assert set(WITH) == set(FEATURES)


def device_of(backend: str) -> str | None:
    """A device of this machine on which `backend` runs at all."""
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    plain = AttentionProblem(1, 2, 2, 24, 24, 64, 64)
    return next((d for d in devices for dtype in CAPABILITIES[backend].dtypes
                 if why_not(backend, replace(plain, device=d, dtype=dtype)) is None), None)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", CAPABILITIES)
def test_feature(backend: str, feature: str) -> None:
    device = device_of(backend)
    if device is None:
        pytest.skip(f"{backend} does not run on this machine")
    able = CAPABILITIES[backend]
    case = replace(PLAIN, dtype="float32" if "float32" in able.dtypes else "bfloat16", **WITH[feature])
    if feature in able.features:
        check(case, Target(backend, device))
    else:
        with pytest.raises(InputError, match=FEATURES[feature]):
            run(case, build(case, device), backend)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("backend", CAPABILITIES)
def test_dtype(backend: str, dtype: str) -> None:
    device = device_of(backend)
    if device is None:
        pytest.skip(f"{backend} does not run on this machine")
    case = replace(PLAIN, dtype=dtype)
    if dtype in CAPABILITIES[backend].dtypes:
        check(case, Target(backend, device))
    else:
        with pytest.raises(InputError, match=dtype):
            run(case, build(case, device), backend)


@pytest.mark.parametrize("backend", CAPABILITIES)
def test_head_dims(backend: str) -> None:
    device = device_of(backend)
    if device is None:
        pytest.skip(f"{backend} does not run on this machine")
    smallest, largest = CAPABILITIES[backend].head_dims
    dtype = "float32" if "float32" in CAPABILITIES[backend].dtypes else "bfloat16"
    for dim, fits in ((smallest - 1, False), (smallest, True), (largest, True), (largest + 1, False)):
        if not 0 <= dim <= 1024:
            continue
        case = replace(PLAIN, dim=dim, dim_v=max(dim, 1), dtype=dtype, seq_q=8, seq_k=8)
        if fits:
            check(case, Target(backend, device))
        else:
            with pytest.raises(InputError, match="head dim"):
                run(case, build(case, device), backend)
