// What the kernels share: offsets, 16-byte packets, and sums over a warp or a block.
//
// One source for NVRTC, nvcc and g++ (the emulator), so no host header is included. cooperative_groups.h is left to
// the files that use it: it takes NVRTC over a second.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Element offsets are 64-bit: B * NH * T * T passes 2^31 at sizes that fit into one GPU.
typedef long long Offset;

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 1024 / kWarpSize;  // in the largest block that CUDA allows
constexpr unsigned kFullWarp = 0xffffffffu;

__host__ __device__ constexpr int ceil_div(int count, int size) { return (count + size - 1) / size; }

__device__ inline int lane_index() { return threadIdx.x % kWarpSize; }
__device__ inline int warp_index() { return threadIdx.x / kWarpSize; }

// ------------------------------------------------------------------------------------------------- packets

// 16 bytes, the most that one thread can load or store at once. Addresses must be multiples of 16.
template <class T>
struct alignas(16) Packet {
    static constexpr int size = 16 / sizeof(T);
    T values[size];

    __device__ T& operator[](int i) { return values[i]; }
    __device__ const T& operator[](int i) const { return values[i]; }
};

template <class T>
__device__ inline Packet<T> packet_of(int4 bits) {
    Packet<T> packet;
    memcpy(&packet, &bits, sizeof(bits));
    return packet;
}

template <class T>
__device__ inline int4 bits_of(const Packet<T>& packet) {
    int4 bits;
    memcpy(&bits, &packet, sizeof(bits));
    return bits;
}

template <class T>
__device__ inline Packet<T> load_packet(const T* address) {
    return packet_of<T>(*reinterpret_cast<const int4*>(address));
}

// Streaming: the line is the first to leave the caches. For data that nobody reads again soon.
template <class T>
__device__ inline Packet<T> load_packet_streaming(const T* address) {
    return packet_of<T>(__ldcs(reinterpret_cast<const int4*>(address)));
}

template <class T>
__device__ inline void store_packet(T* address, const Packet<T>& packet) {
    *reinterpret_cast<int4*>(address) = bits_of(packet);
}

template <class T>
__device__ inline void store_packet_streaming(T* address, const Packet<T>& packet) {
    __stcs(reinterpret_cast<int4*>(address), bits_of(packet));
}

// ---------------------------------------------------------------------------------------------- reductions

// The sum over the 32 lanes, in every lane. All lanes of the warp must call it together.
__device__ inline float warp_sum(float value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullWarp, value, distance);
    }
    return value;
}

// N sums over the block at once, each in every thread. All threads of a one-dimensional block of BlockSize
// threads (a multiple of 32) must call it together; it may be called any number of times.
template <int BlockSize, int N>
__device__ inline void block_sum(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = warp_sum(values[i]);
    if constexpr (BlockSize > kWarpSize) {
        constexpr int warps = BlockSize / kWarpSize;
        __shared__ float of_warp[N][kMaxWarps];
        __syncthreads();  // an earlier call's sums have been read by everybody
        if (lane_index() == 0) {
#pragma unroll
            for (int i = 0; i < N; ++i) of_warp[i][warp_index()] = values[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = warp_sum(lane_index() < warps ? of_warp[i][lane_index()] : 0.0f);
    }
}

template <int BlockSize>
__device__ inline float block_sum(float value) {
    float values[1] = {value};
    block_sum<BlockSize>(values);
    return values[0];
}
