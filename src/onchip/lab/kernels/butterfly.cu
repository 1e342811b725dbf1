// A reduction that leaves its result in every lane: log2(LANES) exchanges with the lane whose number differs in one bit.
//
// OP 0: the maximum. OP 1: the sum. OP 2: the pair (m, l) of online softmax, l = Σ e^(x − m), merged by
//     m = max(m_a, m_b)      l = l_a e^(m_a − m) + l_b e^(m_b − m)
// LANES 32: a row spread over a warp. LANES 4: a row of an mma accumulator. Each round works on the result of the one before, so that
// clocks[0] / ROUNDS is a latency. One warp. out[lane]: the maximum, the mean, or m + ln(mean e^(x − m)), each of the lane's group.
#include "lab.cuh"

constexpr int ROUNDS = 16;

extern "C" __global__ void butterfly(const float* x, float* out, long long* clocks) {
    int lane = threadIdx.x;
    float m = shuffle_xor(x[lane], 0);  // an exchange with itself: x has arrived before the clock is read
    float l = OP == 2 ? 1.f : m;
    long long start = clock64();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
            if (OP == 0) m = fmaxf(m, shuffle_xor(m, mask));
            if (OP == 1) l += shuffle_xor(l, mask);
            if (OP == 2) {
                float m_other = shuffle_xor(m, mask), l_other = shuffle_xor(l, mask);
                float m_new = fmaxf(m, m_other);
                l = l * exp2_mufu((m - m_new) * LOG2E) + l_other * exp2_mufu((m_other - m_new) * LOG2E);
                m = m_new;
            }
        }
        if (OP > 0) l *= 1.f / LANES;  // else LANES^ROUNDS would overflow
    }
    long long end = clock64();
    out[lane] = OP == 0 ? m : OP == 1 ? l : m + logf(l);
    if (lane == 0) clocks[0] = end - start;
}
