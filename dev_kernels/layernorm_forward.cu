// LayerNorm over rows of C elements, with x a row of inp:
//     mean = sum of x / C,  rstd = 1 / sqrt(sum of (x - mean)^2 / C + 1e-5),  out = (x - mean) * rstd * weight + bias
// mean and rstd are kept in fp32, whatever type the rest is stored in.
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per row, three passes: mean, variance, output
//   2  a kernel each for mean and variance (a block per row) and output (a thread per element): coalesced loads
//   3  one warp per row, one kernel: shuffles, no shared memory; what is used once streams past the caches
//   4  + mean and variance in a single pass
//   5  as 4, one block per row: enough threads for long rows
//   6  one warp per row, nothing is read twice: the row stays in shared memory, and so do weight and bias, for all rows
//      of the block; 16 bytes per access
//
// Where weight, bias and rows do not fit into shared memory, 6 runs version 5's kernel.
//
// The variance as the mean square minus the square of the mean cancels when the mean is large: of x = 1000 +- 1 hardly
// a digit is left in fp32. A single pass therefore sums x - x[0], which has the variance of x and a mean of the size of
// the spread.
#include "common.cuh"

constexpr int kMaxBlock = 1024;
constexpr float kEpsilon = 1e-5f;  // keeps rstd finite where all elements of a row are equal

struct Statistics {
    float mean, rstd;
};

__device__ inline float reciprocal_deviation(float squared_deviations, int C) {
    return rsqrtf(squared_deviations / C + kEpsilon);
}

__device__ inline float normalised(float x, float mean, float rstd, float weight, float bias) {
    return (x - mean) * rstd * weight + bias;
}

// ----------------------------------------------------------------------------------------- 1: a thread per row

template <class T>
__global__ void layernorm_forward1(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                   const T* __restrict__ inp, const T* __restrict__ weight,
                                   const T* __restrict__ bias, int rows, int C) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    inp += row * C, out += row * C;

    float sum = 0.0f;
    for (int i = 0; i < C; ++i) sum += to_float(inp[i]);
    const float m = sum / C;
    float squares = 0.0f;
    for (int i = 0; i < C; ++i) {
        const float deviation = to_float(inp[i]) - m;
        squares += deviation * deviation;
    }
    const float r = reciprocal_deviation(squares, C);
    for (int i = 0; i < C; ++i) {
        out[i] = from_float<T>(normalised(to_float(inp[i]), m, r, to_float(weight[i]), to_float(bias[i])));
    }
    mean[row] = m;
    rstd[row] = r;
}

// --------------------------------------------------------------------------------------- 2: a kernel per step

// The sum over the block, in every thread, by halving the number of summands. The block is a power of two.
__device__ inline float tree_sum(float value) {
    __shared__ float sums[kMaxBlock];
    const int thread = threadIdx.x;
    sums[thread] = value;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();  // the sums of the step before are there
        if (thread < half) sums[thread] += sums[thread + half];
    }
    __syncthreads();
    return sums[0];
}

template <class T>
__global__ void mean2(float* __restrict__ mean, const T* __restrict__ inp, int C) {
    inp += Offset(blockIdx.x) * C;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < C; i += blockDim.x) sum += to_float(inp[i]);
    sum = tree_sum(sum);
    if (threadIdx.x == 0) mean[blockIdx.x] = sum / C;
}

template <class T>
__global__ void rstd2(float* __restrict__ rstd, const T* __restrict__ inp, const float* __restrict__ mean, int C) {
    inp += Offset(blockIdx.x) * C;
    const float m = mean[blockIdx.x];
    float squares = 0.0f;
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        const float deviation = to_float(inp[i]) - m;
        squares += deviation * deviation;
    }
    squares = tree_sum(squares);
    if (threadIdx.x == 0) rstd[blockIdx.x] = reciprocal_deviation(squares, C);
}

template <class T>
__global__ void normalise2(T* __restrict__ out, const T* __restrict__ inp, const float* __restrict__ mean,
                           const float* __restrict__ rstd, const T* __restrict__ weight, const T* __restrict__ bias,
                           int rows, int C) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= Offset(rows) * C) return;
    const Offset row = i / C;
    const int column = int(i - row * C);
    out[i] = from_float<T>(
        normalised(to_float(inp[i]), mean[row], rstd[row], to_float(weight[column]), to_float(bias[column])));
}

// ------------------------------------------------------------------------------------- 3 and 4: a warp per row

