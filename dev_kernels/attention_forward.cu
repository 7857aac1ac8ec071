// Causal multi-head attention, from packed queries, keys and values inp (B, T, 3, NH, HS) to out (B, T, NH, HS).
//
// Per batch and head, with scale = 1 / sqrt(HS):
//     preatt[t, t2] = q[t] . k[t2]                       for t2 <= t; above the diagonal it is never read
//     att[t, :] = softmax over t2 <= t of scale * preatt[t, t2], 0 above the diagonal
//     out[t] = sum over t2 <= t of att[t, t2] * v[t2]
//
// Versions ("+": what it adds to the one before):
//
//   1  naive: a thread per score, then a thread per row of the softmax, then a thread per row of out
//   2  flash attention: no (T, T) matrix; tiles of keys pass by, and a warp per row keeps a running maximum and sum. A
//      step aside, to see what is saved by not storing the matrix, before GEMMs, which need it, do the products
//   3  two GEMMs, and a kernel for each of the other steps: split the heads, scale and mask, softmax, merge the heads
//   4  + scale, mask and softmax in one kernel: a warp per row, up to the diagonal, online: maximum and sum in one pass
//   5  + a row is read once, and waits in registers for its maximum and sum
//   6  + no splitting and merging: the GEMMs read inp and write out in place, by their strides
//  10  cuDNN's fused attention: one step of the plan, no kernel here
//
// Numbers follow the ladder that these versions are known by; there are no 7 to 9. Registers hold rows of up to 1024
// elements: 5 and 6 read the rest of a longer row again in each pass.
//
// Elements are stored as float, __nv_bfloat16 or __half; sums and exponentials are float. A row's maximum is subtracted
// before scaling, which is exact where it matters: the largest exponential of every row is exp(0). Rows are as long as
// T, whatever T is. Grids have one dimension: it alone may exceed 65535 blocks.
#include "common.cuh"

constexpr int kMaxBlock = 512;  // keeps a kernel that takes any block size below 65536 / 512 registers

// --------------------------------------------------------------------------------------- 1: three naive kernels

// The first element of one head's queries (part 0), keys (1) or values (2); from token to token it is 3 * NH * HS.
template <class Element>
__device__ inline const Element* part_of_head(const Element* inp, int part, int b, int head, int T, int NH, int HS) {
    return inp + (Offset(b) * T * 3 + part) * NH * HS + head * HS;
}

template <class Element>
__global__ void scores1(Element* __restrict__ preatt, const Element* __restrict__ inp, int heads, int T, int NH,
                        int HS) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= Offset(heads) * T * T) return;
    const int t2 = i % T, t = i / T % T, head = i / T / T;
    if (t2 > t) return;
    const Offset token = 3 * NH * HS;
    const Element* q = part_of_head(inp, 0, head / NH, head % NH, T, NH, HS) + t * token;
    const Element* k = part_of_head(inp, 1, head / NH, head % NH, T, NH, HS) + t2 * token;
    float sum = 0.0f;
    for (int d = 0; d < HS; ++d) sum += to_float(q[d]) * to_float(k[d]);
    preatt[i] = from_float<Element>(sum);
}

template <class Element>
__global__ void softmax1(Element* __restrict__ att, const Element* __restrict__ preatt, int heads, int T,
                         float scale) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= Offset(heads) * T) return;
    const int t = row % T;
    att += row * T, preatt += row * T;

    float largest = -infinity();
    for (int t2 = 0; t2 <= t; ++t2) largest = fmaxf(largest, to_float(preatt[t2]));
    float sum = 0.0f;
    for (int t2 = 0; t2 <= t; ++t2) sum += expf(scale * (to_float(preatt[t2]) - largest));
    for (int t2 = 0; t2 <= t; ++t2) {
        att[t2] = from_float<Element>(expf(scale * (to_float(preatt[t2]) - largest)) / sum);
    }
    for (int t2 = t + 1; t2 < T; ++t2) att[t2] = from_float<Element>(0.0f);
}

// One thread per token and head, in the order of `out`.
template <class Element>
__global__ void values1(Element* __restrict__ out, const Element* __restrict__ att, const Element* __restrict__ inp,
                        int tokens, int T, int NH, int HS) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= Offset(tokens) * NH) return;
    const int head = i % NH, t = i / NH % T, b = i / NH / T;
    const Element* row = att + ((Offset(b) * NH + head) * T + t) * T;
    const Element* v = part_of_head(inp, 2, b, head, T, NH, HS);
    const Offset token = 3 * NH * HS;
    for (int d = 0; d < HS; ++d) {
        float sum = 0.0f;
        for (int t2 = 0; t2 <= t; ++t2) sum += to_float(row[t2]) * to_float(v[t2 * token + d]);
        out[i * HS + d] = from_float<Element>(sum);
    }
}

