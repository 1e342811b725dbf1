"""Ledgers of the attention schedules: naive → tiled → online softmax → FlashAttention-1 → FlashAttention-2 → split-KV, and the backward.

Conventions, shared with `onchip.simulate`, which executes the same schedules and must count the same bytes:

* a tile is br query rows × bc keys; ragged tiles count their real rows and keys;
* a tile without a visible pair is skipped and its data not loaded;
* a query tile that sees nothing loads nothing and still writes its (zero) output;
* statistics (m, l, lse, D) and unfinished sums (partial O, dQ) have a format of their own, fp32 unless said otherwise;
* each query head walks its own K and V (a group of G query heads therefore issues K and V G times, unless packed);
* naive kernels skip nothing: masking comes after the products.

Sources: FlashAttention (arXiv 2205.14135, Alg. 1 and 4), FlashAttention-2 (arXiv 2307.08691, Alg. 1 and 2), Flash-Decoding (2023).
"""
from dataclasses import dataclass
from itertools import accumulate

from onchip.errors import require
from onchip.roofline.dtypes import BYTES, parse_dtype
from onchip.roofline.ledger import Kernel, Pipeline, Stream, once
from onchip.roofline.shape import AttentionShape, TileWalk, count_blocks, visits, walk

# fp32 instructions an element of S costs beside its exponential: scale-and-subtract (one FMA), max, add into l, convert to P's format.
SOFTMAX_OPS = 4


