// What a warp shuffle costs: its latency along a chain of dependent ones, its throughput when every warp has CHAINS of them in flight.
//
// out[thread * CHAINS + c]: the value after STEPS exchanges; clocks[2 * warp], [2 * warp + 1]: the SM's clock before and after.
#include "lab.cuh"

#ifndef CHAINS
#define CHAINS 1
#endif
constexpr int STEPS = 80;  // a multiple of 10: each bit of the lane number is exchanged an even number of times

extern "C" __global__ void shuffle(float* out, long long* clocks) {
    float x[CHAINS];
    for (int c = 0; c < CHAINS; ++c) x[c] = float(threadIdx.x * CHAINS + c);
    __syncthreads();  // all warps start together
    long long start = clock64();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int c = 0; c < CHAINS; ++c) x[c] = shuffle_xor(x[c], 1 << step % 5);
    long long end = clock64();
    for (int c = 0; c < CHAINS; ++c) out[threadIdx.x * CHAINS + c] = x[c];  // also keeps the chain alive
    if (threadIdx.x % 32 == 0) {
        clocks[threadIdx.x / 32 * 2] = start;
        clocks[threadIdx.x / 32 * 2 + 1] = end;
    }
}