__device__ inline Offset row_of_warp() {
    return Offset(blockIdx.x) * (blockDim.x / kWarpSize) + warp_index();
}

// The last pass over a row, whose elements are not needed any more and leave the caches to weight and bias. `thread` of
// `threads` takes every threads-th element, so neighbours access neighbours.
template <class T>
__device__ inline void normalise_row(T* __restrict__ out, const T* __restrict__ inp, const T* __restrict__ weight,
                                     const T* __restrict__ bias, Statistics row, int thread, int threads, int C) {
    for (int i = thread; i < C; i += threads) {
        const float x = to_float(__ldcs(inp + i));
        const float y = normalised(x, row.mean, row.rstd, to_float(weight[i]), to_float(bias[i]));
        __stcs(out + i, from_float<T>(y));
    }
}

template <class T>
__global__ void layernorm_forward3(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                   const T* __restrict__ inp, const T* __restrict__ weight,
                                   const T* __restrict__ bias, int rows, int C) {
    const Offset row = row_of_warp();
    if (row >= rows) return;  // a whole warp
    inp += row * C, out += row * C;

    float sum = 0.0f;
    for (int i = lane_index(); i < C; i += kWarpSize) sum += to_float(inp[i]);
    const float m = warp_sum(sum) / C;
    float squares = 0.0f;
    for (int i = lane_index(); i < C; i += kWarpSize) {
        const float deviation = to_float(inp[i]) - m;
        squares += deviation * deviation;
    }
    const float r = reciprocal_deviation(warp_sum(squares), C);
    normalise_row(out, inp, weight, bias, {m, r}, lane_index(), kWarpSize, C);
    if (lane_index() == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

// Sums of d and d * d, where d is an element minus `shift`, the first element of its row.
struct Moments {
    float shift, sum, squares;

    template <class T>
    __device__ Moments(const T* row, int thread, int threads, int C)
        : shift(to_float(row[0])), sum(0.0f), squares(0.0f) {
        for (int i = thread; i < C; i += threads) {
            const float d = to_float(row[i]) - shift;
            sum += d;
            squares += d * d;
        }
    }

    // Of all threads' sums. Rounding can leave the difference of two equal numbers below zero.
    __device__ Statistics statistics(int C) const {
        const float m = sum / C;
        return {shift + m, reciprocal_deviation(fmaxf(squares - sum * m, 0.0f), C)};
    }
};

template <class T>
__global__ void layernorm_forward4(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                   const T* __restrict__ inp, const T* __restrict__ weight,
                                   const T* __restrict__ bias, int rows, int C) {
    const Offset row = row_of_warp();
    if (row >= rows) return;  // a whole warp
    inp += row * C, out += row * C;

    Moments moments(inp, lane_index(), kWarpSize, C);
    moments.sum = warp_sum(moments.sum);
    moments.squares = warp_sum(moments.squares);
    const Statistics of_row = moments.statistics(C);
    normalise_row(out, inp, weight, bias, of_row, lane_index(), kWarpSize, C);
    if (lane_index() == 0) {
        mean[row] = of_row.mean;
        rstd[row] = of_row.rstd;
    }
}

// ----------------------------------------------------------------------------------------- 5: a block per row

template <class T>
__global__ void layernorm_forward5(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                   const T* __restrict__ inp, const T* __restrict__ weight,
                                   const T* __restrict__ bias, int C) {
    __shared__ float sums[kMaxWarps], squares[kMaxWarps];
    inp += Offset(blockIdx.x) * C, out += Offset(blockIdx.x) * C;

    Moments moments(inp, threadIdx.x, blockDim.x, C);
    moments.sum = warp_sum(moments.sum);
    moments.squares = warp_sum(moments.squares);
    if (lane_index() == 0) {
        sums[warp_index()] = moments.sum;
        squares[warp_index()] = moments.squares;
    }
    __syncthreads();  // one barrier for both sums
    const bool holds_sums = lane_index() < int(blockDim.x) / kWarpSize;
    moments.sum = warp_sum(holds_sums ? sums[lane_index()] : 0.0f);
    moments.squares = warp_sum(holds_sums ? squares[lane_index()] : 0.0f);
    const Statistics of_row = moments.statistics(C);
    normalise_row(out, inp, weight, bias, of_row, threadIdx.x, blockDim.x, C);
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = of_row.mean;
        rstd[blockIdx.x] = of_row.rstd;
    }
}

// ------------------------------------------------------------------------------- 6: a row stays in shared memory

// Two blocks of 1024 threads fill a multiprocessor of 2048, if a thread has at most 32 registers. Those hold three
// packets, a batch, whose loads are under way at the same time. Loading element by element takes more registers, and is
// slow with or without a full multiprocessor.
__host__ __device__ constexpr int blocks_at_once(bool aligned) { return aligned ? 2 : 1; }

// Packets on their way are held as 16 bytes: their elements would take a register each. Aligned: every row begins at a
// multiple of 16 bytes, and C is a multiple of a packet.
template <bool Aligned, int Batch, class T>
__device__ inline void load_batch(int4 (&batch)[Batch], const T* __restrict__ row, int first, int packets, int C) {
#pragma unroll
    for (int k = 0; k < Batch; ++k) {
        const int i = first + k * kWarpSize;
        if (i >= packets) continue;
        batch[k] = bits_of(load_row_packet_streaming<Aligned>(row, i * Packet<T>::size, C, from_float<T>(0.0f)));
    }
}

// Bring a row into shared memory; the sum of this lane's elements. The first batch is on its way.
template <bool Aligned, int Batch, class T>
__device__ inline float keep_row(int4* __restrict__ kept, int4 (&batch)[Batch], const T* __restrict__ row,
                                 int packets, int C) {
    float sum = 0.0f;
    for (int first = lane_index(); first < packets; first += Batch * kWarpSize) {
        if (first >= Batch * kWarpSize) load_batch<Aligned>(batch, row, first, packets, C);
#pragma unroll
        for (int k = 0; k < Batch; ++k) {
            if (first + k * kWarpSize >= packets) continue;
            kept[first + k * kWarpSize] = batch[k];
            const Packet<T> packet = packet_of<T>(batch[k]);
#pragma unroll
            for (int j = 0; j < Packet<T>::size; ++j) sum += to_float(packet[j]);
        }
    }
    return sum;
}

// Dynamic shared memory holds weight, bias and one row per warp, each filled up to whole packets. A lane reads of the
// row what it wrote itself, so only weight and bias need a barrier.
template <class T, bool Aligned, int Batch>
__global__ void __launch_bounds__(kMaxBlock, blocks_at_once(Aligned))
layernorm_forward6(T* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd, const T* __restrict__ inp,
                   const T* __restrict__ weight, const T* __restrict__ bias, int rows, int C) {
    constexpr int kPacket = Packet<T>::size;
    extern __shared__ int4 shared[];
    const int packets = ceil_div(C, kPacket);
    int4* x = shared + (2 + warp_index()) * packets;

    const Offset row = row_of_warp();
    const bool has_row = row < rows;
    inp += row * C, out += row * C;
    int4 batch[Batch];
    if (has_row) load_batch<Aligned>(batch, inp, lane_index(), packets, C);
    // While that is on its way, each thread brings a packet of weight or of bias: in a large block none waits twice.
    // Unrolled, it would take registers from the batch.
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * packets; i += blockDim.x) {
        const bool is_weight = i < packets;
        const int first = (is_weight ? i : i - packets) * kPacket;
        shared[i] = bits_of(load_row_packet<Aligned>(is_weight ? weight : bias, first, C, from_float<T>(0.0f)));
    }

    float m = 0.0f, r = 0.0f;
    if (has_row) {
        m = warp_sum(keep_row<Aligned>(x, batch, inp, packets, C)) / C;
        float squares = 0.0f;
        for (int i = lane_index(); i < packets; i += kWarpSize) {
            const Packet<T> packet = packet_of<T>(x[i]);
#pragma unroll
            for (int j = 0; j < kPacket; ++j) {
                const float deviation = to_float(packet[j]) - m;
                squares += Aligned || i * kPacket + j < C ? deviation * deviation : 0.0f;
            }
        }
        r = reciprocal_deviation(warp_sum(squares), C);
        if (lane_index() == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
    __syncthreads();  // weight and bias are there
    if (!has_row) return;

    // Ordinary stores: whatever comes next reads `out`.
    for (int i = lane_index(); i < packets; i += kWarpSize) {
        Packet<T> packet = packet_of<T>(x[i]);
        const Packet<T> w = packet_of<T>(shared[i]), b = packet_of<T>(shared[packets + i]);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) {
            packet[j] = from_float<T>(normalised(to_float(packet[j]), m, r, to_float(w[j]), to_float(b[j])));
        }
        store_row_packet<Aligned>(out, i * kPacket, C, packet);
    }
}
