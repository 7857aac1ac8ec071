// Backward pass of LayerNorm: gradients of its input, weight and bias from the gradient of its output.
//
// Per row of C channels, with mean and rstd as the forward pass left them, in fp32:
//     n = (inp - mean) * rstd,  d = weight * dout
//     dinp    += rstd * (d - mean of d - n * mean of (d * n))        dinp holds the residual stream's gradient already
//     dweight  = sum over rows of n * dout,  dbias = sum over rows of dout        (or += where `accumulate` is set)
// A row is easy: one warp, two passes. Versions differ in how they add up N rows into 2 C sums, always in fp32.
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per row, two global atomics per element
//   2  one warp per row: shared-memory atomics add up the rows of a block, then global ones the sums of the blocks
//   3  + persistent blocks: as many as fit on the GPU, with many rows each, so fewer sums of blocks; streaming loads
//   4  + sums of blocks added in pairs, by 64-bit compare-and-swap
//   5  one block per multiprocessor, each with an area of its own for its sums; the last to end adds up the areas
//   6  as 3, in one kernel: the last block to end converts the sums
//   7  + four channels loaded at once; both means in one chain of shuffles
//   8  + 16 bytes per access; sums in an order in which the 32 lanes of an atomic meet 32 banks
//   9  as 8, no atomic sums, so deterministic: warps hand their terms to warp 0, which adds them up; areas as in 5
//  10  + nothing handed over: threads keep their channels, whose sums stay in registers, from row to row, and only the
//      means of a row cross warps. A second kernel, of many blocks, adds up the areas
//
// Where 2 C floats do not fit into shared memory, the sums of a block are in global memory instead (Shared = false).
// Where a row has over two packets per thread, too many for registers, version 10 keeps its sums there, too. Versions 1
// to 4 end with a small kernel that converts their sums. Any N and C: what does not fill a packet, a warp or a block
// works on zeros.
#include "common.cuh"

constexpr int kMaxBlock = 1024;  // keeps a kernel that takes any block size at 65536 / 1024 registers or below

// -------------------------------------------------------------------------------------------------- shared parts

__device__ inline float* dynamic_shared() {
    extern __shared__ float4 memory[];  // its type sets the alignment: 16 bytes
    return reinterpret_cast<float*>(memory);
}

// What one row needs to know of itself.
struct RowMeans {
    float mean, rstd;
    float d, dn;  // means of d and of d * n

    __device__ float normalised(float x) const { return (x - mean) * rstd; }
    __device__ float input_gradient(float n, float product) const { return rstd * (product - d - n * dn); }
};

// One row's arrays.
template <class T>
struct Row {
    T* dinp;
    const T* dout;
    const T* inp;
    float mean, rstd;

    __device__ Row(T* dinps, const T* douts, const T* inps, const float* means, const float* rstds, Offset row, int C)
        : dinp(dinps + row * C), dout(douts + row * C), inp(inps + row * C), mean(means[row]), rstd(rstds[row]) {}
};

// Sums of `width` channels are those of dweight, then those of dbias.

template <class T>
__device__ inline void store_gradient(T* gradient, int channel, float sum, int accumulate) {
    gradient[channel] = from_float<T>(accumulate ? to_float(gradient[channel]) + sum : sum);
}

// dweight and dbias from sums over all rows.
template <class T>
__global__ void convert_sums(T* dweight, T* dbias, const float* sums, int C, int accumulate) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    store_gradient(dweight, c, sums[c], accumulate);
    store_gradient(dbias, c, sums[C + c], accumulate);
}

__device__ inline void clear(float* sums, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) sums[i] = 0.0f;
    __syncthreads();
}

// Where the warps of a block add up: cleared shared memory, or the sums of all blocks, which the plan has cleared.
template <bool Shared>
__device__ inline float* begin_sums(float* sums, int count) {
    if constexpr (Shared) {
        clear(dynamic_shared(), count);
        return dynamic_shared();
    } else {
        return sums;
    }
}

// Adds the sums of this block to those of all blocks, unless they are there already.
template <bool Shared>
__device__ inline void add_to_all(float* sums, const float* block_sums, int count) {
    if constexpr (Shared) {
        __syncthreads();  // all rows of this block are in its sums
        for (int i = threadIdx.x; i < count; i += blockDim.x) atomicAdd(sums + i, block_sums[i]);
    }
}