// ------------------------------------------------------------------------------------------- 2: flash attention

// Keys or values of one tile as floats: `count` rows of HS elements, `pitch` apart in shared memory.
template <class Element>
__device__ inline void load_rows(float* __restrict__ tile, const Element* __restrict__ rows, Offset token, int count,
                                 int HS, int pitch) {
    for (int i = threadIdx.x; i < count * HS; i += blockDim.x) {
        tile[i / HS * pitch + i % HS] = to_float(rows[i / HS * token + i % HS]);
    }
}

// A warp per row of queries; a block has as many rows of one head as it has warps. `keys` keys, at most 32, are in
// shared memory at a time: scores are spread over the lanes by key, outputs by element of the head, of which each lane
// keeps at most Chunks. The last rows of all heads, which are the longest, go first.
template <class Element, int Chunks>
__global__ void __launch_bounds__(kMaxBlock, 1)  // without the 1, the compiler spills to fit more blocks
flash_attention2(Element* __restrict__ out, float* __restrict__ lse, const Element* __restrict__ inp, int heads, int T,
                 int NH, int HS, int keys, float scale) {
    extern __shared__ float shared[];
    const int rows = blockDim.x / kWarpSize;
    const int pitch = HS + 1;  // lanes read one element each of 32 keys: with HS apart, of one bank where 32 divides HS
    float* const queries = shared + warp_index() * HS;
    float* const k_tile = shared + rows * HS;
    float* const v_tile = k_tile + keys * pitch;

    const int head = blockIdx.x % heads, b = head / NH;
    const int last = T - 1 - int(blockIdx.x / heads) * rows;  // of the block's rows
    const int t = last - warp_index();                        // below 0 in warps that have nothing to do
    const Offset token = 3 * NH * HS;
    const Element* const q = part_of_head(inp, 0, b, head % NH, T, NH, HS) + t * token;
    const Element* const k = part_of_head(inp, 1, b, head % NH, T, NH, HS);
    const Element* const v = part_of_head(inp, 2, b, head % NH, T, NH, HS);
    for (int d = lane_index(); t >= 0 && d < HS; d += kWarpSize) queries[d] = to_float(q[d]);

    float largest = -infinity(), sum = 0.0f;
    float sums[Chunks] = {};  // of exponentials times values
    for (int first = 0; first <= last; first += keys) {
        const int count = min(keys, last + 1 - first);
        __syncthreads();  // the tile before this one has been read by everybody
        load_rows(k_tile, k + first * token, token, count, HS, pitch);
        load_rows(v_tile, v + first * token, token, count, HS, HS);
        __syncthreads();
        if (first > t) continue;  // masked from end to end, for the whole warp; the next tile's barriers are met

        const bool visible = lane_index() < count && first + lane_index() <= t;
        float score = 0.0f;
        for (int d = 0; visible && d < HS; ++d) score += queries[d] * k_tile[lane_index() * pitch + d];
        // At least lane 0 sees its key, so from the first tile on this is finite.
        const float larger = fmaxf(largest, warp_max(visible ? score : -infinity()));
        const float weight = visible ? expf(scale * (score - larger)) : 0.0f;
        const float shrink = expf(scale * (largest - larger));  // 0 in the first tile
        largest = larger;
        sum = sum * shrink + warp_sum(weight);
#pragma unroll
        for (int i = 0; i < Chunks; ++i) sums[i] *= shrink;
        for (int j = 0; j < count; ++j) {
            const float weight_of_key = __shfl_sync(kFullWarp, weight, j);
#pragma unroll
            for (int i = 0; i < Chunks; ++i) {
                const int d = i * kWarpSize + lane_index();
                if (d < HS) sums[i] += weight_of_key * v_tile[j * HS + d];
            }
        }
    }
    if (t < 0) return;
    Element* const result = out + ((Offset(b) * T + t) * NH + head % NH) * HS;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
        const int d = i * kWarpSize + lane_index();
        if (d < HS) result[d] = from_float<Element>(sums[i] / sum);
    }
    if (lane_index() == 0) lse[Offset(head) * T + t] = scale * largest + logf(sum);
}

