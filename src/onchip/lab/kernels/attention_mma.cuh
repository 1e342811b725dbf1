// What the two tensor-core loops share: a 64 × 64 tile of fp16 in shared memory, the two products, and sums along a row.
//
// PAD halves end each row of a tile; SWIZZLE XORs its 16-byte chunks with the row instead. A block is 4 warps of 16 query rows each.
#include "lab.cuh"

#ifndef PAD
#define PAD 8
#endif
#ifndef SWIZZLE
#define SWIZZLE 0
#endif

constexpr int D = 64, B = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr int PITCH = D + PAD, TILE = B * PITCH;
constexpr int CHUNKS = B * D / 8 / THREADS;  // 16-byte chunks of a tile that each thread moves: a loop of known length unrolls

__device__ inline int at(int row, int col) { return row * PITCH + (SWIZZLE ? col ^ row % 8 * 8 : col); }

// One tile from device memory, 16 bytes a thread at a time, through registers.
__device__ inline void load_tile(half* to, const half* from) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        int c = i * THREADS + threadIdx.x;
        *(uint4*)&to[at(c / 8, c % 8 * 8)] = load_l2((const uint4*)&from[c * 8]);
    }
}

// The same by cp.async; the caller commits and waits.
__device__ inline void load_tile_async(half* to, const half* from) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        int c = i * THREADS + threadIdx.x;
        copy_async(&to[at(c / 8, c % 8 * 8)], &from[c * 8]);
    }
}

// This warp's 16 rows of Q as mma operands: 4 steps of 16 along D.
__device__ inline void load_rows(unsigned (&a)[D / 16][4], const half* tile) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) ldmatrix_x4(a[d], &tile[at(row, 16 * d + lane / 16 * 8)]);
}

// This warp's 16 rows of a tile from device memory and back, 16 bytes a lane: whole sectors, which the 4 bytes a lane holds of a row are not.
__device__ inline void load_warp_rows(half* tile, const half* from) {
    int first = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = lane; c < 16 * D / 8; c += 32) {
        int row = first + c / 8, col = c % 8 * 8;
        *(uint4*)&tile[at(row, col)] = load_l2((const uint4*)&from[row * D + col]);
    }
    __syncwarp();
}

__device__ inline void store_warp_rows(half* to, const half* tile, long long pitch = D) {  // pitch: halves from row to row of `to`
    int first = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int c = lane; c < 16 * D / 8; c += 32) {
        int row = first + c / 8, col = c % 8 * 8;
        *(uint4*)&to[row * pitch + col] = *(const uint4*)&tile[at(row, col)];
    }
}

// acc times `factor` of its row, rounded to fp16, into this warp's rows of a tile.
__device__ inline void put_rows(half* tile, const float (&acc)[D / 8][4], const float (&factor)[2]) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
        for (int r = 0; r < 2; ++r)
            *(unsigned*)&tile[at(row + 8 * r, 8 * d + col)] = pack(acc[d][2 * r] * factor[r], acc[d][2 * r + 1] * factor[r]);
}

// s (16 × 64) = q · kᵀ: B / 16 · D / 16 = 16 ldmatrix.x4 and twice as many mma.
__device__ inline void scores(float (&s)[B / 8][4], const unsigned (&q)[D / 16][4], const half* k) {
    int lane = threadIdx.x % 32, key = lane / 16 * 8 + lane % 8, d_half = lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < B / 16; ++j) {
        for (int i = 0; i < 4; ++i) s[2 * j][i] = s[2 * j + 1][i] = 0.f;
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            unsigned b[4];
            ldmatrix_x4(b, &k[at(16 * j + key, 16 * d + d_half)]);
            mma_16x8x16(s[2 * j], q[d], b[0], b[1]);
            mma_16x8x16(s[2 * j + 1], q[d], b[2], b[3]);
        }
    }
}

// acc (16 × D) += p (16 × 64, an accumulator that becomes an operand without leaving its lanes) · v.
__device__ inline void accumulate(float (&acc)[D / 8][4], const float (&p)[B / 8][4], const half* v) {
    int lane = threadIdx.x % 32, key = lane % 16, d_half = lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < B / 16; ++j) {
        const float *left = p[2 * j], *right = p[2 * j + 1];
        unsigned a[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])};
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            unsigned b[4];
            ldmatrix_x4_trans(b, &v[at(16 * j + key, 16 * d + d_half)]);
            mma_16x8x16(acc[2 * d], a, b[0], b[1]);
            mma_16x8x16(acc[2 * d + 1], a, b[2], b[3]);
        }
    }
}

// A row of an accumulator lies in the four lanes of a quad: two exchanges, not five.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

__device__ inline float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// The maximum of row g (r = 0) or g + 8 (r = 1) of s.
__device__ inline float row_max(const float (&s)[B / 8][4], int r) {
    float m = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
    for (int j = 1; j < B / 8; ++j) m = fmaxf(m, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
    return quad_max(m);
}

// s becomes p = 2^(scale · s − m) in row r; this lane's share of its sum comes back.
__device__ inline float exponentials(float (&s)[B / 8][4], int r, float scale, float m) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < B / 8; ++j)
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
            s[j][i] = exp2_mufu(s[j][i] * scale - m);
            sum += s[j][i];
        }
    return sum;
}
