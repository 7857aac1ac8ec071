// Softmax over rows: out[r, c] = exp(inp[r, c] - largest of row r) / sum over c2 of exp(inp[r, c2] - largest of row r).
//
// Rows may be very long, as those of logits over a vocabulary are.
//
// Versions:
//
//   1  one thread per row, three passes: the largest, the sum, the results. The sum of so many terms is compensated: it
//      carries the error of its last addition along
//   2  one block per row: neighbouring threads read neighbouring elements, trees in shared memory combine their results
//   3  one warp per row: shuffles in place of trees, no shared memory, no barriers
//   4  one block per row: shuffles within warps, then thread 0 combines the warps' results
//   5  as 1, online: the largest and the sum in one pass, so two passes in all. Back to a thread per row, to see what
//      the saved pass buys
//   6  one warp per row, online: lanes merge pairs of largest and sum
//   7  one block per row, online, read once: it waits in shared memory for its second pass, while asynchronous copies
//      bring the next row
//   8  as 6, 16 bytes per access; lanes agree on the largest of the row before they add up their sums, so each rescales
//      its sum once, not in every merge
//
// Where a row does not fit into shared memory, 7 reads it twice, the second time backwards.
//
// Exponentials are computed twice rather than kept in `out`, where they would be rounded to its type. Rows need not
// begin at multiples of 16 bytes: packets of 7 and 8 begin at the first sector of memory in each row. Grids have one
// dimension.
#include "softmax.cuh"

constexpr int kMaxBlock = 1024;  // keeps a kernel that takes any block size at 65536 / 1024 registers or below
constexpr int kBatch = 4;        // packets of a thread that are loaded at the same time, unless a version says
static_assert(kBatch * Packet<float>::size % 16 == 0, "SoftmaxSum adds 16 elements at a time");

// ----------------------------------------------------------------------------------- 1: a thread per row, three passes

// A sum that carries the error of its last addition along. A thread that adds a whole row by itself needs it: once the
// sum is 1, exponentials below 2^-24 would all be lost, and a long row has enough of them to be missed.
struct CompensatedSum {
    float sum = 0.0f;
    float excess = 0.0f;  // of `sum` over the sum without rounding

    __device__ void add(float value) {
        const float term = value - excess;
        const float next = sum + term;
        excess = (next - sum) - term;
        sum = next;
    }
    __device__ void scale(float factor) { sum *= factor, excess *= factor; }
};

template <class T>
__device__ inline void store_softmax_row(T* __restrict__ out, const T* __restrict__ inp, int C, float largest,
                                         float sum) {
    const float scale = 1.0f / sum;
    for (int c = 0; c < C; ++c) out[c] = from_float<T>(expf(to_float(inp[c]) - largest) * scale);
}

template <class T>
__global__ void softmax_forward1(T* __restrict__ out, const T* __restrict__ inp, int N, int C) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= N) return;
    inp += row * C, out += row * C;

    float largest = -infinity();
    for (int c = 0; c < C; ++c) largest = fmaxf(largest, to_float(inp[c]));
    CompensatedSum sum;
    for (int c = 0; c < C; ++c) sum.add(expf(to_float(inp[c]) - largest));
    store_softmax_row(out, inp, C, largest, sum.sum);
}

// --------------------------------------------------------------------- 2 to 4: a block or a warp per row, three passes

// What thread number `thread` of `threads` has of a row: elements thread, thread + threads, ...
template <class T>
__device__ inline float largest_of_thread(const T* __restrict__ inp, int C, int thread, int threads) {
    float largest = -infinity();  // stays so in threads that have no element
    for (int c = thread; c < C; c += threads) largest = fmaxf(largest, to_float(inp[c]));
    return largest;
}

template <class T>
__device__ inline float sum_of_thread(const T* __restrict__ inp, int C, float largest, int thread, int threads) {
    float sum = 0.0f;
    for (int c = thread; c < C; c += threads) sum += expf(to_float(inp[c]) - largest);
    return sum;
}

