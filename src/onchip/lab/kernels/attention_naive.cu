// Attention as the textbook writes it: S = Q Kᵀ, P = softmax(S), O = P V, each a kernel, S and P through device memory in fp16.
//
// q, k, v, o: (heads, n, D) fp16; s, p: (heads, n, n) fp16. `scores` and `out` give a thread one element and re-read operands from the caches:
// the point of this file is what crosses memory, not how fast a matmul can be. `scale_scores` and `mask_scores` are the separate kernels of
// eager code; with them `scores` is called with scale 1, otherwise with 1/√D.
#include "lab.cuh"

constexpr int D = 64;

// grid (n / 16, n / 16, heads), block (16, 16)
extern "C" __global__ void scores(const half* q, const half* k, half* s, int n, float scale) {
    long long head = blockIdx.z, i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    const half *q_row = q + (head * n + i) * D, *k_row = k + (head * n + j) * D;
    float dot = 0.f;
    for (int d = 0; d < D; ++d) dot += to_float(q_row[d]) * to_float(k_row[d]);
    s[(head * n + i) * n + j] = to_half(dot * scale);
}

// In place over `elements`, two a thread.
extern "C" __global__ void scale_scores(unsigned* s, long long pairs, float scale) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < pairs) s[i] = pack(to_float(half(s[i])) * scale, to_float(half(s[i] >> 16)) * scale);
}

// Causal, in place: −inf selected right of the diagonal. grid (⌈n / 512⌉, n, heads), block 256; n even.
extern "C" __global__ void mask_scores(unsigned* s, int n) {
    int pair = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (2 * pair >= n) return;
    unsigned* at = s + ((long long)blockIdx.z * n + row) * (n / 2) + pair;
    unsigned both = *at, minus_inf = 0xfc00u;
    if (2 * pair > row) both = (both & 0xffff0000u) | minus_inf;
    if (2 * pair + 1 > row) both = (both & 0xffffu) | minus_inf << 16;
    *at = both;
}

// One block of 256 threads a row, the row kept in registers as it came: read once, written once. n even, at most 8192.
extern "C" __global__ void __launch_bounds__(256) softmax_rows(const unsigned* s, unsigned* p, int n) {
    constexpr int MOST = 16;
    __shared__ float partial[8];
    const unsigned* row = s + (long long)blockIdx.x * (n / 2);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned x[MOST];
    float m = -infinity(), l = 0.f;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 2) {
            x[i] = row[i * 256 + threadIdx.x];
            m = fmaxf(m, fmaxf(to_float(half(x[i])), to_float(half(x[i] >> 16))));
        }
    for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, shuffle_xor(m, mask));
    if (lane == 0) partial[warp] = m;
    __syncthreads();
    m = partial[lane % 8];
    for (int mask = 4; mask > 0; mask /= 2) m = fmaxf(m, shuffle_xor(m, mask));
    m *= LOG2E;  // exponentials are powers of two
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 2)
            l += exp2_mufu(to_float(half(x[i])) * LOG2E - m) + exp2_mufu(to_float(half(x[i] >> 16)) * LOG2E - m);
    for (int mask = 16; mask > 0; mask /= 2) l += shuffle_xor(l, mask);
    if (lane == 0) partial[warp] = l;
    __syncthreads();
    l = partial[lane % 8];
    for (int mask = 4; mask > 0; mask /= 2) l += shuffle_xor(l, mask);
    unsigned* to = p + (long long)blockIdx.x * (n / 2);
    float inverse = 1.f / l;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 2)
            to[i * 256 + threadIdx.x] = pack(exp2_mufu(to_float(half(x[i])) * LOG2E - m) * inverse,
                                             exp2_mufu(to_float(half(x[i] >> 16)) * LOG2E - m) * inverse);
}

// grid (D / 16, n / 16, heads), block (16, 16)
extern "C" __global__ void out(const half* p, const half* v, half* o, int n) {
    long long head = blockIdx.z, i = blockIdx.y * 16 + threadIdx.y;
    int d = blockIdx.x * 16 + threadIdx.x;
    const half *p_row = p + (head * n + i) * n, *v_column = v + head * n * D + d;
    float dot = 0.f;
    for (int j = 0; j < n; ++j) dot += to_float(p_row[j]) * to_float(v_column[(long long)j * D]);
    o[(head * n + i) * D + d] = to_half(dot);
}
