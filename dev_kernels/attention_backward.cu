// Backward pass of causal attention that keeps its attention matrix.
//
// Forward, per batch and head: att[t, :] = softmax over t2 <= t of q[t] . k[t2] / sqrt(HS), 0 above the diagonal;
// out = att v. Backward, from dout:
//     datt = dout v^T                          a GEMM
//     dv   = att^T dout                        a GEMM
//     dpreatt[t, t3] = scale * sum over t2 <= t of att[t, t2] * ((t2 == t3) - att[t, t3]) * datt[t, t2]
//     dq   = dpreatt k, dk = dpreatt^T q       two GEMMs
// with scale = 1 / sqrt(HS), and dpreatt = 0 for t3 > t. Versions 1 to 8 share the GEMMs, and differ in dpreatt.
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per column t3, which walks over all batches and heads, and in each over t and t2
//   2  one thread per column of each head: heads run side by side
//   3  one warp per column: lanes split the sum over t2, so that loads coalesce, and a warp reduction joins their parts
//   4  one warp per eight columns: each loaded row serves eight sums
//   5  + no branches in the inner loop: the indicator t2 == t3 only where it can be 1, for the 32 values of t2 around
//      the eight columns
//   6  one block per row t: products att * datt are staged in shared memory, tile by tile, and read by all columns
//   7  simplified formula: dpreatt = scale * att * (datt - sum of att * datt), whose sum over t2 is the same for all
//      t3: a block-wide sum, then one pass over the row
//   8  + four rows per block, whose sums share a reduction; the longest rows first, 16-byte streaming loads
//   9  + no splitting and merging: the GEMMs read inp and write dinp in place, by their strides; and dpreatt takes the
//      place of datt, so that there is one (T, T) matrix less
//  10  cuDNN's fused backward pass: one step of the plan, no kernel here, and no (T, T) matrix: att is computed again
//      from q, k and the log-sum-exp that the forward pass left
//
// Every version but 10 writes all of dpreatt, the zeros above the diagonal included, and uses att and datt at or below
// the diagonal only. Elements are stored as float, __nv_bfloat16 or __half; products and sums are float. Rows are as
// long as T, whatever T is. Grids have one dimension: it alone may exceed 65535 blocks.
#include "common.cuh"

constexpr int kMaxBlock = 1024;  // keeps a kernel that takes any block size below 65536 / 1024 registers
constexpr int kBatch = 4;        // products whose loads are under way at the same time in one thread

