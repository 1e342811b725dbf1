"""What a Hopper attention kernel knows of its call: which task a thread block takes, where it lies, which keys it meets.

A *task* is a query tile; with SPLIT it is one part of a tile's keys, and the parts of a tile are tasks `parts · tile` and following.

Everything here is arithmetic on a few integers; the tests run these very functions as plain Python.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.attention.hopper.compat import aggregate, here

BM = gl.constexpr(64)  # rows of a consumer: one wgmma's


@aggregate
class Divisor:
    """A number to divide by, see `onchip.launcher.divisor`. A tile takes six divisions in each consumer."""

    d: gl.tensor
    m: gl.tensor  # its 32 bits, as a signed number
    s: gl.tensor

    @gluon.constexpr_function
    def __init__(self, d, m, s):
        self.d, self.m, self.s = d, m, s

    @gluon.jit
    def into(self, x):
        """x // d."""
        return (gl.umulhi((2 * x).to(gl.uint32), self.m.to(gl.uint32)) >> self.s.to(gl.uint32)).to(gl.int32)


@aggregate
class Call:
    """The sizes of the call and how it is cut into tiles; then what the kernel is built for.

    What the compiler could compute once for the whole kernel comes as an argument instead: arguments lie in constant memory, values it
    hoists would lie in registers of warps that have few.
    """

    cu_q: gl.tensor  # offsets of packed sequences, looked at only if PACKED
    cu_k: gl.tensor
    len_q: gl.tensor  # rows of a sequence, or of the whole packed tensor
    len_k: gl.tensor
    heads: Divisor
    group_k: Divisor  # query heads that share a head of k, of v
    group_v: Divisor
    tiles: Divisor  # query tiles a sequence
    early_heads: gl.tensor  # heads before the last section
    early_tiles: gl.tensor  # and their tiles
    last_heads: Divisor  # heads of the last section
    parts: Divisor  # of each tile's keys, looked at only if SPLIT
    total: gl.tensor  # tasks of the call
    behind: gl.tensor  # row i sees keys from i + behind to i + ahead, looked at only if LEFT, RIGHT; packed, plus keys − rows of its
    ahead: gl.tensor  # sequence unless TOP_LEFT
    taken: gl.tensor  # tasks taken beyond the first of each thread block; 0 before and after the launch
    failed: gl.tensor  # (tasks, consumers): must be repeated
    unsure: gl.tensor  # (thread blocks,): must any of its tasks
    chain: gl.tensor  # (tasks,): the task its thread block took before it
    NC: gl.constexpr  # consumer warpgroups
    BN: gl.constexpr  # keys a block
    STAGES: gl.constexpr
    D1: gl.constexpr  # width of the second part of q and k, of v and o; 0: there is none
    V1: gl.constexpr
    PACKED: gl.constexpr
    TOP_LEFT: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    ONLINE: gl.constexpr
    PING_PONG: gl.constexpr
    QUERIES: gl.constexpr  # slots for tiles of q
    PIECES: gl.constexpr  # in which o leaves
    SPLIT: gl.constexpr  # tasks are parts of tiles

    @gluon.constexpr_function
    def __init__(self, cu_q, cu_k, len_q, len_k, heads, group_k, group_v, tiles, early_heads, early_tiles, last_heads, parts, total,
                 behind, ahead, taken, failed, unsure, chain, NC, BN, STAGES, D1, V1, PACKED, TOP_LEFT, LEFT, RIGHT, ONLINE, PING_PONG,
                 QUERIES, PIECES, SPLIT):
        self.cu_q, self.cu_k, self.len_q, self.len_k, self.heads = cu_q, cu_k, len_q, len_k, heads
        self.group_k, self.group_v = group_k, group_v
        self.tiles, self.early_heads, self.early_tiles, self.last_heads = tiles, early_heads, early_tiles, last_heads
        self.parts, self.total, self.behind, self.ahead = parts, total, behind, ahead
        self.taken, self.failed, self.unsure, self.chain = taken, failed, unsure, chain
        self.NC, self.BN, self.STAGES, self.D1, self.V1 = map(gl.constexpr, (NC, BN, STAGES, D1, V1))
        self.PACKED, self.TOP_LEFT, self.LEFT, self.RIGHT = map(gl.constexpr, (PACKED, TOP_LEFT, LEFT, RIGHT))
        self.ONLINE, self.PING_PONG, self.QUERIES, self.PIECES, self.SPLIT = map(
            gl.constexpr, (ONLINE, PING_PONG, QUERIES, PIECES, SPLIT))

    @gluon.jit
    def slot(self, told):
        """(the first consumer's slot of q, its parity) of the `told`-th word."""
        return told % self.QUERIES * self.NC, (told // self.QUERIES) & 1

    @gluon.jit
    def another(self):
        """The next task of this thread block: whoever is free takes the next one. Every block asks until it is told a task too many, so
        the last question of all is number `total`, and leaves the counter as it was found."""
        asked = gl.atomic_add(self.taken, 1, sem="relaxed")
        if asked + 1 == self.total:
            gl.store(self.taken, 0)
        return gl.num_programs(0) + asked

    @gluon.jit
    def tile_of(self, task):
        """(tile, part of its keys) of a task."""
        tile, part = task, 0
        if self.SPLIT:
            tile = self.parts.into(task)
            part = task - tile * self.parts.d
        return tile, part

    @gluon.jit
    def place(self, tile):
        """(batch, head, first row) of a tile. The tiles of a head follow each other, those with the most keys first: its k and v are read
        by many thread blocks at the same time, and whoever is free takes the next one. The heads of the last section are taken together,
        so that what is left for the end is small."""
        if tile < self.early_tiles:
            bh = self.tiles.into(tile)
            r = tile - bh * self.tiles.d
        else:
            r = self.last_heads.into(tile - self.early_tiles)
            bh = self.early_heads + tile - self.early_tiles - r * self.last_heads.d
        b = self.heads.into(bh)
        first = r * (self.NC * BM)
        if self.RIGHT:
            first = (self.tiles.d - r) * (self.NC * BM) - self.NC * BM
        return b, bh - b * self.heads.d, first

    @gluon.jit
    def lengths(self, b, at):
        """(rows, keys, first row, first key) of sequence b. Offsets are clamped to the tensors: bad ones lead nowhere.

        `at` ≥ 0 is some number of blocks: `at >> 30` is 0, but the compiler does not know. So what follows from the lengths is worked out
        where it is used, not before the warps part, whence it would go to local memory.
        """
        rows, keys, q_begin, k_begin = self.len_q, self.len_k | (at >> 30), 0, 0
        if self.PACKED:
            q_begin = gl.minimum(gl.maximum(gl.load(self.cu_q + b), 0), self.len_q)
            rows = gl.minimum(gl.maximum(gl.load(self.cu_q + b + 1), q_begin), self.len_q) - q_begin
            k_begin = gl.minimum(gl.maximum(gl.load(self.cu_k + b), 0), self.len_k)
            keys = gl.minimum(gl.maximum(gl.load(self.cu_k + b + 1), k_begin), self.len_k) - k_begin
        return rows, keys, q_begin, k_begin

    @gluon.jit
    def wanted(self, task, redo):
        """Is a task to be computed: in the first pass, always; in the one that repeats, if a consumer's rows of it failed."""
        failures = 0
        for c in gl.static_range(self.NC):
            failures += gl.load(self.failed + task * self.NC + c, mask=redo != 0, other=1, volatile=True)
        return failures > 0

    @gluon.jit
    def reach(self, i, rows, keys):
        """(i + behind, i + ahead) of row i in its own sequence; a lane's row added to either would be kept from before the warps part."""
        if self.PACKED and not self.TOP_LEFT:
            i += keys - rows
        return i + here(self.behind), i + here(self.ahead)

    @gluon.jit
    def sight(self, i, rows, keys):
        """(lowest, highest) key that rows i see; none if highest < lowest."""
        before, after = self.reach(i, rows, keys)
        lowest, highest = i * 0, i * 0 + (keys - 1)
        if self.RIGHT:
            highest = gl.minimum(highest, after)
        if self.LEFT:
            lowest = gl.maximum(before, 0)
        return lowest, highest

    @gluon.jit
    def blocks(self, first, rows, keys, part):
        """(lo, hi, top, right edge, left edge): the rows of a tile together see keys lo … hi − 1, cut into blocks of BN from lo on; `top`
        is the first key of the last one (there is always one). With SPLIT, all this for one part of these blocks.

        Every row sees the last key before `sure`. Edges are the blocks from the one that holds it upward, and those that hold keys before
        the left edge, the first key from which no row is cut on the left. Blocks in between are seen whole by every row.
        """
        last = gl.minimum(first + self.NC * BM, rows) - 1
        lo, hi, sure, left_edge = 0, keys, keys, 0
        first_before, first_after = self.reach(first, rows, keys)
        last_before, last_after = self.reach(last, rows, keys)
        if self.LEFT:
            lo = gl.minimum(gl.maximum(first_before, 0), keys)
        if self.RIGHT:
            hi = gl.minimum(gl.maximum(last_after + 1, lo), keys)
            sure = gl.minimum(gl.maximum(first_after + 1, lo), keys)
        if self.LEFT:
            left_edge = gl.minimum(gl.maximum(last_before, lo), hi)
        right_edge = lo + (gl.cdiv(sure - lo, self.BN) - 1) * self.BN
        if self.SPLIT:
            lo, hi = self.share(part, lo, hi)
            left_edge = gl.maximum(left_edge, lo)
        top = lo + gl.maximum(gl.cdiv(hi - lo, self.BN) - 1, 0) * self.BN
        return lo, hi, top, right_edge, left_edge

    @gluon.jit
    def share(self, part, lo, hi):
        """(lo, hi) of a part: the blocks of keys lo … hi − 1 dealt out evenly; hi = lo where there are too few for all parts."""
        count = gl.cdiv(hi - lo, self.BN)
        begin = lo + self.parts.into(part * count) * self.BN
        return begin, gl.minimum(lo + self.parts.into((part + 1) * count) * self.BN, hi)
