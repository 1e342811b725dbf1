// FlashAttention-2's loop on the CUDA cores: S stays on the chip, every multiply-add is one fp32 instruction.
//
// q, k, v, o: (heads, n, D) fp16, n a multiple of 64. grid (n / 64, heads), block 256: a 16 × 16 grid of threads, each with 4 rows and, 16 apart,
// 4 columns of the 64 × 64 tile. A row lies in 16 lanes of one warp. scale: 1/√D · log2 e, so that exponentials are powers of two.
#include "lab.cuh"

constexpr int D = 64, B = 64;          // B query rows × B keys a tile
constexpr int PITCH = D + 2;           // 66 halves = 33 words: the scalar reads down a column meet no conflict
constexpr int P_PITCH = B + 1;

__device__ inline void load_tile(half* to, const half* from) {
#pragma unroll
    for (int i = 0; i < B * D / 256; ++i) {
        int e = i * 256 + threadIdx.x;
        to[e / D * PITCH + e % D] = from[e];
    }
}

extern "C" __global__ void __launch_bounds__(256) tiled(const half* q, const half* k, const half* v, half* o, int n, float scale) {
    __shared__ half qs[B * PITCH], ks[B * PITCH], vs[B * PITCH];
    __shared__ float ps[B * P_PITCH];  // P, which every thread of a row needs
    int row0 = threadIdx.x / 16 * 4, col0 = threadIdx.x % 16;
    long long head = (long long)blockIdx.y * n * D, first = head + (long long)blockIdx.x * B * D;
    float acc[4][4] = {}, m[4], l[4] = {};  // acc: unnormalised O (4 rows × 4 of D)
    for (int i = 0; i < 4; ++i) m[i] = -infinity();
    load_tile(qs, q + first);
    for (int key = 0; key < n; key += B) {
        load_tile(ks, k + head + (long long)key * D);
        load_tile(vs, v + head + (long long)key * D);
        __syncthreads();
        float s[4][4] = {};
        for (int d = 0; d < D; ++d) {
            float a[4], b[4];
            for (int i = 0; i < 4; ++i) a[i] = to_float(qs[(row0 + i) * PITCH + d]);
            for (int j = 0; j < 4; ++j) b[j] = to_float(ks[(col0 + 16 * j) * PITCH + d]);
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) s[i][j] += a[i] * b[j];
        }
        for (int i = 0; i < 4; ++i) {
            float top = fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3]));
            for (int mask = 8; mask > 0; mask /= 2) top = fmaxf(top, shuffle_xor(top, mask));
            float m_new = fmaxf(m[i], top * scale), rescale = exp2_mufu(m[i] - m_new);
            m[i] = m_new;
            l[i] *= rescale;
            for (int j = 0; j < 4; ++j) {
                float p = exp2_mufu(s[i][j] * scale - m_new);
                l[i] += p;  // this lane's share of the row; the lanes are added up once, at the end
                ps[(row0 + i) * P_PITCH + col0 + 16 * j] = p;
                acc[i][j] *= rescale;
            }
        }
        __syncthreads();
        for (int j = 0; j < B; ++j) {
            float a[4], b[4];
            for (int i = 0; i < 4; ++i) a[i] = ps[(row0 + i) * P_PITCH + j];
            for (int c = 0; c < 4; ++c) b[c] = to_float(vs[j * PITCH + col0 + 16 * c]);
            for (int i = 0; i < 4; ++i)
                for (int c = 0; c < 4; ++c) acc[i][c] += a[i] * b[c];
        }
        __syncthreads();  // before the next tile overwrites K, V and P
    }
    for (int i = 0; i < 4; ++i) {
        for (int mask = 8; mask > 0; mask /= 2) l[i] += shuffle_xor(l[i], mask);
        for (int c = 0; c < 4; ++c) o[first + (row0 + i) * D + col0 + 16 * c] = to_half(acc[i][c] / l[i]);
    }
}