// Copies the sums of this block to its area in global memory, unless they are there already.
template <bool Shared>
__device__ inline void copy_to_area(float* area, const float* block_sums, int count) {
    if constexpr (Shared) {
        __syncthreads();  // all rows of this block are in its sums
        for (int i = threadIdx.x; i < count; i += blockDim.x) area[i] = block_sums[i];
    }
}

// True in the block that comes last, which then sees all that the others have written. All threads must call it.
__device__ inline bool is_last_block(unsigned* counter) {
    __shared__ bool last;
    __threadfence();  // what this thread has written is visible before the block is counted
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __syncthreads();
    __threadfence();  // nothing is read before all blocks were counted
    return last;
}

// The end of versions 5 and 9: the last block adds up all areas, in their order. place(c): which sum is channel c's.
template <class T, class Place>
__device__ inline void last_block_adds_areas(T* dweight, T* dbias, const float* areas, unsigned* counter, int width,
                                             int C, int accumulate, Place place) {
    if (!is_last_block(counter)) return;
    const auto sum_of = [&](int i) {
        float sum = 0.0f;
#pragma unroll 8
        for (unsigned area = 0; area < gridDim.x; ++area) sum += areas[Offset(area) * 2 * width + i];
        return sum;
    };
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        store_gradient(dweight, c, sum_of(place(c)), accumulate);
        store_gradient(dbias, c, sum_of(width + place(c)), accumulate);
    }
}

// The end of versions 6 to 8: the last block converts the sums of all. The word behind them counts the blocks, so that
// one step of the plan clears both.
template <class T, class Place>
__device__ inline void last_block_converts(T* dweight, T* dbias, float* sums, int width, int C, int accumulate,
                                           Place place) {
    if (!is_last_block(reinterpret_cast<unsigned*>(sums + 2 * width))) return;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        store_gradient(dweight, c, sums[place(c)], accumulate);
        store_gradient(dbias, c, sums[width + place(c)], accumulate);
    }
}

struct InOrder {
    __device__ int operator()(int channel) const { return channel; }
};

// The rows of this warp, where all warps of the grid take turns.
template <class Work>
__device__ inline void each_row_of_warp(int N, Work work) {
    const int warps = blockDim.x / kWarpSize;
    for (Offset row = Offset(blockIdx.x) * warps + warp_index(); row < N; row += Offset(gridDim.x) * warps) work(row);
}

// ------------------------------------------------------------------------------- 1 to 6: element by element

// First pass over channels first, first + step, ... of a row: adds up d and d * n.
template <class T>
__device__ inline void add_row(RowMeans& means, const Row<T>& row, const T* __restrict__ weight, int first, int step,
                               int C) {
    for (int c = first; c < C; c += step) {
        const float d = to_float(weight[c]) * to_float(row.dout[c]);
        means.d += d;
        means.dn += d * means.normalised(to_float(row.inp[c]));
    }
}

// Adds one element's terms to the sums; returns its gradient.
__device__ inline float finish_element(float* sums, int c, int C, const RowMeans& means, float dy, float x, float w) {
    const float n = means.normalised(x);
    atomicAdd(sums + c, n * dy);
    atomicAdd(sums + C + c, dy);
    return means.input_gradient(n, w * dy);
}

// Second pass. Streaming: nobody reads this row of dout and inp again.
template <bool Streaming, class T>
__device__ inline void finish_row(float* sums, const RowMeans& means, const Row<T>& row, const T* __restrict__ weight,
                                  int first, int step, int C) {
    for (int c = first; c < C; c += step) {
        const float dy = to_float(Streaming ? __ldcs(row.dout + c) : row.dout[c]);
        const float x = to_float(Streaming ? __ldcs(row.inp + c) : row.inp[c]);
        const float gradient = finish_element(sums, c, C, means, dy, x, to_float(weight[c]));
        row.dinp[c] = from_float<T>(to_float(row.dinp[c]) + gradient);
    }
}

template <class T>
__global__ void layernorm_backward1(T* dinp, float* sums, const T* dout, const T* inp, const T* weight,
                                    const float* mean, const float* rstd, int N, int C) {
    const Offset index = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= N) return;
    const Row<T> row(dinp, dout, inp, mean, rstd, index, C);
    RowMeans means = {row.mean, row.rstd, 0.0f, 0.0f};
    add_row(means, row, weight, 0, 1, C);
    means.d /= C, means.dn /= C;
    finish_row<false>(sums, means, row, weight, 0, 1, C);
}

