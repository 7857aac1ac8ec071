// Gradient of the logits of softmax and cross-entropy together:
//     dlogits[b, t, v] = (probs[b, t, v] - (v == targets[b, t])) * dlosses[b, t]
//
// There is one version:
//
//   1  four packets of 16 bytes per thread, whose loads are under way together: the tensor is one line of packets,
//      wherever rows begin, so all accesses are aligned; a thread divides once, and then finds the rows of its packets
//      by comparing
//
// dlogits may be the same memory as probs, so these two are not __restrict__; a thread reads all its packets before it
// writes any. Loads and stores have no streaming hints: with four packets per thread, they make this kernel slower.
#include "common.cuh"

constexpr int kMaxBlock = 1024;  // keeps the kernel, which takes any block size, at 65536 / 1024 registers or below

__device__ inline float gradient(float probability, bool is_target, float dloss) {
    return (probability - (is_target ? 1.0f : 0.0f)) * dloss;
}

// The gradient in place of a packet of probabilities, the first of which is at `column` of `row`. Most packets lie
// within a row; others walk from row to row, up to the last row.
template <class T>
__device__ inline void replace_by_gradient(Packet<T>& packet, Offset row, unsigned column, const int* targets,
                                           const float* dlosses, Offset rows, unsigned V) {
    int target = targets[row];
    float dloss = dlosses[row];
    if (column + Packet<T>::size <= V) {
#pragma unroll
        for (int i = 0; i < Packet<T>::size; ++i) {
            packet[i] = from_float<T>(gradient(to_float(packet[i]), column + i == unsigned(target), dloss));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i, ++column) {
        if (column == V) {
            column = 0;
            ++row;
            if (row == rows) return;  // the last packet of all may be shorter
            target = targets[row], dloss = dlosses[row];
        }
        packet[i] = from_float<T>(gradient(to_float(packet[i]), column == unsigned(target), dloss));
    }
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock, 1)
crossentropy_softmax_backward1(T* dlogits, const T* probs, const int* __restrict__ targets,
                               const float* __restrict__ dlosses, int rows, int V) {
    constexpr int kPacket = Packet<T>::size;
    constexpr int kBatch = 4;  // packets per thread
    const Offset count = Offset(rows) * V;
    const Offset block_start = Offset(blockIdx.x) * blockDim.x * (kBatch * kPacket);
    // From here on in 32 bits: a thread's packets are `step` elements apart, from `first` of the block's on. `left` is
    // what there is from that element on, as far as the block may reach: at most 2^15 elements.
    const int step = blockDim.x * kPacket, first = threadIdx.x * kPacket;
    const int left = int(min(count - block_start, Offset(kBatch * step))) - first;
    const T* const from = probs + block_start + first;
    T* const to = dlogits + block_start + first;

    Packet<T> packets[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        if (i * step + kPacket <= left) {
            packets[i] = load_packet(from + i * step);
        } else {
#pragma unroll
            for (int j = 0; j < kPacket; ++j) {
                if (i * step + j < left) packets[i][j] = from[i * step + j];
            }
        }
    }

    // The one division of 64 bits, by V, is of the block's start. Where rows are longer than what a block has, most
    // threads need no other one.
    Offset row = block_start / V;
    unsigned column = unsigned(block_start - row * V) + first;
#pragma unroll
    for (int i = 0; i < kBatch; ++i, column += step) {
        if (i * step >= left) return;
        if (column >= unsigned(V)) row += column / V, column %= V;
        replace_by_gradient(packets[i], row, column, targets, dlosses, rows, V);
        if (i * step + kPacket <= left) {
            store_packet(to + i * step, packets[i]);
        } else {
#pragma unroll
            for (int j = 0; j < kPacket; ++j) {
                if (i * step + j < left) to[i * step + j] = packets[i][j];
            }
        }
    }
}