// ------------------------------------------------------------------------- 3: scale and mask, then a plain softmax

template <class Element>
__global__ void scale_and_mask3(Element* __restrict__ att, const Element* __restrict__ preatt, int heads, int T,
                                float scale) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= Offset(heads) * T * T) return;
    const int t2 = i % T, t = i / T % T;
    att[i] = from_float<Element>(t2 <= t ? scale * to_float(preatt[i]) : -infinity());
}

// One block per row, in place: each thread reads and writes the columns threadIdx.x, threadIdx.x + blockDim.x, ...
// exp(-infinity) is 0, so the softmax need not know where the diagonal is.
template <class Element>
__global__ void softmax3(Element* __restrict__ att, int T) {
    att += Offset(blockIdx.x) * T;
    float largest = -infinity();
    for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) largest = fmaxf(largest, to_float(att[t2]));
    largest = any_block_max(largest);
    float sum = 0.0f;
    for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) sum += expf(to_float(att[t2]) - largest);
    sum = any_block_sum(sum);
    for (int t2 = threadIdx.x; t2 < T; t2 += blockDim.x) {
        att[t2] = from_float<Element>(expf(to_float(att[t2]) - largest) / sum);
    }
}

// --------------------------------------------------------------------------------- 4 to 6: a softmax per warp

// The row of a warp. The last rows of the last head go first: the GEMM before has written them last, so they are the
// likeliest to be in L2 still, and the first rows, written last here, are what the GEMM behind begins with.
struct WarpRow {
    Offset start;  // of the row's elements
    int t;         // -1 in warps that have nothing to do

    __device__ WarpRow(int heads, int T) {
        const Offset row = Offset(heads) * T - 1 - Offset(blockIdx.x) * (blockDim.x / kWarpSize) - warp_index();
        start = row * T;
        t = row < 0 ? -1 : int(row % T);
    }
};

// Elements first, first + 1, ... of a row, -infinity from `size` on: behind the diagonal anything may stand, NaN too.
template <bool Aligned, class Element>
__device__ inline void load_scores(float (&scores)[Packet<Element>::size], const Element* __restrict__ row, int first,
                                   int size) {
    const Packet<Element> packet =
        load_row_packet_streaming<Aligned>(row, first, size, from_float<Element>(-infinity()));
#pragma unroll
    for (int i = 0; i < Packet<Element>::size; ++i) {
        scores[i] = first + i < size ? to_float(packet[i]) : -infinity();
    }
}

// Ordinary stores: the next GEMM reads what is written here.
template <bool Aligned, class Element>
__device__ inline void store_scaled(Element* __restrict__ row, const float (&values)[Packet<Element>::size],
                                    float factor, int first, int T) {
    Packet<Element> packet;
#pragma unroll
    for (int i = 0; i < Packet<Element>::size; ++i) packet[i] = from_float<Element>(values[i] * factor);
    store_row_packet<Aligned>(row, first, T, packet);
}

// scores -> 2^(scale2 * (score - largest)); returns their sum.
template <int N>
__device__ inline float exponentials(float (&scores)[N], float largest, float scale2) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        scores[i] = exp2f(scale2 * (scores[i] - largest));
        sum += scores[i];
    }
    return sum;
}

template <int N>
__device__ inline float largest_of(const float (&scores)[N], float largest) {
#pragma unroll
    for (int i = 0; i < N; ++i) largest = fmaxf(largest, scores[i]);
    return largest;
}

// scale2 = scale * log2(e): powers of 2 are what the hardware computes.
template <class Element, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock)
softmax4(Element* __restrict__ att, const Element* __restrict__ preatt, int heads, int T, float scale2) {
    constexpr int kPacket = Packet<Element>::size;
    const WarpRow row(heads, T);
    if (row.t < 0) return;
    const int size = row.t + 1;
    att += row.start, preatt += row.start;

    // Maximum and sum in one pass: where a larger score comes, the sum so far shrinks. Lanes without elements keep
    // -infinity and 0.
    float largest = -infinity(), sum = 0.0f;
    for (int first = lane_index() * kPacket; first < size; first += kWarpSize * kPacket) {
        float scores[kPacket];
        load_scores<Aligned>(scores, preatt, first, size);
        const float larger = largest_of(scores, largest);
        sum = sum * exp2f(scale2 * (largest - larger)) + exponentials(scores, larger, scale2);
        largest = larger;
    }
    const float of_row = warp_max(largest);
    sum = warp_sum(sum * exp2f(scale2 * (largest - of_row)));

    for (int first = lane_index() * kPacket; first < T; first += kWarpSize * kPacket) {
        float scores[kPacket] = {};
        if (first < size) {
            load_scores<Aligned>(scores, preatt, first, size);
            exponentials(scores, of_row, scale2);
        }
        store_scaled<Aligned>(att, scores, 1.0f / sum, first, T);
    }
}