// A row by one warp, all of whose lanes must call it together.
template <bool Streaming, class T>
__device__ inline void warp_row(float* sums, const Row<T>& row, const T* weight, int C) {
    RowMeans means = {row.mean, row.rstd, 0.0f, 0.0f};
    add_row(means, row, weight, lane_index(), kWarpSize, C);
    means.d = warp_sum(means.d) / C;
    means.dn = warp_sum(means.dn) / C;
    finish_row<Streaming>(sums, means, row, weight, lane_index(), kWarpSize, C);
}

// All rows of this warp, element by element, streaming.
template <class T>
__device__ inline void warp_rows(T* dinp, float* sums, const T* dout, const T* inp, const T* weight, const float* mean,
                                 const float* rstd, int N, int C) {
    each_row_of_warp(N, [&](Offset row) {
        warp_row<true>(sums, Row<T>(dinp, dout, inp, mean, rstd, row, C), weight, C);
    });
}

template <class T, bool Shared>
__global__ void layernorm_backward2(T* dinp, float* sums, const T* dout, const T* inp, const T* weight,
                                    const float* mean, const float* rstd, int N, int C) {
    float* block_sums = begin_sums<Shared>(sums, 2 * C);
    const Offset row = Offset(blockIdx.x) * (blockDim.x / kWarpSize) + warp_index();
    // No early return: warps without a row have to reach the barrier, too.
    if (row < N) warp_row<false>(block_sums, Row<T>(dinp, dout, inp, mean, rstd, row, C), weight, C);
    add_to_all<Shared>(sums, block_sums, 2 * C);
}

template <class T, bool Shared>
__global__ void layernorm_backward3(T* dinp, float* sums, const T* dout, const T* inp, const T* weight,
                                    const float* mean, const float* rstd, int N, int C) {
    float* block_sums = begin_sums<Shared>(sums, 2 * C);
    warp_rows(dinp, block_sums, dout, inp, weight, mean, rstd, N, C);
    add_to_all<Shared>(sums, block_sums, 2 * C);
}

// Adds two neighbouring floats at an address that is a multiple of 8, as one atomic operation.
__device__ inline void add_pair(float* pair, float2 terms) {
    auto* address = reinterpret_cast<unsigned long long*>(pair);
    unsigned long long found = __ldcg(address), expected;  // from L2: that is where the atomics happen
    do {
        expected = found;
        float2 sum;
        memcpy(&sum, &expected, sizeof(sum));
        sum.x += terms.x, sum.y += terms.y;
        unsigned long long bits;
        memcpy(&bits, &sum, sizeof(bits));
        found = atomicCAS(address, expected, bits);
    } while (found != expected);  // another block was faster
}

template <class T, bool Shared>
__global__ void layernorm_backward4(T* dinp, float* sums, const T* dout, const T* inp, const T* weight,
                                    const float* mean, const float* rstd, int N, int C) {
    float* block_sums = begin_sums<Shared>(sums, 2 * C);
    warp_rows(dinp, block_sums, dout, inp, weight, mean, rstd, N, C);
    if constexpr (Shared) {
        __syncthreads();  // all rows of this block are in its sums
        // 2 C sums are C pairs, whatever C is: for odd C one of them holds a sum of each kind.
        for (int i = threadIdx.x; i < C; i += blockDim.x) {
            add_pair(sums + 2 * i, {block_sums[2 * i], block_sums[2 * i + 1]});
        }
    }
}

template <class T, bool Shared>
__global__ void layernorm_backward5(T* dinp, T* dweight, T* dbias, float* areas, unsigned* counter, const T* dout,
                                    const T* inp, const T* weight, const float* mean, const float* rstd, int N, int C,
                                    int accumulate) {
    float* area = areas + Offset(blockIdx.x) * 2 * C;
    float* block_sums = Shared ? dynamic_shared() : area;
    clear(block_sums, 2 * C);
    warp_rows(dinp, block_sums, dout, inp, weight, mean, rstd, N, C);
    copy_to_area<Shared>(area, block_sums, 2 * C);
    last_block_adds_areas(dweight, dbias, areas, counter, C, C, accumulate, InOrder());
}

template <class T, bool Shared>
__global__ void layernorm_backward6(T* dinp, T* dweight, T* dbias, float* sums, const T* dout, const T* inp,
                                    const T* weight, const float* mean, const float* rstd, int N, int C,
                                    int accumulate) {
    float* block_sums = begin_sums<Shared>(sums, 2 * C);
    warp_rows(dinp, block_sums, dout, inp, weight, mean, rstd, N, C);
    add_to_all<Shared>(sums, block_sums, 2 * C);
    last_block_converts(dweight, dbias, sums, C, C, accumulate, InOrder());
}

