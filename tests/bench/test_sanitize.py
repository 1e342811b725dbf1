"""What racecheck reports of the Hopper forward, and which of it is explained."""
import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("sanitize", Path(__file__).parents[2] / "benchmarks" / "sanitize.py")
assert SPEC is not None
assert SPEC.loader is not None
sanitize = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sanitize)

PRODUCER = sanitize.HOPPER["producer.py"].read_text().splitlines()
PLACES = {name: f"producer.py:{PRODUCER.index(line) + 1}" for name, line in (
    ("read", "    return gl.max(words.index(index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)"),
    ("write", next(line for line in PRODUCER if "words.index(index).store(" in line)),
    ("another", next(line for line in PRODUCER if "mbarrier.init(" in line)))}


def race(first: str, *others: str) -> str:
    """A report, as the tool prints it."""
    def access(kind_and_place: str, address: int) -> str:
        kind, place = kind_and_place.split()
        return f"{kind} access at forward_kernel+{address:#x} in {PLACES[place]}"

    return "".join([f"========= Error: Race reported between {access(first, 0x8b90)}\n",
                    *(f"=========     and {access(other, 0xa250 + at)} [32 hazards]\n" for at, other in enumerate(others)), "========= \n"])


@pytest.mark.parametrize(("reports", "explained"), [
    ([race("Read read", "Write write", "Write write")], True),
    ([race("Write write", "Read read")], True),
    ([race("Read read", "Write write"), race("Write write", "Read read")], True),
    ([race("Write write", "Write write")], False),
    ([race("Read read", "Read read")], False),
    ([race("Write read", "Read write")], False),  # the reader writes
    ([race("Read read", "Write write", "Write another")], False),
    ([race("Read read", "Write write"), race("Write another", "Read read")], False),
])
def test_a_race_is_explained_in_either_order(reports: list[str], explained: bool) -> None:
    said = "========= COMPUTE-SANITIZER\n" + "".join(reports) + "the result is right\n"
    assert sanitize._explained(said, len(reports)) == explained
    assert not sanitize._explained(said, len(reports) + 1)  # one more than the tool printed


@pytest.mark.parametrize("place", ["forward.py:0", "elsewhere.cu:12"])
def test_a_place_outside_of_every_function_is_not_explained(place: str) -> None:
    assert not sanitize._explained(race("Read read", "Write write").replace(PLACES["write"], place), 1)
