// Gradient of the logits of softmax and cross-entropy together:
//     dlogits[b, t, v] = (probs[b, t, v] - (v == targets[b, t])) * dlosses[b, t]
//
// There is one version:
//
//   1  four packets of 16 bytes per thread, whose loads are under way together: the tensor is one line of packets,
//      wherever rows begin, so all accesses are aligned
//
// dlogits may be the same memory as probs, so pointers are not __restrict__; a thread reads all its packets before it
// writes any.
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
__global__ void __launch_bounds__(kMaxBlock)
crossentropy_softmax_backward1(T* dlogits, const T* probs, const int* targets, const float* dlosses, int rows, int V) {
    constexpr int kPacket = Packet<T>::size;
    constexpr int kBatch = 4;  // packets per thread
    // The division by V is of 64 bits for a block, and of 32 bits for a packet.
    const Offset count = Offset(rows) * V;
    const Offset block_start = Offset(blockIdx.x) * blockDim.x * (kBatch * kPacket);
    const Offset block_row = block_start / V;
    const unsigned block_column = unsigned(block_start - block_row * V);
    const auto within_block = [](int i) { return (i * blockDim.x + threadIdx.x) * kPacket; };

    Packet<T> packets[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const Offset start = block_start + within_block(i);
        if (start + kPacket <= count) {
            packets[i] = load_packet_streaming(probs + start);
        } else {
#pragma unroll
            for (int j = 0; j < kPacket; ++j) {
                if (start + j < count) packets[i][j] = probs[start + j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const Offset start = block_start + within_block(i);
        if (start >= count) return;
        const unsigned column = block_column + within_block(i);
        replace_by_gradient(packets[i], block_row + column / V, column % V, targets, dlosses, rows, V);
        if (start + kPacket <= count) {
            store_packet_streaming(dlogits + start, packets[i]);
        } else {
#pragma unroll
            for (int j = 0; j < kPacket; ++j) {
                if (start + j < count) dlogits[start + j] = packets[i][j];
            }
        }
    }
}
