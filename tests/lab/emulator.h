// Runs the lab's CUDA kernels on a CPU: included before a kernel's source, it stands in for lab.cuh and for CUDA's own words.
//
// Each thread of a block is a fibre with a stack of its own; it runs until it must wait for its warp or its block. Blocks run one after
// another. Warp-wide instructions follow the PTX ISA's tables of fragments. cp.async copies when the thread waits for it, not before, so a
// missing wait shows. Every address that load_shared and ldmatrix read is kept: `request_at` gives them, request by request.
#define ONCHIP_LAB_CUH

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifdef DYNAMIC_SHARED  // extern __shared__ int memory[]
#define __shared__
#else
#define __shared__ static
#endif
#define extern_c extern "C" __attribute__((visibility("default")))

typedef unsigned short half;
struct Dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

struct Barrier { unsigned arrived = 0, generation = 0; };
struct Copy { half* to; const half* from; };
constexpr size_t STACK = 1 << 16;
struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    Dim3 index;
    bool done;
    unsigned exchanges, loads;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
struct Warp {
    Barrier barrier;
    unsigned lanes = 0;
    unsigned char slots[2][32][32];  // alternating: who writes the next exchange may not disturb who still reads this one
};

static std::vector<Fibre> fibres;
static std::vector<Warp> warps;
static Barrier block_barrier;
static unsigned current;
static ucontext_t scheduler;
static std::vector<std::vector<int64_t>> requests;  // each: bytes a lane, 32 addresses (−1 for a lane that reads nothing), 1 if .trans
static std::map<std::pair<unsigned, unsigned>, size_t> seen;  // (warp, number of the load) → request
static void (*body)();

static Fibre& me() { return fibres[current]; }
static Warp& my_warp() { return warps[current / 32]; }

static void yield() {
    unsigned self = current;
    swapcontext(&fibres[self].context, &scheduler);
}

static void wait(Barrier& barrier, unsigned count) {
    unsigned generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
    } else {
        while (barrier.generation == generation) yield();
    }
}

static inline void __syncthreads() { wait(block_barrier, fibres.size()); }
static inline void __syncwarp() { wait(my_warp().barrier, my_warp().lanes); }
static inline long long clock64() { static long long ticks; return ++ticks; }
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }

// Every lane's value, once all have given theirs.
template <typename T> static const unsigned char (*exchange(const T& mine))[32] {
    static_assert(sizeof(T) <= 32);
    auto slots = my_warp().slots[me().exchanges++ % 2];
    memcpy(slots[current % 32], &mine, sizeof(T));
    __syncwarp();
    return slots;
}

template <typename T> static T from_lane(const unsigned char (*slots)[32], unsigned lane) {
    T value;
    memcpy(&value, slots[lane], sizeof(T));
    return value;
}

constexpr float LOG2E = 1.44269504089f;
static inline float infinity() { return INFINITY; }
static inline float to_float(half x) { _Float16 y; memcpy(&y, &x, 2); return float(y); }
static inline half to_half(float x) { _Float16 y = _Float16(x); half bits; memcpy(&bits, &y, 2); return bits; }
static inline float from_bfloat(half x) { return __int_as_float(int(x) << 16); }
static inline half to_bfloat(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest even
}
static inline unsigned pack(float low, float high) { return unsigned(to_half(high)) << 16 | to_half(low); }
static inline float exp2_mufu(float x) { return exp2f(x); }
template <typename T> static T load_l2(const T* p) { return *p; }
static inline float shuffle_xor(float x, int mask) { return from_lane<float>(exchange(x), current % 32 ^ mask); }

static void record(int width, unsigned lane, const void* address, unsigned number, bool transposed = false) {
    auto [at, fresh] = seen.try_emplace({current / 32, number}, requests.size());
    if (fresh) requests.emplace_back(34, -1);
    requests[at->second][0] = width;
    requests[at->second][33] = transposed;
    requests[at->second][1 + lane] = int64_t(address);
}

static inline half load_shared(const half* p) {
    record(2, current % 32, p, me().loads++);
    return *p;
}