template <class Element, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock)
softmax5(Element* __restrict__ att, const Element* __restrict__ preatt, int heads, int T, float scale2) {
    constexpr int kPacket = Packet<Element>::size, kStep = kWarpSize * kPacket;
    constexpr int kHeld = 32 / kPacket;  // packets per lane that wait in registers: rows of up to 1024 elements
    const WarpRow row(heads, T);
    if (row.t < 0) return;
    const int size = row.t + 1;
    att += row.start, preatt += row.start;

    const int first = lane_index() * kPacket;
    float held[kHeld][kPacket], other[kPacket];
    float largest = -infinity();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) held[i][j] = -infinity();
        if (first + i * kStep < size) load_scores<Aligned>(held[i], preatt, first + i * kStep, size);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) largest = largest_of(held[i], largest);
    // What the registers do not hold is read again in every pass.
    const int rest = first + kHeld * kStep;
    for (int next = rest; next < size; next += kStep) {
        load_scores<Aligned>(other, preatt, next, size);
        largest = largest_of(other, largest);
    }
    largest = warp_max(largest);

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum += exponentials(held[i], largest, scale2);
    for (int next = rest; next < size; next += kStep) {
        load_scores<Aligned>(other, preatt, next, size);
        sum += exponentials(other, largest, scale2);
    }
    const float factor = 1.0f / warp_sum(sum);

    // The exponentials of -infinity, from the diagonal on, are the zeros that belong there.
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        if (first + i * kStep < T) store_scaled<Aligned>(att, held[i], factor, first + i * kStep, T);
    }
    for (int next = rest; next < T; next += kStep) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) other[j] = 0.0f;
        if (next < size) {
            load_scores<Aligned>(other, preatt, next, size);
            exponentials(other, largest, scale2);
        }
        store_scaled<Aligned>(att, other, factor, next, T);
    }
}

// ----------------------------------------------------------------------------------------- layouts of 3 to 5

// qkvr (3, B, NH, T, HS) = inp (B, T, 3, NH, HS). One block per token; N consecutive elements per access.
template <class Element, int N>
__global__ void split_heads(Element* __restrict__ qkvr, const Element* __restrict__ inp, int B, int T, int NH,
                            int HS) {
    struct alignas(sizeof(Element) * N) Run { Element values[N]; };
    const int b = blockIdx.x / T, t = blockIdx.x % T;
    const int per_head = HS / N;
    for (int i = threadIdx.x; i < 3 * NH * per_head; i += blockDim.x) {
        const int part_and_head = i / per_head, d = i % per_head * N;
        const int part = part_and_head / NH, head = part_and_head % NH;
        const Offset source = Offset(blockIdx.x) * 3 * NH * HS + i * N;
        const Offset target = (((Offset(part) * B + b) * NH + head) * T + t) * HS + d;
        *reinterpret_cast<Run*>(qkvr + target) = *reinterpret_cast<const Run*>(inp + source);
    }
}

// out (B, T, NH, HS) = vaccum (B, NH, T, HS). One block per token; N consecutive elements per access.
template <class Element, int N>
__global__ void merge_heads(Element* __restrict__ out, const Element* __restrict__ vaccum, int T, int NH, int HS) {
    struct alignas(sizeof(Element) * N) Run { Element values[N]; };
    const int b = blockIdx.x / T, t = blockIdx.x % T;
    const int per_head = HS / N;
    for (int i = threadIdx.x; i < NH * per_head; i += blockDim.x) {
        const int head = i / per_head, d = i % per_head * N;
        const Offset source = ((Offset(b) * NH + head) * T + t) * HS + d;
        const Offset target = Offset(blockIdx.x) * NH * HS + i * N;
        *reinterpret_cast<Run*>(out + target) = *reinterpret_cast<const Run*>(vaccum + source);
    }
}
