"""The experiments, in the order a newcomer would run them."""
from onchip.errors import require
from onchip.lab.compiler import Source
from onchip.lab.experiment import Experiment
from onchip.lab.experiments import attention, banks, limits, reductions, traffic

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one for room in (reductions, banks, attention, traffic, limits) for one in room.EXPERIMENTS
}


def pick(names: "list[str] | None") -> list[Experiment]:
    """Those experiments, or all. Raises `InputError` naming the known ones."""
    for name in names or ():
        require(name in EXPERIMENTS, "NAME", repr(name), ", ".join(EXPERIMENTS))
    return [EXPERIMENTS[name] for name in dict.fromkeys(names or EXPERIMENTS)]


def sources(experiments: "list[Experiment]") -> list[Source]:
    """What they compile, each once."""
    return list(dict.fromkeys(source for one in experiments for source in one.sources))
