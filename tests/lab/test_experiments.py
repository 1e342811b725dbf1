"""Every experiment measured from beginning to end on an emulated card: its kernels against float64, its shared-memory addresses against the
prediction, and the check that would catch a kernel gone wrong."""
import numpy as np
import pytest

from onchip.lab.bench import Bench, WrongResult
from onchip.lab.experiment import Sizes
from onchip.lab.experiments import EXPERIMENTS, attention, banks, limits
from onchip.roofline.banks import request
from onchip.roofline.hardware import find_gpu
from tests.lab import emulator
from tests.lab.emulator import EmulatedCard

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for this CPU")
SMALL = Sizes.small()


def measured(name, **options):
    card = EmulatedCard()
    bench = Bench(card, card.gpu, SMALL, **options)
    EXPERIMENTS[name].measure(bench)
    return card, bench


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_measures_what_it_predicts_from_kernels_that_are_right(name):
    experiment = EXPERIMENTS[name]
    card, bench = measured(name)
    wanted = {p.quantity for p in experiment.predict(card.gpu, SMALL) if not p.counted}
    assert wanted <= set(bench.found), wanted - set(bench.found)
    misaligned = {source for source in experiment.sources if source.file == "tile.cu" and dict(source.defines)["PITCH"] % 8}
    used = {source for source, _ in card.launched}
    assert used | misaligned == set(experiment.sources)  # no source is listed in vain, none missing from the list


@pytest.mark.parametrize("name", [
    name for name, one in EXPERIMENTS.items() if any(p.counted for p in one.predict(find_gpu("h200"), SMALL))])
def test_counts_each_range_that_a_counter_is_predicted_for(name):
    card, bench = measured(name, counting=True)
    keys = {key for key, launches in bench.counted if launches}
    counted = [p.quantity for p in EXPERIMENTS[name].predict(card.gpu, SMALL) if p.counted]
    assert counted
    assert {quantity.rsplit(".", 1)[0] for quantity in counted} <= keys


ALIGNED = [(layout, access) for layout, access in banks.PAIRS
           if not any(one.misaligned for one in banks.requests(banks.LAYOUTS[layout], access))]


@pytest.mark.parametrize(("layout", "access"), ALIGNED)
def test_the_tile_kernel_makes_the_requests_that_are_predicted(layout, access):
    tile = banks.LAYOUTS[layout]
    predicted = banks.requests(tile, access)
    source, x = banks.variant(tile, access), np.zeros((64, 64), np.float16)
    emulator.launch(source, "tile", (1,), (banks.THREADS,), x, np.zeros(banks.THREADS, np.float32), np.zeros((8, 2), np.int64))
    made = emulator.requests(source)
    assert {transposed for *_, transposed in made} == {banks.ACCESSES[access].trans}
    base = min(min(addresses) for _, addresses, _ in made)
    executed = sorted((width, tuple(a - base for a in addresses)) for width, addresses, _ in made)
    assert executed == sorted((one.width, one.addresses) for one in predicted for _ in range(banks.READS))


@pytest.mark.parametrize("name", attention.LAYOUTS)
def test_the_attention_loop_meets_the_conflicts_that_are_predicted(name):
    source, layout = attention.LAYOUTS[name]
    heads, n = SMALL.loops
    q = np.random.default_rng(0).standard_normal((heads, n, 64)).astype(np.float16)
    out = np.empty_like(q)
    emulator.launch(source, "fa2", (n // 64, heads), (128,), q, q, q, out, out, n, 0.1)
    counts = [request(addresses, width) for width, addresses, _ in emulator.requests(source)]
    assert attention.count(counts) == attention.loads(attention.square(SMALL.loops), layout)
    assert (name == "plain") == any(c.degree > 1 for c in counts)


def test_misaligned_rows_are_refused_and_found_so():
    _, bench = measured("tiles")
    assert {key: value for key, value in bench.found.items() if "misaligned" in key} == {
        "ldmatrix.65.misaligned": 1, "ldmatrix.66.misaligned": 1}


@pytest.mark.parametrize("name", ["oversized", "overflow"])
def test_predictions_that_need_no_clock_hold_on_the_emulated_card(name):
    card, bench = measured(name)
    judged = [p.judge(bench.found) for p in EXPERIMENTS[name].predict(card.gpu, SMALL)]
    assert len(judged) >= 9
    assert [(j.prediction.quantity, j.measured) for j in judged if not j.holds] == []


def test_overflow_is_found_where_the_format_ends():
    _, bench = measured("overflow")
    assert bench.found["overflow.fp16.first"] == pytest.approx(11.09, abs=limits.STEP)
    assert bench.found["overflow.bf16.first"] == pytest.approx(88.72, abs=limits.STEP)
    assert bench.found["overflow.fp32.first"] == pytest.approx(88.72, abs=2 * limits.STEP)


class Broken(EmulatedCard):
    """Returns every fp16 output spoiled by `spoil`."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def numpy(self, array):
        copy = array.copy()
        if copy.dtype == np.float16:
            self.spoil(copy)
        return copy


@pytest.mark.parametrize("spoil", [
    lambda o: o.fill(0), lambda o: o.__setitem__((-1, -1), np.nan), lambda o: np.copyto(o, np.roll(o, 1, axis=1)),
    lambda o: np.copyto(o, o * np.float16(1.01)),
], ids=["all zero", "one row not written", "shifted by a row", "one per cent too large"])
def test_a_wrong_kernel_is_not_timed(spoil):
    card = Broken(spoil)
    bench = Bench(card, card.gpu, SMALL)
    with pytest.raises(WrongResult, match="division"):
        EXPERIMENTS["division"].measure(bench)
    assert bench.found == {}
