"""The traffic ledger: what every kernel of a pipeline computes and moves, counted in closed form.

Three byte counts, never mixed:

* **compulsory**: every input once, every output once. What no schedule can avoid.
* **issued**: what the thread blocks ask for when the schedule runs tile by tile (`onchip.simulate` executes it and must agree to the byte).
* **DRAM**: what is left of the issued bytes after an L2 of finite size (`onchip.roofline.dram`).

One `Stream` is one tensor read or written by one kernel; a `Kernel` is its streams and its work; a pipeline is a list of kernels.
The schedules themselves are in `onchip.roofline.attention` and `onchip.roofline.softmax`.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """One tensor, as one kernel reads or writes it.

    `issued` bytes are asked for, `unique` of them are new to the kernel (0 where it re-reads what it wrote itself). Where data is used
    again, four numbers tell the L2 model how: it falls into `sets` of `set_bytes` (the K and V of one head, say), each walked by
    `walkers` thread blocks (the head's query tiles), each of them `sweeps` times; one walk over everything touches `extent` bytes.
    `shares`: the share of a set that each sweep touches, where a mask makes them differ.
    """

    tensor: str
    write: bool
    unique: int
    issued: int
    extent: int = 0
    set_bytes: int = 0  # 0: no re-use, every byte is touched once
    sets: int = 1
    walkers: int = 1
    sweeps: int = 1
    intermediate: bool = False  # made by one kernel for another: costs no DRAM where it fits in L2
    shares: tuple[float, ...] = ()  # one a sweep; empty: every sweep walks the whole set


@dataclass(frozen=True)
class Kernel:
    """One launch: its streams, and its work by the unit that does it."""

    name: str
    streams: tuple[Stream, ...]
    blocks: int  # thread blocks in the grid
    matmul_flops: int = 0  # on the tensor cores, as executed (visited tiles whole)
    exps: int = 0  # on the exp unit (MUFU)
    vector_ops: int = 0  # fp32 instructions on the CUDA cores: scale, max, subtract, add, convert; an FMA counts once
    smem_bytes: int = 0  # read from shared memory by the matmuls' operands

    @property
    def issued(self) -> int:
        """Bytes the thread blocks ask for."""
        return sum(s.issued for s in self.streams)

    @property
    def unique(self) -> int:
        """Bytes of this kernel's operands, each once: the textbook count of one launch."""
        return sum(s.unique for s in self.streams)

    def read(self, tensor: str) -> int:
        """Issued bytes read from `tensor`."""
        return sum(s.issued for s in self.streams if s.tensor == tensor and not s.write)

    def written(self, tensor: str) -> int:
        """Issued bytes written to `tensor`."""
        return sum(s.issued for s in self.streams if s.tensor == tensor and s.write)


@dataclass(frozen=True)
class Pipeline:
    """Kernels that run one after another and together do one job."""

    name: str
    kernels: tuple[Kernel, ...]
    compulsory: int  # bytes: the job's inputs once and outputs once
    useful_flops: int  # matmul FLOPs the job needs: visible pairs only, nothing recomputed

    @property
    def issued(self) -> int:
        """Issued bytes, all kernels."""
        return sum(k.issued for k in self.kernels)

    @property
    def textbook(self) -> int:
        """Σ over kernels of their operands once: 8Nd + 8N² for naive attention at two bytes an element."""
        return sum(k.unique for k in self.kernels)

    @property
    def matmul_flops(self) -> int:
        """Executed matmul FLOPs, all kernels."""
        return sum(k.matmul_flops for k in self.kernels)

    @property
    def exps(self) -> int:
        """Exponentials, all kernels."""
        return sum(k.exps for k in self.kernels)

    @property
    def intensity(self) -> float:
        """Matmul FLOPs a byte issued."""
        return self.matmul_flops / self.issued


def once(tensor: str, nbytes: int, *, write: bool = False, intermediate: bool = False) -> Stream:
    """A stream whose every byte is touched once."""
    return Stream(tensor, write, nbytes, nbytes, intermediate=intermediate)
