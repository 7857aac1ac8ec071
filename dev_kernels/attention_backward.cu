// Backward pass of causal attention that keeps its attention matrix.
//
// Forward, per batch and head: att[t, :] = softmax over t2 <= t of q[t] . k[t2] / sqrt(HS), 0 above the diagonal;
// out = att v. Backward, from dout:
//     datt = dout v^T                          a GEMM
//     dv   = att^T dout                        a GEMM
//     dpreatt[t, t3] = scale * sum over t2 <= t of att[t, t2] * ((t2 == t3) - att[t, t3]) * datt[t, t2]
//     dq   = dpreatt k, dk = dpreatt^T q       two GEMMs
// with scale = 1 / sqrt(HS), and dpreatt = 0 for t3 > t. The versions differ in how they compute dpreatt:
//
//   1  one thread per column t3 walks over all batches, heads, rows t and t2
//   2  + one thread per column of each head: heads run side by side
//   3  + one warp per column: lanes split the sum over t2, so loads coalesce
//   4  + one warp per eight columns: a row that was loaded serves eight sums
//   5  + no branches in the inner loop: only the 32 values of t2 around the eight columns can meet t2 == t3
//   6  one block per row t: products att * datt are staged in shared memory, tile by tile, and read by all columns
//   7  the sum over t2 does not depend on t3: dpreatt = scale * att * (datt - sum of att * datt), two passes over a row
//   8  + four rows per block, the longest first, 16 bytes per access, streaming loads
//
// Every version writes all of dpreatt, the zeros above the diagonal included, and uses att and datt at or below the
// diagonal only. Rows are as long as T, whatever T is. Grids have one dimension: it alone may exceed 65535 blocks.
#include "common.cuh"

constexpr int kMaxBlock = 1024;  // keeps a kernel that takes any block size below 65536 / 1024 registers
constexpr int kBatch = 4;        // products whose loads are under way at the same time in one thread

// products[i] = att * datt at begin + i * step, 0 from `end` on. Chosen by value, not by branch, so that all loads
// start before the first of them is waited for, in the last batch of a row, too.
__device__ inline void load_products(float (&products)[kBatch], const float* __restrict__ att,
                                     const float* __restrict__ datt, int begin, int step, int end) {
    float a[kBatch], d[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const int t2 = begin + i * step;
        a[i] = t2 < end ? att[t2] : 0.0f;
        d[i] = t2 < end ? datt[t2] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) products[i] = a[i] * d[i];
}

// --------------------------------------------------------------------------------- 1 and 2: a thread per column

// Column t3 of one head. Threads of a warp have neighbouring columns and walk over the same rows in step, so they
// read the same att[t, t2] at once, and what they write lies side by side.
__device__ inline void column_of_head(float* __restrict__ dpreatt, const float* __restrict__ datt,
                                      const float* __restrict__ att, int t3, int T, float scale) {
    for (int t = 0; t < T; ++t) {
        const Offset row = Offset(t) * T;
        float sum = 0.0f;  // stays 0 above the diagonal
        if (t3 <= t) {
            const float att_t3 = att[row + t3];
#pragma unroll 8
            for (int t2 = 0; t2 <= t; ++t2) {
                const float indicator = t2 == t3 ? 1.0f : 0.0f;
                sum += att[row + t2] * (indicator - att_t3) * datt[row + t2];
            }
        }
        dpreatt[row + t3] = scale * sum;
    }
}

__global__ void softmax_backward1(float* __restrict__ dpreatt, const float* __restrict__ datt,
                                  const float* __restrict__ att, int heads, int T, float scale) {
    const int t3 = blockIdx.x * blockDim.x + threadIdx.x;
    if (t3 >= T) return;
    for (int head = 0; head < heads; ++head) {
        const Offset start = Offset(head) * T * T;
        column_of_head(dpreatt + start, datt + start, att + start, t3, T, scale);
    }
}

__global__ void softmax_backward2(float* __restrict__ dpreatt, const float* __restrict__ datt,
                                  const float* __restrict__ att, int T, float scale) {
    const int blocks_per_head = ceil_div(T, blockDim.x);
    const int t3 = (blockIdx.x % blocks_per_head) * blockDim.x + threadIdx.x;
    if (t3 >= T) return;
    const Offset start = Offset(blockIdx.x / blocks_per_head) * T * T;
    column_of_head(dpreatt + start, datt + start, att + start, t3, T, scale);
}

// ------------------------------------------------------------------------------- 3, 4 and 5: a warp per column(s)

// Which head a warp works on, and the first of its columns, when each warp has `columns` of them.
struct WarpPlace {
    Offset head;  // offset of the head's first element
    int column;   // at least T in warps that have nothing to do