template <class T>
__device__ inline void store_softmax(T* __restrict__ out, const T* __restrict__ inp, int C, float largest, float sum,
                                     int thread, int threads) {
    const float scale = 1.0f / sum;
    for (int c = thread; c < C; c += threads) out[c] = from_float<T>(expf(to_float(inp[c]) - largest) * scale);
}

// Combines the values of all threads in `shared`, one float per thread: the upper half is folded onto the lower, until
// one is left. Of an odd number the one in the middle waits for the next round.
template <class Combine>
__device__ inline float combine_in_tree(float* shared, float value, Combine combine) {
    const int thread = threadIdx.x;
    __syncthreads();  // an earlier result has been read by everybody
    shared[thread] = value;
    __syncthreads();
    for (int count = blockDim.x; count > 1;) {
        const int kept = ceil_div(count, 2);
        if (thread + kept < count) shared[thread] = combine(shared[thread], shared[thread + kept]);
        __syncthreads();
        count = kept;
    }
    return shared[0];
}

template <class T>
__global__ void softmax_forward2(T* __restrict__ out, const T* __restrict__ inp, int C) {
    extern __shared__ float of_thread[];
    const int thread = threadIdx.x, threads = blockDim.x;
    inp += Offset(blockIdx.x) * C, out += Offset(blockIdx.x) * C;

    const float largest = combine_in_tree(of_thread, largest_of_thread(inp, C, thread, threads),
                                          [](float a, float b) { return fmaxf(a, b); });
    const float sum = combine_in_tree(of_thread, sum_of_thread(inp, C, largest, thread, threads),
                                      [](float a, float b) { return a + b; });
    store_softmax(out, inp, C, largest, sum, thread, threads);
}

template <class T>
__global__ void softmax_forward3(T* __restrict__ out, const T* __restrict__ inp, int C) {
    inp += Offset(blockIdx.x) * C, out += Offset(blockIdx.x) * C;
    const float largest = warp_max(largest_of_thread(inp, C, lane_index(), kWarpSize));
    const float sum = warp_sum(sum_of_thread(inp, C, largest, lane_index(), kWarpSize));
    store_softmax(out, inp, C, largest, sum, lane_index(), kWarpSize);
}

template <class T>
__global__ void softmax_forward4(T* __restrict__ out, const T* __restrict__ inp, int C) {
    // Each stage has memory of its own: warp 0 may write the sum while the last warp still reads the largest value.
    __shared__ float largest_of_warp[kMaxWarps], sum_of_warp[kMaxWarps];
    const int thread = threadIdx.x, threads = blockDim.x;
    const int warps = threads / kWarpSize;
    inp += Offset(blockIdx.x) * C, out += Offset(blockIdx.x) * C;

    const float my_largest = warp_max(largest_of_thread(inp, C, thread, threads));
    if (lane_index() == 0) largest_of_warp[warp_index()] = my_largest;
    __syncthreads();
    if (thread == 0) {
        float largest = my_largest;
        for (int i = 1; i < warps; ++i) largest = fmaxf(largest, largest_of_warp[i]);
        largest_of_warp[0] = largest;
    }
    __syncthreads();
    const float largest = largest_of_warp[0];

    const float my_sum = warp_sum(sum_of_thread(inp, C, largest, thread, threads));
    if (lane_index() == 0) sum_of_warp[warp_index()] = my_sum;
    __syncthreads();
    if (thread == 0) {
        float sum = my_sum;
        for (int i = 1; i < warps; ++i) sum += sum_of_warp[i];
        sum_of_warp[0] = sum;
    }
    __syncthreads();
    store_softmax(out, inp, C, largest, sum_of_warp[0], thread, threads);
}

// ----------------------------------------------------------------------------------------- 5: online, a thread per row