// -------------------------------------------------------------------------------- 7: several loads under way at once

constexpr int kBatch = 4;  // channels of a lane that are loaded before the first of them is used

// Channels c, c + 32, ... of an array; 0 from C on.
template <class T>
__device__ inline void load_batch(float (&values)[kBatch], const T* __restrict__ array, int c, int C) {
    T raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const int channel = c + i * kWarpSize;
        raw[i] = channel < C ? array[channel] : from_float<T>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = to_float(raw[i]);
}

template <class T>
__device__ inline void warp_row_batched(float* sums, const Row<T>& row, const T* __restrict__ weight, int C) {
    RowMeans means = {row.mean, row.rstd, 0.0f, 0.0f};
    float dy[kBatch], x[kBatch], w[kBatch], before[kBatch];
    const auto load = [&](int c) {
        load_batch(dy, row.dout, c, C);
        load_batch(x, row.inp, c, C);
        load_batch(w, weight, c, C);
    };
    for (int c = lane_index(); c < C; c += kBatch * kWarpSize) {
        load(c);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            means.d += w[i] * dy[i];
            means.dn += w[i] * dy[i] * means.normalised(x[i]);
        }
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        means.d += __shfl_xor_sync(kFullWarp, means.d, distance);
        means.dn += __shfl_xor_sync(kFullWarp, means.dn, distance);
    }
    means.d /= C, means.dn /= C;

    for (int c = lane_index(); c < C; c += kBatch * kWarpSize) {
        load(c);
        load_batch(before, row.dinp, c, C);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int channel = c + i * kWarpSize;
            if (channel >= C) break;
            const float gradient = finish_element(sums, channel, C, means, dy[i], x[i], w[i]);
            row.dinp[channel] = from_float<T>(before[i] + gradient);
        }
    }
}

template <class T, bool Shared>
__global__ void __launch_bounds__(kMaxBlock, 1)
layernorm_backward7(T* dinp, T* dweight, T* dbias, float* sums, const T* dout, const T* inp, const T* weight,
                    const float* mean, const float* rstd, int N, int C, int accumulate) {
    float* block_sums = begin_sums<Shared>(sums, 2 * C);
    each_row_of_warp(N, [&](Offset row) {
        warp_row_batched(block_sums, Row<T>(dinp, dout, inp, mean, rstd, row, C), weight, C);
    });
    add_to_all<Shared>(sums, block_sums, 2 * C);
    last_block_converts(dweight, dbias, sums, C, C, accumulate, InOrder());
}

// -------------------------------------------------------------------------------- packets of 16 bytes, for 8 to 10

// A packet of a row, zeros where there is none. As four words: elements of 16 bits would take a register each.
template <bool Aligned, bool Streaming = false, class T>
__device__ inline int4 bits_or_zero(const T* row, int first, int C, bool exists) {
    if (!exists || first >= C) return {};
    const T zero = from_float<T>(0.0f);
    if constexpr (Streaming) {
        return bits_of(load_row_packet_streaming<Aligned>(row, first, C, zero));
    } else {
        return bits_of(load_row_packet<Aligned>(row, first, C, zero));
    }
}

template <class T>
__device__ inline void unpack(float (&values)[Packet<T>::size], int4 bits) {
    const Packet<T> packet = packet_of<T>(bits);
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) values[i] = to_float(packet[i]);
}

