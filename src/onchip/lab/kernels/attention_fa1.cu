// FlashAttention-1 (arXiv 2205.14135, Alg. 1): K and V in the outer loop, queries in the inner one. Each step needs the O, m and l that an
// earlier step left, so they go through device memory, and nothing but the heads can run side by side.
//
// q, k, v, o: (heads, n, D) fp16; m, l: (heads, n) fp32; n a multiple of 64. grid heads, block 128. scale: 1/√D · log2 e, and so m is in
// powers of two.
#include "attention_mma.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 3)
fa1(const half* q, const half* k, const half* v, half* o, float* m, float* l, int n, float scale) {
    __shared__ __align__(128) half qs[TILE], ks[TILE], vs[TILE], os[TILE];
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    long long head = (long long)blockIdx.x * n * D, stat = (long long)blockIdx.x * n;

    for (int i = threadIdx.x; i < n; i += THREADS) {
        m[stat + i] = -infinity();
        l[stat + i] = 0.f;
    }
    for (int i = threadIdx.x; i < n * D / 2; i += THREADS) ((unsigned*)(o + head))[i] = 0u;

    for (int j = 0; j < n / B; ++j) {
        __syncthreads();  // K and V have been used; O, m, l are written
        load_tile(ks, k + head + (long long)j * B * D);
        load_tile(vs, v + head + (long long)j * B * D);
        for (int i = 0; i < n / B; ++i) {
            __syncthreads();
            load_tile(qs, q + head + (long long)i * B * D);
            load_warp_rows(os, o + head + (long long)i * B * D);
            __syncthreads();
            unsigned q_rows[D / 16][4];
            load_rows(q_rows, qs);
            float s[B / 8][4], acc[D / 8][4], inverse[2];
            scores(s, q_rows, ks);
            for (int r = 0; r < 2; ++r) {
                long long row = i * B + warp * 16 + g + 8 * r;
                float m_old = m[stat + row], l_old = l[stat + row], m_new = fmaxf(m_old, row_max(s, r) * scale);
                float kept = l_old * exp2_mufu(m_old - m_new), l_new = kept + quad_sum(exponentials(s, r, scale, m_new));
                __syncwarp();  // all four lanes of the row have read m and l
                if (t == 0) {
                    m[stat + row] = m_new;
                    l[stat + row] = l_new;
                }
                inverse[r] = 1.f / l_new;
#pragma unroll
                for (int d = 0; d < D / 8; ++d) {
                    unsigned both = *(const unsigned*)&os[at(warp * 16 + g + 8 * r, 8 * d + 2 * t)];
                    acc[d][2 * r] = to_float(half(both)) * kept;  // O was normalised by l_old
                    acc[d][2 * r + 1] = to_float(half(both >> 16)) * kept;
                }
            }
            accumulate(acc, s, vs);
            put_rows(os, acc, inverse);
            store_warp_rows(o + head + (long long)i * B * D, os);
        }
    }
}
