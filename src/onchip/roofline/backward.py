"""Ledgers of the attention backward: naive (P, dP and dS through memory) and recomputing, in one kernel (FlashAttention-2, Alg. 2) or two.

    dV = PᵀdO    dP = dO Vᵀ    dS = P ∘ (dP − D), D = rowsum(P ∘ dP) = rowsum(dO ∘ O)    dQ = dS K    dK = dSᵀ Q

Five matmuls, 2.5 times the forward's FLOPs. Gradients of K and V are summed over the query heads that share them inside the kernel.
"""
from onchip.roofline.attention import Formats, Sizes, Tile, gemm_smem, operand, scores
from onchip.roofline.ledger import Kernel, Pipeline, Stream, once
from onchip.roofline.shape import AttentionShape, count_blocks, walk

# fp32 instructions an element of S costs beside its exponential: scale-and-subtract, dP − D, · P, and converting P and dS (packed by two).
BACKWARD_OPS = 4


def backward_flops(shape: AttentionShape) -> int:
    """What the gradients need without recomputing S: four matmuls over the visible pairs, 2(2d + 2dv) FLOPs each."""
    return shape.query_heads * shape.pairs() * 4 * (shape.head_dim + shape.head_dim_v)


def naive_backward(shape: AttentionShape, tile: Tile | None = None, formats: Formats = Formats(), *, key_rows: int | None = None,
                   scale_kernel: bool = False, mask_kernel: bool = False, product_kernel: bool = False) -> Pipeline:
    """Five kernels; P is read twice (the forward kept it), dP and dS are written and read. Nothing is skipped.

    `tile` is that of dP, and its rows those of dQ; a block of dK and dV owns `key_rows` keys, as many as the tile unless given. What the
    forward did to S in a kernel of its own, scaling or masking it, has a kernel here that does it to dS. `product_kernel`: another makes
    P ∘ dP, as torch's softmax backward does.
    """
    n, kv, group = shape.query_heads, shape.kv_pairs, shape.group
    sq, sk, d, dv, e = shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v, formats.e
    b, tile = Sizes(shape, formats), tile or Tile(sq, sk)
    tq, tk, tkv = count_blocks(sq, tile.br), count_blocks(sk, tile.bc), count_blocks(sk, key_rows or tile.bc)
    do_set, q_set, k_set = group * sq * dv * e, group * sq * d * e, sk * d * e
    dov_set = do_set + sk * dv * e

    def gemm(name: str, streams: tuple[Stream, ...], blocks: int, batch: int, m: int, cols: int, k: int) -> Kernel:
        return Kernel(name, streams, blocks, matmul_flops=2 * batch * m * cols * k, smem_bytes=gemm_smem(batch, m, cols, k, e))

    def on_scores(name: str) -> Kernel:
        return Kernel(name, (scores("dS", b.s), scores("dS", b.s, write=True)), n * sq, vector_ops=b.scores)

    kernels = (
        gemm("dV = PᵀdO", (scores("P", b.s), operand("dO", b.o, b.o * tkv, do_set, kv, tkv), once("dV", b.v, write=True)),
             kv * tkv, n, sk, dv, sq),
        gemm("dP = dO Vᵀ", (operand("dO", b.o, b.o * tk, dov_set, kv, group * tq * tk),
                            operand("V", b.v, b.v * group * tq, dov_set, kv, group * tq * tk), scores("dP", b.s, write=True)),
             n * tq * tk, n, sq, sk, dv),
        *([Kernel("P ∘ dP", (scores("P", b.s), scores("dP", b.s), scores("P ∘ dP", b.s, write=True)), n * sq, vector_ops=b.scores)]
          if product_kernel else []),
        Kernel("dS = P ∘ (dP − D)", (scores("P", b.s), scores("dP", b.s), scores("dS", b.s, write=True)), n * sq,
               vector_ops=BACKWARD_OPS * b.scores),
        *([on_scores("mask dS")] if mask_kernel else []), *([on_scores("dS · scale")] if scale_kernel else []),
        gemm("dQ = dS K", (scores("dS", b.s), operand("K", b.k, b.k * group * tq, k_set, kv, group * tq), once("dQ", b.q, write=True)),
             n * tq, n, sq, d, sk),
        gemm("dK = dSᵀ Q", (scores("dS", b.s), operand("Q", b.q, b.q * tkv, q_set, kv, tkv), once("dK", b.k, write=True)),
             kv * tkv, n, sk, d, sq),
    )
    compulsory = 2 * b.inputs + b.o  # Q, K, V and their gradients, dO; P, which this backward also needs, is its own making
    name = "naive backward" + " + scale kernel" * scale_kernel + " + mask kernel" * mask_kernel
    return Pipeline(name, kernels, compulsory, backward_flops(shape))


