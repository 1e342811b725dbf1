"""From issued bytes to what the counters around the L2 see.

**Between L2 and SMs** crosses what is issued: TMA and asynchronous copies go past the L1, a plain load of a tile finds nothing of its own
there, stores write through. Two things break the equality: registers that spill, which are no part of a ledger, and a block that reads
again what its L1 still holds. `crossing` is the least that crosses, where all that fits there is found: torch.softmax, two rows of 64 KB an
SM, crossed 693 MB, between 537 MB and the 1074 MB issued.

**Lookups in the L2** are fewer and more. Fewer, since a request coalescer before the L2 merges what several SMs ask for at the same time
(Nsight Compute's Profiling Guide, "lrc"): data that several blocks walk in step is looked up once for 1 … `walkers` of them. More, since an
L2 of two halves looks up a line that is at home in the other half twice: half of all that is written, and half of all that comes from
DRAM.

    reads  = own + shared / merged + DRAM reads / 2, 1 ≤ merged ≤ walkers        writes = 1.5 · written

Counted on an H200: without sharing within 2 % (elementwise kernels, softmax in one, two and three passes); K and V of the fused rungs are
merged 1.8 to 3.2 times, the operands of the unfused GEMMs 1.3 to 1.6 times.
"""
from dataclasses import dataclass

from onchip.roofline.dram import counted_dram_bytes
from onchip.roofline.ledger import Kernel, Stream

HALVES = 2  # partitions of the L2 of an A100 or later


def crossing(kernel: Kernel, l1_bytes: int, blocks_per_sm: int = 1) -> int:
    """The least that crosses between L2 and SMs: what is issued, less what one block reads again of a set of its own, where the sets of all
    blocks of an SM fit its L1 of `l1_bytes`."""
    def again(stream: Stream) -> int:
        own = stream.sweeps > 1 and stream.walkers == 1 and not stream.write
        return stream.issued - stream.unique if own and blocks_per_sm * stream.set_bytes <= l1_bytes else 0

    return kernel.issued - sum(again(stream) for stream in kernel.streams)


@dataclass(frozen=True)
class Lookups:
    """Bytes looked up in the L2 by one kernel: `read` by data that one block has for itself and by DRAM, `shared` by what blocks share."""

    read: float
    shared: float
    most_merged: int  # blocks that walk the shared data at once
    written: float

    @property
    def least(self) -> float:
        """Every request for shared data merged with those of all other walkers."""
        return self.read + self.shared / self.most_merged + self.written

    @property
    def most(self) -> float:
        """None merged."""
        return self.read + self.shared + self.written

    def merged(self, counted: float) -> float:
        """How many requests for shared data became one, by what was counted, reads and writes; 1 where nothing is shared."""
        rest = counted - self.read - self.written
        return self.shared / rest if self.shared and rest > 0 else 1.0


def lookups(kernel: Kernel, l2_bytes: int, wave: int) -> Lookups:
    """What `kernel` looks up in an L2 of `l2_bytes` when `wave` thread blocks run at once."""
    def shares(stream: Stream) -> bool:
        return stream.set_bytes > 0 and stream.walkers > 1

    wave = max(1, min(wave, kernel.blocks))
    reads = [s for s in kernel.streams if not s.write]
    shared = [s for s in reads if shares(s)]
    far = counted_dram_bytes(kernel, l2_bytes, wave).read * (HALVES - 1) / HALVES
    written = sum(s.issued for s in kernel.streams if s.write) * (2 * HALVES - 1) / HALVES
    return Lookups(sum(s.issued for s in reads if not shares(s)) + far, sum(s.issued for s in shared),
                   max((min(wave, s.walkers) for s in shared), default=1), written)
