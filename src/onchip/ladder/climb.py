"""Climbing: every rung predicted from its ledger, executed on real numbers, its counted bytes held against the closed form."""
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onchip.errors import require
from onchip.ladder.rungs import Ladder, Rung
from onchip.roofline.ledger import Pipeline
from onchip.roofline.roofs import Prediction, predict
from onchip.roofline.shape import AttentionShape, count_blocks
from onchip.simulate.problem import Problem, Result

# Scores a run computes before it samples query tiles: 4096² take about two seconds at d = 128 on two CPU cores.
BUDGET = 1 << 24


@dataclass(frozen=True)
class Step:
    """One rung after the climb."""

    rung: Rung
    pipeline: Pipeline
    prediction: Prediction
    result: Result

    @property
    def error(self) -> float:
        """‖x − truth‖ / ‖truth‖ against float64, the worst of the output or the gradients; over the executed rows."""
        return max(error.rms for name, error in self.result.errors.items() if name != "lse")


def sample_size(shape: AttentionShape, br: int, budget: int = BUDGET) -> int | None:
    """Query tiles to execute so that about `budget` scores are computed; None: all of them."""
    tiles = shape.query_heads * count_blocks(shape.seq_q, br)
    affordable = max(1, budget // (min(br, shape.seq_q) * shape.seq_k))
    return None if tiles <= affordable else affordable


def mismatches(pipeline: Pipeline, result: Result) -> list[str]:
    """Where counted bytes differ from the closed form, in words; empty when every tensor of every kernel agrees."""
    wrong = []
    for kernel, counted in zip(pipeline.kernels, result.kernels, strict=True):
        for tensor in sorted({s.tensor for s in kernel.streams} | set(counted.reads) | set(counted.writes)):
            closed, got = (kernel.read(tensor), kernel.written(tensor)), (counted.read(tensor), counted.written(tensor))
            if closed != got:
                wrong.append(f"{kernel.name}, {tensor}: counted {got} bytes read and written, closed form {closed}")
    return wrong


def climb(ladder: Ladder, problem: Problem, *, backward: bool = False,
          on_rung: Callable[[Rung], None] = lambda rung: None) -> Iterator[Step]:
    """Yield each rung as it is executed on `problem`.

    Raises AssertionError where counted bytes and closed form differ: that is a fault of the library, not of the caller.
    """
    require(problem.shape == ladder.shape, "problem", problem.shape, ladder.shape)  # type: ignore[arg-type]
    for rung in ladder.rungs(backward=backward):
        on_rung(rung)
        pipeline, tile = ladder.pipeline(rung), ladder.tile_of(rung)
        result = rung.execute(problem, tile, ladder.choices, sram=ladder.sram, sample=sample_size(ladder.shape, tile.br))
        wrong = mismatches(pipeline, result)
        if wrong:
            raise AssertionError("; ".join(wrong))
        yield Step(rung, pipeline, predict(pipeline, ladder.gpu, ladder.formats.inputs), result)
