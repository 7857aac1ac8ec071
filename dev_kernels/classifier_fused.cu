// The end of a language model, forward and backward at once: softmax, cross-entropy loss, and gradient of the logits.
//
// Row r = (b, t) of `logits` has P elements, of which the first V are logits z; the others are padding. With target y:
//     p[i]          = exp(z[i] - largest) / sum over j of exp(z[j] - largest)
//     losses[r]     = -log p[y] = log(sum) + largest - z[y]
//     dlogits[r, i] = (p[i] - (i == y)) * dlosses[r]      for i < V, and 0 in the padding
//
// Probabilities are never stored: a first pass over a row finds its largest element and its sum, a second one computes
// the gradient.
//
// Versions:
//
//   1  one warp per row, online softmax: the largest and the sum in one pass
//   2  one block per row, four elements per access; the first pass walks backwards, so that the second one begins with
//      what the caches hold
//   3  as 2, one element per access: a step back, to see what wide accesses buy
//   4  as 2, 16 bytes per access in every type, streaming
//   5  one block per row, read once: it waits in shared memory for its second pass, while asynchronous copies bring the
//      next row; packets begin at the first sector of each row, and none needs a guard for V
//   6  as 5, made for gradients in place of the logits and a matrix product after it: the last row first, and stores
//      that stay in L2, so that the product, which begins with row 0, finds the newest rows there
//
// Where a row does not fit into shared memory, 5 and 6 read it twice, the second time backwards.
//
// dlogits may be the same memory as logits, so pointers are not __restrict__, and two orders matter: the logit of the
// target is read before a barrier that all writes of the row come after, and an element of the second pass is read by
// the thread that then overwrites it. Grids have one dimension.
#include "softmax.cuh"

constexpr int kMaxBlock = 1024;  // keeps a kernel that takes any block size at 65536 / 1024 registers or below
constexpr int kBatch = 4;        // packets of a thread that are loaded at the same time
static_assert(kBatch * Packet<float>::size % 16 == 0, "SoftmaxSum adds 16 elements at a time");

// What the gradient of a row takes besides its logits.
struct RowGradient {
    float largest, scale, dloss;
    int target;

    __device__ RowGradient(SoftmaxSum row, float dloss, int target)
        : largest(row.largest), scale(1.0f / row.sum), dloss(dloss), target(target) {}

    __device__ float at(int column, float logit) const {
        const float probability = expf(logit - largest) * scale;
        return (probability - (column == target ? 1.0f : 0.0f)) * dloss;
    }
};

// -log of the target's probability. As a difference: a probability too small for a float still has a finite logarithm.
__device__ inline float loss_of(SoftmaxSum row, float logit_of_target) {
    return logf(row.sum) + (row.largest - logit_of_target);
}

// ------------------------------------------------------------------------------------------------ a warp per row

template <class T>
__global__ void classifier_fused1(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses,
                                  int rows, int V, int P) {
    const Offset row = Offset(blockIdx.x) * (blockDim.x / kWarpSize) + warp_index();
    if (row >= rows) return;
    const T* const source = logits + row * P;
    T* const result = dlogits + row * P;
    const int target = targets[row];
    const float logit_of_target = to_float(source[target]);

    SoftmaxSum mine;
    for (int i = lane_index(); i < V; i += kWarpSize) mine.add(to_float(source[i]));
    const SoftmaxSum all = warp_merge(mine);
    __syncwarp();  // lane 0 has read the target's logit: shuffles alone do not order memory accesses
    if (lane_index() == 0) losses[row] = loss_of(all, logit_of_target);

    const RowGradient gradient(all, dlosses[row], target);
    for (int i = lane_index(); i < P; i += kWarpSize) {
        result[i] = from_float<T>(i < V ? gradient.at(i, to_float(source[i])) : 0.0f);
    }
}

// ----------------------------------------------------------------------------------------------- a block per row

// Count elements that move at once; their address is a multiple of their size.
template <class T, int Count>
struct alignas(sizeof(T) * Count) Group {
    T values[Count];
};

// Group number `group` of a row of `size` elements; past the end of the row it holds zeros. Aligned: `size` is a
// multiple of Count, so that every group of every row is aligned and none reaches over the end.
template <bool Aligned, bool Streaming, class T, int Count>
__device__ inline void load_group(Group<T, Count>& loaded, const T* row, int group, int size) {
    if constexpr (Aligned && Streaming && sizeof(T) * Count == 16) {
        const Packet<T> packet = load_packet_streaming(row + group * Count);
#pragma unroll
        for (int i = 0; i < Count; ++i) loaded.values[i] = packet[i];
    } else if constexpr (Aligned) {
        loaded = *reinterpret_cast<const Group<T, Count>*>(row + group * Count);
    } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const int column = group * Count + i;
            loaded.values[i] = column < size ? row[column] : from_float<T>(0.0f);
        }
    }
}

