// A block that asks for as much shared memory as its launch says and proves that it has it: the first and the last word travel through it.
//
// out[block]: `words` if the last word holds what was written, else 0. Nothing else happens: whether the launch succeeds is the answer.
#include "lab.cuh"

extern __shared__ int memory[];

extern "C" __global__ void __launch_bounds__(256) oversized(int* out, int words) {
    if (threadIdx.x == 0) memory[0] = 0;
    __syncthreads();
    if (threadIdx.x == 1) memory[words - 1] = words + memory[0];
    __syncthreads();
    if (threadIdx.x == 2) out[blockIdx.x] = memory[words - 1] == words ? words : 0;
}
