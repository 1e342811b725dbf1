// What a warp shuffle costs: its latency along a chain of dependent ones, its throughput when every warp has CHAINS of them in flight.
//
// The loop's body is 80 shuffles, 1.3 KiB, and is run once before the clock is read: straight code of all steps and 8 chains is 10 KiB, whose
// first and only pass waits for instructions as well (on an H200 it ran at 0.83 shuffles a clock).
// out[thread * CHAINS + c]: the value after STEPS exchanges; clocks[2 * warp], [2 * warp + 1]: the SM's clock before and after.
#include "lab.cuh"

#ifndef CHAINS
#define CHAINS 1
#endif
constexpr int STEPS = 160, BODY = 80 / CHAINS;  // BODY: a multiple of 10, so that each bit of the lane number is exchanged back

extern "C" __global__ void shuffle(float* out, long long* clocks) {
    float x[CHAINS];
    for (int c = 0; c < CHAINS; ++c) x[c] = float(threadIdx.x * CHAINS + c);
    long long start = 0;
#pragma unroll 1
    for (int pass = -1; pass < STEPS / BODY; ++pass) {
        if (pass == 0) {
            __syncthreads();  // all warps start together
            start = clock64();
        }
#pragma unroll
        for (int step = 0; step < BODY; ++step)
#pragma unroll
            for (int c = 0; c < CHAINS; ++c) x[c] = shuffle_xor(x[c], 1 << step % 5);
    }
    long long end = clock64();
    for (int c = 0; c < CHAINS; ++c) out[threadIdx.x * CHAINS + c] = x[c];  // also keeps the chain alive
    if (threadIdx.x % 32 == 0) {
        clocks[threadIdx.x / 32 * 2] = start;
        clocks[threadIdx.x / 32 * 2 + 1] = end;
    }
}
