// Products of 128 x 128 tiles by hand: the outputs of a block in registers, slabs of the operands in shared memory.
#pragma once
#include "common.cuh"

// ------------------------------------------------------------------------------------------------------- quads

constexpr int kQuad = 4;

// Four elements that move together: 16 bytes of float, 8 of the 16-bit types.
template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
    T values[kQuad];
};

// As load_row_packet, with 0 past the end of the row, but for quads: Aligned says that the row begins at a multiple of
// a quad, and that `size` is one.
template <bool Aligned, class T>
__device__ inline Quad<T> load_row_quad(const T* row, int first, int size) {
    Quad<T> quad;
    if constexpr (Aligned) {
        if (first < size) return *reinterpret_cast<const Quad<T>*>(row + first);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) quad.values[i] = from_float<T>(0.0f);
    } else {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) quad.values[i] = first + i < size ? row[first + i] : from_float<T>(0.0f);
    }
    return quad;
}

template <bool Aligned, class T>
__device__ inline void store_row_quad_streaming(T* row, int first, int size, const Quad<T>& quad) {
    if constexpr (Aligned) {
        if (first >= size) return;
        if constexpr (sizeof(quad) == sizeof(int4)) {
            int4 bits;
            memcpy(&bits, &quad, sizeof(bits));
            __stcs(reinterpret_cast<int4*>(row + first), bits);
        } else {
            int2 bits;
            memcpy(&bits, &quad, sizeof(bits));
            __stcs(reinterpret_cast<int2*>(row + first), bits);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
            if (first + i < size) __stcs(row + first + i, quad.values[i]);
        }
    }
}

// -------------------------------------------------------------------------------------------- products of tiles
//
// A block of 256 threads multiplies 128 rows of A by 128 rows of B, both row-major with rows of K elements: 128 x 128
// dot products, 8 x 8 in each thread. A warp has 32 x 64 of them, as 2 x 2 pieces of 4 x 8 threads with 4 x 4 each.

constexpr int kTile = 128;
constexpr int kTileThreads = 256;
constexpr int kTileSide = 8;  // rows and columns per thread

// Blocks per multiprocessor that registers are kept free for: one multiplies while the other loads its first slab or
// stores. Where rows are not aligned, four loads take the place of one, and need the registers.
__host__ __device__ constexpr int tile_blocks(bool aligned) { return aligned ? 2 : 1; }

constexpr int kSlab = 8;                 // elements of k in shared memory at a time: one quad per thread and operand
constexpr int kSlabRow = kTile + kQuad;  // transposed stores of a warp (16 rows, 2 quads) then meet all 32 banks

// Which of the 4 x 8 threads of its warp a lane is. Lanes that differ in bit 0 share a column, lanes that differ in bit
// 1 a row: on these conditions shared memory serves 16 lanes at once, not 8, when each lane reads 16 bytes.
__device__ inline int tile_lane_row() { return (lane_index() & 1) | ((lane_index() >> 4) << 1); }
__device__ inline int tile_lane_col() { return (lane_index() >> 1) & 7; }

// Rows and columns in the tile of this thread's sums[i][j].
__device__ inline int tile_row(int i) {
    return warp_index() / 2 * 32 + i / kQuad * 16 + tile_lane_row() * kQuad + i % kQuad;
}
__device__ inline int tile_col(int j) {
    return warp_index() % 2 * 64 + j / kQuad * 32 + tile_lane_col() * kQuad + j % kQuad;
}

// Four elements of one row of an operand, on their way from global memory into a slab.
template <bool Aligned, class T>
struct TileLoader {
    const T* next;  // where this thread's next quad begins
    Quad<T> quad;

    // stride: elements from row to row. rows: how many the operand has from `tile` on. Threads beyond them repeat the
    // last one: what comes of it is not stored.
    __device__ TileLoader(const T* tile, Offset stride, int rows)
        : next(tile + min(int(threadIdx.x) / 2, rows - 1) * stride + first()) {}

    // This thread's quad in a slab begins here: two threads share a row.
    __device__ static int first() { return threadIdx.x % 2 * kQuad; }

    // left: elements of the row from this slab on.
    __device__ void load(int left) {
        quad = load_row_quad<Aligned>(next, 0, left - first());
        next += kSlab;
    }

    __device__ void store(float (&slab)[kSlab][kSlabRow]) const {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) slab[first() + i][threadIdx.x / 2] = to_float(quad.values[i]);
    }
};

// sums[i][j] += row tile_row(i) of A times row tile_col(j) of B. a, b: where the tiles begin; a_rows, b_rows: how many
// rows there are from there on, at least 1. Aligned: rows begin at multiples of a quad, and K is one. All threads of a
// one-dimensional block of kTileThreads must call it together.
template <bool Aligned, class T>
__device__ inline void add_tile_product(float (&sums)[kTileSide][kTileSide], const T* a, Offset a_stride, int a_rows,
                                        const T* b, Offset b_stride, int b_rows, int K) {
    // Of A and of B, twice: one pair is multiplied while the other is filled. One array, for one address to serve all.
    alignas(16) __shared__ float slabs[2][2][kSlab][kSlabRow];
    TileLoader<Aligned, T> a_loader(a, a_stride, a_rows), b_loader(b, b_stride, b_rows);
    a_loader.load(K);
    b_loader.load(K);
    a_loader.store(slabs[0][0]);
    b_loader.store(slabs[0][1]);
    __syncthreads();
    for (int left = K, current = 0; left > 0; left -= kSlab, current ^= 1) {
        // Not behind a branch, which would draw the loads to where their values are stored, past all multiplications:
        // after the last slab come zeros that nobody reads.
        a_loader.load(left - kSlab);
        b_loader.load(left - kSlab);
#pragma unroll
        for (int k = 0; k < kSlab; ++k) {
            float a_values[kTileSide];
#pragma unroll
            for (int i = 0; i < kTileSide; i += kQuad) {
                const Packet<float> part = load_packet(&slabs[current][0][k][tile_row(i)]);
#pragma unroll
                for (int e = 0; e < kQuad; ++e) a_values[i + e] = part[e];
            }
#pragma unroll
            for (int j = 0; j < kTileSide; j += kQuad) {
                const Packet<float> part = load_packet(&slabs[current][1][k][tile_col(j)]);
#pragma unroll
                for (int i = 0; i < kTileSide; ++i) {
#pragma unroll
                    for (int e = 0; e < kQuad; ++e) sums[i][j + e] += a_values[i] * part[e];
                }
            }
        }
        a_loader.store(slabs[current ^ 1][0]);  // everybody is done with this pair since the barrier before
        b_loader.store(slabs[current ^ 1][1]);
        __syncthreads();
    }
}