template <int COUNT> static void ldmatrix(unsigned (&r)[COUNT], const half* row, bool transposed) {
    unsigned load = me().loads++;
    if (current % 32 < 8 * COUNT) record(16, current % 32, row, load, transposed);  // the other lanes' addresses are not looked at
    if (uintptr_t(row) % 16) {
        fprintf(stderr, "misaligned address\n");
        _exit(3);
    }
    auto rows = exchange(row);
    unsigned lane = current % 32;
    for (int i = 0; i < COUNT; ++i) {
        half two[2];
        for (unsigned e = 0; e < 2; ++e) {
            unsigned y = transposed ? lane % 4 * 2 + e : lane / 4, x = transposed ? lane / 4 : lane % 4 * 2 + e;
            two[e] = from_lane<const half*>(rows, 8 * i + y)[x];
        }
        r[i] = unsigned(two[1]) << 16 | two[0];
    }
}
static inline void ldmatrix_x4(unsigned (&r)[4], const half* row) { ldmatrix(r, row, false); }
static inline void ldmatrix_x4_trans(unsigned (&r)[4], const half* row) { ldmatrix(r, row, true); }
static inline void ldmatrix_x2(unsigned (&r)[2], const half* row) { ldmatrix(r, row, false); }
static inline void ldmatrix_x1(unsigned (&r)[1], const half* row) { ldmatrix(r, row, false); }

static void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operands { unsigned a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    auto all = exchange(mine);
    unsigned lane = current % 32;
    for (int i = 0; i < 4; ++i) {
        unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; ++k) {
            unsigned a_pair = from_lane<Operands>(all, row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2];
            unsigned b_pair = from_lane<Operands>(all, column * 4 + k % 8 / 2).b[k / 8];
            d[i] += to_float(half(a_pair >> k % 2 * 16)) * to_float(half(b_pair >> k % 2 * 16));
        }
    }
}

static inline void copy_async(half* to, const half* from) { me().open.push_back({to, from}); }
static inline void commit_copies() { me().groups.push_back(std::move(me().open)); me().open.clear(); }
template <int PENDING> static void wait_copies() {
    for (auto& groups = me().groups; groups.size() > PENDING; groups.pop_front())
        for (auto [to, from] : groups.front()) memcpy(to, from, 16);
}

#ifdef DYNAMIC_SHARED
int memory[1 << 18];
#endif

static void start() {
    body();
    me().done = true;
    yield();
}

static void run_block(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) {
        Fibre& fibre = fibres[i];
        fibre.done = false;
        fibre.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        getcontext(&fibre.context);
        fibre.exchanges = fibre.loads = 0;
        fibre.groups.clear();
        fibre.open.clear();
        fibre.context.uc_stack = {fibre.stack.get(), 0, STACK};
        makecontext(&fibre.context, start, 0);
    }
    for (unsigned alive = threads; alive > 0;) {
        alive = 0;
        for (current = 0; current < threads; ++current)
            if (!me().done) {
                threadIdx = me().index;
                swapcontext(&scheduler, &me().context);
                alive += !fibres[current].done;
            }
    }
}

typedef void (*Kernel)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);
static Kernel kernel;
static int64_t words[8];
static float number;

// The calling convention hands integers and floating-point numbers over in different registers, so that one call serves every kernel with at
// most eight pointers or integers and one float, wherever the float stands.
extern_c void launch(void* function, const unsigned* grid, const unsigned* block, const int64_t* integers, float real) {
    kernel = Kernel(function);
    memcpy(words, integers, sizeof words);
    number = real;
    body = [] { kernel(words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7], number); };
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    unsigned threads = block[0] * block[1] * block[2];
    requests.clear();
    fibres = std::vector<Fibre>(threads);
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x) {
                warps = std::vector<Warp>((threads + 31) / 32);
                for (unsigned i = 0; i < threads; ++i) ++warps[i / 32].lanes;
                block_barrier = {};
                seen.clear();
                run_block(threads);
            }
}

// The number of requests, and the 34 numbers of one of them.
extern_c int64_t request_count() { return requests.size(); }
extern_c const int64_t* request_at(int64_t i) { return requests[i].data(); }