// One instruction for each, since a bf16 is the upper half of a float. Element by element, every other one takes two.
template <>
__device__ inline void unpack<__nv_bfloat16>(float (&values)[8], int4 bits) {
    const unsigned words[4] = {unsigned(bits.x), unsigned(bits.y), unsigned(bits.z), unsigned(bits.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// Adds the terms of mean(d) and of mean(d n) / rstd that one packet of a row gives.
template <class T>
__device__ inline void add_row_terms(float& sum_d, float& sum_dx, int4 dys, int4 xs, int4 ws, float mean) {
    float dy[Packet<T>::size], x[Packet<T>::size], w[Packet<T>::size];
    unpack<T>(dy, dys), unpack<T>(x, xs), unpack<T>(w, ws);
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) {
        const float d = w[i] * dy[i];
        sum_d += d;
        sum_dx += d * (x[i] - mean);
    }
}

// Adds a packet's terms to the sums of its channels; returns what is to be stored in place of `before` in dinp.
template <class T>
__device__ inline Packet<T> add_channel_terms(float (&dweight)[Packet<T>::size], float (&dbias)[Packet<T>::size],
                                              int4 befores, int4 dys, int4 xs, int4 ws, const RowMeans& means) {
    float dy[Packet<T>::size], x[Packet<T>::size], w[Packet<T>::size], before[Packet<T>::size];
    unpack<T>(dy, dys), unpack<T>(x, xs), unpack<T>(w, ws), unpack<T>(before, befores);
    Packet<T> dinp;
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) {
        const float n = means.normalised(x[i]);
        dweight[i] += n * dy[i];
        dbias[i] += dy[i];
        dinp[i] = from_float<T>(before[i] + means.input_gradient(n, w[i] * dy[i]));
    }
    return dinp;
}

// sum_d and sum_dx of this thread over the packets that begin at first, first + step, ... of a row.
template <bool Aligned, class T>
__device__ inline void add_packets(float& sum_d, float& sum_dx, const Row<T>& row, const T* weight, int first, int step,
                                   int C) {
#pragma unroll 2
    for (int c = first; c < C; c += step) {
        const int4 dy = bits_or_zero<Aligned>(row.dout, c, C, true);
        const int4 x = bits_or_zero<Aligned>(row.inp, c, C, true);
        add_row_terms<T>(sum_d, sum_dx, dy, x, bits_or_zero<Aligned>(weight, c, C, true), row.mean);
    }
}

// The terms that one packet adds to the sums; zeros where nothing exists.
template <class T>
struct Terms {
    float dweight[Packet<T>::size] = {}, dbias[Packet<T>::size] = {};
};

// Brings a packet of dinp up to date.
template <bool Aligned, class T>
__device__ inline Terms<T> finish_packet(const Row<T>& row, const RowMeans& means, const T* weight, int c, int C,
                                         bool exists) {
    const int4 dy = bits_or_zero<Aligned, true>(row.dout, c, C, exists);
    const int4 x = bits_or_zero<Aligned, true>(row.inp, c, C, exists);
    const int4 w = bits_or_zero<Aligned>(weight, c, C, exists);
    const int4 before = bits_or_zero<Aligned>(row.dinp, c, C, exists);
    Terms<T> terms;
    const Packet<T> dinp = add_channel_terms<T>(terms.dweight, terms.dbias, before, dy, x, w, means);
    if (exists && c < C) store_row_packet<Aligned>(row.dinp, c, C, dinp);
    return terms;
}

// ----------------------------------------------------------------------------------------- 8 and 9: a warp per row

// A warp takes a row in chunks of one packet per lane. Lane l adds element x of its packet to a sum, all lanes at once:
// in the order of the channels lanes would be a packet apart and meet in the same banks. So the sums of a chunk are
// ordered by x first: x * 32 + l. Rows are padded to whole chunks.
template <class T>
struct Chunks {
    static constexpr int packet = Packet<T>::size;
    static constexpr int size = kWarpSize * packet;  // channels

    __device__ static int width(int C) { return ceil_div(C, size) * size; }
    __device__ static int place(int chunk, int x, int lane) { return chunk + x * kWarpSize + lane; }

    // Where the sums of a channel are.
    __device__ int operator()(int channel) const {
        const int in_chunk = channel % size;
        return place(channel - in_chunk, in_chunk % packet, in_chunk / packet);
    }
};

template <bool Aligned, class T>
__device__ inline RowMeans warp_row_means(const Row<T>& row, const T* weight, int C) {
    RowMeans means = {row.mean, row.rstd, 0.0f, 0.0f};
    add_packets<Aligned>(means.d, means.dn, row, weight, lane_index() * Chunks<T>::packet, Chunks<T>::size, C);
    means.d = warp_sum(means.d) / C;
    means.dn = warp_sum(means.dn) * row.rstd / C;
    return means;
}

template <class T, bool Aligned, bool Shared>
__global__ void __launch_bounds__(kMaxBlock, 1)
layernorm_backward8(T* dinp, T* dweight, T* dbias, float* sums, const T* dout, const T* inp, const T* weight,
                    const float* mean, const float* rstd, int N, int C, int accumulate) {
    using Chunk = Chunks<T>;
    const int width = Chunk::width(C);
    float* block_sums = begin_sums<Shared>(sums, 2 * width);
    each_row_of_warp(N, [&](Offset index) {
        const Row<T> row(dinp, dout, inp, mean, rstd, index, C);
        const RowMeans means = warp_row_means<Aligned>(row, weight, C);
        for (int chunk = 0; chunk < width; chunk += Chunk::size) {
            const int c = chunk + lane_index() * Chunk::packet;
            const Terms<T> terms = finish_packet<Aligned>(row, means, weight, c, C, true);
#pragma unroll
            for (int x = 0; x < Chunk::packet; ++x) {
                const int place = Chunk::place(chunk, x, lane_index());
                atomicAdd(block_sums + place, terms.dweight[x]);
                atomicAdd(block_sums + width + place, terms.dbias[x]);
            }
        }
    });
    add_to_all<Shared>(sums, block_sums, 2 * width);
    last_block_converts(dweight, dbias, sums, width, C, accumulate, Chunk());
}

// Shared memory: the sums of the block (if Shared), then one float per thread and kind to hand over.
template <class T, bool Aligned, bool Shared>
__global__ void __launch_bounds__(kMaxBlock, 1)
layernorm_backward9(T* dinp, T* dweight, T* dbias, float* areas, unsigned* counter, const T* dout, const T* inp,
                    const T* weight, const float* mean, const float* rstd, int N, int C, int accumulate) {
    using Chunk = Chunks<T>;
    const int width = Chunk::width(C);
    float* area = areas + Offset(blockIdx.x) * 2 * width;
    float* block_sums = Shared ? dynamic_shared() : area;
    float* handed_dweight = dynamic_shared() + (Shared ? 2 * width : 0);
    float* handed_dbias = handed_dweight + blockDim.x;
    clear(block_sums, 2 * width);

    const int warps = blockDim.x / kWarpSize;
    // All warps go through this loop equally often, since there are barriers in it: those without a row have zeros.
    for (Offset first = Offset(blockIdx.x) * warps; first < N; first += Offset(gridDim.x) * warps) {
        const bool exists = first + warp_index() < N;
        const Row<T> row(dinp, dout, inp, mean, rstd, exists ? first + warp_index() : first, C);
        const RowMeans means = warp_row_means<Aligned>(row, weight, C);
        for (int chunk = 0; chunk < width; chunk += Chunk::size) {
            const int c = chunk + lane_index() * Chunk::packet;
            Terms<T> terms = finish_packet<Aligned>(row, means, weight, c, C, exists);
#pragma unroll
            for (int x = 0; x < Chunk::packet; ++x) {
                if (warp_index() > 0) {
                    handed_dweight[threadIdx.x] = terms.dweight[x];
                    handed_dbias[threadIdx.x] = terms.dbias[x];
                }
                __syncthreads();
                if (warp_index() == 0) {
                    for (int i = kWarpSize + lane_index(); i < int(blockDim.x); i += kWarpSize) {
                        terms.dweight[x] += handed_dweight[i];
                        terms.dbias[x] += handed_dbias[i];
                    }
                    const int place = Chunk::place(chunk, x, lane_index());
                    block_sums[place] += terms.dweight[x];
                    block_sums[width + place] += terms.dbias[x];
                }
                __syncthreads();  // warp 0 has read what the next element will overwrite
            }
        }
    }
    copy_to_area<Shared>(area, block_sums, 2 * width);
    last_block_adds_areas(dweight, dbias, areas, counter, width, C, accumulate, Chunk());
}

// ------------------------------------------------------------------------------------ 10: threads keep their channels

// Threads that keep one packet of a row take 80 registers, and spill with fewer. Two blocks of this size fit into
// a multiprocessor. Those that keep two packets take 128.
constexpr int kMaxBlock10 = 384;
constexpr int kThreadsOf128Registers = 512;

// V sums over the lanes, V a power of two: lane l gets that of value l % V. Lanes first divide the values among
// themselves, which takes fewer shuffles than V times warp_sum(): 6, not 20, for V = 4.
template <int V>
__device__ inline float warp_sums(float (&values)[V]) {
    int distance = 1;
#pragma unroll
    for (int count = V / 2; count > 0; count /= 2, distance *= 2) {
        const bool odd = lane_index() & distance;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float kept = odd ? values[2 * i + 1] : values[2 * i];
            const float sent = odd ? values[2 * i] : values[2 * i + 1];
            values[i] = kept + __shfl_xor_sync(kFullWarp, sent, distance);
        }
    }
    float sum = values[0];
#pragma unroll
    for (; distance < kWarpSize; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
    return sum;
}

// V sums over the threads of `warps` warps from `first` on, each in all of their threads. All threads of the block must
// call it together. `of_warp` must be another one than in the call before: then one barrier is enough, since nobody
// comes to the call after the next before all have read this one.
template <int V>
__device__ inline void sum_over_warps(float (&values)[V], float (*of_warp)[V], int first, int warps) {
    const float sum = warp_sums(values);
    if (lane_index() < V) of_warp[warp_index()][lane_index()] = sum;
    __syncthreads();
    float sums = 0.0f;
#pragma unroll 1  // up to 8 warps it is one turn for V = 4
    for (int warp = lane_index() / V; warp < warps; warp += kWarpSize / V) {
        sums += of_warp[first + warp][lane_index() % V];
    }
#pragma unroll
    for (int distance = V; distance < kWarpSize; distance *= 2) sums += __shfl_xor_sync(kFullWarp, sums, distance);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = __shfl_sync(kFullWarp, sums, i);
}

// N floats, a multiple of 4, to or from an address that is a multiple of 16.
template <int N>
__device__ inline void store_floats(float* target, const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        store_packet(target + i, Packet<float>{values[i], values[i + 1], values[i + 2], values[i + 3]});
    }
}

