"""The card behind cuda.core: what needs none here, everything on one where there is a GPU."""
import os
import sys

import numpy as np
import pytest

from onchip.errors import MissingExtra
from onchip.lab import card as module
from onchip.lab.card import Array, Card, LaunchError, find_card
from onchip.lab.compiler import source
from onchip.lab.experiments import EXPERIMENTS
from onchip.lab.run import conduct
from onchip.roofline.hardware import find_gpu

pytest.importorskip("cuda.core")


def there() -> bool:
    return isinstance(find_card(), Card)


def test_arguments_get_the_types_the_kernels_declare():
    assert [(type(x), x) for x in map(module._argument, (3, 0.5, np.int64(7)))] == [(np.int32, 3), (np.float32, 0.5), (np.int64, 7)]
    assert module._argument(Array("a buffer", (2,), np.dtype(np.float32))) == "a buffer"


def test_no_gpu_is_a_sentence(monkeypatch):
    def none(index):
        raise RuntimeError("CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected\nand more")

    monkeypatch.setattr("cuda.core.Device", none)
    assert find_card() == "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"


def test_without_cuda_core_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingExtra, match=r"the lab needs cuda-core, which is not installed: pip install 'onchip\[lab\]'"):
        find_card()


def test_times_are_medians_and_never_of_a_few(monkeypatch):
    card = object.__new__(Card)
    calls, times = [], iter(range(1, 100))
    monkeypatch.setattr(module, "WARMUP", 0.0)
    monkeypatch.setattr(Card, "_once", lambda self, call: (call(), next(times))[1])
    assert card.seconds(lambda: calls.append(1)) == 5  # of 1 … 9 seconds: the fewest that are taken
    assert len(calls) == 9


def test_the_driver_s_word_for_an_error_is_kept():
    from cuda.bindings.driver import CUresult

    card = object.__new__(Card)
    card._driver = type("driver", (), {"CUresult": CUresult})
    assert card._check((CUresult.CUDA_SUCCESS, 13000)) == 13000
    assert card._check((CUresult.CUDA_SUCCESS,)) is None
    with pytest.raises(LaunchError, match=r"^CUDA_ERROR_INVALID_VALUE$"):
        card._check((CUresult.CUDA_ERROR_INVALID_VALUE,))


def test_only_the_driver_s_errors_become_launch_errors():
    with pytest.raises(LaunchError, match=r"^CUDA_ERROR_MISALIGNED_ADDRESS$"), module._driver_errors():
        raise RuntimeError("CUDA_ERROR_MISALIGNED_ADDRESS: While executing a kernel, the device encountered …")
    with pytest.raises(TypeError, match="an argument"), module._driver_errors():
        raise TypeError("an argument of a type it does not know")


@pytest.mark.gpu
@pytest.mark.skipif(not there(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_to_its_end_on_a_card(name):
    card = find_card()
    (outcome,) = conduct([EXPERIMENTS[name]], card, find_gpu(card.name))
    assert outcome.problem is None
    assert all(j.measured is not None for j in outcome.judgements if not j.prediction.counted)


def test_a_launch_of_its_own_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(module, "_launch_alone", os.abort)  # called with arguments it does not take: the process ends in an error
    card = object.__new__(Card)
    with pytest.raises(LaunchError, match="ended without an answer"):
        card.fault(source("oversized"), "oversized", (1,), (1,))
