// Kernels whose accesses are counted by hand in test_counts.py. One access a line, where lines are asked for.
#include "common.cuh"

__device__ int self() { return blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void copy(float* y, const float* x) {
    y[self()] = x[self()];
}

__global__ void strided(float* y, const float* x, int load, int store, int shift) {
    y[self() * store + shift] = x[self() * load];
}

__global__ void packets(float* y, const float* x) {
    const Packet<float> packet =
        load_packet(x + 4 * self());
    store_packet(y + 4 * self(), packet);
}

struct alignas(8) Pair {
    float a, b;
};
__global__ void structures(float* y, const float* x) {
    const Pair pair = reinterpret_cast<const Pair*>(x)[self()];
    const float3 three = reinterpret_cast<const float3*>(x)[self()];
    y[self()] = pair.a * pair.b + three.x * three.y * three.z;
}

// pitch: of a row of shared memory, in floats.
template <int Pitch>
__global__ void column(float* y, const float* x) {
    __shared__ float tile[32][Pitch];
    for (int row = threadIdx.x / 32; row < 32; row += blockDim.x / 32)
        tile[row][threadIdx.x % 32] = x[row * 32 + threadIdx.x % 32];
    __syncthreads();
    y[self()] = tile[threadIdx.x % 32][threadIdx.x / 32];
}

extern __shared__ float4 wide[];
__global__ void wide_rows(float* y, const float* x, int step) {
    wide[threadIdx.x] = make_float4(x[0], 1, 2, 3);
    __syncwarp();
    const float4 got = wide[threadIdx.x * step % 32];
    y[threadIdx.x] = got.x + got.y + got.z + got.w;
}

__global__ void bytes_in_words(float* y, const float* x) {
    __shared__ __nv_bfloat16 row[64];
    row[threadIdx.x] = from_float<__nv_bfloat16>(x[0]);
    y[threadIdx.x] = to_float(row[threadIdx.x]);
}

__global__ void atomics(float* y, const float* x) {
    __shared__ float sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&y[0], x[self()]);
    atomicAdd(&y[self()], 1.0f);
    atomicAdd(&sum, 1.0f);
}

__global__ void barriers(float* y, const float* x) {
    for (int i = 0; i < 3; ++i)
        __syncthreads();
    y[self()] = block_sum<64>(
        x[self()]);
}

// Lanes leave the loop one after another.
__global__ void triangle(float* y, const float* x) {
    float sum = 0;
    for (int i = 0; i < threadIdx.x; ++i)
        sum += x[32 * i + threadIdx.x];
    y[threadIdx.x] = sum;
}

// Half of the lanes in each turn: never all 32 together, although each lane comes here as often as all others.
__global__ void checkered(float* y, const float* x) {
    float sum = 0;
    for (int i = 0; i < 4; ++i)
        if ((i + threadIdx.x) % 2 == 0)
            sum += x[32 * i + threadIdx.x];
    y[threadIdx.x] = sum;
}

__device__ __noinline__ float fetch(const float* x, int i) {
    return x[i];
}
__global__ void calls(float* y, const float* x) {
    float sum = fetch(x, threadIdx.x);
    if (threadIdx.x % 2) sum += fetch(x, 0);
    y[threadIdx.x] = sum;
}

__global__ void rows_of_8(float* y, const float* x) {
    y[threadIdx.y * 64 + threadIdx.x] = x[threadIdx.y * 64 + threadIdx.x];
}

__global__ void long_way(float* y, const float* x, int turns) {
    float sum = 0;
    for (int i = 0; i < turns; ++i) sum += x[i % 32];
    y[threadIdx.x] = sum;
}

__global__ void beyond(float* y, const float* x, int i) {
    y[i] = x[i];
}
