// FlashAttention-2 (arXiv 2307.08691, Alg. 1): a block owns 64 query rows and walks the keys; m, l and O never leave its registers.
//
// q, k, v, o: (heads, n, D) fp16, n a multiple of 64; p: (heads, n, n) fp16, touched with WRITE_P only. grid (n / 64, heads), block 128.
// scale: 1/√D · log2 e. The variants, each one idea:
//   PAD, SWIZZLE   the layout of the tiles (attention_mma.cuh)
//   STAGES 2       the next K and V are copied (cp.async) while the tensor cores work on these; 1: copied through registers, then waited for
//   DIVIDE         O kept normalised: multiplied by l_old and divided by l_new at every tile, instead of divided once at the end
//   WRITE_P        P also written out "for debugging", unnormalised as it stands; by way of Q's tile, so that whole rows of 128 bytes leave
#include "attention_mma.cuh"

#ifndef STAGES
#define STAGES 1
#endif
#ifndef DIVIDE
#define DIVIDE 0
#endif
#ifndef WRITE_P
#define WRITE_P 0
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 3)
fa2(const half* q, const half* k, const half* v, half* o, half* p, int n, float scale) {
    __shared__ __align__(128) half qs[TILE], ks[STAGES][TILE], vs[STAGES][TILE];
    long long head = (long long)blockIdx.y * n * D, first = head + (long long)blockIdx.x * B * D;
    const half *k_head = k + head, *v_head = v + head;
    float acc[D / 8][4] = {}, m[2] = {-infinity(), -infinity()}, l[2] = {};  // rows g and g + 8; l: this lane's share (DIVIDE: all of it)

    load_tile(qs, q + first);
    if (STAGES == 2) {
        load_tile_async(ks[0], k_head);
        load_tile_async(vs[0], v_head);
        commit_copies();
    }
    __syncthreads();
    unsigned q_rows[D / 16][4];
    load_rows(q_rows, qs);

    for (int j = 0; j < n / B; ++j) {
        int stage = j % STAGES;
        if (STAGES == 2) {
            if (j + 1 < n / B) {  // into the stage that the end of the last step set free
                load_tile_async(ks[1 - stage], k_head + (long long)(j + 1) * B * D);
                load_tile_async(vs[1 - stage], v_head + (long long)(j + 1) * B * D);
            }
            commit_copies();  // an empty group at the end keeps the count
            wait_copies<1>();
        } else {
            load_tile(ks[0], k_head + (long long)j * B * D);
            load_tile(vs[0], v_head + (long long)j * B * D);
        }
        __syncthreads();

        float s[B / 8][4];
        scores(s, q_rows, ks[stage]);
        float factor[2];
        for (int r = 0; r < 2; ++r) {
            float m_new = fmaxf(m[r], row_max(s, r) * scale), rescale = exp2_mufu(m[r] - m_new);
            float sum = exponentials(s, r, scale, m_new);
            m[r] = m_new;
            factor[r] = DIVIDE ? rescale * l[r] : rescale;
            l[r] = l[r] * rescale + (DIVIDE ? quad_sum(sum) : sum);
        }
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
            for (int i = 0; i < 4; ++i) acc[d][i] *= factor[i / 2];
        if (WRITE_P) {  // Q is in registers: its tile is free
            const float as_it_is[2] = {1.f, 1.f};
            put_rows(qs, s, as_it_is);
            store_warp_rows(p + ((long long)blockIdx.y * n + blockIdx.x * B) * n + j * B, qs, n);
        }
        accumulate(acc, s, vs[stage]);
        if (DIVIDE)
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                for (int i = 0; i < 4; ++i) acc[d][i] *= 1.f / l[i / 2];  // one reciprocal a row, D products
        __syncthreads();
    }

    float inverse[2];
    for (int r = 0; r < 2; ++r) inverse[r] = DIVIDE ? 1.f : 1.f / quad_sum(l[r]);
    put_rows(qs, acc, inverse);
    store_warp_rows(o + first, qs);
}
