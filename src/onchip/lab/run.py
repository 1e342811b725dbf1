"""Run experiments on a card: predict, check, measure, judge; and the whole as a dict for JSON."""
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onchip import __version__
from onchip.lab.bench import Bench, Device
from onchip.lab.experiment import Experiment, Judgement, Sizes, verdict
from onchip.roofline.hardware import GPU


@dataclass(frozen=True)
class Outcome:
    """An experiment after its run, or before it."""

    experiment: Experiment
    judgements: tuple[Judgement, ...]
    problem: str | None = None  # what kept it from running to its end
    found: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict(self.judgements, self.problem)


def judge(experiment: Experiment, gpu: GPU, sizes: Sizes, found: Mapping[str, float], problem: str | None = None) -> Outcome:
    """Hold the predictions for `gpu` against what was found."""
    return Outcome(experiment, tuple(p.judge(found) for p in experiment.predict(gpu, sizes)), problem, dict(found))


def conduct(experiments: Iterable[Experiment], card: Device, gpu: GPU, sizes: Sizes = Sizes(),
            count: Callable[[list[str]], Mapping[str, float]] | None = None,
            on_experiment: Callable[[str], None] = lambda name: None,
            keep: Callable[[list[Outcome]], None] = lambda outcomes: None) -> list[Outcome]:
    """Measure `experiments` on `card`, predictions made for `gpu`; one that fails is reported and the next one run.

    `count(names)` brings the hardware counters of those that predict some (`onchip.lab.counters.count`), after all times are taken.
    `on_experiment` hears what runs next; `keep` is given all outcomes so far after each experiment: a run may be cut short.
    """
    outcomes = []
    for experiment in experiments:
        on_experiment(experiment.name)
        bench, problem = Bench(card, gpu, sizes), None
        try:
            experiment.measure(bench)
        except Exception as error:  # a wrong result, a refused launch: the others still tell something
            problem = str(error) or type(error).__name__
        outcomes.append(judge(experiment, gpu, sizes, bench.found, problem))
        keep(outcomes)
    names = [one.experiment.name for one in outcomes if not one.problem and any(j.prediction.counted for j in one.judgements)]
    if count is not None and names:
        on_experiment("hardware counters")
        counted = count(names)
        outcomes = [judge(one.experiment, gpu, sizes, {**one.found, **_of(one, counted)}, one.problem) for one in outcomes]
    return outcomes


def _of(outcome: Outcome, counted: Mapping[str, float]) -> dict[str, float]:
    """Those of `counted` whose range belongs to the experiment."""
    own = {j.prediction.quantity.rpartition(".")[0] for j in outcome.judgements if j.prediction.counted}
    return {key: value for key, value in counted.items() if key.rpartition(".")[0] in own}


def report(outcomes: Iterable[Outcome], gpu: GPU, sizes: Sizes, machine: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON takes it: the machine, what was predicted for which card, and each experiment with its numbers and verdict. Units are SI."""
    def number(value: float | None) -> float | str | None:
        return value if value is None or abs(value) != float("inf") else str(value)

    return {
        "onchip": __version__, **machine, "predicted_for": gpu.name, "sizes": asdict(sizes),
        "experiments": [
            {
                "name": one.experiment.name, "claim": one.experiment.claim, "pitfall": one.experiment.pitfall, "verdict": one.verdict,
                "predictions": [
                    {"quantity": j.prediction.quantity, "what": j.prediction.what, "low": number(j.prediction.interval.low),
                     "high": number(j.prediction.interval.high), "unit": j.prediction.unit, "source": j.prediction.source,
                     "measured": number(j.measured), "holds": j.holds} for j in one.judgements],
                "found": {key: number(value) for key, value in one.found.items()},
            } for one in outcomes],
    }
