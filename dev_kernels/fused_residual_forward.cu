// Residual connection and the LayerNorm behind it in one operation. Per row of C elements:
//     residual = inp1 + inp2                                             rounded to the stored type
//     mean = sum of x / C,  rstd = 1 / sqrt(sum of (x - mean)^2 / C + 1e-5)       of the rounded row x = residual
//     normed = (x - mean) * rstd * weight + bias
// The statistics are those of the residual as it is stored, so what a separate LayerNorm would see: fusing changes no
// bit of the contract. mean and rstd are kept in fp32, whatever type the rest is stored in.
//
// Versions ("+": what it adds to the one before):
//
//   1  two kernels: a thread per element adds, then a thread per row normalises
//   2  one kernel: a thread per row does both
//   3  one warp per row, so that accesses coalesce; three passes, the last two over the residual just written
//   4  + a single pass for mean and variance, so two in all; 16 bytes per access, and the last pass walks backwards:
//      what was written last is the likeliest to be still in a cache
//   5  one warp per row, nothing is read twice: the row stays in shared memory, and so do weight and bias, for all rows
//      of the block; 16 bytes per access
//   6  + persistent blocks: they load weight and bias once, and have the next row's loads under way while they work on
//      this one; several warps per row
//
// Where weight, bias and rows do not fit into shared memory, 5 and 6 run version 4's kernel.
//
// Where a pass reads the residual back, each thread reads what it wrote itself, which needs no barrier. A single pass
// sums x - x[0]: the mean square of x minus the square of its mean would cancel where the mean is large.
#include "common.cuh"

constexpr int kMaxBlock = 1024;
constexpr float kEpsilon = 1e-5f;  // keeps rstd finite where all elements of a row are equal

__device__ inline float reciprocal_deviation(float squared_deviations, int C) {
    return rsqrtf(squared_deviations / C + kEpsilon);
}

__device__ inline float normalised(float x, float mean, float rstd, float weight, float bias) {
    return (x - mean) * rstd * weight + bias;
}

template <class T>
__device__ inline T sum(T a, T b) {
    return from_float<T>(to_float(a) + to_float(b));
}

template <class T>
__device__ inline Packet<T> sum(const Packet<T>& a, const Packet<T>& b) {
    Packet<T> result;
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) result[i] = sum(a[i], b[i]);
    return result;
}

// One row to be normalised, read once more from where it was written.
template <class T>
struct Row {
    T* normed;
    const T* residual;
    const T* weight;
    const T* bias;
    int C;

    __device__ float squared_deviations(float mean, int thread, int threads) const {
        float squares = 0.0f;
        for (int i = thread; i < C; i += threads) {
            const float deviation = to_float(residual[i]) - mean;
            squares += deviation * deviation;
        }
        return squares;
    }

    __device__ void normalise(float mean, float rstd, int thread, int threads) const {
        for (int i = thread; i < C; i += threads) {
            normed[i] = from_float<T>(
                normalised(to_float(residual[i]), mean, rstd, to_float(weight[i]), to_float(bias[i])));
        }
    }
};

// ----------------------------------------------------------------------------------- 1 and 2: a thread per row

template <class T>
__global__ void residual1(T* __restrict__ residual, const T* __restrict__ inp1, const T* __restrict__ inp2, int rows,
                          int C) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < Offset(rows) * C) residual[i] = sum(inp1[i], inp2[i]);
}

template <class T>
__global__ void layernorm1(T* __restrict__ normed, float* __restrict__ mean, float* __restrict__ rstd,
                           const T* __restrict__ residual, const T* __restrict__ weight, const T* __restrict__ bias,
                           int rows, int C) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Row<T> x = {normed + row * C, residual + row * C, weight, bias, C};

    float total = 0.0f;
    for (int i = 0; i < C; ++i) total += to_float(x.residual[i]);
    const float m = total / C;
    const float r = reciprocal_deviation(x.squared_deviations(m, 0, 1), C);
    x.normalise(m, r, 0, 1);
    mean[row] = m;
    rstd[row] = r;
}