    __device__ WarpPlace(int columns, int T) {
        const int columns_per_block = (blockDim.x / kWarpSize) * columns;
        const int blocks_per_head = ceil_div(T, columns_per_block);
        head = Offset(blockIdx.x / blocks_per_head) * T * T;
        column = (blockIdx.x % blocks_per_head) * columns_per_block + warp_index() * columns;
    }
};

// A warp that owns columns owns the rows of the same numbers, too, as far as they lie above the diagonal: zeros are
// written along a row, where stores coalesce, and every element is still written once.
__device__ inline void zero_right_of_diagonal(float* __restrict__ dpreatt, int first, int columns, int T) {
    for (int t = first; t < min(first + columns, T); ++t) {
        for (int t3 = t + 1 + lane_index(); t3 < T; t3 += kWarpSize) dpreatt[Offset(t) * T + t3] = 0.0f;
    }
}

__global__ void softmax_backward3(float* __restrict__ dpreatt, const float* __restrict__ datt,
                                  const float* __restrict__ att, int T, float scale) {
    const WarpPlace place(1, T);
    const int t3 = place.column;
    if (t3 >= T) return;
    dpreatt += place.head, datt += place.head, att += place.head;

    for (int t = t3; t < T; ++t) {
        const Offset row = Offset(t) * T;
        const float att_t3 = att[row + t3];
        float sum = 0.0f;
#pragma unroll 8
        for (int t2 = lane_index(); t2 <= t; t2 += kWarpSize) {
            const float indicator = t2 == t3 ? 1.0f : 0.0f;
            sum += att[row + t2] * (indicator - att_t3) * datt[row + t2];
        }
        sum = warp_sum(sum);
        if (lane_index() == 0) dpreatt[row + t3] = scale * sum;
    }
    zero_right_of_diagonal(dpreatt, t3, 1, T);
}

constexpr int kColumns = 8;  // per warp: divides 32, so the columns of a warp lie in one stretch of 32

// Sums over the lanes, one per column; lane k writes column first + k of row t, if that is not above the diagonal.
__device__ inline void store_columns(float* __restrict__ row, const float (&sums)[kColumns], int first, int t,
                                     float scale) {
    float mine = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        const float sum = warp_sum(sums[k]);
        if (lane_index() == k) mine = sum;  // a register cannot be indexed by the lane
    }
    const int t3 = first + lane_index();
    if (lane_index() < kColumns && t3 <= t) row[t3] = scale * mine;
}

__global__ void __launch_bounds__(kMaxBlock)
softmax_backward4(float* __restrict__ dpreatt, const float* __restrict__ datt, const float* __restrict__ att, int T,
                  float scale) {
    const WarpPlace place(kColumns, T);
    const int first = place.column;
    if (first >= T) return;
    dpreatt += place.head, datt += place.head, att += place.head;

    for (int t = first; t < T; ++t) {
        const Offset row = Offset(t) * T;
        float att_t3[kColumns], sums[kColumns];
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            att_t3[k] = first + k <= t ? att[row + first + k] : 0.0f;
            sums[k] = 0.0f;
        }
#pragma unroll 4
        for (int t2 = lane_index(); t2 <= t; t2 += kWarpSize) {
            const float product = att[row + t2] * datt[row + t2];
#pragma unroll
            for (int k = 0; k < kColumns; ++k) {
                if (first + k > t) continue;
                const float indicator = t2 == first + k ? 1.0f : 0.0f;
                sums[k] += product * (indicator - att_t3[k]);
            }
        }
        store_columns(dpreatt + row, sums, first, t, scale);
    }
    zero_right_of_diagonal(dpreatt, first, kColumns, T);
}

__global__ void __launch_bounds__(kMaxBlock)
softmax_backward5(float* __restrict__ dpreatt, const float* __restrict__ datt, const float* __restrict__ att, int T,
                  float scale) {
    const WarpPlace place(kColumns, T);
    const int first = place.column;
    if (first >= T) return;
    dpreatt += place.head, datt += place.head, att += place.head;

    const int stretch = first / kWarpSize * kWarpSize;  // the 32 values of t2 that hold all columns of this warp
    for (int t = first; t < T; ++t) {
        const Offset row = Offset(t) * T;
        float att_t3[kColumns], sums[kColumns];
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            att_t3[k] = att[row + min(first + k, t)];  // columns above the diagonal get a value that is never used
            sums[k] = 0.0f;
        }
        const auto subtract_products = [&](int begin, int end) {
            for (int t2 = begin + lane_index(); t2 < end; t2 += kBatch * kWarpSize) {
                float products[kBatch];
                load_products(products, att + row, datt + row, t2, kWarpSize, end);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
#pragma unroll
                    for (int k = 0; k < kColumns; ++k) sums[k] -= products[i] * att_t3[k];
                }
            }
        };
        subtract_products(0, stretch);
        const int near = stretch + lane_index();
        const float product = near <= t ? att[row + near] * datt[row + near] : 0.0f;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sums[k] += product * ((near == first + k ? 1.0f : 0.0f) - att_t3[k]);
        subtract_products(stretch + kWarpSize, t + 1);
        store_columns(dpreatt + row, sums, first, t, scale);
    }
    zero_right_of_diagonal(dpreatt, first, kColumns, T);
}

