// The sum of an array read `rounds` times over, WIDTH floats a load: 4 is the widest access of a lane, 16 bytes.
//
// n floats, a multiple of gridDim * blockDim * WIDTH * BATCH. In round r block b reads the slices that block b + r read in round 0, so that no
// round is served by the L1 of the SM that read it before: every byte comes from L2, or from DRAM where it is not kept.
// out[thread of the grid]: its partial sum. BATCH independent loads are in flight before the first is used.
#include "lab.cuh"

constexpr int BATCH = 4;

template <int N> struct alignas(4 * N) Vector { float x[N]; };

extern "C" __global__ void walk(const float* x, float* out, long long n, int rounds) {
    typedef Vector<WIDTH> V;
    const V* in = (const V*)x;
    long long stride = (long long)gridDim.x * blockDim.x, vectors = n / WIDTH;
    float sum = 0.f;
    for (int round = 0; round < rounds; ++round) {
        long long first = (long long)((blockIdx.x + round) % gridDim.x) * blockDim.x + threadIdx.x;
        for (long long i = first; i < vectors; i += BATCH * stride) {
            V v[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) v[b] = in[i + b * stride];
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                for (int j = 0; j < WIDTH; ++j) sum += v[b].x[j];
        }
    }
    out[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