template <class T>
__global__ void softmax_forward5(T* __restrict__ out, const T* __restrict__ inp, int N, int C) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= N) return;
    inp += row * C, out += row * C;

    float largest = -infinity();
    CompensatedSum sum;
    for (int c = 0; c < C; ++c) {
        const float value = to_float(inp[c]);
        if (value > largest) {
            sum.scale(expf(largest - value));  // by 0 at the first value, when there is nothing to scale
            largest = value;
        }
        sum.add(expf(value - largest));
    }
    store_softmax_row(out, inp, C, largest, sum.sum);
}

// ------------------------------------------------------------------------------------------- 6: online, a warp per row

// Of two parts of a row: the larger of the two largest, and the sum of the other part rescaled to it.
__device__ inline SoftmaxSum merge(SoftmaxSum a, SoftmaxSum b) {
    const SoftmaxSum& upper = a.largest > b.largest ? a : b;
    const SoftmaxSum& lower = a.largest > b.largest ? b : a;
    SoftmaxSum both = upper;
    both.sum += lower.sum * expf(lower.largest - upper.largest);
    return both;
}

template <class T>
__global__ void softmax_forward6(T* __restrict__ out, const T* __restrict__ inp, int N, int C) {
    const Offset row = Offset(blockIdx.x) * (blockDim.x / kWarpSize) + warp_index();
    if (row >= N) return;
    inp += row * C, out += row * C;

    SoftmaxSum all;
    for (int c = lane_index(); c < C; c += kWarpSize) all.add(to_float(inp[c]));
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        SoftmaxSum other;
        other.largest = __shfl_xor_sync(kFullWarp, all.largest, distance);
        other.sum = __shfl_xor_sync(kFullWarp, all.sum, distance);
        all = merge(all, other);
    }
    // Nobody reads the results soon: streaming stores leave the caches to the rows that are read a second time.
    const float scale = 1.0f / all.sum;
    for (int c = lane_index(); c < C; c += kWarpSize) {
        __stcs(out + c, from_float<T>(expf(to_float(inp[c]) - all.largest) * scale));
    }
}

// ----------------------------------------------------------------------------------------- 7 and 8: online, by packets

template <class T>
__device__ inline T softmax_of(T value, float largest, float scale) {
    return from_float<T>(__expf(to_float(value) - largest) * scale);
}

template <class T>
__device__ inline void store_softmax_packet(T* __restrict__ out, const Packet<T>& values, float largest, float scale) {
    Packet<T> result;
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) result[i] = softmax_of(values[i], largest, scale);
    store_packet_streaming(out, result);
}

// The largest and the sum of what thread number `thread` of `threads` has of a row: packets, Batch of them at a time,
// and one edge at most.
template <int Batch, class T>
__device__ inline SoftmaxSum softmax_sum_of_thread(const T* __restrict__ inp, const RowParts<T>& row, int thread,
                                                   int threads) {
    SoftmaxSum mine;
    if (thread < row.edges) mine.add(to_float(inp[row.edge(thread)]));
    for (int first = thread; first < row.packets; first += Batch * threads) {
        Packet<T> loaded[Batch];
        load_clamped<false>(loaded, inp + row.head, first, threads, row.packets);
        mine.add(loaded, first, threads, row.packets);
    }
    return mine;
}

// The results of that thread, from its last batch of packets to its first: the last is the likeliest still in a cache.
template <int Batch, class T>
__device__ inline void store_softmax_of_thread(T* __restrict__ out, const T* __restrict__ inp, const RowParts<T>& row,
                                               SoftmaxSum all, int thread, int threads) {
    const float scale = 1.0f / all.sum;
    const int step = Batch * threads;
    const int last = thread + (row.packets - 1 - thread) / step * step;
    for (int first = row.packets <= thread ? -1 : last; first >= 0; first -= step) {
        Packet<T> loaded[Batch];
        load_clamped<true>(loaded, inp + row.head, first, threads, row.packets);
#pragma unroll
        for (int i = 0; i < Batch; ++i) {
            const int p = first + i * threads;
            T* const target = out + row.head + Offset(p) * Packet<T>::size;
            if (p < row.packets) store_softmax_packet(target, loaded[i], all.largest, scale);
        }
    }
    if (thread < row.edges) {
        const int c = row.edge(thread);
        out[c] = softmax_of(inp[c], all.largest, scale);
    }
}

