"""Ledgers of the softmax schedules over a (rows, n) array: what each reads, writes and computes.

Accesses an element, reads + writes, when n exceeds what a thread block keeps on chip::

    eager, five kernels   5 + 3    max; subtract; exp; sum; divide, every intermediate through memory
    naive (no maximum)    2 + 1    Σ exp(x); then exp(x) / Σ. Overflows: see onchip.simulate.trace
    safe, three passes    3 + 1    max; Σ exp(x − m); then exp(x − m) / l
    online, two passes    2 + 1    m and l together in one pass; then exp(x − m) / l
    part of a row kept    1 … 2 + 1
    row on chip           1 + 1    compulsory: nothing is left for the online recurrence to save

(m, l) takes a single pass; the probabilities take a second one over the data, wherever the data is by then.

Conventions, shared with `onchip.simulate.softmax`, which executes the same schedules and must count the same bytes: one thread block
owns a row (or one split of it) and walks it in blocks of `block` elements, the last one ragged; x stays on chip in its own format, so exp
is computed once for l and once more for the output; arithmetic is fp32; an exp is one MUFU instruction, its argument
x·log₂e − m·log₂e one FMA.

Sources: Milakov & Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867, Alg. 1–3).
"""
from dataclasses import dataclass

from onchip.errors import require
from onchip.roofline.dtypes import BYTES, parse_dtype
from onchip.roofline.ledger import Kernel, Pipeline, Stream, once
from onchip.roofline.shape import blocks, count_blocks


@dataclass(frozen=True)
class Rows:
    """Softmax along the last dimension of a (rows, n) array whose input and output are `dtype`."""

    rows: int
    n: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("rows", "n"):
            value = getattr(self, name)
            require(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, repr(value), "an integer ≥ 1")
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))

    @property
    def elements(self) -> int:
        """rows · n."""
        return self.rows * self.n

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.n * BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.rows * self.row_bytes

    def blocks(self, block: int) -> int:
        """Blocks of `block` elements in a row, the last one ragged."""
        require(block >= 1, "block", block, "an integer ≥ 1")
        return count_blocks(self.n, block)

    def read(self, tensor: str, sweeps: int = 1) -> Stream:
        """A (rows, n) tensor that the owner of each row reads `sweeps` times over."""
        if sweeps == 1:
            return once(tensor, self.nbytes)
        return Stream(tensor, False, self.nbytes, sweeps * self.nbytes, self.nbytes, self.row_bytes, self.rows, 1, sweeps)

    def ops(self, an_element: int, *passes: str) -> int:
        """fp32 instructions: `an_element` each, and half of one for every pass over the elements in a format narrower than fp32
        (conversions are packed by two)."""
        narrow = sum(BYTES[dtype] < 4 for dtype in passes)
        return an_element * self.elements + count_blocks(narrow * self.elements, 2)

    def pipeline(self, name: str, *kernels: Kernel, arrays: int = 2) -> Pipeline:
        """`kernels` doing a job whose inputs and outputs are `arrays` arrays of this shape."""
        return Pipeline(name, kernels, compulsory=arrays * self.nbytes, useful_flops=0)


def eager(x: Rows, intermediates: str | None = None) -> Pipeline:
    """Five kernels, s = x − m, p = exp(s), m and l through memory in the format `intermediates` (default: x's own)."""
    kept = parse_dtype(intermediates or x.dtype, "intermediates")
    array, stat = x.elements * BYTES[kept], x.rows * BYTES[kept]

    def made(tensor: str, nbytes: int, write: bool = False) -> Stream:
        return once(tensor, nbytes, write=write, intermediate=True)

    return x.pipeline(
        "eager",
        Kernel("max", (x.read("x"), made("m", stat, True)), x.rows, vector_ops=x.ops(1, x.dtype)),
        Kernel("subtract", (x.read("x"), made("m", stat), made("s", array, True)), x.rows, vector_ops=x.ops(1, x.dtype, kept)),
        Kernel("exp", (made("s", array), made("p", array, True)), x.rows, exps=x.elements, vector_ops=x.ops(1, kept, kept)),
        Kernel("sum", (made("p", array), made("l", stat, True)), x.rows, vector_ops=x.ops(1, kept)),
        Kernel("divide", (made("p", array), made("l", stat), once("y", x.nbytes, write=True)), x.rows, vector_ops=x.ops(1, kept, x.dtype)),
    )


def _one_kernel(name: str, x: Rows, x_streams: tuple[Stream, ...], an_element: int, passes: int, rescales: int = 0) -> Pipeline:
    """exp twice an element, plus a rescale (one exp, one FMA) for each online block; `passes` over x and y convert their format."""
    kernel = Kernel("softmax", (*x_streams, once("y", x.nbytes, write=True)), x.rows,
                    exps=2 * x.elements + rescales, vector_ops=x.ops(an_element, *[x.dtype] * passes) + rescales)
    return x.pipeline(name, kernel)


def naive(x: Rows) -> Pipeline:
    """One kernel, no maximum: l = Σ exp(x), then y = exp(x) / l. 2 reads + 1 write."""
    return _one_kernel("naive", x, (x.read("x", 2),), 4, 3)


