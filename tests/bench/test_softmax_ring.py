"""benchmarks/softmax_ring.py compiles for Hopper as it says: rows come and leave by TMA, and every element has one exponential."""
import pytest

pytest.importorskip("triton")
from tests import fresh
from tests.bench import compile_ring


def test_the_ring_compiles_for_hopper():
    cases = [(512, (4, 3, 1, 0), "bfloat16"), (4096, (1, 3, 1, 0), "float16"), (16384, (1, 3, 4, 0), "bfloat16")]
    for (n, (rows, slots, warps, _), _), made in zip(cases, fresh.call(compile_ring.main, cases), strict=True):
        assert made["spills"] == 0, made
        assert (made["loads"], made["stores"]) == (slots, 1), made
        assert made["exponentials"] == rows * n // (32 * warps), made
        assert rows * n * 2 * slots <= made["shared"] <= rows * n * 2 * slots + 1024, made
        assert made["registers"] * 32 * warps * (228 * 1024 // (made["shared"] + 1024)) <= 65536, made  # shared memory sets how many run
