"""Counted memory: a device memory of named tensors, and a bounded memory on the chip that every access to it goes through.

A schedule written against them reads like the paper's algorithm, and its bytes are counted while it runs::

    with chip.kernel("S = QKᵀ"):
        for ...:                                        # a thread block
            q, k = chip.load("Q", head, rows), chip.load("K", head, keys)
            chip.store("S", head, rows, q @ k.T, keys)
            chip.clear()

A *dry* chip (``chip.live = False``) counts the same and moves nothing: `load` and `alloc` give None. `chip.times` counts an access that
many times, for thread blocks that would only repeat it (the other heads of a dry run).
"""
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from onchip.errors import InputError
from onchip.simulate.formats import Array, Format, Precision, parse_format


class OutOfSram(InputError):
    """The buffers alive at once exceed the on-chip bound; the message names each and its bytes."""


class Tensor:
    """A (heads, rows, cols) array in device memory, in one number format.

    Storage appears when it is first touched, in pages of `page` rows filled with NaN, so an N × N intermediate of which a sample is
    executed costs that sample, and reading what nobody wrote shows in the result. An access must not cross a page.
    """

    def __init__(self, name: str, fmt: Format, heads: int, rows: int, cols: int, page: int | None = None) -> None:
        self.name, self.format, self.heads, self.rows, self.cols = name, fmt, heads, rows, cols
        self.page = page or rows
        self._pages: dict[tuple[int, int], Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, touched or not."""
        return self.heads * self.rows * self.cols * self.format.itemsize

    def at(self, head: int, rows: slice, cols: slice | None = None) -> Array:
        """A view of the stored rows of one head."""
        index = rows.start // self.page
        first = index * self.page
        page = self._pages.get((head, index))
        if page is None:
            height = min(self.page, self.rows - first)
            page = self._pages[head, index] = np.full((height, self.cols), np.nan, self.format.dtype)
        return page[rows.start - first:rows.stop - first, cols or slice(None)]

    def fill(self, data: Array) -> None:
        """Take `data` (heads, rows, cols), rounded to the tensor's format."""
        for head, stored in enumerate(self.format.cast(data)):
            self._pages.update(((head, i), stored[i * self.page:(i + 1) * self.page]) for i in range(-(-self.rows // self.page)))

    def dense(self) -> Array:
        """The whole tensor as (heads, rows, cols); NaN where nothing was written."""
        out = np.full((self.heads, self.rows, self.cols), np.nan, self.format.dtype)
        for (head, i), page in self._pages.items():
            out[head, i * self.page:i * self.page + len(page)] = page
        return out


class KernelCount:
    """What one launch moved: bytes by tensor, and its tiles of S by how the mask treats them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.tiles: Counter[str] = Counter()  # "full", "masked" (both visited), "skipped"

    def read(self, tensor: str) -> int:
        """Bytes loaded from `tensor`."""
        return self.reads[tensor]

    def written(self, tensor: str) -> int:
        """Bytes stored to `tensor`."""
        return self.writes[tensor]

    @property
    def issued(self) -> int:
        """All bytes the kernel asked device memory for."""
        return self.reads.total() + self.writes.total()


class Chip:
    """On-chip memory (shared memory and registers together) of at most `sram` bytes, and the only road to device memory.

    A buffer belongs to one thread block and is known by name: loading K again overwrites the K buffer. `peak` is the most bytes alive at
    once, `peak_buffers` what they were. One thread block runs at a time, so the bound is a block's.
    """

    def __init__(self, precision: Precision, sram: int | None = None) -> None:
        self.carrier, self.state, self.sram = precision.carrier, parse_format(precision.state), sram
        self.memory: dict[str, Tensor] = {}
        self.kernels: list[KernelCount] = []
        self.live, self.times = True, 1
        self.peak, self.peak_buffers = 0, dict[str, int]()
        self._buffers: dict[str, int] = {}
        self._used = 0

    @contextmanager
    def kernel(self, name: str) -> Iterator[KernelCount]:
        """Count what happens inside as one launch. Overflow and NaN are part of what is simulated: numpy does not warn of them inside."""
        self.count = KernelCount(name)
        self.kernels.append(self.count)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            yield self.count

    def malloc(self, name: str, fmt: Format, heads: int, rows: int, cols: int, page: int | None = None) -> Tensor:
        """A tensor in device memory."""
        self.memory[name] = tensor = Tensor(name, fmt, heads, rows, cols, page)
        return tensor

    def load(self, name: str, head: int, rows: slice, cols: slice | None = None) -> Array | None:
        """Bring rows (and columns) of a tensor into the buffer of the same name; the values in the carrier."""
        tensor = self.memory[name]
        nbytes = (rows.stop - rows.start) * (tensor.cols if cols is None else cols.stop - cols.start) * tensor.format.itemsize
        self.count.reads[name] += nbytes * self.times
        if self._buffers.get(name) != nbytes:
            self._hold(name, nbytes)
        return tensor.at(head, rows, cols).astype(self.carrier) if self.live else None

    def store(self, name: str, head: int, rows: slice, values: Array | None, cols: slice | None = None) -> None:
        """Write `values` to rows (and columns) of a tensor, rounded to its format."""
        tensor = self.memory[name]
        nbytes = (rows.stop - rows.start) * (tensor.cols if cols is None else cols.stop - cols.start) * tensor.format.itemsize
        self.count.writes[name] += nbytes * self.times
        if self.live:
            assert values is not None
            tensor.at(head, rows, cols)[...] = tensor.format.cast(values)

    def alloc(self, name: str, rows: int, cols: int, fmt: Format | None = None, fill: float | None = 0.0) -> Array | None:
        """A buffer of rows × cols in `fmt` (the state's format unless given), filled with `fill`; None: room for a matmul's result."""
        nbytes = rows * cols * (fmt or self.state).itemsize
        if self._buffers.get(name) != nbytes:
            self._hold(name, nbytes)
        return np.full((rows, cols), fill, self.carrier) if self.live and fill is not None else None

    def forget(self) -> None:
        """Start counting afresh; device memory stays as it is."""
        self.kernels.clear()
        self.peak, self.peak_buffers = 0, {}

    def clear(self) -> None:
        """The thread block ends: its buffers are gone."""
        self._buffers.clear()
        self._used = 0

    def _hold(self, name: str, nbytes: int) -> None:
        self._used += nbytes - self._buffers.get(name, 0)
        self._buffers[name] = nbytes
        if self.sram is not None and self._used > self.sram:
            alive = " + ".join(f"{buffer} {size:,}" for buffer, size in self._buffers.items())
            raise OutOfSram(f"sram: got {self.sram:,} B, accepted: room for the {self._used:,} B alive in '{self.count.name}': {alive}")
        if self._used > self.peak:
            self.peak, self.peak_buffers = self._used, dict(self._buffers)
