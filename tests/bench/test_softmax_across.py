"""benchmarks/softmax_across.py compiles for Hopper as it says: rows come and leave by vectors, once."""
import pytest

pytest.importorskip("triton")
from tests import fresh
from tests.bench import compile_across


def test_stripes_compile_for_hopper():
    cases = [(1024, (8, 80)), (8192, (16, 104))]
    for (_, (pieces, registers)), made in zip(cases, fresh.call(compile_across.main, cases), strict=True):
        assert made["spills"] == 0, made
        assert made["accesses"] == ["ld.global.v4.b32"] * pieces + ["st.global.v4.b32"] * pieces, made
        assert made["registers"] <= registers, made
        assert made["sends"] == 1, made