template <bool Aligned, bool Streaming, class T, int Count>
__device__ inline void store_group(T* row, const Group<T, Count>& values, int group, int size) {
    if constexpr (Aligned && Streaming && sizeof(T) * Count == 16) {
        Packet<T> packet;
#pragma unroll
        for (int i = 0; i < Count; ++i) packet[i] = values.values[i];
        store_packet_streaming(row + group * Count, packet);
    } else if constexpr (Aligned) {
        *reinterpret_cast<Group<T, Count>*>(row + group * Count) = values;
    } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const int column = group * Count + i;
            if (column < size) row[column] = values.values[i];
        }
    }
}

// Versions 2 to 4: a row in groups of Count elements. Groups that reach into the padding are loaded like others, but
// what they hold of it is not used.
template <bool Aligned, bool Streaming, int Count, class T>
__device__ inline void classify_row(T* result, float* loss, const T* source, int target, float dloss, int V, int P) {
    const int thread = threadIdx.x, threads = blockDim.x;
    float logit_of_target = 0.0f;
    if (thread == 0) logit_of_target = to_float(source[target]);

    SoftmaxSum mine;
    const int groups = ceil_div(V, Count);
    const int last = thread + (groups - 1 - thread) / threads * threads;
    for (int g = groups <= thread ? -1 : last; g >= 0; g -= threads) {
        Group<T, Count> loaded;
        load_group<Aligned, Streaming>(loaded, source, g, P);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (g * Count + i < V) mine.add(to_float(loaded.values[i]));
        }
    }
    const SoftmaxSum all = block_merge(mine);  // a barrier: the target's logit has been read
    if (thread == 0) *loss = loss_of(all, logit_of_target);

    const RowGradient gradient(all, dloss, target);
    for (int g = thread; g < ceil_div(P, Count); g += threads) {
        Group<T, Count> loaded, computed;
        load_group<Aligned, Streaming>(loaded, source, g, P);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const int column = g * Count + i;
            const float value = column < V ? gradient.at(column, to_float(loaded.values[i])) : 0.0f;
            computed.values[i] = from_float<T>(value);
        }
        store_group<Aligned, Streaming>(result, computed, g, P);
    }
}

template <class T, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock)
classifier_fused2(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses, int V, int P) {
    const Offset row = blockIdx.x;
    classify_row<Aligned, false, 4>(dlogits + row * P, losses + row, logits + row * P, targets[row], dlosses[row], V,
                                    P);
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock)
classifier_fused3(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses, int V, int P) {
    const Offset row = blockIdx.x;
    classify_row<true, false, 1>(dlogits + row * P, losses + row, logits + row * P, targets[row], dlosses[row], V, P);
}

template <class T, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock)
classifier_fused4(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses, int V, int P) {
    const Offset row = blockIdx.x;
    classify_row<Aligned, true, Packet<T>::size>(dlogits + row * P, losses + row, logits + row * P, targets[row],
                                                 dlosses[row], V, P);
}

// ------------------------------------------------------------------------------------- 5 and 6: each row read once

// As RowGradient, with nothing to compare per element: the one element that is the target's is computed apart.
struct PacketGradient {
    float largest = 0.0f, scale = 0.0f, of_target = 0.0f;
    int target = -1;

    __device__ PacketGradient() {}
    __device__ PacketGradient(SoftmaxSum row, float logit_of_target, float dloss, int target)
        : largest(row.largest), scale(dloss / row.sum),
          of_target(RowGradient(row, dloss, target).at(target, logit_of_target)), target(target) {}

    __device__ float elsewhere(float logit) const { return __expf(logit - largest) * scale; }
};

// The packet of a row's gradient that begins at `column`, from that of its logits. Streaming: nobody reads it soon.
template <bool Streaming, class T>
__device__ inline void store_gradient(T* packet, const Packet<T>& logits, int column, const PacketGradient& gradient) {
    Packet<T> computed;
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) computed[i] = from_float<T>(gradient.elsewhere(to_float(logits[i])));
    if constexpr (Streaming) {
        store_packet_streaming(packet, computed);
    } else {
        store_packet(packet, computed);
    }
    // Over the packet, by the same thread.
    const int target = gradient.target - column;
    if (0 <= target && target < Packet<T>::size) packet[target] = from_float<T>(gradient.of_target);
}

template <class T>
__device__ inline void store_edge(T* result, float logit, int column, const PacketGradient& gradient) {
    result[column] = from_float<T>(column == gradient.target ? gradient.of_target : gradient.elsewhere(logit));
}

template <bool Streaming, class T>
__device__ inline void zero_padding(T* result, int V, int P) {
    const T zero = from_float<T>(0.0f);
    for (int i = V + threadIdx.x; i < P; i += blockDim.x) {
        if constexpr (Streaming) {
            __stcs(result + i, zero);
        } else {
            result[i] = zero;
        }
    }
}

