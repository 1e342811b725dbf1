"""From issued bytes to DRAM bytes: a model of an L2 of finite size.

The model, for each stream of a kernel:

* Data touched once costs its bytes.
* Data walked again costs its bytes once if what is walked at the same time stays in L2. Thread blocks run `wave` at a time; those that walk
  the same set (query tiles of one head) run in step and share a fetch, so the working set is ⌈wave / walkers⌉ sets.
* If the working set does not stay, each further walk misses: a set is fetched once for every wave of its walkers, at most what was issued.
* An intermediate that stays in L2 from the kernel that makes it to the kernel that takes it costs nothing.

A working set stays when it fits in `KEPT` of the L2, and does not stay when it exceeds the whole; linear in between. Less than half is a
property of the A100 and later: two partitions, each caching what its own SMs use, hold shared data twice (NVIDIA A100 whitepaper, "L2
cache").

A counter of one kernel alone sees less than the kernel costs: lines it wrote last are still in L2, and whoever comes next pays for them;
and more, where the caches are flushed before it: no intermediate is found there. `counted_dram_bytes` is what it should see. Counted on an
H200 (60 MiB of L2): of 537 MB or 268 MB written 23 to 27 MB are still there, of 17 MB 6 to 9 MB; FA1's working set of 34 MB misses one walk
in six.
"""
from dataclasses import dataclass

from onchip.roofline.ledger import Kernel, Pipeline, Stream

KEPT = 0.45  # of the L2: a working set that stays, and the most of what a kernel wrote that is still there when it ends


@dataclass(frozen=True)
class Dram:
    """Bytes of one kernel, read and written."""

    read: float
    written: float


def stays(working_set: int, l2_bytes: int) -> float:
    """The share of a re-walked working set found in L2: 1 up to `KEPT` of it, 0 from the whole cache on (and without one)."""
    return min(1.0, max(0.0, (1 - working_set / l2_bytes) / (1 - KEPT))) if l2_bytes else 0.0


def _stream_bytes(stream: Stream, l2_bytes: int, wave: int, *, flushed: bool) -> float:
    if stream.intermediate:
        again = stays(stream.set_bytes * min(wave, stream.sets), l2_bytes)  # a second read of a row by the block that just read it
        found = 0.0 if flushed else stays(stream.unique, l2_bytes)
        return (stream.unique + (stream.issued - stream.unique) * (1 - again)) * (1 - found)
    if stream.set_bytes == 0:
        return stream.issued
    active = min(stream.sets, -(-wave // stream.walkers))
    missing = min(stream.issued, stream.extent * stream.sweeps * -(-stream.walkers // wave))
    return stream.unique + max(0, missing - stream.unique) * (1 - stays(active * stream.set_bytes, l2_bytes))


def _sums(kernel: Kernel, l2_bytes: int, wave: int, *, flushed: bool) -> Dram:
    wave = max(1, min(wave, kernel.blocks))
    moved = [(s.write, _stream_bytes(s, l2_bytes, wave, flushed=flushed)) for s in kernel.streams]
    return Dram(*(sum(nbytes for write, nbytes in moved if write is written) for written in (False, True)))


def dram_bytes(kernel: Kernel, l2_bytes: int, wave: int) -> int:
    """DRAM bytes that one kernel costs when `wave` thread blocks run at once over an L2 of `l2_bytes`."""
    costs = _sums(kernel, l2_bytes, wave, flushed=False)
    return round(costs.read + costs.written)


def counted_dram_bytes(kernel: Kernel, l2_bytes: int, wave: int) -> Dram:
    """What counters of this kernel alone should see: nothing found of what others left, and what it wrote last not yet written back, half
    of all it wrote up to `KEPT` of the L2."""
    costs = _sums(kernel, l2_bytes, wave, flushed=True)
    return Dram(costs.read, costs.written - min(costs.written / 2, KEPT * l2_bytes))


def pipeline_dram_bytes(pipeline: Pipeline, l2_bytes: int, wave: int) -> int:
    """DRAM bytes of a pipeline: the sum over its kernels."""
    return sum(dram_bytes(k, l2_bytes, wave) for k in pipeline.kernels)
