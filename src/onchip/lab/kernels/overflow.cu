// What e^x does without the maximum, and with it, where p is kept in FORMAT: 0 fp16, 1 bf16, 2 fp32.
//
// powers: y[i] = e^x[i] rounded to FORMAT, as fp32. softmax: one warp a row of n values, y = p / Σ p, p = e^(x − m); MAX 0 leaves m at 0.
#include "lab.cuh"

__device__ inline float keep(float x) {
    return FORMAT == 0 ? to_float(to_half(x)) : FORMAT == 1 ? from_bfloat(to_bfloat(x)) : x;
}

extern "C" __global__ void powers(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = keep(exp2_mufu(x[i] * LOG2E));
}

extern "C" __global__ void softmax(const float* x, float* y, int n) {
    const float* row = x + (long long)blockIdx.x * n;
    float m = MAX ? -infinity() : 0.f, l = 0.f;
    if (MAX) {
        for (int j = threadIdx.x; j < n; j += 32) m = fmaxf(m, row[j]);
        for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, shuffle_xor(m, mask));
    }
    for (int j = threadIdx.x; j < n; j += 32) l += keep(exp2_mufu((row[j] - m) * LOG2E));
    for (int mask = 16; mask > 0; mask /= 2) l += shuffle_xor(l, mask);
    for (int j = threadIdx.x; j < n; j += 32) y[(long long)blockIdx.x * n + j] = keep(exp2_mufu((row[j] - m) * LOG2E)) / l;
}
