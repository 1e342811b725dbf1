"""Random problems over the whole feature space, each against the float64 truth."""
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onchip.softmax.triton import plan
from onchip.testing.softmax import DEVICE, agree
from tests.softmax.conftest import forget

PLANS = [None, plan.Plan(False, 4, 16, 4, 1), plan.Plan(False, 1, 8, 4, 1), plan.Plan(True, 8, 64, 4)]


@st.composite
def problems(draw):
    """x with random shape, order of dimensions, steps and offset; any dim; features; a forced plan (or the table's)."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 33]), max_size=4).filter(lambda s: torch.Size(s).numel() <= 2000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    offset = draw(st.integers(0, 3))
    stored = [shape[d] * steps[d] for d in order]
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    x = (torch.randn(offset + torch.Size(stored).numel(), generator=generator) * draw(st.sampled_from([0.1, 3.0, 30.0]))).to(DEVICE, dtype)
    x = x[offset:].view(stored).permute([order.index(d) for d in range(len(shape))])[tuple(slice(None, None, step) for step in steps)]
    if x.ndim and x.shape[0] and draw(st.booleans()):
        x = x[:1].expand(x.shape)
    causal = x.ndim >= 2 and draw(st.booleans())
    mask = None
    if draw(st.booleans()):
        broadcast = [1 if draw(st.booleans()) else n for n in shape][draw(st.integers(0, len(shape))):]
        mask = (torch.rand(broadcast, generator=generator) < draw(st.sampled_from([0.1, 0.7]))).to(DEVICE)
    dim = -1 if causal else draw(st.integers(-max(1, len(shape)), max(1, len(shape)) - 1))
    features = {"scale": draw(st.sampled_from([None, 0.5, -1.5, 0.0])), "log": draw(st.booleans()), "causal": causal, "mask": mask,
                "dtype": draw(st.sampled_from([None, torch.float32])) if dtype != torch.float32 else None}
    return x, dim, features, draw(st.sampled_from(PLANS)), draw(st.sampled_from(["triton", "triton", "reference"]))


@settings(max_examples=80 if DEVICE == "cpu" else 40,  # on a card nearly every example compiles
          deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problem=problems())
def test_random_problems(problem):
    x, dim, features, forced, backend = problem
    with pytest.MonkeyPatch.context() as patch:
        if forced:
            patch.setattr(plan, "choose", lambda *_: forced)
            patch.setattr(plan, "choose_parts", lambda *_: None)
        forget()
        agree(x, dim, backend=backend, **features)
    forget()
