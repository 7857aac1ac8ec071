// Execution space words, shared memory, barriers, and kernels of every kind that can be named.
#include <assert.h>
#include <cooperative_groups.h>
#include <stdio.h>

__constant__ float kTable[4] = {1, 2, 3, 4};
__device__ int total = 100;

static __device__ __forceinline__ int plus_one(int x) { return x + 1; }
__device__ __noinline__ int times_two(int x) { return 2 * x; }
__host__ __device__ inline int square(int x) { return x * x; }

template <class T, int N> struct Tile {
    static __device__ T* memory() {
        __shared__ __align__(16) T cells[N];
        return cells;
    }
};

__global__ void __launch_bounds__(64, 2) words(int* __restrict__ out, const __grid_constant__ int base) {
    __shared__ float grid[2][33];
    extern __shared__ double dynamic[];
    int* cells = Tile<int, 64>::memory();
    const int id = threadIdx.x;
    cells[id] = plus_one(id), grid[id / 32][id % 32] = kTable[id % 4], dynamic[id] = id;
    __syncthreads();
    const int other = 63 - id;
    out[id] = base + square(times_two(cells[other])) + (int)grid[other / 32][other % 32] + (int)dynamic[other] + total;
}

// Blocks run at the same time: each must find only its own numbers.
__global__ void private_to_the_block(int* wrong, int rounds) {
    __shared__ int cells[32];
    for (int round = 0; round < rounds; ++round) {
        cells[threadIdx.x] = (int)blockIdx.x + round;
        __syncthreads();
        if (cells[31 - threadIdx.x] != (int)blockIdx.x + round) atomicAdd(wrong, 1);
        __syncthreads();
    }
}

__global__ void barriers(int* out) {
    const int id = threadIdx.x, n = blockDim.x;
    out[id] = __syncthreads_count(id % 3 == 0);
    out[n + id] = __syncthreads_and(id < n) * 2 + __syncthreads_and(id != 5);
    out[2 * n + id] = __syncthreads_or(id == 7) * 2 + __syncthreads_or(id < 0);
    __threadfence();
    __threadfence_block();
    __threadfence_system();
    __nanosleep(1);
    const long long before = clock64();
    out[3 * n + id] = clock64() >= before && clock() >= 0 && warpSize == 32;
}

__global__ void indices(unsigned int* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const uint3 here = threadIdx;
    const dim3 shape = blockDim;
    out[block * shape.x * shape.y * shape.z + thread] = block * 1000 + thread + (here.x == threadIdx.x ? 0 : 1000000);
}

// ---- names: overloads, templates, namespaces, C linkage, defaults
__global__ void overloaded(float* out) { out[0] = 1; }
__global__ void overloaded(int* out) { out[0] = 2; }
template <class T, int N = 5> __global__ void templated(T* out) { out[0] = N; }
template <int N> __global__ void templated(float* out, int more) { out[0] = N + more; }
namespace inner {
template <bool yes> __global__ void scoped(float* out) { out[0] = yes ? 7 : 8; }
}  // namespace inner
extern "C" __global__ void c_linkage(float* out) { out[0] = 9; }
static __global__ void internal(float* out) { out[0] = 10; }
__global__ void many(float* out, float a, double b, long long c, unsigned char d, bool e, short f, const int* g,
                     float4 h) {
    out[0] = a + (float)b + (float)c + d + e + f + g[0] + h.w;
}

// ---- faults: the line must be this file's
__global__ void asserts(int n) {
    assert(n > 0 && "n must be positive");
}
__global__ void traps() {
    __trap();
}
__global__ void grid_barrier() {
    cooperative_groups::this_grid().sync();
}
__global__ void divergent_group(float* out) {
    const auto block = cooperative_groups::this_thread_block();
    if (threadIdx.x < 32)
        block.sync();
    else
        cooperative_groups::sync(block);
    out[threadIdx.x] = 1;
}
__global__ void prints(int value) {
    if (threadIdx.x == 0) printf("value %d of %s\n", value, "printf");
}