template <int N>
__device__ inline void add_floats(float (&values)[N], const float* source) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const Packet<float> packet = load_packet(source + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[i + j] += packet[j];
    }
}

// Makes the compiler think that it does not know these bits: rather than unpack them again it would keep the numbers
// that it has unpacked from them before, in more registers than there are.
__device__ inline void forget(int4& bits) {
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
}

template <class Packets, int N>
__device__ inline void forget(Packets (&packets)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) forget(packets[i]);
}

// Groups of `warps_per_row` warps take kRows rows at a time. Each thread has K packets of each row of its group, always
// of the same channels, and keeps their sums in registers. Warps that fill no group only meet barriers.
template <class T, int K, bool Aligned>
__global__ void __launch_bounds__(K == 1 ? kMaxBlock10 : kThreadsOf128Registers, K == 1 ? 2 : 1)
layernorm_backward10(T* __restrict__ dinp, float* __restrict__ areas, const T* __restrict__ dout,
                     const T* __restrict__ inp, const T* __restrict__ weight, const float* __restrict__ mean,
                     const float* __restrict__ rstd, int N, int C, int warps_per_row) {
    constexpr int kPacket = Packet<T>::size;
    constexpr int kRows = 2 / K;  // so that each thread has 2 packets of 3 arrays under way at a time
    __shared__ float of_warp[2][kMaxWarps][2 * kRows];  // two, to be used in turns
    const int threads = warps_per_row * kWarpSize;
    const int groups = blockDim.x / threads, group = threadIdx.x / threads;

    int channel[K];
    bool owned[K];
    int4 w[K];
    float sums_dweight[K][kPacket] = {}, sums_dbias[K][kPacket] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
        channel[k] = (threadIdx.x % threads + k * threads) * kPacket;
        owned[k] = group < groups && channel[k] < C;
        w[k] = bits_or_zero<Aligned>(weight, channel[k], C, owned[k]);
    }

    const float one_over_C = 1.0f / C;
    int turn = 0;
    const int rows_per_block = groups * kRows;
    for (Offset start = Offset(blockIdx.x) * rows_per_block; start < N; start += Offset(gridDim.x) * rows_per_block) {
        const Offset first = start + group * kRows;
        const bool working = group < groups && first < N;
        int4 dy[kRows][K], x[kRows][K], before[kRows][K];
        RowMeans means[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool exists = working && first + r < N;
            means[r].mean = exists ? mean[first + r] : 0.0f;
            means[r].rstd = exists ? rstd[first + r] : 0.0f;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const Offset row = (first + r) * C;
                dy[r][k] = bits_or_zero<Aligned, true>(dout + row, channel[k], C, exists);
                x[r][k] = bits_or_zero<Aligned, true>(inp + row, channel[k], C, exists);
                before[r][k] = bits_or_zero<Aligned>(dinp + row, channel[k], C, exists);
            }
        }

        float sums[2 * kRows] = {};
        // Besides saving work, this branch keeps the loads of `before` above it. The compiler would move them down
        // towards their use, and there they would have to be waited for.
        if (working) {
            forget(w);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    add_row_terms<T>(sums[2 * r], sums[2 * r + 1], dy[r][k], x[r][k], w[k], means[r].mean);
                }
            }
        }
        // A warp without a group gets the sums of another one, and has no use for them.
        sum_over_warps(sums, of_warp[turn], group < groups ? group * warps_per_row : 0, warps_per_row);
        turn = 1 - turn;
        if (!working) continue;
        forget(w), forget(dy), forget(x);

