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

// Eight scores, the widest access of a lane. A kernel at DRAM's roof keeps BATCH of them in flight a thread: with one of 4 bytes, and as many
// blocks as that makes, the scale took 199 µs on an H200 for 510 MB, 53 % of the roof.
struct alignas(16) Scores { unsigned pair[4]; };
constexpr int BATCH = 4;

// In place over `vectors` of 8 scores. grid ⌈vectors / (256 · BATCH)⌉, block 256.
extern "C" __global__ void __launch_bounds__(256) scale_scores(Scores* s, long long vectors, float scale) {
    long long first = (long long)blockIdx.x * 256 * BATCH + threadIdx.x;
    Scores x[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
        if (first + b * 256 < vectors) x[b] = s[first + b * 256];
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
        if (first + b * 256 < vectors) {
            for (int i = 0; i < 4; ++i)
                x[b].pair[i] = pack(to_float(half(x[b].pair[i])) * scale, to_float(half(x[b].pair[i] >> 16)) * scale);
            s[first + b * 256] = x[b];
        }
}

// Causal, in place: −inf selected right of the diagonal, BATCH rows a block. grid (n / BATCH, heads), block 256; n a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) mask_scores(Scores* s, int n) {
    int top = blockIdx.x * BATCH, vectors = n / 8;
    Scores* row = s + ((long long)blockIdx.y * n + top) * vectors;
    for (int v = threadIdx.x; v < vectors; v += 256) {
        Scores x[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) x[b] = row[b * vectors + v];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            for (int i = 0; i < 4; ++i) {
                int column = 8 * v + 2 * i;
                if (column > top + b) x[b].pair[i] = (x[b].pair[i] & 0xffff0000u) | 0xfc00u;
                if (column + 1 > top + b) x[b].pair[i] = (x[b].pair[i] & 0xffffu) | 0xfc00u << 16;
            }
            row[b * vectors + v] = x[b];
        }
    }
}

// One block of 256 threads a row, the row kept in registers as it came: read once, written once. n a multiple of 8, at most 8192.
extern "C" __global__ void __launch_bounds__(256) softmax_rows(const Scores* s, Scores* p, int n) {
    constexpr int MOST = 4;
    __shared__ float partial[8];
    const Scores* row = s + (long long)blockIdx.x * (n / 8);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Scores x[MOST];
    float m = -infinity(), l = 0.f;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 8) x[i] = row[i * 256 + threadIdx.x];
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 8)
            for (int j = 0; j < 4; ++j) m = fmaxf(m, fmaxf(to_float(half(x[i].pair[j])), to_float(half(x[i].pair[j] >> 16))));
    for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, shuffle_xor(m, mask));
    if (lane == 0) partial[warp] = m;
    __syncthreads();
    m = partial[lane % 8];
    for (int mask = 4; mask > 0; mask /= 2) m = fmaxf(m, shuffle_xor(m, mask));
    m *= LOG2E;  // exponentials are powers of two
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 8)
            for (int j = 0; j < 4; ++j)
                l += exp2_mufu(to_float(half(x[i].pair[j])) * LOG2E - m) + exp2_mufu(to_float(half(x[i].pair[j] >> 16)) * LOG2E - m);
    for (int mask = 16; mask > 0; mask /= 2) l += shuffle_xor(l, mask);
    if (lane == 0) partial[warp] = l;
    __syncthreads();
    l = partial[lane % 8];
    for (int mask = 4; mask > 0; mask /= 2) l += shuffle_xor(l, mask);
    Scores* to = p + (long long)blockIdx.x * (n / 8);
    float inverse = 1.f / l;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * 256 + threadIdx.x < n / 8) {
            for (int j = 0; j < 4; ++j)
                x[i].pair[j] = pack(exp2_mufu(to_float(half(x[i].pair[j])) * LOG2E - m) * inverse,
                                    exp2_mufu(to_float(half(x[i].pair[j] >> 16)) * LOG2E - m) * inverse);
            to[i * 256 + threadIdx.x] = x[i];
        }
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
