"""Random problems over the whole feature space, against the definition in float64, and relations between problems."""
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from onchip.attention import attention
from onchip.testing.attention import Case, Target, build, check, run

LENGTHS = st.sampled_from([1, 2, 7, 15, 16, 17, 31, 33, 40])
WIDTH = st.one_of(st.none(), st.integers(0, 12))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any problem the contract accepts, at a size that runs in milliseconds."""
    group, kv_heads, batch = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 2))
    heads, seq_q, seq_k = group * kv_heads, draw(LENGTHS), draw(LENGTHS)
    packed = draw(st.integers(0, 3)) == 0
    broadcast = st.tuples(*(st.sampled_from(sorted({1, size})) for size in (batch, heads, seq_q, seq_k)))
    maybe = st.one_of(st.none(), broadcast) if not packed else st.none()
    lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)) if packed else None
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    return Case(
        batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k, dim=draw(st.sampled_from([1, 8, 20, 32])),
        dim_v=draw(st.sampled_from([1, 16, 24])), dtype=dtype, causal=draw(st.sampled_from([False, True, "top-left"])),
        window=draw(st.one_of(st.none(), st.tuples(WIDTH, WIDTH))), scale=draw(st.sampled_from([None, None, 0.0, -0.4, 1.0])),
        softcap=draw(st.sampled_from([None, None, 2.0])), bias=draw(maybe), bias_dtype=draw(st.sampled_from([None, "float32"])),
        mask=draw(maybe),
        alibi=draw(st.sampled_from([0, 0, 1, 2])), sinks=draw(st.booleans()), dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        layout=draw(st.sampled_from(["bhsd", "bshd"])), lengths=None if lengths is None else tuple(lengths), tail=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**64 - 1)))


# On a card nearly every problem compiles kernels of its own, some seconds' worth: parts of them run side by side.
# Under the interpreter a problem takes some 2 s, and CI is short of time.
PARTS = 12 if torch.cuda.is_available() else 1


def _examples(target: Target) -> int:
    if target.backend == "reference":
        return 150 // PARTS
    return (5 if target.backend == "triton" else 150) if target.device == "cpu" else 6


@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems_agree_with_the_definition(target: Target, part: int) -> None:
    # not shrunk: under the interpreter that takes minutes, and the failing case prints its seed
    @seed(part)
    @settings(max_examples=_examples(target), phases=[Phase.generate], deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(cases())
    def agrees(case: Case) -> None:
        check(case, target)

    agrees()


def test_a_batch_is_its_members(target: Target) -> None:
    """No other member of a batch changes a result."""
    case = Case(batch=3, heads=2, kv_heads=1, seq_q=17, seq_k=19, causal=True)
    inputs = build(case, target.device)
    whole = attention(inputs.q, inputs.k, inputs.v, causal=True, backend=target.backend)
    for n in range(3):
        one = attention(*(x[n : n + 1] for x in (inputs.q, inputs.k, inputs.v)), causal=True, backend=target.backend)
        assert torch.allclose(whole[n : n + 1], one, atol=1e-6)


def test_probabilities_sum_to_one(target: Target) -> None:
    case = Case(seq_q=17, seq_k=33, softcap=2.0, alibi=1, window=(20, 20))
    inputs = build(case, target.device)
    inputs.v.data[:] = 1
    assert torch.allclose(run(case, inputs, target.backend)["out"], torch.ones_like(inputs.dout), atol=1e-6)


def test_shifting_the_scores_moves_lse_and_nothing_else(target: Target) -> None:
    case = Case(seq_q=9, seq_k=17, bias=(1, 2, 9, 17))
    inputs = build(case, target.device)
    before = run(case, inputs, target.backend)
    inputs.bias.data += 3
    after = run(case, inputs, target.backend)
    assert torch.allclose(after["lse"], before["lse"] + 3, atol=1e-5)
    for name in ("out", "dq", "dk", "dv", "dbias"):
        assert torch.allclose(after[name], before[name], atol=1e-5), name


def test_the_order_of_keys_does_not_matter(target: Target) -> None:
    case = Case(seq_q=9, seq_k=33, mask=(1, 1, 9, 33))
    inputs = build(case, target.device)
    before = run(case, inputs, target.backend)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0), device="cpu").to(target.device)
    for name in ("k", "v"):
        getattr(inputs, name).data.copy_(getattr(inputs, name).data[:, :, order])
    inputs.mask = inputs.mask[..., order]
    after = run(replace(case), inputs, target.backend)
    for name in ("out", "lse", "dq"):
        assert torch.allclose(after[name], before[name], atol=1e-5), name
    for name in ("dk", "dv"):
        assert torch.allclose(after[name], before[name][:, :, order], atol=1e-5), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_repeat_when_asked(target: Target, dtype: str) -> None:
    case = Case(batch=2, heads=4, kv_heads=2, seq_q=33, seq_k=33, dtype=dtype, causal=True)
    inputs = build(case, target.device)
    first = run(case, inputs, target.backend, deterministic=True)
    for _ in range(30 if target.device == "cuda" else 1):
        again = run(case, inputs, target.backend, deterministic=True)
        for name, right in first.items():
            assert torch.equal(again[name], right), name