// ------------------------------------------------------------------------------------- 6 to 8: a block per row(s)

// One row; each thread has the columns threadIdx.x, threadIdx.x + BlockSize, ...
template <int BlockSize>
__global__ void __launch_bounds__(BlockSize)
softmax_backward6(float* __restrict__ dpreatt, const float* __restrict__ datt, const float* __restrict__ att, int T,
                  float scale) {
    constexpr int kPacket = Packet<float>::size;
    alignas(16) __shared__ float products[BlockSize];
    const int t = blockIdx.x % T;
    const Offset row = Offset(blockIdx.x) * T;

    for (int first3 = 0; first3 < T; first3 += BlockSize) {
        const int t3 = first3 + threadIdx.x;
        const float att_t3 = t3 <= t ? att[row + t3] : 0.0f;
        float sums[kPacket] = {};  // independent chains, so that additions overlap
        // Columns of a tile that begins above the diagonal are all 0: `first3 <= t` is the same for all threads.
        for (int first2 = 0; first3 <= t && first2 <= t; first2 += BlockSize) {
            const int t2 = first2 + threadIdx.x;
            const float product = t2 <= t ? att[row + t2] * datt[row + t2] : 0.0f;
            __syncthreads();  // the tile before this one has been read by everybody
            products[threadIdx.x] = product;
            __syncthreads();
            const int packets = ceil_div(min(BlockSize, t + 1 - first2), kPacket);
#pragma unroll 8
            for (int i = 0; i < packets; ++i) {
                const Packet<float> tile = load_packet(products + i * kPacket);
#pragma unroll
                for (int j = 0; j < kPacket; ++j) sums[j] -= tile[j] * att_t3;
            }
            if (first2 == first3) sums[0] += product;  // here t2 == t3 is possible, and true for the own product
        }
        if (t3 < T) dpreatt[row + t3] = t3 <= t ? scale * ((sums[0] + sums[1]) + (sums[2] + sums[3])) : 0.0f;
    }
}

template <int BlockSize>
__global__ void __launch_bounds__(BlockSize)
softmax_backward7(float* __restrict__ dpreatt, const float* __restrict__ datt, const float* __restrict__ att, int T,
                  float scale) {
    const int t = blockIdx.x % T;
    const Offset row = Offset(blockIdx.x) * T;
    float sum = 0.0f;
    for (int t2 = threadIdx.x; t2 <= t; t2 += kBatch * BlockSize) {
        float products[kBatch];
        load_products(products, att + row, datt + row, t2, BlockSize, t + 1);
        sum += (products[0] + products[1]) + (products[2] + products[3]);
    }
    sum = block_sum<BlockSize>(sum);
#pragma unroll 4
    for (int t3 = threadIdx.x; t3 < T; t3 += BlockSize) {
        dpreatt[row + t3] = t3 <= t ? scale * att[row + t3] * (datt[row + t3] - sum) : 0.0f;
    }
}

constexpr int kRows = 4;  // per block. As many as a packet holds, so that the diagonal lies in one packet per row.
static_assert(kRows == Packet<float>::size, "the diagonal of the rows must fill one packet of columns");

// Four rows by four columns.
struct Tile {
    Packet<float> row[kRows];
};

// The tile at `columns` of the rows that begin at `rows`. On the diagonal what lies above it is replaced by 0; `count`
// rows exist. Aligned: T is a multiple of 4, so every row begins at a 16-byte address.
template <bool Aligned>
__device__ inline Tile load_tile(const float* __restrict__ rows, int columns, bool diagonal, int count, int T) {
    Tile tile;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float* address = rows + (r * T + columns);
        if constexpr (Aligned) {
            tile.row[r] = load_packet_streaming(address);
        } else {
#pragma unroll
            for (int c = 0; c < kRows; ++c) {
                tile.row[r][c] = r < count && (!diagonal || c <= r) ? __ldcs(address + c) : 0.0f;
            }
        }
#pragma unroll
        for (int c = r + 1; c < kRows; ++c) tile.row[r][c] = diagonal ? 0.0f : tile.row[r][c];
    }
    return tile;
}