// Rows blockIdx.x, blockIdx.x + gridDim.x, ... one after the other, counted from the last one if Backwards (version 6).
// In round i a block reads its row i and stores the gradient of its row i - 1, packet by packet in the same steps:
// memory reads and writes all the time, and each byte once. Round 0 stores nothing, and the round after the last row
// reads nothing.
template <class T, int Ahead, bool Backwards>
__device__ inline void classify_rows(T* dlogits, float* losses, const T* logits, const int* targets,
                                     const float* dlosses, int rows, int V, int P) {
    extern __shared__ int4 held[];
    const int thread = threadIdx.x, threads = blockDim.x;
    const auto place_of = [=](Offset row) { return Backwards ? rows - 1 - row : row; };
    RowRing<T, Ahead> ring(held, logits + place_of(0) * P, Backwards ? -Offset(P) : Offset(P), rows, V);
    const int end = steps_of<T>(V) * threads;
    RowParts<T> last;  // the row whose gradient is stored
    PacketGradient gradient;
    float last_edge = 0.0f;
    int target = targets[place_of(blockIdx.x)];

    for (Offset row = blockIdx.x; row < Offset(rows) + gridDim.x; row += gridDim.x) {
        const bool loads = row < rows, stores = row >= gridDim.x;
        const Offset place = place_of(row);
        const T* const source = logits + place * P;
        T* const result = dlogits + place_of(row - gridDim.x) * P;
        const RowParts<T> next = loads ? RowParts<T>(source, V) : RowParts<T>();
        const float dloss = loads ? dlosses[place] : 0.0f;
        const float logit_of_target = loads ? to_float(source[target]) : 0.0f;
        // A round early: an address that is itself waited for would hold up the round.
        const int next_target = row + gridDim.x < rows ? targets[place_of(row + gridDim.x)] : 0;
        const float next_edge = thread < next.edges ? to_float(source[next.edge(thread)]) : 0.0f;
        int column = last.head + thread * Packet<T>::size;
        SoftmaxSum mine;
        for (int p = thread; p < end; p += threads) {
            Packet<T> leaving;
            if (p < last.packets) leaving = packet_of<T>(ring.leaving());
            ring.refill();
            if (p < last.packets) store_gradient<!Backwards>(result + column, leaving, column, gradient);
            column += threads * Packet<T>::size;
            const int4& arrived = ring.arrived();
            if (p < next.packets) mine.add(packet_of<T>(arrived));
        }
        if (thread < last.edges) store_edge(result, last_edge, last.edge(thread), gradient);
        if (stores) zero_padding<!Backwards>(result, V, P);
        if (thread < next.edges) mine.add(next_edge);

        const SoftmaxSum all = block_merge(mine);  // a barrier: the target's logit has been read
        if (loads && thread == 0) losses[place] = loss_of(all, logit_of_target);
        last = next, last_edge = next_edge, gradient = PacketGradient(all, logit_of_target, dloss, target);
        target = next_target;
    }
}

template <class T, int Ahead>
__global__ void __launch_bounds__(kMaxBlock)
classifier_fused5(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses, int rows, int V,
                  int P) {
    classify_rows<T, Ahead, false>(dlogits, losses, logits, targets, dlosses, rows, V, P);
}

template <class T, int Ahead>
__global__ void __launch_bounds__(kMaxBlock)
classifier_fused6(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses, int rows, int V,
                  int P) {
    classify_rows<T, Ahead, true>(dlogits, losses, logits, targets, dlosses, rows, V, P);
}

// Rows that do not fit into shared memory are read twice, the second time backwards: what was read last is the
// likeliest still in L2.
template <class T, bool Backwards>
__global__ void __launch_bounds__(kMaxBlock)
classifier_fused_long(T* dlogits, float* losses, const T* logits, const int* targets, const float* dlosses, int V,
                      int P) {
    const int thread = threadIdx.x, threads = blockDim.x;
    const Offset row = Backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const T* const source = logits + row * P;
    T* const result = dlogits + row * P;
    const RowParts<T> parts(source, V);
    const int target = targets[row];
    const float logit_of_target = to_float(source[target]);
    const float edge = thread < parts.edges ? to_float(source[parts.edge(thread)]) : 0.0f;

    SoftmaxSum mine;
    if (thread < parts.edges) mine.add(edge);
    const int step = kBatch * threads;
    int first = thread;
    for (; first < parts.packets; first += step) {
        Packet<T> loaded[kBatch];
        load_clamped<false>(loaded, source + parts.head, first, threads, parts.packets);
        mine.add(loaded, first, threads, parts.packets);
    }
    const SoftmaxSum all = block_merge(mine);  // a barrier: the target's logit has been read
    if (thread == 0) losses[row] = loss_of(all, logit_of_target);

    const PacketGradient gradient(all, logit_of_target, dlosses[row], target);
    for (first -= step; first >= 0; first -= step) {
        Packet<T> loaded[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            // No clamp here: the last packet may have been overwritten by its own thread.
            const int p = first + i * threads;
            if (p < parts.packets) loaded[i] = load_packet_streaming(source + parts.head + p * Packet<T>::size);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int p = first + i * threads, column = parts.head + p * Packet<T>::size;
            if (p < parts.packets) store_gradient<!Backwards>(result + column, loaded[i], column, gradient);
        }
    }
    if (thread < parts.edges) store_edge(result, edge, parts.edge(thread), gradient);
    zero_padding<!Backwards>(result, V, P);
}
