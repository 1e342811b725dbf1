"""Few tiles, many SMs: how many parts each tile's keys are dealt out to, and the kernel that puts the parts together.

A query tile is one thread block's, and with fewer tiles than SMs the others stand still: a step of decoding has a tile a head. So a tile's
keys are cut into parts, each attended to by itself, and softmax weighs the parts by their lse:

    lse = log Σₚ exp(lseₚ)        out = Σₚ exp(lseₚ − lse) outₚ

Sources: Flash-Decoding (2023); FlashAttention (arXiv 2205.14135), §3.1.
"""
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from onchip.attention.hopper import tiles
from onchip.attention.hopper.tiles import Tile
from onchip.attention.problem import Spec
from onchip.launcher import Launcher

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(8)  # strides of out are multiples of so many elements, as TMA wants heads to be
MOST = 64  # parts of a tile
MOST_PARTS = tl.constexpr(MOST)
LEAST_BLOCKS = 4  # of keys in a part of the heaviest tile: its first softmax and its last PV overlap with nothing

# What an H200 takes, in seconds, for `parts_of` to weigh: measured where the notes have a figure, else of that order.
SM_FLOPS = 5.3e12  # a second and SM: 700 TFLOP/s on 132
DRAM_BYTES = 4.2e12  # a second, of 4.8e12
TASK = 1.5e-6  # between two tiles, and to start
MERGE = 5e-6  # launch and latency of the second kernel, on device and host
PARTIAL_BYTES = 4e12  # a second, for parts written and read again, mostly in L2
GAIN = 1.1  # what splitting must promise