// Ordinary stores: the next GEMM reads dpreatt, and begins with what the last blocks have written.
template <bool Aligned>
__device__ inline void store_tile(float* __restrict__ rows, const Tile& tile, int columns, int count, int T) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float* address = rows + (r * T + columns);
        if constexpr (Aligned) {
            store_packet(address, tile.row[r]);
        } else {
#pragma unroll
            for (int c = 0; c < kRows; ++c) {
                if (r < count && columns + c < T) address[c] = tile.row[r][c];
            }
        }
    }
}

// Rows 4 * group to 4 * group + 3 of one head. Seen in tiles, tile p < group lies below the diagonal, tile `group` on
// it, the later ones above.
template <int BlockSize, bool Aligned>
__global__ void __launch_bounds__(BlockSize)
softmax_backward8(float* __restrict__ dpreatt, const float* __restrict__ datt, const float* __restrict__ att, int T,
                  float scale) {
    // The last rows, which are the longest, go first, so that no long row is left over at the end. The last heads go
    // first, too: the GEMM before wrote their datt last, so it is still in L2.
    const int groups = ceil_div(T, kRows);
    const unsigned place = gridDim.x - 1 - blockIdx.x;
    const int group = place % groups;
    const int count = min(kRows, T - group * kRows);
    const Offset rows = (Offset(place / groups) * T + group * kRows) * T;
    dpreatt += rows, datt += rows, att += rows;
    const int thread = threadIdx.x;

    for (int p = group + 1 + thread; p < groups; p += BlockSize) {
        store_tile<Aligned>(dpreatt, Tile{}, p * kRows, count, T);
    }

    // From the last tile of this thread to its first, which stays in registers for the second pass.
    Tile a = {}, d = {};
    float sums[kRows] = {};
    const int last = thread + (group - thread) / BlockSize * BlockSize;
    for (int p = group < thread ? -1 : last; p >= thread; p -= BlockSize) {
        a = load_tile<Aligned>(att, p * kRows, p == group, count, T);
        d = load_tile<Aligned>(datt, p * kRows, p == group, count, T);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kRows; ++c) sums[r] += a.row[r][c] * d.row[r][c];
        }
    }
    block_sum<BlockSize>(sums);

    for (int p = thread; p <= group; p += BlockSize) {
        if (p > thread) {
            a = load_tile<Aligned>(att, p * kRows, p == group, count, T);
            d = load_tile<Aligned>(datt, p * kRows, p == group, count, T);
        }
        Tile result;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kRows; ++c) result.row[r][c] = scale * a.row[r][c] * (d.row[r][c] - sums[r]);
        }
        store_tile<Aligned>(dpreatt, result, p * kRows, count, T);
    }
}

// ------------------------------------------------------------------------------------------------------- layouts

// dvaccum (B, NH, T, HS) = dout (B, T, NH, HS). One block per token; N consecutive elements per access.
template <class Element, int N>
__global__ void split_heads(Element* __restrict__ dvaccum, const Element* __restrict__ dout, int T, int NH, int HS) {
    struct alignas(sizeof(Element) * N) Run { Element values[N]; };
    const int b = blockIdx.x / T, t = blockIdx.x % T;
    const int per_head = HS / N;
    for (int i = threadIdx.x; i < NH * per_head; i += blockDim.x) {
        const int head = i / per_head, d = i % per_head * N;
        const Offset source = Offset(blockIdx.x) * NH * HS + i * N;
        const Offset target = ((Offset(b) * NH + head) * T + t) * HS + d;
        *reinterpret_cast<Run*>(dvaccum + target) = *reinterpret_cast<const Run*>(dout + source);
    }
}

// dinp (B, T, 3, NH, HS) = dqkvr (3, B, NH, T, HS). One block per token; N consecutive elements per access.
template <class Element, int N>
__global__ void merge_heads(Element* __restrict__ dinp, const Element* __restrict__ dqkvr, int B, int T, int NH,
                            int HS) {
    struct alignas(sizeof(Element) * N) Run { Element values[N]; };
    const int b = blockIdx.x / T, t = blockIdx.x % T;
    const int per_head = HS / N;
    for (int i = threadIdx.x; i < 3 * NH * per_head; i += blockDim.x) {
        const int part_and_head = i / per_head, d = i % per_head * N;
        const int part = part_and_head / NH, head = part_and_head % NH;
        const Offset source = (((Offset(part) * B + b) * NH + head) * T + t) * HS + d;
        const Offset target = Offset(blockIdx.x) * 3 * NH * HS + i * N;
        *reinterpret_cast<Run*>(dinp + target) = *reinterpret_cast<const Run*>(dqkvr + source);
    }
}