// products[i] = att * datt at begin + i * step, 0 from `end` on. Chosen by value, not by branch, so that all loads
// start before the first of them is waited for, in the last batch of a row, too.
template <class Element>
__device__ inline void load_products(float (&products)[kBatch], const Element* __restrict__ att,
                                     const Element* __restrict__ datt, int begin, int step, int end) {
    float a[kBatch], d[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const int t2 = begin + i * step;
        a[i] = t2 < end ? to_float(att[t2]) : 0.0f;
        d[i] = t2 < end ? to_float(datt[t2]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) products[i] = a[i] * d[i];
}

// --------------------------------------------------------------------------------- 1 and 2: a thread per column

// Column t3 of one head. Threads of a warp have neighbouring columns and walk over the same rows in step, so they
// read the same att[t, t2] at once, and what they write lies side by side.
template <class Element>
__device__ inline void column_of_head(Element* __restrict__ dpreatt, const Element* __restrict__ datt,
                                      const Element* __restrict__ att, int t3, int T, float scale) {
    for (int t = 0; t < T; ++t) {
        const Offset row = Offset(t) * T;
        float sum = 0.0f;  // stays 0 above the diagonal
        if (t3 <= t) {
            const float att_t3 = to_float(att[row + t3]);
#pragma unroll 8
            for (int t2 = 0; t2 <= t; ++t2) {
                const float indicator = t2 == t3 ? 1.0f : 0.0f;
                sum += to_float(att[row + t2]) * (indicator - att_t3) * to_float(datt[row + t2]);
            }
        }
        dpreatt[row + t3] = from_float<Element>(scale * sum);
    }
}

template <class Element>
__global__ void softmax_backward1(Element* __restrict__ dpreatt, const Element* __restrict__ datt,
                                  const Element* __restrict__ att, int heads, int T, float scale) {
    const int t3 = blockIdx.x * blockDim.x + threadIdx.x;
    if (t3 >= T) return;
    for (int head = 0; head < heads; ++head) {
        const Offset start = Offset(head) * T * T;
        column_of_head(dpreatt + start, datt + start, att + start, t3, T, scale);
    }
}

template <class Element>
__global__ void softmax_backward2(Element* __restrict__ dpreatt, const Element* __restrict__ datt,
                                  const Element* __restrict__ att, int T, float scale) {
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
template <class Element>
__device__ inline void zero_right_of_diagonal(Element* __restrict__ dpreatt, int first, int columns, int T) {
    const Element zero = from_float<Element>(0.0f);
    for (int t = first; t < min(first + columns, T); ++t) {
        for (int t3 = t + 1 + lane_index(); t3 < T; t3 += kWarpSize) dpreatt[Offset(t) * T + t3] = zero;
    }
}

template <class Element>
__global__ void softmax_backward3(Element* __restrict__ dpreatt, const Element* __restrict__ datt,
                                  const Element* __restrict__ att, int T, float scale) {
    const WarpPlace place(1, T);
    const int t3 = place.column;
    if (t3 >= T) return;
    dpreatt += place.head, datt += place.head, att += place.head;

    for (int t = t3; t < T; ++t) {
        const Offset row = Offset(t) * T;
        const float att_t3 = to_float(att[row + t3]);
        float sum = 0.0f;
#pragma unroll 8
        for (int t2 = lane_index(); t2 <= t; t2 += kWarpSize) {
            const float indicator = t2 == t3 ? 1.0f : 0.0f;
            sum += to_float(att[row + t2]) * (indicator - att_t3) * to_float(datt[row + t2]);
        }
        sum = warp_sum(sum);
        if (lane_index() == 0) dpreatt[row + t3] = from_float<Element>(scale * sum);
    }
    zero_right_of_diagonal(dpreatt, t3, 1, T);
}

constexpr int kColumns = 8;  // per warp: divides 32, so the columns of a warp lie in one stretch of 32

// Sums over the lanes, one per column; lane k writes column first + k of row t, if that is not above the diagonal.
template <class Element>
__device__ inline void store_columns(Element* __restrict__ row, const float (&sums)[kColumns], int first, int t,
                                     float scale) {
    float mine = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        const float sum = warp_sum(sums[k]);
        if (lane_index() == k) mine = sum;  // a register cannot be indexed by the lane
    }
    const int t3 = first + lane_index();
    if (lane_index() < kColumns && t3 <= t) row[t3] = from_float<Element>(scale * mine);
}

template <class Element>
__global__ void __launch_bounds__(kMaxBlock)
softmax_backward4(Element* __restrict__ dpreatt, const Element* __restrict__ datt, const Element* __restrict__ att,
                  int T, float scale) {
    const WarpPlace place(kColumns, T);
    const int first = place.column;
    if (first >= T) return;
    dpreatt += place.head, datt += place.head, att += place.head;

    for (int t = first; t < T; ++t) {
        const Offset row = Offset(t) * T;
        float att_t3[kColumns], sums[kColumns];
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            att_t3[k] = first + k <= t ? to_float(att[row + first + k]) : 0.0f;
            sums[k] = 0.0f;
        }
#pragma unroll 4
        for (int t2 = lane_index(); t2 <= t; t2 += kWarpSize) {
            const float product = to_float(att[row + t2]) * to_float(datt[row + t2]);
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

template <class Element>
__global__ void __launch_bounds__(kMaxBlock)
softmax_backward5(Element* __restrict__ dpreatt, const Element* __restrict__ datt, const Element* __restrict__ att,
                  int T, float scale) {
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
            att_t3[k] = to_float(att[row + min(first + k, t)]);  // above the diagonal a value that is never used
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
        const float product = near <= t ? to_float(att[row + near]) * to_float(datt[row + near]) : 0.0f;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sums[k] += product * ((near == first + k ? 1.0f : 0.0f) - att_t3[k]);
        subtract_products(stretch + kWarpSize, t + 1);
        store_columns(dpreatt + row, sums, first, t, scale);
    }
    zero_right_of_diagonal(dpreatt, first, kColumns, T);
}

// ------------------------------------------------------------------------------------- 6 to 9: a block per row(s)

// One row; each thread has the columns threadIdx.x, threadIdx.x + BlockSize, ...
template <class Element, int BlockSize>
__global__ void __launch_bounds__(BlockSize)
softmax_backward6(Element* __restrict__ dpreatt, const Element* __restrict__ datt, const Element* __restrict__ att,
                  int T, float scale) {
    constexpr int kPacket = Packet<float>::size;
    alignas(16) __shared__ float products[BlockSize];
    const int t = blockIdx.x % T;
    const Offset row = Offset(blockIdx.x) * T;

    for (int first3 = 0; first3 < T; first3 += BlockSize) {
        const int t3 = first3 + threadIdx.x;
        const float att_t3 = t3 <= t ? to_float(att[row + t3]) : 0.0f;
        float sums[kPacket] = {};  // independent chains, so that additions overlap
        // Columns of a tile that begins above the diagonal are all 0: `first3 <= t` is the same for all threads.
        for (int first2 = 0; first3 <= t && first2 <= t; first2 += BlockSize) {
            const int t2 = first2 + threadIdx.x;
            const float product = t2 <= t ? to_float(att[row + t2]) * to_float(datt[row + t2]) : 0.0f;
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
        if (t3 < T) {
            const float sum = t3 <= t ? scale * ((sums[0] + sums[1]) + (sums[2] + sums[3])) : 0.0f;
            dpreatt[row + t3] = from_float<Element>(sum);
        }
    }
}

template <class Element, int BlockSize>
__global__ void __launch_bounds__(BlockSize)
softmax_backward7(Element* __restrict__ dpreatt, const Element* __restrict__ datt, const Element* __restrict__ att,
                  int T, float scale) {
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
        const float result = t3 <= t ? scale * to_float(att[row + t3]) * (to_float(datt[row + t3]) - sum) : 0.0f;
        dpreatt[row + t3] = from_float<Element>(result);
    }
}

constexpr int kRows = 4;  // per block

// Four rows of a packet each: four columns of fp32, eight of 16-bit types. Where rows do not begin at 16-byte
// addresses, elements move one by one, and only the first four columns are used. As the number of columns is a multiple
// of four, the diagonal of the rows lies in one tile.
template <class Element>
struct Tile {
    Packet<Element> row[kRows];
};

template <class Element, bool Aligned>
constexpr int kTileColumns = Aligned ? Packet<Element>::size : kRows;

// The tile at `column` of the rows that begin at `rows`. Row r is used up to element r + `reach` of the tile: on the
// diagonal, what lies behind that is replaced by 0; `count` rows exist. Aligned: T is a multiple of a packet, so every
// row begins at a 16-byte address.
template <bool Aligned, class Element>
__device__ inline Tile<Element> load_tile(const Element* __restrict__ rows, int column, bool diagonal, int reach,
                                          int count, int T) {
    constexpr int kWidth = kTileColumns<Element, Aligned>;
    const Element zero = from_float<Element>(0.0f);
    Tile<Element> tile;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Element* address = rows + (r * T + column);
        if constexpr (Aligned) {
            tile.row[r] = load_packet_streaming(address);
        } else {
#pragma unroll
            for (int c = 0; c < kWidth; ++c) {
                tile.row[r][c] = r < count && (!diagonal || c <= r + reach) ? __ldcs(address + c) : zero;
            }
        }
#pragma unroll
        for (int c = r + 1; c < kWidth; ++c) {
            tile.row[r][c] = diagonal && c > r + reach ? zero : tile.row[r][c];
        }
    }
    return tile;
}

// Ordinary stores: the next GEMM reads dpreatt, and begins with what the last blocks have written.
template <bool Aligned, class Element>
__device__ inline void store_tile(Element* __restrict__ rows, const Tile<Element>& tile, int column, int count, int T) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        Element* address = rows + (r * T + column);
        if constexpr (Aligned) {
            store_packet(address, tile.row[r]);
        } else {
#pragma unroll
            for (int c = 0; c < kTileColumns<Element, Aligned>; ++c) {
                if (r < count && column + c < T) address[c] = tile.row[r][c];
            }
        }
    }
}

