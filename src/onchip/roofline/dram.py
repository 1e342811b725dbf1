"""From issued bytes to DRAM bytes: a model of an L2 of finite size.

The model, for each stream of a kernel:

* Data touched once costs its bytes.
* Data walked again costs its bytes once if what is walked at the same time stays in L2. Thread blocks run `wave` at a time; those that walk
  the same set (query tiles of one head) run in step and share a fetch, so the working set is ⌈wave / walkers⌉ sets.
* If the working set does not stay, each further walk misses: a set is fetched once for every wave of its walkers, at most what was issued.
* An intermediate that stays in L2 from the kernel that makes it to the kernel that takes it costs nothing.

A working set stays when it fits in half the L2, and does not stay when it exceeds the whole; linear in between. The half is a property of
the A100 and later: two partitions, each caching what its own SMs use, hold shared data twice (NVIDIA A100 whitepaper, "L2 cache").
Not modelled: dirty lines still in L2 when a kernel ends, about 30 MB a kernel on an H200, which a counter of one kernel does not see.
"""
from onchip.roofline.ledger import Kernel, Pipeline, Stream


def stays(working_set: int, l2_bytes: int) -> float:
    """The share of a re-walked working set found in L2: 1 up to half the cache, 0 from the whole cache on (and without one)."""
    return min(1.0, max(0.0, 2.0 - 2.0 * working_set / l2_bytes)) if l2_bytes else 0.0


def _stream_bytes(stream: Stream, l2_bytes: int, wave: int) -> float:
    if stream.intermediate:
        again = stays(stream.set_bytes * min(wave, stream.sets), l2_bytes)  # a second read of a row by the block that just read it
        return (stream.unique + (stream.issued - stream.unique) * (1 - again)) * (1 - stays(stream.unique, l2_bytes))
    if stream.set_bytes == 0:
        return stream.issued
    active = min(stream.sets, -(-wave // stream.walkers))
    missing = min(stream.issued, stream.extent * stream.sweeps * -(-stream.walkers // wave))
    return stream.unique + max(0, missing - stream.unique) * (1 - stays(active * stream.set_bytes, l2_bytes))


def dram_bytes(kernel: Kernel, l2_bytes: int, wave: int) -> int:
    """DRAM bytes of one kernel when `wave` thread blocks run at once over an L2 of `l2_bytes`."""
    wave = max(1, min(wave, kernel.blocks))
    return round(sum(_stream_bytes(s, l2_bytes, wave) for s in kernel.streams))


def pipeline_dram_bytes(pipeline: Pipeline, l2_bytes: int, wave: int) -> int:
    """DRAM bytes of a pipeline: the sum over its kernels."""
    return sum(dram_bytes(k, l2_bytes, wave) for k in pipeline.kernels)