@dataclass(frozen=True)
class Tile:
    """A tile of br query rows × bc keys.

    `mma_rows` output rows share one read of K or V from shared memory: the rows of a warp with mma.sync (0, the default, means four
    warps, so br / 4 and at least the instruction's 16), 64 with wgmma.
    """

    br: int
    bc: int
    mma_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("br", "bc"):
            require(getattr(self, name) >= 1, f"tile {name}", getattr(self, name), "an integer ≥ 1")
        if self.mma_rows == 0:
            object.__setattr__(self, "mma_rows", max(16, self.br // 4))


@dataclass(frozen=True)
class Formats:
    """Number formats: `inputs` for Q, K, V, O and gradients, `scores` for S and P where they go through memory, `state` for the rest."""

    inputs: str = "bfloat16"
    scores: str = "bfloat16"
    state: str = "float32"

    def __post_init__(self) -> None:
        for name in ("inputs", "scores", "state"):
            object.__setattr__(self, name, parse_dtype(getattr(self, name), name))

    @property
    def e(self) -> int:
        """Bytes of an input element."""
        return BYTES[self.inputs]

    @property
    def es(self) -> int:
        """Bytes of an element of S or P."""
        return BYTES[self.scores]

    @property
    def et(self) -> int:
        """Bytes of a statistic or an element of an unfinished sum."""
        return BYTES[self.state]


class Sizes:
    """Bytes of one problem's tensors, over all heads and batches."""

    def __init__(self, shape: AttentionShape, formats: Formats) -> None:
        e, rows, keys = formats.e, shape.query_heads * shape.seq_q, shape.kv_pairs * shape.seq_k
        self.q, self.o = rows * shape.head_dim * e, rows * shape.head_dim_v * e
        self.k, self.v = keys * shape.head_dim * e, keys * shape.head_dim_v * e
        self.stat = rows * formats.et  # one of m, l, lse, D
        self.scores = rows * shape.seq_k  # elements of S
        self.s = self.scores * formats.es
        self.inputs, self.forward = self.q + self.k + self.v, self.q + self.k + self.v + self.o
        self.backward = 2 * self.inputs + 2 * self.o + self.stat  # inputs, O, dO and lse read, gradients written


def scores(tensor: str, nbytes: int, *, write: bool = False) -> Stream:
    """S, P or one of their gradients on its way through memory."""
    return once(tensor, nbytes, write=write, intermediate=True)


def operand(tensor: str, nbytes: int, issued: int, set_bytes: int, sets: int, walkers: int) -> Stream:
    """An input that several thread blocks walk."""
    return Stream(tensor, False, nbytes, issued, nbytes, set_bytes, sets, walkers)


def gemm_smem(batch: int, m: int, n: int, k: int, e: int) -> int:
    """Operand bytes a good GEMM reads from shared memory: warps of 64 × 64 outputs, each reading both its strips."""
    return batch * k * e * (m * count_blocks(n, 64) + n * count_blocks(m, 64))


def naive(shape: AttentionShape, tile: Tile | None = None, formats: Formats = Formats(), *, scale_kernel: bool = False,
          mask_kernel: bool = False, row_on_chip: bool = True) -> Pipeline:
    """S = QKᵀ, P = softmax(S), O = PV, each through device memory: 4Nd·e + 4N²·es once each, + 2N²·es for each separate scale or mask.

    `tile` is the GEMMs' output tile; without one, operands are issued once (the textbook ledger). `row_on_chip` False: the softmax
    kernel cannot hold a row and reads S twice.
    """
    n, sq, sk, d, dv, e = shape.query_heads, shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v, formats.e
    b, tile = Sizes(shape, formats), tile or Tile(sq, sk)
    tq, tk = count_blocks(sq, tile.br), count_blocks(sk, tile.bc)
    kv, group = shape.kv_pairs, shape.group
    elementwise = n * sq  # a block a row
    qk_set, v_set = (group * sq + sk) * d * e, sk * dv * e
    kernels = [Kernel(
        "S = QKᵀ",
        (operand("Q", b.q, b.q * tk, qk_set, kv, group * tq * tk), operand("K", b.k, b.k * group * tq, qk_set, kv, group * tq * tk),
         scores("S", b.s, write=True)),
        n * tq * tk, matmul_flops=2 * b.scores * d, smem_bytes=gemm_smem(n, sq, sk, d, e))]
    if scale_kernel:
        kernels.append(Kernel("S · scale", (scores("S", b.s), scores("S", b.s, write=True)), elementwise, vector_ops=b.scores))
    if mask_kernel:
        kernels.append(Kernel("mask S", (scores("S", b.s), scores("S", b.s, write=True)), elementwise, vector_ops=b.scores))
    reads = scores("S", b.s) if row_on_chip else Stream("S", False, b.s, 2 * b.s, b.s, sk * formats.es, n * sq, 1, 2, True)
    kernels += [
        Kernel("P = softmax(S)", (reads, scores("P", b.s, write=True)), elementwise, exps=b.scores if row_on_chip else 2 * b.scores,
               vector_ops=SOFTMAX_OPS * b.scores),
        Kernel("O = PV", (scores("P", b.s), operand("V", b.v, b.v * group * tq, v_set, kv, group * tq), once("O", b.o, write=True)),
               n * tq, matmul_flops=2 * b.scores * dv, smem_bytes=gemm_smem(n, sq, dv, sk, e))]
    name = "naive" + " + scale kernel" * scale_kernel + " + mask kernel" * mask_kernel
    return Pipeline(name, tuple(kernels), b.forward, useful_flops(shape))


def useful_flops(shape: AttentionShape) -> int:
    """2(d + dv) for each visible pair: 4N²d when nothing is masked."""
    return shape.query_heads * shape.pairs() * 2 * (shape.head_dim + shape.head_dim_v)


def _fused(name: str, shape: AttentionShape, tile: Tile, formats: Formats, k_passes: int, exp_passes: int, *, rescales: bool = False,
           lse: bool = False) -> Pipeline:
    """Q outer, K and V inner, S on the chip; K walked `k_passes` times (S recomputed each time), V once."""
    b, w, n = Sizes(shape, formats), walk(shape, tile.br, tile.bc), shape.query_heads
    d, dv, e = shape.head_dim, shape.head_dim_v, formats.e
    tq = count_blocks(shape.seq_q, tile.br)
    kv_set, walkers = shape.seq_k * (d + dv) * e, shape.group * tq

    def walked(tensor: str, nbytes: int, dim: int, passes: int) -> Stream:
        return Stream(tensor, False, nbytes, n * w.key_visits * dim * e * passes, nbytes, kv_set, shape.kv_pairs, walkers, passes)

    streams = [once("Q", n * w.rows * d * e), walked("K", b.k, d, k_passes), walked("V", b.v, dv, 1), once("O", b.o, write=True)]
    if lse:
        streams.append(once("lse", b.stat, write=True))
    kernel = Kernel(name, tuple(streams), n * tq, matmul_flops=2 * n * w.area * (d * k_passes + dv),
                    exps=n * exp_passes * (w.area + w.row_visits),
                    vector_ops=n * (SOFTMAX_OPS * exp_passes * w.area + (w.row_visits * dv if rescales else 0)),
                    smem_bytes=operand_smem(n, w, tile, d * k_passes + dv, d * k_passes, e))
    return Pipeline(name, (kernel,), b.forward + (b.stat if lse else 0), useful_flops(shape))


def operand_smem(n: int, w: TileWalk, tile: Tile, shared_dims: int, row_dims: int, e: int) -> int:
    """Shared-memory reads of a fused kernel's matmuls: keys once for `mma_rows` rows, the queries once a key tile; P stays in registers."""
    return n * e * (w.area * shared_dims // tile.mma_rows + w.row_visits * row_dims)


def tiled(shape: AttentionShape, tile: Tile, formats: Formats = Formats()) -> Pipeline:
    """S in tiles that never leave the chip, safe softmax in three passes (max; sum; PV): K read, QKᵀ computed three times a query tile."""
    return _fused("tiled, three passes", shape, tile, formats, 3, 2)


def online(shape: AttentionShape, tile: Tile, formats: Formats = Formats()) -> Pipeline:
    """Online softmax: m and l in one pass, then P and PV in a second; K read twice a query tile."""
    return _fused("online softmax, two passes", shape, tile, formats, 2, 2)


def fa2(shape: AttentionShape, tile: Tile, formats: Formats = Formats(), *, lse: bool = True) -> Pipeline:
    """FlashAttention-2: Q outer, one pass, O rescaled on the chip and divided once.

    Issues 2Nd·e + 2N²d·e/br bytes a head when d = dv and br divides N, and 4N more for the `lse` a backward needs.
    """
    return _fused("FlashAttention-2", shape, tile, formats, 1, 1, rescales=True, lse=lse)


def fa1(shape: AttentionShape, tile: Tile, formats: Formats = Formats()) -> Pipeline:
    """FlashAttention-1: K/V outer, Q inner; O, m, l written once to initialise, then read and written at every step. One block a head."""
    b, w, n = Sizes(shape, formats), walk(shape, tile.br, tile.bc), shape.query_heads
    d, dv, e, et, sk = shape.head_dim, shape.head_dim_v, formats.e, formats.et, shape.seq_k
    set_bytes, sweeps, shares = shape.seq_q * ((d + dv) * e + 2 * et), count_blocks(sk, tile.bc), row_shares(shape, tile)

    def state(tensor: str, nbytes: int, row_bytes: int, *, write: bool) -> Stream:
        first = 1 if write else 0  # the write that initialises; every read is of what the kernel itself wrote
        return Stream(tensor, write, first * nbytes, n * w.row_visits * row_bytes + first * nbytes, nbytes, set_bytes, n, 1, sweeps + first,
                      shares=shares)

    streams = [Stream("Q", False, b.q, n * w.row_visits * d * e, b.q, set_bytes, n, 1, sweeps, shares=shares)]
    for tensor, nbytes, row_bytes in (("O", b.o, dv * e), ("m", b.stat, et), ("l", b.stat, et)):
        streams += [state(tensor, nbytes, row_bytes, write=False), state(tensor, nbytes, row_bytes, write=True)]
    kv_set = sk * (d + dv) * e
    streams += [operand("K", b.k, n * w.keys * d * e, kv_set, shape.kv_pairs, shape.group),
                operand("V", b.v, n * w.keys * dv * e, kv_set, shape.kv_pairs, shape.group)]
    kernel = Kernel("FlashAttention-1", tuple(streams), n, matmul_flops=2 * n * w.area * (d + dv), exps=n * (w.area + 2 * w.row_visits),
                    vector_ops=n * (SOFTMAX_OPS * w.area + 2 * w.row_visits * dv), smem_bytes=operand_smem(n, w, tile, d + dv, d, e))
    return Pipeline("FlashAttention-1", (kernel,), b.forward, useful_flops(shape))


def row_shares(shape: AttentionShape, tile: Tile) -> tuple[float, ...]:
    """The share of the query rows that meet each key tile, empty where all do: what one step of FA1's loop over K and V touches."""
    if not shape.masked:
        return ()
    change = [0] * (count_blocks(shape.seq_k, tile.bc) + 1)
    for rows, first, last, _ in visits(shape, tile.br, tile.bc):
        change[first] += rows
        change[last] -= rows
    return tuple(met / shape.seq_q for met in accumulate(change[:-1]))


def split_kv(shape: AttentionShape, tile: Tile, splits: int, formats: Formats = Formats(), *, pack_gqa: bool = False) -> Pipeline:
    """Flash-Decoding: each split walks ⌈Tk / splits⌉ key tiles and leaves a partial O and lse (fp32); a second kernel merges them.

    `pack_gqa` stacks the query heads that share a K/V head as rows of one tile, so that K and V are issued once a group.
    """
    require(splits >= 1, "splits", splits, "an integer ≥ 1")
    compulsory, useful = Sizes(shape, formats).forward, useful_flops(shape)
    shape = shape.packed() if pack_gqa else shape
    b, w, n = Sizes(shape, formats), walk(shape, tile.br, tile.bc), shape.query_heads
    d, dv, e = shape.head_dim, shape.head_dim_v, formats.e
    tq, per_split = count_blocks(shape.seq_q, tile.br), count_blocks(count_blocks(shape.seq_k, tile.bc), splits)
    q_rows = sum(rows * ((last - 1) // per_split - first // per_split + 1) for rows, first, last, _ in visits(shape, tile.br, tile.bc))
    partial_o, partial_lse = splits * b.stat * dv, splits * b.stat
    kv_set, walkers = shape.seq_k * (d + dv) * e, shape.group * tq
    walked = Kernel(
        "split walk",
        (operand("Q", n * w.rows * d * e, n * q_rows * d * e, shape.seq_q * d * e, n, splits),
         operand("K", b.k, n * w.key_visits * d * e, kv_set, shape.kv_pairs, walkers),
         operand("V", b.v, n * w.key_visits * dv * e, kv_set, shape.kv_pairs, walkers),
         scores("partial O", partial_o, write=True), scores("partial lse", partial_lse, write=True)),
        n * tq * splits, matmul_flops=2 * n * w.area * (d + dv), exps=n * (w.area + w.row_visits),
        vector_ops=n * (SOFTMAX_OPS * w.area + w.row_visits * dv), smem_bytes=operand_smem(n, w, tile, d + dv, d, e))
    merge = Kernel(
        "merge", (scores("partial O", partial_o), scores("partial lse", partial_lse), once("O", b.o, write=True)), n * tq,
        exps=splits * n * shape.seq_q, vector_ops=2 * splits * n * shape.seq_q * dv)
    return Pipeline(f"split-KV, {splits} splits", (walked, merge), compulsory, useful)