// Rows 4 * group to 4 * group + 3 of one head. Seen in tiles, tile p < diagonal lies below the diagonal, tile
// `diagonal` on it, the later ones above. dpreatt may be the memory of datt: a tile is read by the thread that writes
// it, and before that.
template <class Element, int BlockSize, bool Aligned>
__device__ inline void backward_of_rows(Element* dpreatt, const Element* datt, const Element* att, int T,
                                        float scale) {
    constexpr int kWidth = kTileColumns<Element, Aligned>;
    // Whether a thread's first tiles stay in registers. The compiler keeps them as floats: of 16-bit types, they are
    // too many for the 64 registers of each of 1024 threads.
    constexpr bool kKept = sizeof(Element) == sizeof(float) || BlockSize < kMaxBlock;
    // The last rows, which are the longest, go first, so that no long row is left over at the end. The last heads go
    // first, too: the GEMM before wrote their datt last, so it is still in L2.
    const int groups = ceil_div(T, kRows), tiles = ceil_div(T, kWidth);
    const unsigned place = gridDim.x - 1 - blockIdx.x;
    const int group = place % groups;
    const int count = min(kRows, T - group * kRows);
    const int diagonal = group * kRows / kWidth, reach = group * kRows % kWidth;
    const Offset rows = (Offset(place / groups) * T + group * kRows) * T;
    dpreatt += rows, datt += rows, att += rows;
    const int thread = threadIdx.x;

    for (int p = diagonal + 1 + thread; p < tiles; p += BlockSize) {
        store_tile<Aligned>(dpreatt, Tile<Element>{}, p * kWidth, count, T);
    }

    // From the last tile of this thread to its first, which is kept for the second pass.
    Tile<Element> a = {}, d = {};
    float sums[kRows] = {};
    const int last = thread + (diagonal - thread) / BlockSize * BlockSize;
    for (int p = diagonal < thread ? -1 : last; p >= thread; p -= BlockSize) {
        a = load_tile<Aligned>(att, p * kWidth, p == diagonal, reach, count, T);
        d = load_tile<Aligned>(datt, p * kWidth, p == diagonal, reach, count, T);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kWidth; ++c) sums[r] += to_float(a.row[r][c]) * to_float(d.row[r][c]);
        }
    }
    block_sum<BlockSize>(sums);

    for (int p = thread; p <= diagonal; p += BlockSize) {
        if (!kKept || p > thread) {
            a = load_tile<Aligned>(att, p * kWidth, p == diagonal, reach, count, T);
            d = load_tile<Aligned>(datt, p * kWidth, p == diagonal, reach, count, T);
        }
        Tile<Element> result;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kWidth; ++c) {
                const float factor = scale * to_float(a.row[r][c]);
                result.row[r][c] = from_float<Element>(factor * (to_float(d.row[r][c]) - sums[r]));
            }
        }
        store_tile<Aligned>(dpreatt, result, p * kWidth, count, T);
    }
}

template <class Element, int BlockSize, bool Aligned>
__global__ void __launch_bounds__(BlockSize)
softmax_backward8(Element* __restrict__ dpreatt, const Element* __restrict__ datt, const Element* __restrict__ att,
                  int T, float scale) {
    backward_of_rows<Element, BlockSize, Aligned>(dpreatt, datt, att, T, scale);
}

// datt -> dpreatt in place.
template <class Element, int BlockSize, bool Aligned>
__global__ void __launch_bounds__(BlockSize)
softmax_backward9(Element* dpreatt, const Element* __restrict__ att, int T, float scale) {
    backward_of_rows<Element, BlockSize, Aligned>(dpreatt, dpreatt, att, T, scale);
}

// -------------------------------------------------------------------------------------------- layouts of 1 to 8

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
