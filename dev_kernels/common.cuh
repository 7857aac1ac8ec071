// What the kernels share: offsets, conversions, 16-byte packets, and reductions over a warp or a block.
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

// --------------------------------------------------------------------------------------------- conversions

// Kernels store float, __nv_bfloat16 or __half, and compute in float.
__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// Rounded to the nearest, ties to even.
template <class T>
__device__ inline T from_float(float value) {
    return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
    return __float2half_rn(value);
}

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

// Packets of a row of `size` elements, where Aligned says that the row begins at a multiple of 16 bytes and `size` is a
// multiple of a packet. Else elements move one by one: what lies past the end is `fill` when loaded, and not stored.
template <bool Aligned, class T>
__device__ inline Packet<T> load_row_packet(const T* row, int first, int size, T fill) {
    if constexpr (Aligned) {
        return load_packet(row + first);
    } else {
        Packet<T> packet;
#pragma unroll
        for (int i = 0; i < Packet<T>::size; ++i) packet[i] = first + i < size ? row[first + i] : fill;
        return packet;
    }
}

template <bool Aligned, class T>
__device__ inline Packet<T> load_row_packet_streaming(const T* row, int first, int size, T fill) {
    if constexpr (Aligned) {
        return load_packet_streaming(row + first);
    } else {
        Packet<T> packet;
#pragma unroll
        for (int i = 0; i < Packet<T>::size; ++i) packet[i] = first + i < size ? __ldcs(row + first + i) : fill;
        return packet;
    }
}

template <bool Aligned, class T>
__device__ inline void store_row_packet(T* row, int first, int size, const Packet<T>& packet) {
    if constexpr (Aligned) {
        store_packet(row + first, packet);
    } else {
#pragma unroll
        for (int i = 0; i < Packet<T>::size; ++i) {
            if (first + i < size) row[first + i] = packet[i];
        }
    }
}

template <bool Aligned, class T>
__device__ inline void store_row_packet_streaming(T* row, int first, int size, const Packet<T>& packet) {
    if constexpr (Aligned) {
        store_packet_streaming(row + first, packet);
    } else {
#pragma unroll
        for (int i = 0; i < Packet<T>::size; ++i) {
            if (first + i < size) __stcs(row + first + i, packet[i]);
        }
    }
}

// ------------------------------------------------------------------------------------------ asynchronous copies

// One thread's copies of 16 bytes from global into shared memory, past registers and L1. In each step it starts one, or
// none, and may then wait() for those of all steps but the last `Pending`. Addresses are multiples of 16. What the
// thread read from `target` before, it read before it is overwritten; other threads see the copy after a barrier. The
// emulator copies as late as it may, so that a read without a wait finds something else.
template <int Pending>
class AsyncCopies {
#ifdef KBENCH_EMULATOR
    static constexpr int kStarted = Pending + 1;
    int4* targets[kStarted] = {};
    const int4* sources[kStarted] = {};
    int oldest = 0;

public:
    void start(bool wanted, int4* target, const void* source) {
        targets[oldest] = wanted ? target : nullptr;
        sources[oldest] = static_cast<const int4*>(source);
        oldest = (oldest + 1) % kStarted;
    }
    void wait() {
        if (targets[oldest]) *targets[oldest] = *sources[oldest];
    }
#else
public:
    __device__ void start(bool wanted, int4* target, const void* source) {
        if (wanted) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(target))),
                         "l"(__cvta_generic_to_global(source))
                         : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }
#endif
};

// Has L2 fetch `bytes` bytes: one thread asks for all. Both are multiples of 16. Before sm_90 it does nothing.
__device__ inline void fetch_into_l2(const void* address, int bytes) {
#if !defined(KBENCH_EMULATOR) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(bytes)
                 : "memory");
#endif
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

// The largest value of the 32 lanes, in every lane. All lanes of the warp must call it together.
__device__ inline float warp_max(float value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
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

// The sum and the largest value over a one-dimensional block of any number of whole warps, in every thread. All threads
// must call them together; they may be called any number of times.
__device__ inline float any_block_sum(float value) {
    __shared__ float of_warp[kMaxWarps];
    value = warp_sum(value);
    __syncthreads();  // an earlier call's sums have been read by everybody
    if (lane_index() == 0) of_warp[warp_index()] = value;
    __syncthreads();
    return warp_sum(lane_index() < int(blockDim.x) / kWarpSize ? of_warp[lane_index()] : 0.0f);
}

__device__ inline float any_block_max(float value) {
    __shared__ float of_warp[kMaxWarps];
    value = warp_max(value);
    __syncthreads();  // an earlier call's maxima have been read by everybody
    if (lane_index() == 0) of_warp[warp_index()] = value;
    __syncthreads();
    return warp_max(lane_index() < int(blockDim.x) / kWarpSize ? of_warp[lane_index()] : -infinity());
}
