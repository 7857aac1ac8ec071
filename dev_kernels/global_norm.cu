// Sum of squares of a long vector, the square of the norm by which gradients are clipped: out = sum of data[i]^2.
//
// A grid as large as the GPU holds strides over the vector. Versions differ in how the threads' sums come together.
//
// Versions ("+": what it adds to the one before):
//
//   1  one atomic per block: shuffles within each warp, shared memory between them
//   2  one atomic per warp: shuffles only, no shared memory, no barrier
//   3  as 1, 16 bytes per load, two loads under way in each thread
//   4  + no atomics: one partial sum per block, and a second kernel adds them up in an order that never changes; four
//      loads under way
//   5  as 4, one kernel: the last block to end adds up the blocks' sums
//
// The length may be any: what is left after the last whole packet is added element by element. Sums are fp32.
#include "common.cuh"

constexpr int kMaxBlock = 1024;

__device__ inline Offset first_of_thread() { return Offset(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline Offset threads_of_grid() { return Offset(gridDim.x) * blockDim.x; }

// ------------------------------------------------------------------------------------------- 1 and 2: one by one

// The squares of a thread's elements: neighbouring threads have neighbouring elements.
template <class T>
__device__ inline float squares(const T* __restrict__ data, Offset count) {
    float sum = 0.0f;
    for (Offset i = first_of_thread(); i < count; i += threads_of_grid()) {
        const float value = to_float(data[i]);
        sum += value * value;
    }
    return sum;
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock)
global_norm1(float* __restrict__ out, const T* __restrict__ data, Offset count) {
    __shared__ float of_warp[kMaxWarps];
    const float sum = warp_sum(squares(data, count));
    if (lane_index() == 0) of_warp[warp_index()] = sum;
    __syncthreads();
    if (warp_index() == 0) {
        const int warps = blockDim.x / kWarpSize;
        const float of_block = warp_sum(lane_index() < warps ? of_warp[lane_index()] : 0.0f);
        if (lane_index() == 0) atomicAdd(out, of_block);
    }
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock)
global_norm2(float* __restrict__ out, const T* __restrict__ data, Offset count) {
    const float sum = warp_sum(squares(data, count));
    if (lane_index() == 0) atomicAdd(out, sum);
}

// -------------------------------------------------------------------------------------------- 3 and 4: by packets

template <class T>
__device__ inline void add_squares(float& sum, const Packet<T>& packet) {
#pragma unroll
    for (int k = 0; k < Packet<T>::size; ++k) {
        const float value = to_float(packet[k]);
        sum += value * value;
    }
}

// As `squares`, by packets, N of them under way at the same time. Few variables live through the loop, so that four
// packets fit into 32 registers: a multiprocessor then holds all of its threads, and the grid has no second round.
template <int N, class T>
__device__ inline float packet_squares(const T* __restrict__ data, Offset count) {
    constexpr int kPacket = Packet<T>::size;
    const Offset step = threads_of_grid() * kPacket;
    const Offset whole = count / kPacket * kPacket;
    Offset at = first_of_thread() * kPacket;
    float sum = 0.0f, other = 0.0f;  // two chains of additions
    for (const Offset stop = whole - (N - 1) * step; at < stop;) {
        Packet<T> loaded[N];
#pragma unroll
        for (int i = 0; i < N; ++i, at += step) loaded[i] = load_packet_streaming(data + at);
#pragma unroll
        for (int i = 0; i < N; ++i) add_squares(i % 2 == 0 ? sum : other, loaded[i]);
    }
    for (; at < whole; at += step) add_squares(sum, load_packet_streaming(data + at));
    // Of the elements after the last packet, the first threads of the grid take one each.
    const Offset rest = whole + first_of_thread();
    if (rest < count) {
        const float value = to_float(data[rest]);
        other += value * value;
    }
    return sum + other;
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock)
global_norm3(float* __restrict__ out, const T* __restrict__ data, Offset count) {
    const float sum = any_block_sum(packet_squares<2>(data, count));
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

template <class T, int Packets>
__global__ void __launch_bounds__(kMaxBlock)
global_norm4(float* __restrict__ partials, const T* __restrict__ data, Offset count) {
    const float sum = any_block_sum(packet_squares<Packets>(data, count));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One block adds up any number of partial sums.
__global__ void __launch_bounds__(kMaxBlock)
add_partials(float* __restrict__ out, const float* __restrict__ partials, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = any_block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

// ---------------------------------------------------------------------------------- 5: the last block adds them up

// As `add_partials`, in the last block that comes here with the sum of its own; `counter` starts as 0. Partial sums are
// read past L1, which is not kept coherent with what other multiprocessors write. Which block is the last differs from
// run to run, but not what it adds up, nor in which order. The 2: as many blocks as the grid counts on must fit.
template <class T>
__global__ void __launch_bounds__(kMaxBlock, 2)
global_norm5(float* __restrict__ out, const T* __restrict__ data, Offset count, float* __restrict__ partials,
             unsigned* __restrict__ counter) {
    __shared__ bool last;
    const float of_block = any_block_sum(packet_squares<4>(data, count));
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = of_block;
        __threadfence();  // the partial sum is visible before the block is counted
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();  // no partial sum is read before all blocks were counted
    constexpr int kBatch = 4;  // loads under way: else each would wait for the sum before it
    float sum = 0.0f;
    for (unsigned first = threadIdx.x; first < gridDim.x; first += kBatch * blockDim.x) {
        float batch[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const unsigned i = first + k * blockDim.x;
            batch[k] = i < gridDim.x ? __ldcg(partials + i) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) sum += batch[k];
    }
    sum = any_block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}
