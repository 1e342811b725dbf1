"""Every rung's predicted bytes against what an H200 counted: benchmarks/results/h200/ladder.json, at 4K, 8K and 16K, d = 128, 2¹⁸ rows."""
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from onchip.bench.counters import Counters
from onchip.ladder.counted import Job, _ledgers, held_against
from onchip.ladder.softmax import SOFTMAX_RUNGS
from onchip.roofline.hardware import find_gpu
from onchip.roofline.l2 import crossing
from onchip.roofline.shape import AttentionShape
from onchip.roofline.softmax import Rows

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "ladder.json").read_text())
H200 = find_gpu("h200")
# Two blocks an SM: a wave walks K and V of three heads, 25 MB, and each half of the L2 keeps a copy: 50 of its 60 MB, the model's very edge
EDGE = {("triton", 16384, None): 0.25}


def rungs() -> Iterator[Any]:
    """(part, problem, rung as it was counted)."""
    for part in ("ladder", "backward", "softmax"):
        for found in RESULTS[part]:
            shape = found.get("shape")
            problem = Rows(**found["rows"]) if shape is None else AttentionShape(**{**shape, "window": tuple(shape["window"])})
            size = f"{problem.rows}x{problem.n}" if isinstance(problem, Rows) else f"{problem.seq_q}-{problem.causal}"
            for one in found["counted"]:
                if one["kernels"]:
                    yield pytest.param(problem, one, id=f"{part}-{size}-{one['key']}")


EVERY = list(rungs())


def held(problem: AttentionShape | Rows, one: dict[str, Any]) -> Any:
    """Today's prediction beside the committed counters."""
    ledger = next(x for x in _ledgers(Job(problem, "bfloat16", ()), H200) if x.key == one["key"])
    names = {field.name for field in fields(Counters)}
    launches = [Counters(**{"within": (), **{name: value for name, value in k.items() if name in names}}) for k in one["kernels"]]
    return held_against(ledger, launches, H200, "bfloat16")


@pytest.mark.parametrize(("problem", "one"), EVERY)
def test_dram_bytes_are_predicted_within_a_tenth(problem: AttentionShape | Rows, one: dict[str, Any]) -> None:
    """Registers that spilled cost their bytes up to twice, written back and fetched again, beside what the ledger knows of."""
    found = held(problem, one)
    spilled = sum(k["spilled"] for k in one["kernels"])
    tolerance = EDGE.get((one["key"], problem.seq_q, problem.causal), 0.1) if isinstance(problem, AttentionShape) else 0.1
    assert found.dram_bytes >= found.dram_predicted / (1 + tolerance)
    assert found.dram_bytes - 2 * spilled <= found.dram_predicted * (1 + tolerance)


@pytest.mark.parametrize(("problem", "one"), EVERY)
def test_bytes_between_l2_and_sms_are_what_is_issued(problem: AttentionShape | Rows, one: dict[str, Any]) -> None:
    """But for registers that spill, written through and read from L1 or L2, and rows that the L1 still holds."""
    found = held(problem, one)
    spilled = sum(k["spilled"] for k in one["kernels"])
    least = found.issued
    if isinstance(problem, Rows):
        rung = next(rung for rung in SOFTMAX_RUNGS if rung.key == one["key"])
        least = sum(crossing(k, H200.smem_per_sm, rung.blocks_per_sm(H200)) for k in rung.ledger(problem).kernels)
    assert least / 1.1 <= found.sm_bytes <= 1.1 * found.issued + 2 * spilled
