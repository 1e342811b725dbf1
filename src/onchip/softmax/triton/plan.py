"""Which tile serves which row: a static table by width. Nothing is tuned at run time.

    resident   the whole row in registers: one read, one write
    streamed   two passes over blocks of the row: (m, l) online, then the result; two reads, one write, any width

A tile is rows × columns, and so the same kernel serves both orders of memory: *along* the row (its elements are neighbours; few rows) and
*across* it (neighbouring rows lie side by side, as in softmax over dim 0: enough rows for whole sectors).
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A tile of `block_m` rows × `block_n` columns for `warps` warps; a resident plan's columns hold the row."""

    resident: bool
    block_m: int
    block_n: int
    warps: int
    programs_per_sm: int = 0  # streamed only


# Along the row: width, a power of two → warps of the program that holds one row. Measured on an H200 (2²⁷ elements, forward and backward)
# beside half and twice as many warps: within 2 % of the best in the mean of bf16 and fp32, 4.0–4.3 TB/s up to 8192 columns. At 32768 a
# backward spills some 20 registers and still moves 4.19 (bf16) and 3.95 (fp32) TB/s, where two passes reach 3.0.
RESIDENT_WARPS = {1024: 2, 2048: 4, 4096: 8, 8192: 8, 16384: 16, 32768: 16}
SHORT_TILE, SHORT_WARPS = 1024, 1  # narrower rows share a program of this many elements
# Two passes: what pays is bytes in flight, more than rows in L2. 1, 2, 4 programs an SM: 1.7, 2.2, 2.7 TB/s at 65536 columns of bf16.
STREAMED = Plan(False, 1, 8192, 8, 4)

# Across the rows: 64 rows × 2 bytes fill a 128-byte line; 16 still fill a 32-byte sector. Streamed, over dim 0 of 8192 columns of bf16:
# 1.44 TB/s with 64 × 128, 1.38 with 16 × 512.
ACROSS_ROWS, ACROSS_LEAST, ACROSS_TILE, ACROSS_WARPS = 64, 16, 8192, 8
ACROSS_STREAMED = Plan(False, 64, 128, 8, 2)


def choose(n: int, across: bool) -> Plan:
    """The plan for rows of `n` elements, however many there are."""
    width = 1 << (n - 1).bit_length()  # the least power of two ≥ n
    if across:
        fits = ACROSS_LEAST * width <= ACROSS_TILE
        return Plan(True, min(ACROSS_ROWS, ACROSS_TILE // width), width, ACROSS_WARPS) if fits else ACROSS_STREAMED
    if width < SHORT_TILE:
        return Plan(True, SHORT_TILE // width, width, SHORT_WARPS)
    return Plan(True, 1, width, RESIDENT_WARPS[width]) if width in RESIDENT_WARPS else STREAMED
