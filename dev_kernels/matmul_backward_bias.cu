// Bias gradient of a linear layer: the sums of the columns of dout, (B * T, OC) row-major.
//
//     dbias[o] = (accumulate ? dbias[o] : 0) + sum over rows of dout[row, o]
//
// Versions ("+": what it adds to the one before):
//
//   1  one block per channel: threads stride over the rows, then a tree of sums in shared memory
//   2  one warp per channel: shuffles, no shared memory, no barrier
//   3  one block per channel: shuffles within warps, then over the warps' sums
//   4  one block per 32 neighbouring channels: the lanes of a warp read side by side, so that loads coalesce
//   5  one thread per channel, rows shared among many blocks, which fill the GPU: fp32 atomics join their sums
//   7  + 16-byte loads, eight rows under way; the sums of a block meet in shared memory, so fewer atomics leave it
//   8  + warps 8 packets wide and 4 rows deep: shuffles in place of atomics in shared memory; more blocks across and
//      fewer down, so fewer atomics still
//   9  + no atomics at all: every block writes a row of sums, and version 4's kernel adds up the rows
//  10  + no second kernel where dout is small: warps 4 packets wide and 8 rows deep, and blocks that have all rows of
//      their channels, so that nothing is left to join. Half lines are read more slowly than whole ones, but a small
//      dout is read before a second kernel has started. A large one takes the path of 9
//
// Numbers follow the ladder that these versions are known by; there is no 6. 8 and 9, too, write dbias at once where
// their grid leaves all rows of a channel to one block.
//
// Channels may be any number: where rows do not begin at multiples of 16 bytes, 7 to 10 load their packets element by
// element, and two rows at a time. Sums are fp32 throughout, across blocks too, and are rounded once.
#include "common.cuh"

// Kernels take any block size, so they may use 65536 / 1024 = 64 registers. They say (by the 1 in their launch bounds)
// that one block per multiprocessor is enough: else the compiler makes room for a second by loading one row at a time.
constexpr int kMaxBlock = 1024;

template <class T>
__device__ inline void store_sum(T* __restrict__ dbias, int channel, float sum, bool accumulate) {
    dbias[channel] = from_float<T>(accumulate ? to_float(dbias[channel]) + sum : sum);
}

// ------------------------------------------------------------------------------- 1 to 3: every channel on its own

// The sum of a channel over the rows first, first + step, ...
template <class T>
__device__ inline float channel_sum(const T* __restrict__ dout, int channel, int first, int step, int rows, int OC) {
    float sum = 0.0f;
    for (Offset row = first; row < rows; row += step) sum += to_float(dout[row * OC + channel]);
    return sum;
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias1(T* __restrict__ dbias, const T* __restrict__ dout, int rows, int OC, bool accumulate) {
    __shared__ float sums[kMaxBlock];
    const int thread = threadIdx.x;
    sums[thread] = channel_sum(dout, blockIdx.x, thread, blockDim.x, rows, OC);
    // Each round adds the upper half to the lower one; where the count is odd, the one in the middle stays as it is.
    for (int count = blockDim.x; count > 1;) {
        const int half = (count + 1) / 2;
        __syncthreads();
        if (thread + half < count) sums[thread] += sums[thread + half];
        count = half;
    }
    if (thread == 0) store_sum(dbias, blockIdx.x, sums[0], accumulate);
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias2(T* __restrict__ dbias, const T* __restrict__ dout, int rows, int OC, bool accumulate) {
    const int channel = blockIdx.x * (blockDim.x / kWarpSize) + warp_index();
    if (channel >= OC) return;  // whole warps leave
    const float sum = warp_sum(channel_sum(dout, channel, lane_index(), kWarpSize, rows, OC));
    if (lane_index() == 0) store_sum(dbias, channel, sum, accumulate);
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias3(T* __restrict__ dbias, const T* __restrict__ dout, int rows, int OC, bool accumulate) {
    const float sum = any_block_sum(channel_sum(dout, blockIdx.x, threadIdx.x, blockDim.x, rows, OC));
    if (threadIdx.x == 0) store_sum(dbias, blockIdx.x, sum, accumulate);
}

// ----------------------------------------------------------------------- 4 and 5: neighbouring channels, coalesced

// Versions 5 and 7 to 10 use this, too: to add the fp32 sums of their blocks, as rows of a small matrix, to dbias.
template <class T, class Source>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias4(T* __restrict__ dbias, const Source* __restrict__ dout, int rows, int OC, bool accumulate) {
    __shared__ float of_warp[kMaxWarps][kWarpSize];
    const int warps = blockDim.x / kWarpSize;
    const int channel = blockIdx.x * kWarpSize + lane_index();
    float sum = 0.0f;
    if (channel < OC) {
#pragma unroll 4
        for (Offset row = warp_index(); row < rows; row += warps) sum += to_float(dout[row * OC + channel]);
    }
    of_warp[warp_index()][lane_index()] = sum;
    __syncthreads();
    if (warp_index() == 0 && channel < OC) {
        for (int warp = 1; warp < warps; ++warp) sum += of_warp[warp][lane_index()];
        store_sum(dbias, channel, sum, accumulate);
    }
}

template <class T>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias5(float* __restrict__ sums, const T* __restrict__ dout, int rows, int OC) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= OC) return;
    float sum = 0.0f;
#pragma unroll 4
    for (Offset row = blockIdx.y; row < rows; row += gridDim.y) sum += to_float(dout[row * OC + channel]);
    atomicAdd(sums + channel, sum);
}

// ----------------------------------------------------------------------------------------------- 7 to 10: packets

// Adds `count` rows of a packet of channels, at most N; all of their loads are under way at the same time. Whole: count
// is N. If not, the last row is loaded again in place of those past it, and masked: a branch would wait for one load
// before it lets the next one start.
template <int N, bool Whole, bool Aligned, class T>
__device__ inline void add_batch(float (&sums)[Packet<T>::size], const T* __restrict__ rows, Offset stride, int channel,
                                 int OC, int count) {
    Packet<T> packets[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int row = Whole ? i : min(i, count - 1);
        packets[i] = load_row_packet_streaming<Aligned>(rows + row * stride, channel, OC, from_float<T>(0.0f));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int k = 0; k < Packet<T>::size; ++k) {
            const float value = to_float(packets[i][k]);
            sums[k] += Whole || i < count ? value : 0.0f;
        }
    }
}