#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            means[r].d = sums[2 * r] * one_over_C;
            means[r].dn = sums[2 * r + 1] * means[r].rstd * one_over_C;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const Packet<T> result = add_channel_terms<T>(sums_dweight[k], sums_dbias[k], before[r][k], dy[r][k],
                                                              x[r][k], w[k], means[r]);
                if (owned[k] && first + r < N) {
                    store_row_packet<Aligned>(dinp + (first + r) * C, channel[k], C, result);
                }
            }
        }
    }

    // Group by group, in their order: each adds its sums to what the one before has left in shared memory.
    const int width = ceil_div(C, kPacket) * kPacket;
    float* area = areas + Offset(blockIdx.x) * 2 * width;
    for (int g = 0; g < groups; ++g) {
        float* target = g == groups - 1 ? area : dynamic_shared();
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (g != group || !owned[k]) continue;
            if (g > 0) {
                add_floats(sums_dweight[k], dynamic_shared() + channel[k]);
                add_floats(sums_dbias[k], dynamic_shared() + width + channel[k]);
            }
            store_floats(target + channel[k], sums_dweight[k]);
            store_floats(target + width + channel[k], sums_dbias[k]);
        }
        __syncthreads();
    }
}

// Rows too wide for registers: a block takes one row at a time, a thread packets p, p + block size, ... of every row.
// Nobody else adds to their sums, in shared memory or, if not Shared, in the area of the block.
template <class T, bool Aligned, bool Shared>
__global__ void __launch_bounds__(kMaxBlock10, 2)
layernorm_backward10_wide(T* __restrict__ dinp, float* __restrict__ areas, const T* __restrict__ dout,
                          const T* __restrict__ inp, const T* __restrict__ weight, const float* __restrict__ mean,
                          const float* __restrict__ rstd, int N, int C) {
    constexpr int kPacket = Packet<T>::size;
    __shared__ float of_warp[2][kMaxWarps][2];  // two, to be used in turns
    const int width = ceil_div(C, kPacket) * kPacket, step = blockDim.x * kPacket;
    float* area = areas + Offset(blockIdx.x) * 2 * width;
    float* block_sums = Shared ? dynamic_shared() : area;
    clear(block_sums, 2 * width);

    int turn = 0;
    for (Offset index = blockIdx.x; index < N; index += gridDim.x) {
        const Row<T> row(dinp, dout, inp, mean, rstd, index, C);
        float sums[2] = {};
        add_packets<Aligned>(sums[0], sums[1], row, weight, threadIdx.x * kPacket, step, C);
        sum_over_warps(sums, of_warp[turn], 0, blockDim.x / kWarpSize);
        turn = 1 - turn;
        const RowMeans means = {row.mean, row.rstd, sums[0] / C, sums[1] * row.rstd / C};
        for (int c = threadIdx.x * kPacket; c < C; c += step) {
            Terms<T> terms = finish_packet<Aligned>(row, means, weight, c, C, true);
            add_floats(terms.dweight, block_sums + c);
            add_floats(terms.dbias, block_sums + width + c);
            store_floats(block_sums + c, terms.dweight);
            store_floats(block_sums + width + c, terms.dbias);
        }
    }
    copy_to_area<Shared>(area, block_sums, 2 * width);
}

constexpr int kSlices = 32;  // of the areas: as many as the threads of a block of 1024 per column of a warp

// dweight and dbias from the areas of version 10. A block has 32 of the 2 * width columns. Each of its warps adds up
// every 32nd area, all at the same time, then the first warp adds up the warps.
template <class T>
__global__ void __launch_bounds__(kSlices * kWarpSize)
sum_areas(T* __restrict__ dweight, T* __restrict__ dbias, const float* __restrict__ areas, int count, int C, int width,
          int accumulate) {
    __shared__ float slices[kSlices][kWarpSize];
    const int column = blockIdx.x * kWarpSize + lane_index();
    float sum = 0.0f;
    if (column < 2 * width) {
#pragma unroll 8
        for (int area = warp_index(); area < count; area += kSlices) sum += areas[Offset(area) * 2 * width + column];
    }
    slices[warp_index()][lane_index()] = sum;
    __syncthreads();
    const int c = column < width ? column : column - width;
    if (warp_index() > 0 || c >= C) return;
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) sum += slices[i][lane_index()];
    store_gradient(column < width ? dweight : dbias, c, sum, accumulate);
}
