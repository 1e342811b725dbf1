"""Which kernel and tile serves which row: static tables by width. Nothing is tuned at run time.

    resident   the whole row in registers, of one program or of a cluster of them (`cluster`): one read, one write
    parts      a row in the shared memory of a group of thread blocks (`parts`): one read, one write, however wide
    streamed   two passes over blocks of the row: (m, l) online, then the result; two reads, one write: what no other plan takes

A resident or streamed tile is rows × columns, and so the same kernel serves both orders of memory: *along* the row (its elements are
neighbours; few rows) and *across* it (neighbouring rows lie side by side, as in softmax over dim 0: enough rows for whole sectors, which
clusters share too: `stripe`).
"""
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plan:
    """A tile of `block_m` rows × `block_n` columns for `warps` warps; a resident plan's columns hold the row."""

    resident: bool
    block_m: int
    block_n: int
    warps: int
    programs_per_sm: int = 0  # streamed only
    registers: int | None = None  # at most, a thread: that programs share an SM
    narrow: bool = False  # the row waits in the 16 bits it came in, and is widened for each use
    parts: int = 1  # thread blocks of a cluster that share the row
    pieces: int = 1  # of `block_n` columns, that one of them holds
    held: int = 0  # of these, pieces of dy that wait in shared memory, a vector a thread each

    def span(self, n: int) -> int:
        """Elements of a part: whole lines of memory."""
        return min(self.block_n * self.pieces, -(-n // (self.parts * SPAN)) * SPAN)


SPAN = 64  # elements: 128 bytes and more
# Along the row: width, a power of two → warps of the program that holds one row, forward and backward. Measured on an H200 (2²⁷ elements)
# beside half and twice as many warps: within 1 % of the best in bf16 and fp32, 4.0–4.35 TB/s (`benchmarks/softmax_plans.py`).
RESIDENT_WARPS = {1024: (2, 2), 2048: (4, 4), 4096: (16, 16), 8192: (16, 16), 16384: (16, 16), 32768: (16, 16)}
# Rows of 16 bits that wait as such, in pieces of a vector a thread: width → rows, columns of a piece, registers (None: as it likes); a warp
# for each 256 of these columns. No lane is empty but in a row's last piece, maxima of two elements are found at once, and a row of up to
# 1024 columns is a warp's own, without a barrier. bf16, TB/s, so and in a tile of a power of two, a copy 4.06–4.16: 512 columns 4.16 and
# 4.14, 3000 4.11 and 4.08, 5000 4.04 and 3.19; backward 3000 4.27 and 4.06, 5000 4.25 and 3.70; sums of 1024 4.14 and 3.19, of 8192 4.17
# and 3.32; a mask at 4096 4.03 and 3.98. In 32 registers, which would do at 5000, 4.01.
PIECES = {512: (2, 256, None), 1024: (2, 256, None), 2048: (1, 512, None), 4096: (1, 1024, 48), 8192: (1, 1024, 48)}
PIECES_MASKED = 64  # registers, where the table has a number: at 4096 4.03, with as many as it takes 3.99
# Where plain rows, forward, need all of these pieces, columns of fewer: 4096 4.06 TB/s for 4.05; None: a tile in float32, 4.11 for 4.01.
FULL = {4096: 2048, 8192: None}
# Rows that wait in float32, the same way: width → longest of them, rows, columns of a piece; a warp for each 128. TB/s, copy 4.2: forward
# 2500 columns 4.14 (in a tile 3.69), 3000 4.11 and 3.94, with a mask 3.94 and 3.58, but 3500 4.13 and 4.14; sums of 3000 4.39 and 3.14, of
# 4096 4.47 and 4.01, of 6000 4.45 and 4.42. Gradients lose up to 0.7 % but at 2048, where they are even: 4.322 and 4.316.
WIDE_PIECES, WIDE_SUMS = {4096: (3328, 1, 256)}, {4096: (4096, 1, 1024), 8192: (7168, 1, 1024)}
WIDE_GRADIENT = {2048: (2048, 2, 128)}
# Wider rows of 16 bits that no cluster takes, forward: width → rows, warps and registers. So 2 programs of 32768 columns share an SM, and
# one reads while the other computes: 4.03 TB/s where rows in float32 had 3.13; of 16384 three.
NARROW = {16384: (1, 16, 40), 32768: (1, 16, 64)}
# Rows that start inside a vector: their ends cost each thread some 100 instructions, so it gets 32 elements, 14 instructions for each.
# With 16 it is 20, of the 32 that an SM issues at the memory's rate: within 1 % at 1001 and 4095 columns, 3 % slower at 8191.
EDGES_EACH = 32
# Rows of a triangle get 32 elements a thread or more: they move 3/4 of a plain row's bytes, and may issue no more of its instructions.
# Half the warps, in tiles halved for rows that see little, issue 0.80 to 0.84 of them (1024, 4096, 8192 columns of bf16), all of them 1.2.
# With fewer bytes each, more rows have to be under way: twelve in programs of 40 registers at 4096, eight of 64 at 8192, whose threads have
# 64 elements; at 1024 32 rows of a warp each, 3.86 TB/s (in 48 registers 3.82), where two in each of 28 warps have 3.76.
NARROW_TRIANGLE = {1024: (1, 1, 56), 2048: (1, 2, 40), 4096: (1, 4, 40), 8192: (1, 4, 64), 16384: (1, 8, 64), 32768: (1, 16, 64)}
TRIANGLE_REGISTERS = {8192: 64, 16384: 64}  # of float32: four programs an SM, and two; one or a few more would let three, and one
SHORT_TILE, SHORT_WARPS = 1024, 1  # narrower rows share a program of this many elements
SHORT_NARROW = (2048, 4)  # plain ones of 16 bits this one, and four warps: 256 columns forward 4.144 TB/s, 4.135 in the tile above
# Two passes: what pays is bytes in flight, more than rows in L2. 1, 2, 4 programs an SM: 1.7, 2.2, 2.7 TB/s at 65536 columns of bf16.
STREAMED = Plan(False, 1, 8192, 8, 4)
# Columns from which rows that start inside a vector are read by vectors, and their ends apart: those that have a program to themselves.
EDGES_FROM = SHORT_TILE // 2 + 1

# Across the rows: 64 rows × 2 bytes fill a 128-byte line; 16 still fill a 32-byte sector. Streamed, over dim 0 of 8192 columns of bf16:
# 1.44 TB/s with 64 × 128, 1.38 with 16 × 512.
ACROSS_ROWS, ACROSS_LEAST, ACROSS_TILE, ACROSS_WARPS = 64, 16, 8192, 8
ACROSS_STREAMED = Plan(False, 64, 128, 8, 2)


def choose(n: int, across: bool, edges: bool = False, forward: bool = True, narrow: bool = False, triangle: bool = False,
           masked: bool = False, summed: bool = False) -> Plan:
    """The tile for rows of `n` elements, however many there are.

    `edges`: they start and end inside vectors; `narrow`: they have 16 bits an element and nothing is added to them; `triangle`: they are
    those of one; `masked`: a mask's bytes are read beside them; `summed`: only their sums are written.
    """
    width = 1 << (n - 1).bit_length()  # the least power of two ≥ n
    if across:
        fits = ACROSS_LEAST * width <= ACROSS_TILE
        return Plan(True, min(ACROSS_ROWS, ACROSS_TILE // width), width, ACROSS_WARPS) if fits else ACROSS_STREAMED
    pieces = None
    if not triangle:
        pieces = _in_pieces(n, width, edges, forward, masked, summed) if narrow else _in_wide_pieces(n, width, edges, forward, summed)
    if pieces:
        return pieces
    if narrow and 2 * width <= SHORT_NARROW[0] and not (edges or triangle or masked or summed):
        return Plan(True, SHORT_NARROW[0] // width, width, SHORT_NARROW[1])
    if width < SHORT_TILE:
        return Plan(True, SHORT_TILE // width, width, SHORT_WARPS)
    if width not in RESIDENT_WARPS:
        return STREAMED
    waits = NARROW_TRIANGLE if triangle else NARROW
    if forward and narrow and width in waits:
        more = triangle and (edges or masked)
        rows, warps, registers = NARROW.get(width, (1, width // (32 * EDGES_EACH), None)) if more else waits[width]
        return Plan(True, rows, width, warps, registers=registers, narrow=True)
    warps = min(16, width // (32 * EDGES_EACH)) if edges or triangle else RESIDENT_WARPS[width][not forward]
    return Plan(True, 1, width, warps, registers=TRIANGLE_REGISTERS.get(width) if triangle and not (edges and masked) else None)


def _in_pieces(n: int, width: int, edges: bool, forward: bool, masked: bool, summed: bool) -> Plan | None:
    """Rows of `n` elements that wait in 16 bits, in pieces where those serve them better than a tile of `width` columns."""
    if width not in PIECES:
        return None
    rows, piece, registers = PIECES[width]
    full = n > width - piece
    if edges:
        rows, registers = 1, None
    if not forward:
        piece, registers = None if full or edges else piece, None
    elif masked:
        registers = registers and PIECES_MASKED
    elif full and not summed:
        piece, registers = FULL.get(width, piece), None
    return None if piece is None else _pieces(n, rows, piece, 8, registers)


def _in_wide_pieces(n: int, width: int, edges: bool, forward: bool, summed: bool) -> Plan | None:
    """The same of rows that wait in float32."""
    table = WIDE_SUMS if summed else WIDE_PIECES if forward else WIDE_GRADIENT
    longest, rows, piece = table.get(width, (0, 0, 0))
    return None if edges or n > longest else _pieces(n, rows, piece, 4)


def _pieces(n: int, rows: int, piece: int, vector: int, registers: int | None = None) -> Plan:
    """Of `piece` columns, a vector a thread."""
    return Plan(True, rows, piece, rows * piece // (32 * vector), registers=registers, narrow=vector == 8, pieces=-(-n // piece))


# Longer rows on clusters. By (elements wait in 16 bits, backward): up to which length, columns of a piece, pieces of a thread block at
# most, warps, registers and pieces of dy in shared memory. A piece is a vector a thread. What counts is bytes of rows that wait on an SM,
# here 95 to 254 KB ("Rows on clusters" in docs/notes/softmax.md works them out), in warps enough to keep it busy (16).
CLUSTERS = {
    (True, False): ((131072, (1024, 8, 4, 64)), (163840, (1024, 10, 4, 64)), (262144, (1024, 16, 4, 96))),
    (False, False): ((131072, (1024, 8, 8, 64)), (262144, (1024, 16, 8, 80))),
    (True, True): ((131072, (1024, 8, 4, 96)), (262144, (2048, 8, 8, 80))),
    (False, True): ((131072, (512, 16, 4, 160)), (163840, (1024, 10, 8, 120)), (262144, (1024, 16, 8, 128, 8))),
}
# Forward rows of whole vectors, whose results are written, are served better by more and smaller blocks, as long as a cluster has no more
# than ten: bf16 16384 columns 4.09–4.13 TB/s and in a program 4.01, 32768 4.09 and 4.03, float32 32768 4.14–4.20 and 4.09. Of sums they are
# not (16384 3.78 and 4.19), nor where each block has the instructions of ends.
SMALLER = {(True, False): ((49152, (1024, 6, 4, 56)),), (False, False): ((32768, (1024, 4, 8, 48)), (65536, (1024, 7, 8, 64)))}
HELD_VECTOR = 4  # elements of a vector where pieces may wait in shared memory: 32 bits each, and not read one by one
CLUSTERS_BEYOND, CLUSTERS_BEYOND_ENDS = 8192, 16384  # columns; the latter of float32 rows with ends, or of which sums are wanted


def choose_cluster(n: int, backward: bool, narrow: bool, whole: bool = True) -> Plan | None:
    """The cluster for rows of `n` elements; None where one program is as good, or where a cluster's registers do not hold them.

    `whole`: they are made of whole vectors, and y or dx is wanted.
    """
    if n <= (CLUSTERS_BEYOND if whole or narrow else CLUSTERS_BEYOND_ENDS):
        return None
    blocks = (SMALLER.get((narrow, backward), ()) if whole else ()) + CLUSTERS[narrow, backward]
    return next((cluster(n, narrow, *block) for width, block in blocks if n <= width), None)


def cluster(n: int, narrow: bool, piece: int, most: int, warps: int, registers: int | None, held: int = 0) -> Plan:
    """Rows of `n` elements on as few thread blocks of `most` pieces as hold them."""
    parts = -(-n // (piece * most))
    return Plan(True, 1, piece, warps, registers=registers, narrow=narrow, parts=parts, pieces=-(-n // (parts * piece)), held=held)


# Neighbouring rows, none of them hidden, by (elements of 16 bits, backward): up to which length, rows and columns of a piece, pieces of a
# thread block at most, warps, registers. A piece is a vector a thread, of a column's elements in neighbouring rows. What counts is how much
# of a line a stripe has (bf16 1024 columns 3.41 TB/s in 64 rows and 3.17 in 32; float32, where 64 rows are two lines, 3.88), then bytes
# that wait on an SM (192 KB) in many small blocks: in eight warps and 104 registers, 128 KB, 3.14. With more than eight or so parts
# narrower stripes are better ("Across the rows" in docs/notes/softmax.md).
STRIPES = {
    (True, False): ((128, (64, 16, 8, 4, 80)), (4096, (64, 16, 32, 4, 168)), (8192, (32, 16, 32, 2, 168)), (30720, (16, 64, 30, 4, 168))),
    (False, False): ((4096, (64, 8, 32, 4, 168)), (8192, (32, 16, 32, 4, 168)), (16384, (16, 64, 16, 8, 104))),
    (True, True): ((4096, (64, 16, 16, 4, 168)), (16384, (32, 64, 16, 8, 168))),
    (False, True): ((2048, (64, 8, 16, 4, 168)), (4096, (32, 16, 16, 4, 168)), (8192, (16, 64, 8, 8, 104))),
}
STRIPES_BEYOND = 32  # columns: at 64 bf16 2.76 TB/s, 1.57 in a tile; gradients 3.86 and 3.77


def choose_stripe(n: int, n0: int, backward: bool, narrow: bool) -> Plan | None:
    """The cluster for rows of `n` elements, `n0` of them side by side; None where a tile is as good, or where no cluster holds them."""
    if n <= STRIPES_BEYOND:
        return None
    return next((stripe(n, narrow, *block) for width, block in STRIPES[narrow, backward] if n <= width and block[0] <= n0), None)


def stripe(n: int, narrow: bool, rows: int, columns: int, most: int, warps: int, registers: int | None) -> Plan:
    """As `cluster`, of so many neighbouring rows."""
    return replace(cluster(n, narrow, columns, most, warps, registers), block_m=rows)


@dataclass(frozen=True)
class Parts:
    """`group` thread blocks a row, each with `slots` slots of 256 threads × `vectors` × 16 bytes (of every input)."""

    group: int
    slots: int
    blocks_per_sm: int
    vectors: int
    registers: int  # at most, a thread: that so many blocks do fit on an SM
    one: bool = False  # row a group has, of so few elements a thread that all stay in registers

    def columns(self, vector: int) -> int:
        """Elements of a part."""
        return self.slots * 32 * PARTS_WARPS * self.vectors * vector

    def groups(self, rows: int, processors: int) -> int:
        """How many share the rows: of those that run at once, as many as finish together."""
        rounds = -(-rows // (self.blocks_per_sm * processors // self.group))
        return -(-rows // rounds)


PARTS_WARPS = 8
PARTS_VECTORS = 2  # with four, ptxas of Triton 3.6 spills at 80 registers, and nothing is gained
PARTS_REGISTERS, PARTS_PER_SM = 80, 3  # 64 registers and four blocks an SM: up to 3 % less
PARTS_SLOTS = (8, 4)  # of a block, at most (forward, backward): 64 KB, so that three blocks share an SM
ONE_ELEMENTS, ONE_REGISTERS = 32, 128  # of a thread whose block has an SM to itself: 4 × 262144 of 16 bits 7.9 → 7.65 µs
BESIDE_SLOTS = 2048  # bytes of shared memory a block: a reduction's, and what the card keeps for itself
# The longest rows that registers serve better, by elements of a vector and direction. TB/s from registers and in parts, copy 4.2: forward
# bf16 8192 4.07 and 3.49, 16384 3.70 and 3.73, 32768 3.13 and 3.62; fp32 32768 3.93 and 3.62; backward bf16 32768 4.16 and 3.85.
PARTS_BEYOND = {(8, False): 8192, (4, False): 32768, (8, True): 32768, (4, True): 32768}


def choose_parts(rows: int, n: int, vector: int, edges: bool, processors: int, shared_memory: int, backward: bool) -> Parts | None:
    """How rows of `n` elements, accessed by vectors of `vector`, are cut on a card of `processors` SMs with `shared_memory` bytes a block.

    Few rows are cut in more parts, so that every SM has one. None where registers are better, or where a group would not fit on the card
    (an H200: beyond 12 million elements of 16 bits).
    """
    if n <= PARTS_BEYOND[vector, backward] or n >= 2**30 or rows >= 2**31:
        return None
    slot = 32 * PARTS_WARPS * PARTS_VECTORS * vector
    slots = -(-(n + (vector - 1) * edges) // slot)  # a row that starts inside a vector is that much longer
    group = -(-slots // PARTS_SLOTS[backward])
    if rows * group < processors:
        group = min(slots, max(group, processors // rows))
    most = -(-slots // group)
    group = -(-slots // most)
    if not backward and rows * group <= processors and most * PARTS_VECTORS * vector <= ONE_ELEMENTS:
        return Parts(group, most, 1, PARTS_VECTORS, ONE_REGISTERS, True)
    blocks = min(PARTS_PER_SM, (shared_memory + 1024) // ((1 + backward) * most * slot // vector * 16 + BESIDE_SLOTS))
    return Parts(group, most, blocks, PARTS_VECTORS, PARTS_REGISTERS) if group <= blocks * processors else None

