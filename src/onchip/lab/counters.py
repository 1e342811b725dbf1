"""Hardware counters of the lab's launches: the lab runs itself once more under Nsight Compute (`onchip.bench.counters`).

``python -m onchip.lab.counters KEYS NAME…`` is the program that is profiled: of each experiment named, every launch that would be timed
happens once, between cuProfilerStart and cuProfilerStop, after its check; the file KEYS then says what was launched, in order.
"""
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from onchip.bench import counters
from onchip.bench.counters import Counters
from onchip.errors import InputError
from onchip.lab.bench import Bench
from onchip.lab.experiment import COUNTERS, Experiment


def count(names: Sequence[str], ncu: Path) -> dict[str, float]:
    """Counters of the experiments called `names`: ``'layout.padded.conflicts'`` → number. Raises `InputError` where counting fails."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        launches = counters.count([sys.executable, "-m", "onchip.lab.counters", str(keys), *names], ncu)
        return merge(json.loads(keys.read_text()), launches)


def merge(keys: Sequence[tuple[str, int]], launches: Sequence[Counters]) -> dict[str, float]:
    """``key.counter`` → sum over its launches; `keys`: (key, launches) in order. A counter the card has not is left out.

    Raises `InputError` where other launches were counted than made.
    """
    expected = sum(count for _, count in keys)
    if expected != len(launches):
        raise InputError(f"ncu: counted {len(launches)} launches, {expected} were made")
    found, first = {}, 0
    for key, count in keys:
        mine, first = launches[first:first + count], first + count
        for name in COUNTERS:
            parts = ("dram_read", "dram_written") if name == "dram_bytes" else (name,)
            values = [getattr(launch, part) for launch in mine for part in parts]
            if None not in values:
                found[f"{key}.{name}"] = float(sum(values))
    return found


def _measure(experiment: Experiment, bench: Bench) -> None:
    try:
        experiment.measure(bench)
    except Exception as error:  # what is counted of the others is still worth having
        sys.stderr.write(f"{experiment.name}: {error}\n")


def main(arguments: Sequence[str]) -> None:
    """What runs under ncu."""
    from onchip.lab.card import Card
    from onchip.lab.experiments import pick
    from onchip.roofline.hardware import find_gpu

    keys, *names = arguments
    card = Card()
    bench = Bench(card, find_gpu(card.name), counting=True)
    for experiment in pick(names):
        _measure(experiment, bench)
    Path(keys).write_text(json.dumps(bench.counted))


if __name__ == "__main__":
    main(sys.argv[1:])