// Rows blockIdx.x, blockIdx.x + gridDim.x, ... one after the other. In round i a block reads its row i and stores the
// results of its row i - 1, packet by packet in the same steps: memory reads and writes all the time, and each byte
// once. Round 0 stores nothing, and the round after the last row reads nothing.
template <class T, int Ahead>
__global__ void __launch_bounds__(kMaxBlock)
softmax_forward7(T* __restrict__ out, const T* __restrict__ inp, int N, int C) {
    extern __shared__ int4 held[];
    const int thread = threadIdx.x, threads = blockDim.x;
    RowRing<T, Ahead> ring(held, inp, C, N, C);
    const int end = steps_of<T>(C) * threads;
    RowParts<T> last;  // the row whose results are stored
    float last_edge = 0.0f, largest = 0.0f, scale = 0.0f;

    for (Offset row = blockIdx.x; row < Offset(N) + gridDim.x; row += gridDim.x) {
        const T* const source = inp + row * C;
        T* const target = out + (row - gridDim.x) * C;
        const RowParts<T> next = row < N ? RowParts<T>(source, C) : RowParts<T>();
        const float next_edge = thread < next.edges ? to_float(source[next.edge(thread)]) : 0.0f;
        T* result = target + last.head + thread * Packet<T>::size;
        SoftmaxSum mine;
        for (int p = thread; p < end; p += threads) {
            Packet<T> leaving;
            if (p < last.packets) leaving = packet_of<T>(ring.leaving());
            ring.refill();
            if (p < last.packets) store_softmax_packet(result, leaving, largest, scale);
            result += threads * Packet<T>::size;
            const int4& arrived = ring.arrived();
            if (p < next.packets) mine.add(packet_of<T>(arrived));
        }
        if (thread < last.edges) target[last.edge(thread)] = from_float<T>(__expf(last_edge - largest) * scale);
        if (thread < next.edges) mine.add(next_edge);

        const SoftmaxSum all = block_merge(mine);
        last = next, last_edge = next_edge, largest = all.largest, scale = 1.0f / all.sum;
    }
}

// Rows that do not fit into shared memory are read twice; the second time a part of them is still in L2.
template <class T>
__global__ void __launch_bounds__(kMaxBlock)
softmax_forward7_long(T* __restrict__ out, const T* __restrict__ inp, int C) {
    inp += Offset(blockIdx.x) * C, out += Offset(blockIdx.x) * C;
    const RowParts<T> parts(inp, C);
    const SoftmaxSum all = block_merge(softmax_sum_of_thread<kBatch>(inp, parts, threadIdx.x, blockDim.x));
    store_softmax_of_thread<kBatch>(out, inp, parts, all, threadIdx.x, blockDim.x);
}

template <class T, int Batch>
__global__ void __launch_bounds__(kMaxBlock)
softmax_forward8(T* __restrict__ out, const T* __restrict__ inp, int N, int C) {
    const Offset row = Offset(blockIdx.x) * (blockDim.x / kWarpSize) + warp_index();
    if (row >= N) return;
    inp += row * C, out += row * C;
    const RowParts<T> parts(inp, C);
    const SoftmaxSum all = warp_merge(softmax_sum_of_thread<Batch>(inp, parts, lane_index(), kWarpSize));
    store_softmax_of_thread<Batch>(out, inp, parts, all, lane_index(), kWarpSize);
}
