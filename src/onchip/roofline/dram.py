"""From issued bytes to DRAM bytes: a model of an L2 of finite size.

The model, for each stream of a kernel:

* Data touched once costs its bytes.
* Data that several blocks walk costs its bytes once if what is walked at the same time stays in L2. Thread blocks run `wave` at a time;
  those that walk the same set (query tiles of one head) run in step and share a fetch, so the working set is ⌈wave / walkers⌉ sets. It
  stays when it fits in `KEPT` of the L2, and does not stay when it exceeds the whole; linear in between: two partitions, each caching what
  its own SMs use, hold shared data twice (NVIDIA A100 whitepaper, "L2 cache"). If it does not stay, a set is fetched once for every wave of
  its walkers, at most what was issued.
* Data that one block walks again and again (FA1's Q, O, m, l) is found if fewer lines than its set has ways came between. Lines spread at
  random: P(Poisson(ways · bytes between / L2) < ways) (A. J. Smith, "A comparative study of set associative memory mapping algorithms",
  1978). Between two walks lie the sets of all blocks that run, as much of them as the sweep touches, and `copies` of some lines. A line
  rewritten reaches DRAM each time it is written back before: `CLEAN` ways earlier.
* An intermediate that stays in L2 from the kernel that makes it to the kernel that takes it costs nothing.

A counter of one kernel alone sees less than the kernel costs: of the lines in L2 when it ends, those it wrote wait for whoever comes next.
They are the share of writes among the lines that came in, of an L2's worth of them, at most `KEPT` of the L2: of 537 MB written and as
much read 23 to 27 MB, of a fused forward's output 6 to 10 MB at any length, of 4 MB beside 12 MB read all (H200, 60 MiB). And it sees more,
where the caches are flushed before it: no intermediate is found there. `counted_dram_bytes` is what it should see.

`WAYS` and `CLEAN` are two numbers fitted to twelve counters, reads and writes of FA1 at 4K, 8K and 16K, 16 heads, full and causal. In a
later run, of 64, 32 and 16 heads, full is within 1 % and causal within 3 %. 16 heads of 4K are a set of 34 MB on the steep part, and the
card does not repeat itself: full 586, 210 and 329 MB in three runs, causal 84 and 141 MB in two; predicted are 220 and 72 MB.
"""
import math
from dataclasses import dataclass

from onchip.roofline.ledger import Kernel, Pipeline, Stream

KEPT = 0.45  # of the L2: a shared working set that stays, and the most that is dirty when a kernel ends
# Lines that a line takes: one that SMs of both halves read is in both; one that an SM reads is where it is at home and, half of the time,
# in the SM's half too; one that is written is at home alone.
SHARED, OWN, WRITTEN = 2.0, 1.5, 1.0
WAYS = 32  # lines of a set
CLEAN = 4  # ways before its eviction at which a dirty line is written back


@dataclass(frozen=True)
class Dram:
    """Bytes of one kernel, read and written."""

    read: float
    written: float


def stays(working_set: int, l2_bytes: int) -> float:
    """The share of a re-walked working set found in L2: 1 up to `KEPT` of it, 0 from the whole cache on (and without one)."""
    return min(1.0, max(0.0, (1 - working_set / l2_bytes) / (1 - KEPT))) if l2_bytes else 0.0


def found(between: float, l2_bytes: int, ways: int = WAYS) -> float:
    """The share of lines still in L2 after `between` other bytes came in: P(fewer than `ways` of them fell into a line's set of `WAYS`)."""
    if not l2_bytes:
        return 0.0
    mean = WAYS * between / l2_bytes
    if mean > 4 * WAYS:  # less than 10⁻²⁰
        return 0.0
    return min(1.0, math.exp(-mean) * sum(mean**n / math.factorial(n) for n in range(ways)))


def copies(kernel: Kernel) -> float:
    """Lines that a line of what each block walks by itself takes: 1.25 in FA1, half of whose bytes are Q and half O, m and l."""
    written = {stream.tensor for stream in kernel.streams if stream.write}
    own = {stream.tensor: stream.extent for stream in kernel.streams if stream.sweeps > 1 and stream.walkers == 1}
    lines = sum(extent * (WRITTEN if tensor in written else OWN) for tensor, extent in own.items())
    return lines / (sum(own.values()) or 1)


def rewalked(stream: Stream, between: float, l2_bytes: int) -> float:
    """The share of an own set's further walks, reads or writes, that reaches DRAM, if `between` bytes come in while all of it is walked."""
    ways, shares = WAYS - CLEAN * stream.write, stream.shares or (1.0,)
    missed = sum(share * (1 - found(share * between, l2_bytes, ways)) for share in shares)
    return missed / sum(shares)


def _stream_bytes(stream: Stream, l2_bytes: int, wave: int, lines: float, *, flushed: bool) -> float:
    if stream.intermediate:
        again = stays(stream.set_bytes * min(wave, stream.sets), l2_bytes)  # a second read of a row by the block that just read it
        kept = 0.0 if flushed else stays(stream.unique, l2_bytes)
        return (stream.unique + (stream.issued - stream.unique) * (1 - again)) * (1 - kept)
    if stream.set_bytes == 0:
        return stream.issued
    active = min(stream.sets, -(-wave // stream.walkers))
    if stream.walkers == 1:
        return stream.unique + (stream.issued - stream.unique) * rewalked(stream, lines * active * stream.set_bytes, l2_bytes)
    missing = min(stream.issued, stream.extent * stream.sweeps * -(-stream.walkers // wave))
    return stream.unique + max(0, missing - stream.unique) * (1 - stays(active * stream.set_bytes, l2_bytes))


def _sums(kernel: Kernel, l2_bytes: int, wave: int, *, flushed: bool) -> Dram:
    wave = max(1, min(wave, kernel.blocks))
    lines = copies(kernel)
    moved = [(s.write, _stream_bytes(s, l2_bytes, wave, lines, flushed=flushed)) for s in kernel.streams]
    return Dram(*(sum(nbytes for write, nbytes in moved if write is written) for written in (False, True)))


def dram_bytes(kernel: Kernel, l2_bytes: int, wave: int) -> int:
    """DRAM bytes that one kernel costs when `wave` thread blocks run at once over an L2 of `l2_bytes`."""
    costs = _sums(kernel, l2_bytes, wave, flushed=False)
    return round(costs.read + costs.written)


def counted_dram_bytes(kernel: Kernel, l2_bytes: int, wave: int) -> Dram:
    """What counters of this kernel alone should see: nothing found of what others left, and what is dirty when it ends not yet written."""
    costs = _sums(kernel, l2_bytes, wave, flushed=True)
    written = sum(s.unique for s in kernel.streams if s.write)
    came = written + sum(s.unique * (SHARED if s.walkers > 1 else OWN) for s in kernel.streams if not s.write)
    dirty = l2_bytes * (WAYS - CLEAN) / WAYS  # of the lines that came in last, the part not written back yet
    return Dram(costs.read, costs.written - min(written * min(1.0, dirty / max(came, 1)), KEPT * l2_bytes))


def pipeline_dram_bytes(pipeline: Pipeline, l2_bytes: int, wave: int) -> int:
    """DRAM bytes of a pipeline: the sum over its kernels."""
    return sum(dram_bytes(k, l2_bytes, wave) for k in pipeline.kernels)