def tile_blocks(tile: Tile, rows: int, keys: int, spec: Spec) -> list[int]:
    """Blocks of keys that each tile of a head meets, at least one: what `schedule.Call.blocks` counts on the card."""
    offset = 0 if spec.causal == 2 else keys - rows
    counts = []
    for first in range(0, rows, tile.rows):
        last = min(first + tile.rows, rows) - 1
        lo = min(max(0, first + offset - spec.window_left), keys) if spec.window_left >= 0 else 0
        hi = max(min(keys, last + offset + spec.window_right + 1), lo) if spec.window_right >= 0 else keys
        counts.append(max(1, -(-(hi - lo) // tile.keys)))
    return counts


def seconds(tile: Tile, blocks: Sequence[int], heads: int, rows: int, parts: int, sms: int, key_bytes: int) -> float:
    """An estimate of a call whose `heads` have tiles of so many `blocks` of keys, `rows` rows in all, each tile in `parts`.

    Equal tasks run in rounds of all SMs; of unequal ones the light ones fill the gaps at the end. No kernel is faster than its keys and
    values come from memory. Of the two limits the lower one shows by a tenth: the more SMs ask, the nearer memory comes to its rate.
    """
    tasks = heads * len(blocks) * parts
    heaviest, mean = -(-max(blocks) // parts), heads * sum(blocks) / tasks
    if min(blocks) == max(blocks):
        rounds: float = -(-tasks // sms)
        walked = (rounds - 1) * mean + heaviest
    else:
        rounds = max(1.0, tasks / sms)
        walked = max(rounds * mean, heaviest)
    block = 2 * tile.rows * tile.keys * (tile.dim + tile.dim_v) / SM_FLOPS
    limits = rounds * TASK + walked * block, key_bytes / DRAM_BYTES
    walk = max(limits) + min(limits) / 10
    return walk if parts == 1 else walk + MERGE + 8 * parts * rows * heads * tile.dim_v / PARTIAL_BYTES


def parts_of(tile: Tile, heads: int, kv_heads: int, rows: int, keys: int, spec: Spec, sms: int) -> int:
    """Into how many parts to cut each tile's keys; 1: not at all, as always with a tile for every SM.

    `heads` and `kv_heads` count those of all batches, `rows` and `keys` those of a head. The answer depends on nothing else, batch and
    heads included: a call split otherwise rounds otherwise.
    """
    if heads * -(-rows // tile.rows) >= sms:
        return 1
    blocks = tile_blocks(tile, rows, keys, spec)
    key_bytes = 2 * kv_heads * min(keys, max(blocks) * tile.keys) * (tile.dim + tile.dim_v)
    best, least = 1, seconds(tile, blocks, heads, rows, 1, sms, key_bytes) / GAIN
    for parts in range(2, min(MOST, max(blocks) // LEAST_BLOCKS) + 1):
        time = seconds(tile, blocks, heads, rows, parts, sms, key_bytes)
        if time < least:
            best, least = parts, time
    return best


def fold_of(heads: int, kv_heads: int, rows: int, tile: Tile) -> int:
    """How many query heads that share their keys to take for one head of so many times the rows; 1 if that saves no tile.

    Only where every row sees every key, since then it does not matter which row it is: a step of decoding has a tile a head of k, not of q.
    """
    group = heads // kv_heads
    return group if -(-group * rows // tile.rows) < group * -(-rows // tile.rows) else 1


def cut(shape: Sequence[int], kv_heads: int, dim_v: int, spec: Spec, sms: int, *, joined: bool, tile: Tile | None = None,
        parts: int | None = None) -> tuple[int, Tile, int]:
    """(query heads taken for one, tile, parts of each tile's keys) of a dense call: q of `shape` (B, H, S, D), on a card of `sms` SMs.

    `joined`: heads follow each other as rows do in q and out, and there are no sinks. Otherwise heads are taken for one only if the keys
    are split: the merge writes out wherever it lies and knows each row's head, and q is copied. `tile` and `parts`, if given, stay.
    """
    batch, heads, length, dim = shape
    keys, right = spec.max_seqlen_k, spec.window_right >= 0
    whole = tile or tiles.forward(dim, dim_v, length, right)
    group = 1 if right or spec.window_left >= 0 else fold_of(heads, kv_heads, length, whole)
    if group > 1:
        taller = tile or tiles.forward(dim, dim_v, group * length)
        count = parts or parts_of(taller, batch * heads // group, batch * kv_heads, group * length, keys, spec, sms)
        if joined or count > 1:
            return group, taller, count
    return 1, whole, parts or parts_of(whole, batch * heads, batch * kv_heads, length, keys, spec, sms)


# Not specialised: another length or number of parts never compiles a new kernel.
@triton.jit(do_not_specialize=["parts", "rows", "heads", "length", "out_b", "out_h", "out_s"])
def merge_kernel(partial, logs, sinks, out, lse, parts, rows, heads, length, out_b: tl.int64, out_h: tl.int64, out_s: tl.int64,
                 SINKS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """out and lse of one row, from parts (B · H / group, parts, rows, WIDTH) in fp32 and their lse in units of log₂, (…, parts, rows).

    rows = group · length are those of `group` heads of out (B, H, length, DIM). A sink is one more key, with this logit and value 0. Grid:
    rows of all heads and batches, a warp each, four columns a lane.
    """
    row = tl.program_id(0)
    bh = row // length
    i = row - bh * length
    b = bh // heads
    h = bh - b * heads
    head = row // rows
    first = head.to(tl.int64) * parts * rows + row - head * rows
    part = tl.arange(0, MOST_PARTS)
    weights = tl.load(logs + first + part * rows, mask=part < parts, other=float("-inf"))
    m = tl.max(weights, 0)
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    m = tl.where(m == float("-inf"), 0.0, m)  # no key seen: no −∞ − (−∞)
    norm = tl.sum(tl.exp2(weights - m), 0)
    if SINKS:
        norm += tl.exp2(sink - m)
    column = tl.arange(0, COLUMNS)
    o = tl.zeros([COLUMNS], tl.float32)
    for p in tl.range(0, parts, loop_unroll_factor=8):  # eight loads under way at a time
        at = first + p * rows
        log = tl.load(logs + at)
        o_p = tl.load(partial + at * WIDTH + column, mask=column < DIM, other=0.0)
        o += tl.where(log == float("-inf"), 0.0, o_p * tl.exp2(log - m))  # a part not seen weighs nothing, NaN or not
    o = o / tl.where(norm == 0.0, 1.0, norm)  # not "norm > 0": NaN must reach the output
    tl.store(out + (b * out_b + h * out_h + i * out_s) * UNIT + column, o.to(out.dtype.element_ty), mask=column < DIM)
    tl.store(lse + row, (m + tl.log2(norm)) * LN2)


class Merge:
    """The second kernel of calls of one kind: (parts, their lse) to (out, lse)."""

    def __init__(self, out: Tensor, parts: int, width: int, group: int = 1) -> None:
        assert 1 < parts <= MOST, parts
        batch, heads, length, dim = out.shape
        self.grid = batch * heads * length
        self.partial = parts * self.grid * width  # fp32 numbers before the parts' lse
        self.floats = self.partial + parts * self.grid
        strides = (stride // UNIT.value if size > 1 else 0 for stride, size in zip(out.stride(), out.shape[:3], strict=False))
        self.numbers = (parts, group * length, heads, length, *strides)
        self.constants = (dim, width, triton.next_power_of_2(dim))
        self.launcher: Launcher | None = None

    def __call__(self, partial: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, stream: int = 0) -> None:
        """Merge what the first `floats` numbers of `partial` hold; on `stream`, the current one, from the second time on."""
        constants = (sinks is not None, *self.constants)
        if self.launcher is not None:
            base = partial.data_ptr()
            self.launcher(self.grid, stream, (base, base + 4 * self.partial, 0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
                                              lse.data_ptr(), *self.numbers, *constants))
            return
        compiled = merge_kernel[(self.grid,)](partial, partial[self.partial :], lse if sinks is None else sinks, out, lse, *self.numbers,
                                              *constants, num_warps=1)
        if Launcher.serves(compiled):
            self.launcher = Launcher(compiled)
