// The few machine instructions the lab's kernels need that plain CUDA C++ has no word for. No other header is included: NVRTC alone compiles
// every kernel.
#ifndef ONCHIP_LAB_CUH
#define ONCHIP_LAB_CUH

typedef unsigned short half;  // the bits of an IEEE fp16

constexpr float LOG2E = 1.44269504089f;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

__device__ inline float to_float(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ inline half to_half(float x) {  // rounds to nearest even; beyond 65519.99 to infinity
    half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ inline half to_bfloat(float x) {  // the same for bf16, whose bits are the upper half of an fp32
    half y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ inline float from_bfloat(half x) { return __int_as_float(int(x) << 16); }

// Two fp16 in one register, `low` in the lower half: how mma takes its operands.
__device__ inline unsigned pack(float low, float high) { return unsigned(to_half(high)) << 16 | to_half(low); }

// 2^x by one MUFU instruction; e^x = 2^(x log2 e).
__device__ inline float exp2_mufu(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The value of the lane whose number differs in the bits of `mask`.
__device__ inline float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Reads of device memory that L1 does not keep: what a block asks for is what L2 is asked for, as with cp.async.
__device__ inline unsigned load_l2(const unsigned* p) {
    unsigned x;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}

__device__ inline uint4 load_l2(const uint4* p) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

// A read the compiler may neither keep in a register nor merge.
__device__ inline half load_shared(const half* p) { return *(const volatile half*)p; }

// Four 8×8 matrices of fp16: lane i gives the address of 16-byte row i % 8 of matrix i / 8 and receives, from each, elements 2 (i % 4) and
// 2 (i % 4) + 1 of row i / 4.
__device__ inline void ldmatrix_x4(unsigned (&r)[4], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Two matrices, whose rows lanes 0 to 15 address, and one, lanes 0 to 7.
__device__ inline void ldmatrix_x2(unsigned (&r)[2], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}

__device__ inline void ldmatrix_x1(unsigned (&r)[1], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(shared_address(row)) : "memory");
}

// Four, each transposed on its way: element pairs run down a column.
__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// d (16×8, fp32) += a (16×16, fp16) · b (16×8, fp16), all three spread over the warp. With g = lane / 4 and t = lane % 4 a lane holds
//   a[0] (g, 2t) a[1] (g + 8, 2t) a[2] (g, 2t + 8) a[3] (g + 8, 2t + 8)      and each one's right neighbour
//   b0 (2t, g) b1 (2t + 8, g)                                                and each one's lower neighbour
//   d[0], d[1] (g, 2t), (g, 2t + 1)      d[2], d[3] the same in row g + 8: a row lies in four lanes
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from device to shared memory that no register holds and no thread waits for (cp.async).
__device__ inline void copy_async(half* to, const half* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of this thread's committed groups are on their way.
template <int PENDING> __device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

#endif