template <class T>
__global__ void fused_residual_forward2(T* __restrict__ normed, T* residual, float* __restrict__ mean,
                                        float* __restrict__ rstd, const T* __restrict__ inp1,
                                        const T* __restrict__ inp2, const T* __restrict__ weight,
                                        const T* __restrict__ bias, int rows, int C) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    inp1 += row * C, inp2 += row * C, residual += row * C;
    const Row<T> x = {normed + row * C, residual, weight, bias, C};

    float total = 0.0f;
    for (int i = 0; i < C; ++i) {
        const T element = sum(inp1[i], inp2[i]);
        residual[i] = element;
        total += to_float(element);
    }
    const float m = total / C;
    const float r = reciprocal_deviation(x.squared_deviations(m, 0, 1), C);
    x.normalise(m, r, 0, 1);
    mean[row] = m;
    rstd[row] = r;
}

// ------------------------------------------------------------------------------------- 3 and 4: a warp per row

__device__ inline Offset row_of_warp() {
    return Offset(blockIdx.x) * (blockDim.x / kWarpSize) + warp_index();
}

template <class T>
__global__ void fused_residual_forward3(T* __restrict__ normed, T* residual, float* __restrict__ mean,
                                        float* __restrict__ rstd, const T* __restrict__ inp1,
                                        const T* __restrict__ inp2, const T* __restrict__ weight,
                                        const T* __restrict__ bias, int rows, int C) {
    const Offset row = row_of_warp();
    if (row >= rows) return;  // a whole warp
    inp1 += row * C, inp2 += row * C, residual += row * C;
    const Row<T> x = {normed + row * C, residual, weight, bias, C};

    float total = 0.0f;
    for (int i = lane_index(); i < C; i += kWarpSize) {
        const T element = sum(inp1[i], inp2[i]);
        residual[i] = element;
        total += to_float(element);
    }
    const float m = warp_sum(total) / C;
    const float r = reciprocal_deviation(warp_sum(x.squared_deviations(m, lane_index(), kWarpSize)), C);
    x.normalise(m, r, lane_index(), kWarpSize);
    if (lane_index() == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

// What lies past the end of a row is never used: it only has to be some number.
template <bool Aligned, class T>
__device__ inline Packet<T> load_streaming(const T* __restrict__ row, int packet, int C) {
    return load_row_packet_streaming<Aligned>(row, packet * Packet<T>::size, C, from_float<T>(0.0f));
}

template <bool Aligned, class T>
__device__ inline Packet<T> load(const T* __restrict__ row, int packet, int C) {
    return load_row_packet<Aligned>(row, packet * Packet<T>::size, C, from_float<T>(0.0f));
}

// Whether element `i` of a packet belongs to the row. Aligned: every row is made of whole packets.
template <bool Aligned, class T>
__device__ inline bool in_row(int packet, int i, int C) {
    return Aligned || packet * Packet<T>::size + i < C;
}

// Ordinary stores, here and elsewhere: whatever comes next reads `normed`, and `residual` a little later.
template <bool Aligned, class T>
__device__ inline void normalise_packet(T* __restrict__ normed, Packet<T> x, const Packet<T>& weight,
                                        const Packet<T>& bias, float mean, float rstd, int packet, int C) {
#pragma unroll
    for (int i = 0; i < Packet<T>::size; ++i) {
        x[i] = from_float<T>(normalised(to_float(x[i]), mean, rstd, to_float(weight[i]), to_float(bias[i])));
    }
    store_row_packet<Aligned>(normed, packet * Packet<T>::size, C, x);
}

// 32 registers, two of the largest blocks per multiprocessor, suffice for packets of a 16-bit type only: weight and
// bias of floats are twice as long, and elements that are loaded one by one need a register each.
template <class T, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock, Aligned && sizeof(T) == 2 ? 2 : 1)
fused_residual_forward4(T* __restrict__ normed, T* residual, float* __restrict__ mean, float* __restrict__ rstd,
                        const T* __restrict__ inp1, const T* __restrict__ inp2, const T* __restrict__ weight,
                        const T* __restrict__ bias, int rows, int C) {
    constexpr int kPacket = Packet<T>::size;
    const Offset row = row_of_warp();
    if (row >= rows) return;  // a whole warp
    inp1 += row * C, inp2 += row * C, residual += row * C, normed += row * C;

    const int packets = ceil_div(C, kPacket);
    const float shift = to_float(sum(inp1[0], inp2[0]));
    float total = 0.0f, squares = 0.0f;
    for (int p = lane_index(); p < packets; p += kWarpSize) {
        const Packet<T> a = load_streaming<Aligned>(inp1, p, C), b = load_streaming<Aligned>(inp2, p, C);
        const Packet<T> x = sum(a, b);
        store_row_packet<Aligned>(residual, p * kPacket, C, x);
#pragma unroll
        for (int i = 0; i < kPacket; ++i) {
            const float d = in_row<Aligned, T>(p, i, C) ? to_float(x[i]) - shift : 0.0f;
            total += d;
            squares += d * d;
        }
    }
    total = warp_sum(total);
    squares = warp_sum(squares);
    const float shifted_mean = total / C;
    const float m = shift + shifted_mean;
    // Rounding can leave the difference of two equal numbers below zero.
    const float r = reciprocal_deviation(fmaxf(squares - total * shifted_mean, 0.0f), C);

    const int last = ceil_div(packets - lane_index(), kWarpSize) - 1;  // -1 for lanes that have no packet
    for (int p = lane_index() + last * kWarpSize; p >= lane_index(); p -= kWarpSize) {
        const Packet<T> x = load<Aligned>(residual, p, C);
        normalise_packet<Aligned>(normed, x, load<Aligned>(weight, p, C), load<Aligned>(bias, p, C), m, r, p, C);
    }
    if (lane_index() == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

// ------------------------------------------------------------------------- 5 and 6: rows stay in shared memory

// Dynamic shared memory: weight, bias and rows, each filled up to whole packets.
extern __shared__ int4 shared[];

// A thread has a packet of weight or of bias, so that in a large block no thread waits for memory twice.
template <bool Aligned, class T>
__device__ inline void share_weight_and_bias(const T* __restrict__ weight, const T* __restrict__ bias, int packets,
                                             int C) {
#pragma unroll 1  // more loads at the same time would take registers from those of the rows
    for (int p = threadIdx.x; p < 2 * packets; p += blockDim.x) {
        const bool is_weight = p < packets;
        shared[p] = bits_of(load<Aligned>(is_weight ? weight : bias, is_weight ? p : p - packets, C));
    }
}

// The threads that share a row, a warp or a team of warps, take turns: the packets of a thread are `thread`,
// `thread + threads`, and so on. What it keeps of the row in shared memory, it alone reads. Packets on their way are
// held as 16 bytes: their elements would take a register each.
template <class T>
struct KeptRow {
    int4* x;
    int thread, threads, packets, C;

    // The first N packets of this thread from `first` on, of both inputs, with all loads under way at the same time.
    template <bool Aligned, int N>
    __device__ void load_inputs(int4 (&a)[N], int4 (&b)[N], const T* __restrict__ inp1,
                                const T* __restrict__ inp2, int first) const {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int p = first + k * threads;
            if (p >= packets) continue;
            a[k] = bits_of(load_streaming<Aligned>(inp1, p, C));
            b[k] = bits_of(load_streaming<Aligned>(inp2, p, C));
        }
    }

    // Stores the residual and keeps it; the sum of this thread's elements. The first N packets are on their way.
    template <bool Aligned, int N>
    __device__ float add(int4 (&a)[N], int4 (&b)[N], T* __restrict__ residual, const T* __restrict__ inp1,
                         const T* __restrict__ inp2) const {
        float total = 0.0f;
        for (int first = thread; first < packets; first += N * threads) {
            if (first >= N * threads) load_inputs<Aligned>(a, b, inp1, inp2, first);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const int p = first + k * threads;
                if (p >= packets) continue;
                const Packet<T> packet = sum(packet_of<T>(a[k]), packet_of<T>(b[k]));
                store_row_packet<Aligned>(residual, p * Packet<T>::size, C, packet);
                x[p] = bits_of(packet);
#pragma unroll
                for (int i = 0; i < Packet<T>::size; ++i) total += to_float(packet[i]);
            }
        }
        return total;
    }

    template <bool Aligned>
    __device__ float squared_deviations(float mean) const {
        float squares = 0.0f;
#pragma unroll 1
        for (int p = thread; p < packets; p += threads) {
            const Packet<T> packet = packet_of<T>(x[p]);
#pragma unroll
            for (int i = 0; i < Packet<T>::size; ++i) {
                const float deviation = to_float(packet[i]) - mean;
                squares += in_row<Aligned, T>(p, i, C) ? deviation * deviation : 0.0f;
            }
        }
        return squares;
    }

    template <bool Aligned>
    __device__ void normalise(T* __restrict__ normed, float mean, float rstd) const {
#pragma unroll 1
        for (int p = thread; p < packets; p += threads) {
            const Packet<T> w = packet_of<T>(shared[p]), b = packet_of<T>(shared[packets + p]);
            normalise_packet<Aligned>(normed, packet_of<T>(x[p]), w, b, mean, rstd, p, C);
        }
    }
};

// AtOnce: packets of each input whose loads a lane has under way at the same time.
template <class T, bool Aligned, int AtOnce>
__global__ void __launch_bounds__(kMaxBlock)
fused_residual_forward5(T* __restrict__ normed, T* __restrict__ residual, float* __restrict__ mean,
                        float* __restrict__ rstd, const T* __restrict__ inp1, const T* __restrict__ inp2,
                        const T* __restrict__ weight, const T* __restrict__ bias, int rows, int C) {
    const int packets = ceil_div(C, Packet<T>::size);
    const KeptRow<T> x = {shared + (2 + warp_index()) * packets, lane_index(), kWarpSize, packets, C};
    const Offset row = row_of_warp();
    const bool has_row = row < rows;
    inp1 += row * C, inp2 += row * C, residual += row * C, normed += row * C;

    int4 a[AtOnce], b[AtOnce];
    if (has_row) x.template load_inputs<Aligned>(a, b, inp1, inp2, lane_index());
    share_weight_and_bias<Aligned>(weight, bias, packets, C);  // while those loads are under way

    float m = 0.0f, r = 0.0f;
    if (has_row) {
        m = warp_sum(x.template add<Aligned>(a, b, residual, inp1, inp2)) / C;
        r = reciprocal_deviation(warp_sum(x.template squared_deviations<Aligned>(m)), C);
        if (lane_index() == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
    __syncthreads();  // weight and bias are there
    if (has_row) x.template normalise<Aligned>(normed, m, r);
}

// The sum over the `warps` warps of a team. Every thread of the block calls it, so the barrier is the block's, and all
// teams have the same number of warps. of_warp: a number for each warp of the block.
__device__ inline float team_sum(float value, float* of_warp, int warps) {
    value = warp_sum(value);
    if (warps == 1) return value;
    if (lane_index() == 0) of_warp[warp_index()] = value;
    __syncthreads();
    const int first = warp_index() / warps * warps;
    return warp_sum(lane_index() < warps ? of_warp[first + lane_index()] : 0.0f);
}

// The block is split into teams of `warps` warps, which have one row each at a time, and the first Prefetched packets
// per thread of the next one under way. All teams go round equally often, whether or not there is a row left for
// them, because they share barriers.
template <class T, bool Aligned, int Prefetched>
__global__ void __launch_bounds__(kMaxBlock)
fused_residual_forward6(T* __restrict__ normed, T* __restrict__ residual, float* __restrict__ mean,
                        float* __restrict__ rstd, const T* __restrict__ inp1, const T* __restrict__ inp2,
                        const T* __restrict__ weight, const T* __restrict__ bias, int rows, int C, int warps) {
    // One array for each sum of a round: who writes to one has passed the barrier of the other, at which everybody had
    // read what the one held before.
    __shared__ float totals[kMaxWarps], squares[kMaxWarps];
    const int packets = ceil_div(C, Packet<T>::size);
    const int teams = blockDim.x / kWarpSize / warps, team = warp_index() / warps;
    const int threads = warps * kWarpSize, thread = threadIdx.x - team * threads;
    const KeptRow<T> x = {shared + (2 + team) * packets, thread, threads, packets, C};

    int4 a[Prefetched], b[Prefetched];
    const auto load_inputs = [&](unsigned row) {
        x.template load_inputs<Aligned>(a, b, inp1 + Offset(row) * C, inp2 + Offset(row) * C, thread);
    };
    // Unsigned: `rows` and as many rows more as the GPU has threads are less than 2^32.
    const unsigned end = rows, step = gridDim.x * teams;
    unsigned row = blockIdx.x * teams + team;
    if (row < end) load_inputs(row);
    share_weight_and_bias<Aligned>(weight, bias, packets, C);
    __syncthreads();  // weight and bias are there

    for (; row - team < end; row += step) {
        const bool has_row = row < end;
        const Offset start = Offset(row) * C;
        float total = 0.0f, deviations = 0.0f;
        if (has_row) {
            total = x.template add<Aligned>(a, b, residual + start, inp1 + start, inp2 + start);
            if (row + step < end) load_inputs(row + step);
        }
        const float m = team_sum(total, totals, warps) / C;
        if (has_row) deviations = x.template squared_deviations<Aligned>(m);
        const float r = reciprocal_deviation(team_sum(deviations, squares, warps), C);
        if (!has_row) continue;
        x.template normalise<Aligned>(normed + start, m, r);
        if (thread == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
}
