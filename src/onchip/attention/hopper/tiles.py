"""Which tile the Hopper kernels run, as data: one row for each head dim, held against compiler and planner by the tests."""
from typing import NamedTuple

ROWS = 64  # query rows of a consumer warpgroup: one wgmma's


class Tile(NamedTuple):
    """How the forward is built for q and k of up to `dim` = d0 + d1 and v of up to `dim_v` = v0 + v1.

    Triton's tensors are powers of two, so that other widths come in two parts. `consumers` warpgroups of 64 rows each meet `keys` keys at a
    time; K and V have `stages` slots each, q has `queries`: with two the next tile's arrives before this one's is done with. o leaves
    through shared memory in `pieces`, left and right half if two. Registers a thread: consumers get `registers[0]`, the producer
    `registers[1]`; together the 64 K of an SM (with split keys `split_registers`, if given). `reach`: the longest sequences it is
    meant for, full and causal.
    """

    d0: int
    d1: int
    v0: int
    v1: int
    consumers: int
    keys: int
    stages: int
    queries: int
    pieces: int
    ping_pong: bool
    registers: tuple[int, int]
    reach: tuple[int, int] = (1 << 31, 1 << 31)
    split_registers: tuple[int, int] | None = None

    @property
    def dim(self) -> int:
        """Widest head of q and k it serves."""
        return self.d0 + self.d1

    @property
    def dim_v(self) -> int:
        """Widest head of v it serves."""
        return self.v0 + self.v1

    @property
    def rows(self) -> int:
        """Query rows a thread block."""
        return ROWS * self.consumers

    @property
    def max_registers(self) -> int:
        """Registers a thread at the start, before the warps trade them: an equal share of 64 K."""
        return 65536 // (128 * (self.consumers + 1)) // 8 * 8

    @property
    def buffers(self) -> int:
        """Bytes of q, k, v and o tiles in shared memory."""
        q, o = self.rows * self.dim * self.queries, self.rows * self.dim_v // self.pieces
        return 2 * (q + o + self.stages * self.keys * (self.dim + self.dim_v))

    @property
    def barriers(self) -> int:
        """Bytes of mbarriers: full and empty of q (a slot and consumer), of k and v (a stage), turns (a consumer), the verdict."""
        return 8 * ((2 * self.queries + 1) * self.consumers + 4 * self.stages + 1)


FORWARD = (
    # Short sequences: a tile of 192 rows has a third of its pairs above a causal diagonal, and 512 rows are no multiple of it.
    Tile(64, 0, 64, 0, consumers=2, keys=128, stages=4, queries=2, pieces=1, ping_pong=True, registers=(240, 24), reach=(512, 2048)),
    Tile(64, 0, 64, 0, consumers=3, keys=128, stages=3, queries=2, pieces=1, ping_pong=True, registers=(160, 32)),
    Tile(64, 32, 64, 32, consumers=2, keys=128, stages=3, queries=2, pieces=1, ping_pong=True, registers=(240, 24)),
    Tile(128, 0, 128, 0, consumers=2, keys=128, stages=2, queries=2, pieces=1, ping_pong=True, registers=(240, 24)),
    Tile(128, 64, 128, 0, consumers=2, keys=128, stages=2, queries=1, pieces=2, ping_pong=True, registers=(240, 24)),
    Tile(128, 64, 128, 64, consumers=2, keys=64, stages=2, queries=1, pieces=1, ping_pong=True, registers=(240, 24)),
    Tile(256, 0, 256, 0, consumers=2, keys=64, stages=2, queries=1, pieces=2, ping_pong=True, registers=(240, 24),
         split_registers=(232, 40)),  # with 24 a lane's row goes to local memory
)


def forward(dim: int, dim_v: int, seq: int = 1, causal: bool = False) -> Tile:
    """The first row of the table wide enough that is meant for sequences this long; TMA fills what a head lacks with zeros."""
    return next(tile for tile in FORWARD if tile.dim >= dim and tile.dim_v >= dim_v and seq <= tile.reach[causal])
