"""Wall time of a call: warmed up by time, not by count, and the median of what follows."""
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEAST = 3  # timed calls, however slow: the median of fewer is no median


def median_time(fn: Callable[[], Any], device: "str | torch.device" = "cpu", *, warmup: float = 0.05, budget: float = 0.25) -> float:
    """Median seconds of ``fn()`` on `device`: called for `warmup` seconds (once at least), then timed until `budget` seconds are spent.

    CUDA: events around each call and the L2 cache cleared before it (``triton.testing.do_bench``). A CPU: the wall clock, caches as the
    call before left them. Any other accelerator: the wall clock, waiting for the device after each call.
    """
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        return _cuda_median(fn, device, warmup, budget)
    return wall_median(fn, _synchronizer(kind, device), warmup, budget)


def wall_median(fn: Callable[[], Any], synchronize: Callable[[], Any], warmup: float, budget: float) -> float:
    """Median of at least `LEAST` calls by the wall clock; ``synchronize()`` ends each of them."""
    end = perf_counter() + warmup
    while True:
        fn()
        synchronize()
        if perf_counter() >= end:
            break
    times: list[float] = []
    while len(times) < LEAST or sum(times) < budget:
        start = perf_counter()
        fn()
        synchronize()
        times.append(perf_counter() - start)
    return statistics.median(times)


def _synchronizer(kind: str, device: "str | torch.device") -> Callable[[], Any]:
    if kind == "cpu":
        return lambda: None
    import torch

    return lambda: torch.accelerator.synchronize(device)


def _cuda_median(fn: Callable[[], Any], device: "str | torch.device", warmup: float, budget: float) -> float:
    import torch

    with torch.cuda.device(device):
        try:
            from triton.testing import do_bench
        except ImportError:  # no Triton for this platform
            return wall_median(fn, torch.cuda.synchronize, warmup, budget)
        milliseconds: float = do_bench(fn, warmup=1e3 * warmup, rep=1e3 * budget, return_mode="median")
        return milliseconds / 1e3