def fa2_backward(shape: AttentionShape, tile: Tile, formats: Formats = Formats()) -> Pipeline:
    """P recomputed from Q, K and lse: no N² byte is moved. K/V outer, Q inner; dQ accumulated in the state's format in device memory.

    Preprocess writes D = rowsum(dO ∘ O) and zeroes the dQ accumulator; the main kernel reads and writes the accumulator at every visited
    tile; postprocess turns it into dQ.
    """
    n, kv, group = shape.query_heads, shape.kv_pairs, shape.group
    sq, sk, d, dv, e, et = shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v, formats.e, formats.et
    b, w = Sizes(shape, formats), walk(shape, tile.br, tile.bc)
    tq, tk = count_blocks(sq, tile.br), count_blocks(sk, tile.bc)
    acc = n * sq * d * et
    set_bytes = group * sq * ((d + dv) * e + 2 * et + d * et)  # all a K/V tile walks

    def walked(tensor: str, nbytes: int, row_bytes: int, *, write: bool = False, unique: int | None = None) -> Stream:
        return Stream(tensor, write, nbytes if unique is None else unique, n * w.row_visits * row_bytes, nbytes, set_bytes, kv, tk)

    preprocess = Kernel("D = rowsum(dO ∘ O)", (once("dO", b.o), once("O", b.o), once("D", b.stat, write=True, intermediate=True),
                                               once("dQ acc", acc, write=True, intermediate=True)), n * tq, vector_ops=n * sq * dv)
    main = Kernel(
        "dK, dV, dQ",
        (once("K", kv * w.keys * d * e), once("V", kv * w.keys * dv * e), walked("Q", b.q, d * e), walked("dO", b.o, dv * e),
         walked("lse", b.stat, et), walked("D", b.stat, et), walked("dQ acc", acc, d * et),
         walked("dQ acc", acc, d * et, write=True), once("dK", b.k, write=True), once("dV", b.v, write=True)),
        kv * tk, matmul_flops=2 * n * w.area * (3 * d + 2 * dv), exps=n * w.area, vector_ops=n * BACKWARD_OPS * w.area,
        # K and V once for mma_rows query rows; Q and dO as rows of S and dP, then as the shared operand of dK and dV; dS out and back
        smem_bytes=n * e * (w.area * (2 * d + dv) // tile.mma_rows + w.row_visits * 2 * (d + dv) + 2 * w.area))
    postprocess = Kernel("dQ to its format", (once("dQ acc", acc, intermediate=True), once("dQ", b.q, write=True)), n * tq,
                         vector_ops=n * sq * d)
    return Pipeline("FlashAttention-2 backward", (preprocess, main, postprocess), b.backward, backward_flops(shape))


def apart_backward(shape: AttentionShape, tile: Tile, formats: Formats = Formats(), *, query_tile: Tile | None = None) -> Pipeline:
    """P recomputed twice: a kernel whose blocks own keys makes dK and dV, one whose blocks own queries makes dQ. Nothing is accumulated
    in memory, nothing depends on the order in which blocks finish, and seven matmuls are done in place of five.

    `tile` is that of dK and dV, `query_tile` that of dQ, the same unless given. A first kernel writes D = rowsum(dO ∘ O), and lse in the
    units of its exponential.
    """
    n, kv, group = shape.query_heads, shape.kv_pairs, shape.group
    sq, sk, d, dv, e, et = shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v, formats.e, formats.et
    b, w = Sizes(shape, formats), walk(shape, tile.br, tile.bc)
    query_tile = query_tile or tile
    wq = walk(shape, query_tile.br, query_tile.bc)
    tq, tk = count_blocks(sq, query_tile.br), count_blocks(sk, tile.bc)
    rows_set, keys_set = group * sq * ((d + dv) * e + 2 * et), sk * (d + dv) * e  # what a key tile walks; what a query tile walks

    def rows(tensor: str, nbytes: int, row_bytes: int) -> Stream:
        return Stream(tensor, False, nbytes, n * w.row_visits * row_bytes, nbytes, rows_set, kv, tk)

    def keys(tensor: str, nbytes: int, row_bytes: int) -> Stream:
        return Stream(tensor, False, nbytes, n * wq.key_visits * row_bytes, nbytes, keys_set, kv, group * tq)

    def own(tensor: str, row_bytes: int) -> Stream:
        return once(tensor, n * wq.rows * row_bytes)

    first = Kernel("D = rowsum(dO ∘ O)", (
        once("dO", b.o), once("O", b.o), once("lse", b.stat), *(once(t, b.stat, write=True, intermediate=True) for t in ("D", "lse2"))),
        n * count_blocks(sq, tile.br), vector_ops=n * sq * dv)
    of_keys = Kernel(
        "dK, dV", (once("K", kv * w.keys * d * e), once("V", kv * w.keys * dv * e), rows("Q", b.q, d * e), rows("dO", b.o, dv * e),
                   rows("lse2", b.stat, et), rows("D", b.stat, et), once("dK", b.k, write=True), once("dV", b.v, write=True)),
        kv * tk, matmul_flops=2 * n * w.area * (2 * d + 2 * dv), exps=n * w.area, vector_ops=n * BACKWARD_OPS * w.area,
        # Q and dO once for mma_rows keys, for Sᵀ and dPᵀ and again for dK and dV; K and V as the other operand; Pᵀ and dSᵀ in registers
        smem_bytes=n * e * (w.area * 2 * (d + dv) // tile.mma_rows + w.key_visits * (d + dv)))
    of_rows = Kernel(
        "dQ", (own("Q", d * e), own("dO", dv * e), own("lse2", et), own("D", et), keys("K", b.k, d * e), keys("V", b.v, dv * e),
               once("dQ", b.q, write=True)),
        n * tq, matmul_flops=2 * n * wq.area * (2 * d + dv), exps=n * wq.area, vector_ops=n * BACKWARD_OPS * wq.area,
        smem_bytes=n * e * (wq.area * (2 * d + dv) // query_tile.mma_rows + wq.row_visits * (d + dv)))
    return Pipeline("recomputing backward, dQ apart", (first, of_keys, of_rows), b.backward, backward_flops(shape))