// Adds the rows first, first + step, ... of the packet of channels that begins at `channel`. Aligned: OC is a multiple
// of a packet, so all packets lie at multiples of 16 bytes. If they do not, every element has a register of its own,
// and so fewer rows fit.
template <bool Aligned, class T>
__device__ inline void add_rows(float (&sums)[Packet<T>::size], const T* __restrict__ dout, int channel, int first,
                                int step, int rows, int OC) {
    constexpr int kRows = Aligned ? 8 : 2;
    if (channel >= OC || first >= rows) return;
    const Offset stride = Offset(step) * OC;
    const T* row = dout + Offset(first) * OC;
    int left = (rows - 1 - first) / step + 1;
    for (; left >= kRows; left -= kRows, row += kRows * stride) {
        add_batch<kRows, true, Aligned>(sums, row, stride, channel, OC, kRows);
    }
    if (left > 0) add_batch<kRows, false, Aligned>(sums, row, stride, channel, OC, left);
}

// A block is 32 packets wide, and each of its warps takes a row at a time.
template <class T, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias7(float* __restrict__ sums, const T* __restrict__ dout, int rows, int OC) {
    constexpr int kPacket = Packet<T>::size, kChannels = kWarpSize * kPacket;
    __shared__ float of_block[kChannels];
    for (int i = threadIdx.x; i < kChannels; i += blockDim.x) of_block[i] = 0.0f;
    __syncthreads();

    const int warps = blockDim.x / kWarpSize, lane = lane_index();
    const int first = blockIdx.x * kChannels;
    float of_thread[kPacket] = {};
    add_rows<Aligned>(of_thread, dout, first + lane * kPacket, blockIdx.y * warps + warp_index(), gridDim.y * warps,
                      rows, OC);
    // Element k of all lanes lies side by side, so that the 32 lanes of an atomic go to 32 banks.
#pragma unroll
    for (int k = 0; k < kPacket; ++k) atomicAdd(of_block + k * kWarpSize + lane, of_thread[k]);
    __syncthreads();
    for (int i = threadIdx.x; i < kChannels && first + i < OC; i += blockDim.x) {
        atomicAdd(sums + first + i, of_block[i % kPacket * kWarpSize + i / kPacket]);
    }
}

// The sums of this block's channels over this block's share of the rows: `store(channel, sum)` for each channel.
// Across: packets of a row that the lanes of a warp load at once. Eight are a whole line of 128 bytes; four are half of
// one, and make twice as many blocks.
template <bool Aligned, int Across = 8, class T, class Store>
__device__ inline void block_columns(const T* __restrict__ dout, int rows, int OC, Store store) {
    constexpr int kDepth = kWarpSize / Across;  // rows that they load at once
    constexpr int kPacket = Packet<T>::size, kChannels = Across * kPacket;
    __shared__ float of_warp[kMaxWarps][kChannels];
    const int warps = blockDim.x / kWarpSize, warp = warp_index();
    const int across = lane_index() % Across, depth = lane_index() / Across;
    const int first = blockIdx.x * kChannels;

    float sums[kPacket] = {};
    add_rows<Aligned>(sums, dout, first + across * kPacket, (blockIdx.y * warps + warp) * kDepth + depth,
                      gridDim.y * warps * kDepth, rows, OC);
#pragma unroll
    for (int k = 0; k < kPacket; ++k) {
        // Over the lanes of different depth. All lanes take part, also those that had no channel or no row.
#pragma unroll
        for (int distance = Across; distance < kWarpSize; distance *= 2) {
            sums[k] += __shfl_xor_sync(kFullWarp, sums[k], distance);
        }
        if (depth == 0) of_warp[warp][across * kPacket + k] = sums[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kChannels && first + i < OC; i += blockDim.x) {
        float sum = of_warp[0][i];
        for (int other = 1; other < warps; ++other) sum += of_warp[other][i];
        store(first + i, sum);
    }
}

template <class T, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias8(float* __restrict__ sums, const T* __restrict__ dout, int rows, int OC) {
    block_columns<Aligned>(dout, rows, OC, [=](int channel, float sum) { atomicAdd(sums + channel, sum); });
}

template <class T, bool Aligned, int Across>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias9(float* __restrict__ partials, const T* __restrict__ dout, int rows, int OC) {
    float* own = partials + Offset(blockIdx.y) * OC;
    block_columns<Aligned, Across>(dout, rows, OC, [=](int channel, float sum) { own[channel] = sum; });
}

// A block has all rows of its channels. Versions 8 and 9 use this, too, with whole lines.
template <class T, bool Aligned, int Across>
__global__ void __launch_bounds__(kMaxBlock, 1)
matmul_backward_bias10(T* __restrict__ dbias, const T* __restrict__ dout, int rows, int OC, bool accumulate) {
    block_columns<Aligned, Across>(dout, rows, OC,
                                   [=](int channel, float sum) { store_sum(dbias, channel, sum, accumulate); });
}
