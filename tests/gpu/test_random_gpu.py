"""Random problems of the kind the Hopper forward serves, at lengths of several tiles; its backward is Triton's."""
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from onchip.testing.attention import Case, Target, check
from tests.attention.conftest import _poison  # noqa: F401  used by every test here too
from tests.attention.test_random import cases
from tests.gpu.oracle import ON_HOPPER

pytestmark = [pytest.mark.gpu, ON_HOPPER]
LENGTHS = st.sampled_from([1, 5, 63, 64, 65, 128, 129, 200, 257])


@st.composite
def hopper_cases(draw: st.DrawFn) -> Case:
    case = draw(cases())
    lengths = None if case.lengths is None else tuple((17 * a, 23 * b) for a, b in case.lengths)
    scale = case.scale if case.softcap is not None or (case.scale or 0) > 0 else None
    return replace(case, bias=None, mask=None, alibi=0, dropout_p=0.0, dtype=draw(st.sampled_from(["bfloat16", "float16"])), scale=scale,
                   dim=draw(st.sampled_from([8, 40, 64, 128, 256])), dim_v=draw(st.sampled_from([16, 64, 72, 128])),
                   seq_q=draw(LENGTHS), seq_k=draw(LENGTHS), lengths=lengths, size=draw(st.sampled_from([1.0, 1.0, 4.0])))


@pytest.mark.parametrize("part", range(8))
def test_random_problems_agree_with_the_definition(part: int) -> None:
    @seed(part)
    @settings(max_examples=5, phases=[Phase.generate], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(hopper_cases())
    def agrees(case: Case) -> None:
        if case.lengths is not None and all(0 in pair for pair in case.lengths):
            return  # nothing to compute is not Hopper's
        check(case, Target("hopper", "cuda"))

    agrees()