def safe(x: Rows) -> Pipeline:
    """One kernel, three passes: m = max x; l = Σ exp(x − m); y = exp(x − m) / l. 3 reads + 1 write."""
    return _one_kernel("safe", x, (x.read("x", 3),), 5, 4)


def online(x: Rows, block: int = 1024) -> Pipeline:
    """One kernel, two passes: m and l block by block, l rescaled by exp(m_old − m) at each; then y. 2 reads + 1 write.

    `block` changes no byte, only the number of rescales: one exp and one FMA a block.
    """
    return _one_kernel("online", x, (x.read("x", 2),), 5, 3, x.rows * x.blocks(block))


def resident(x: Rows) -> Pipeline:
    """The row kept on chip in its own format: `safe` with its passes over on-chip data. 1 read + 1 write."""
    return _one_kernel("resident", x, (x.read("x"),), 5, 4)


def slots(x: Rows, block: int, sram: int, state: str = "float32") -> int:
    """Blocks of x that stay on chip between the two passes of `partial`, in `sram` bytes: at most all of them.

    m and l take two elements of the format `state`, the rest is slots of `block` elements; a ragged last block takes only what it fills.
    """
    count, size, statistics = x.blocks(block), min(block, x.n) * BYTES[x.dtype], 2 * BYTES[parse_dtype(state, "state")]
    if x.row_bytes + statistics <= sram:
        return count
    fit = (sram - statistics) // size
    require(fit >= 1, "sram", sram, f"at least {size + statistics} bytes: a block of {min(block, x.n)} {x.dtype}, m and l")
    return fit


def partial(x: Rows, block: int, sram: int, state: str = "float32") -> Pipeline:
    """Rows longer than on-chip memory: `online` with as much of the row kept as `sram` bytes hold, the rest read again.

    The first slots − 1 blocks stay; the others pass through the last slot, where the final block is still found when the second pass
    begins with it. What is read twice is therefore (blocks − slots) · block elements exactly; nothing when the row fits.
    """
    count = x.blocks(block)
    again = x.rows * (count - slots(x, block, sram, state)) * block * BYTES[x.dtype]
    kept = once("x", x.nbytes - again)
    reread = Stream("x", False, again, 2 * again, again, again // x.rows, x.rows, 1, 2)
    return _one_kernel("partial", x, (kept, reread) if again else (kept,), 5, 3, x.rows * count)


def split(x: Rows, splits: int, block: int = 1024, state: str = "float32") -> Pipeline:
    """Few long rows: `splits` thread blocks a row. The first kernel leaves each split's (m, l) in memory in the format `state`;
    in the second every block merges all of its row's pairs, reads its split again and writes y.

    m = max mᵢ, l = Σ lᵢ exp(mᵢ − m). A split is ⌈n / splits⌉ elements, so a few may be left without work: those are not launched.
    """
    chunk = split_length(x, splits)
    count = x.blocks(chunk)
    grid, stat = x.rows * count, x.rows * count * BYTES[parse_dtype(state, "state")]
    require(block >= 1, "block", block, "an integer ≥ 1")
    rescales = x.rows * sum(count_blocks(length, block) for _, length in blocks(x.n, chunk))

    def merged(tensor: str) -> Stream:
        return Stream(tensor, False, stat, stat * count, stat, stat // x.rows if count > 1 else 0, x.rows, count, 1, intermediate=True)

    statistics = Kernel(
        "statistics", (x.read("x"), *(once(t, stat, write=True, intermediate=True) for t in "ml")), grid,
        exps=x.elements + rescales, vector_ops=x.ops(3, x.dtype) + rescales)
    normalise = Kernel(
        "normalise", (x.read("x"), merged("m"), merged("l"), once("y", x.nbytes, write=True)), grid,
        exps=x.elements + grid * count, vector_ops=x.ops(2, x.dtype, x.dtype) + 3 * grid * count)  # merge: max, shift, FMA
    return x.pipeline("split", statistics, normalise)


def split_length(x: Rows, splits: int) -> int:
    """Elements of a split: ⌈n / splits⌉."""
    require(1 <= splits <= x.n, "splits", splits, f"1 … n = {x.n}")
    return count_blocks(x.n, splits)


def backward_resident(x: Rows) -> Pipeline:
    """dx = y ∘ (dy − D), D = Σ y ∘ dy, with the rows of y and dy kept on chip. 2 reads + 1 write."""
    return _backward("backward_resident", x, 1)


def backward_two_pass(x: Rows) -> Pipeline:
    """dx = y ∘ (dy − D): a pass for D, a second one for dx. 4 reads + 1 write."""
    return _backward("backward_two_pass", x, 2)


def _backward(name: str, x: Rows, sweeps: int) -> Pipeline:
    streams = (x.read("y", sweeps), x.read("dy", sweeps), once("dx", x.nbytes, write=True))
    # an element: one FMA into D, subtract, multiply; y and dy are converted in either pass, dx once
    return x.pipeline(name, Kernel("softmax_backward", streams, x.rows, vector_ops=x.ops(3, *[x.dtype] * 5)), arrays=3)


