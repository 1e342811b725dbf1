// A [64][64] tile of fp16 in shared memory, laid out with PITCH halves from row to row and, with SWIZZLE, its 16-byte chunks XORed with the
// row; read READS times over by one block of 8 warps.
//
// READ 0: down the columns, one half a lane: a warp's request is one column of 32 rows. READ 1: by ldmatrix of MATRICES 4, 2 or 1 (16 × 16,
// 16 × 8 or 8 × 8 of the tile), numbered down its columns or, with ACROSS, along its rows; TRANS: each transposed on its way.
// out[thread]: the sum of what the thread got; clocks[2 * warp], [2 * warp + 1]: the SM's clock before and after.
#include "lab.cuh"

#ifndef MATRICES
#define MATRICES 4
#endif
#ifndef ACROSS
#define ACROSS 0
#endif
#ifndef TRANS
#define TRANS 0
#endif

constexpr int ROWS = 64, COLS = 64, WARPS = 8, READS = 16;

__device__ inline int at(int row, int col) { return row * PITCH + (SWIZZLE ? col ^ row % 8 * 8 : col); }

extern "C" __global__ void tile(const half* x, float* out, long long* clocks) {
    __shared__ __align__(128) half s[ROWS * PITCH];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < ROWS * COLS; e += blockDim.x) s[at(e / COLS, e % COLS)] = x[e];
    __syncthreads();
    float sum = 0.f;
    long long start = clock64();
#pragma unroll 1
    for (int read = 0; read < READS; ++read) {
        // To ptxas ldmatrix is a read like any other: between barriers it merges two of the same rows, whatever `asm volatile` says. Unrolled
        // and without this one, 16 reads of .x4 became 8 and of .x2 and .x1 became 4.
        __syncthreads();
        if (READ == 0) {
#pragma unroll
            for (int i = 0; i < COLS / WARPS; ++i)
                for (int row = 0; row < ROWS; row += 32) sum += to_float(load_shared(&s[at(row + lane, i * WARPS + warp)]));
        } else {
            constexpr int TALL = MATRICES == 1 ? 8 : 16, WIDE = MATRICES == 4 ? 16 : 8;  // what one request takes of the tile
            int matrix = lane / 8 % MATRICES, below = ACROSS ? matrix / 2 : matrix % 2, beside = ACROSS ? matrix % 2 : matrix / 2;
#pragma unroll
            for (int i = 0; i < ROWS * COLS / (TALL * WIDE) / WARPS; ++i) {
                int block = i * WARPS + warp, row = block / (COLS / WIDE) * TALL + below * 8 + lane % 8;
                const half* from = &s[at(row, block % (COLS / WIDE) * WIDE + beside * 8)];
                unsigned r[MATRICES];
#if MATRICES == 4
                if (TRANS) ldmatrix_x4_trans(r, from);
                else ldmatrix_x4(r, from);
#elif MATRICES == 2
                ldmatrix_x2(r, from);
#else
                ldmatrix_x1(r, from);
#endif
                for (int i = 0; i < MATRICES; ++i) sum += to_float(half(r[i])) + to_float(half(r[i] >> 16));
            }
        }
    }
    long long end = clock64();
    out[threadIdx.x] = sum;
    if (lane == 0) {
        clocks[2 * warp] = start;
        clocks[2 * warp + 1] = end;
    }
}
