"""Ledgers of the attention backward: naive (P, dP and dS through memory) and recomputing (FlashAttention-2, Alg. 2).

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


def naive_backward(shape: AttentionShape, tile: Tile | None = None, formats: Formats = Formats()) -> Pipeline:
    """Five kernels; P is read twice (the forward kept it), dP and dS are written and read. Nothing is skipped."""
    n, kv, group = shape.query_heads, shape.kv_pairs, shape.group
    sq, sk, d, dv, e = shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v, formats.e
    b, tile = Sizes(shape, formats), tile or Tile(sq, sk)
    tq, tk = count_blocks(sq, tile.br), count_blocks(sk, tile.bc)
    do_set, q_set, k_set = group * sq * dv * e, group * sq * d * e, sk * d * e
    dov_set = do_set + sk * dv * e

    def gemm(name: str, streams: tuple[Stream, ...], blocks: int, batch: int, m: int, cols: int, k: int) -> Kernel:
        return Kernel(name, streams, blocks, matmul_flops=2 * batch * m * cols * k, smem_bytes=gemm_smem(batch, m, cols, k, e))

    kernels = (
        gemm("dV = PᵀdO", (scores("P", b.s), operand("dO", b.o, b.o * tk, do_set, kv, tk), once("dV", b.v, write=True)),
             kv * tk, n, sk, dv, sq),
        gemm("dP = dO Vᵀ", (operand("dO", b.o, b.o * tk, dov_set, kv, group * tq * tk),
                            operand("V", b.v, b.v * group * tq, dov_set, kv, group * tq * tk), scores("dP", b.s, write=True)),
             n * tq * tk, n, sq, sk, dv),
        Kernel("dS = P ∘ (dP − D)", (scores("P", b.s), scores("dP", b.s), scores("dS", b.s, write=True)), n * sq,
               vector_ops=BACKWARD_OPS * b.scores),
        gemm("dQ = dS K", (scores("dS", b.s), operand("K", b.k, b.k * group * tq, k_set, kv, group * tq), once("dQ", b.q, write=True)),
             n * tq, n, sq, d, sk),
        gemm("dK = dSᵀ Q", (scores("dS", b.s), operand("Q", b.q, b.q * tk, q_set, kv, tk), once("dK", b.k, write=True)),
             kv * tk, n, sk, d, sq),
    )
    compulsory = 2 * b.inputs + b.o  # Q, K, V and their gradients, dO; P, which this backward also needs, is its own making
    return Pipeline("naive backward", kernels, compulsory, backward_flops(shape))


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
    return Pipeline("FlashAttention-2 backward", (preprocess, main, postprocess), 2 * b.inputs + 2 * b.o + b.stat, backward_flops(shape))
