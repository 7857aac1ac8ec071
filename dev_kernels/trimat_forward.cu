// Scores of causal attention: queries times keys, as far as a query may see them.
//
// out[b, h, t, t2] = scale * q[b, t, h] . k[b, t2, h] for t2 <= t, with scale = 1 / sqrt(HS). What stands above the
// diagonal is never read, so a version may leave anything there. q and k lie in a packed tensor (B, T, 3, NH, HS).
//
// Versions ("+": what it adds to the one before):
//
//   0  the library, to compare with: q and k laid out head by head for one batched GEMM, which computes both triangles
//   1  by hand: one thread per 8 x 8 elements, one dot product after the other, from global memory
//   2  + the 64 sums in registers: 16 loads serve 64 products
//   3  + four elements per load and store
//   4  + tiles of q and k staged in shared memory, transposed, the next slab under way while this one is multiplied
//
// In versions 1 to 4 a block of 256 threads has a tile of 128 x 128 elements, and only tiles at or below the diagonal
// have a block. T and HS are whatever they are. Grids have one dimension: it alone may exceed 65535 blocks.
#include "tiles.cuh"

constexpr int kSide = 8;  // rows and columns per thread of versions 1 to 3

// The tile of a block, and where its head begins.
struct TriangleTile {
    int head;      // counted over all batches
    int row, col;  // first of its 128 queries, first of its 128 keys

    // Tiles of a head are numbered along the rows of the triangle: (0, 0), (1, 0), (1, 1), (2, 0), ...
    __device__ explicit TriangleTile(int T) {
        const int tiles = ceil_div(T, kTile), per_head = tiles * (tiles + 1) / 2;
        const int place = blockIdx.x % per_head;
        head = blockIdx.x / per_head;
        int i = int((sqrtf(8.0f * place + 1.0f) - 1.0f) / 2.0f);
        while (i * (i + 1) / 2 > place) --i;  // sqrtf has rounded
        while ((i + 1) * (i + 2) / 2 <= place) ++i;
        row = i * kTile;
        col = (place - i * (i + 1) / 2) * kTile;
    }

    // Where the query of the head's first token is in inp; its key is NH * HS further.
    __device__ Offset queries(int T, int NH, int HS) const { return (Offset(head / NH) * T * 3 * NH + head % NH) * HS; }
    // Where the head's matrix begins.
    __device__ Offset out(int T) const { return Offset(head) * T * T; }
};

// ----------------------------------------------------------------------------------------- 0: layout for a GEMM

// heads (2, B, NH, T, HS) = q and k of inp (B, T, 3, NH, HS). One block per token; N consecutive elements per access.
template <class Element, int N>
__global__ void trimat_split_heads(Element* __restrict__ heads, const Element* __restrict__ inp, int B, int T, int NH,
                                   int HS) {
    struct alignas(sizeof(Element) * N) Run { Element values[N]; };
    const int b = blockIdx.x / T, t = blockIdx.x % T;
    const int per_head = HS / N;
    for (int i = threadIdx.x; i < 2 * NH * per_head; i += blockDim.x) {
        const int part_and_head = i / per_head, d = i % per_head * N;
        const int part = part_and_head / NH, head = part_and_head % NH;
        const Offset source = Offset(blockIdx.x) * 3 * NH * HS + i * N;
        const Offset target = (((Offset(part) * B + b) * NH + head) * T + t) * HS + d;
        *reinterpret_cast<Run*>(heads + target) = *reinterpret_cast<const Run*>(inp + source);
    }
}

// ------------------------------------------------------------------------------- 1 to 3: all from global memory

template <class Element>
__global__ void __launch_bounds__(kTileThreads)
trimat_forward1(Element* __restrict__ out, const Element* __restrict__ inp, int T, int NH, int HS, float scale) {
    const TriangleTile tile(T);
    const Offset token = Offset(3) * NH * HS;
    const int first_row = tile.row + threadIdx.x * kSide, first_col = tile.col + threadIdx.y * kSide;
    for (int i = first_row; i < min(first_row + kSide, T); ++i) {
        for (int j = first_col; j < min(first_col + kSide, i + 1); ++j) {
            const Element* q = inp + tile.queries(T, NH, HS) + i * token;
            const Element* k = inp + tile.queries(T, NH, HS) + NH * HS + j * token;
            float sum = 0.0f;
            for (int d = 0; d < HS; ++d) sum += to_float(q[d]) * to_float(k[d]);
            out[tile.out(T) + Offset(i) * T + j] = from_float<Element>(scale * sum);
        }
    }
}

// Where this thread's rows and columns of operands begin. Those past the end of T repeat the last one: their sums are
// computed, but never stored.
template <class Element>
struct Operands {
    const Element* q[kSide];
    const Element* k[kSide];

    __device__ Operands(const Element* inp, const TriangleTile& tile, int first_row, int first_col, int T, int NH,
                        int HS) {
        const Offset token = Offset(3) * NH * HS;
        const Element* queries = inp + tile.queries(T, NH, HS);
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
            q[i] = queries + min(first_row + i, T - 1) * token;
            k[i] = queries + NH * HS + min(first_col + i, T - 1) * token;
        }
    }
};

template <class Element>
__global__ void __launch_bounds__(kTileThreads)
trimat_forward2(Element* __restrict__ out, const Element* __restrict__ inp, int T, int NH, int HS, float scale) {
    const TriangleTile tile(T);
    const int first_row = tile.row + threadIdx.x * kSide, first_col = tile.col + threadIdx.y * kSide;
    if (first_row >= T || first_col >= min(first_row + kSide, T)) return;  // all of it above the diagonal
    const Operands<Element> at(inp, tile, first_row, first_col, T, NH, HS);
    float sums[kSide][kSide] = {};
    for (int d = 0; d < HS; ++d) {
        float q[kSide], k[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
            q[i] = to_float(at.q[i][d]);
            k[i] = to_float(at.k[i][d]);
        }
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
            for (int j = 0; j < kSide; ++j) sums[i][j] += q[i] * k[j];
        }
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
            const int row = first_row + i, col = first_col + j;
            if (row >= T || col > row) continue;
            out[tile.out(T) + Offset(row) * T + col] = from_float<Element>(scale * sums[i][j]);
        }
    }
}

// Four columns of a row, where any of them is at or below the diagonal.
template <bool Aligned, class Element>
__device__ inline void store_quad(Element* __restrict__ head, const float* sums, int row, int col, int T, float scale) {
    if (row >= T || col > row) return;
    Quad<Element> quad;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) quad.values[i] = from_float<Element>(scale * sums[i]);
    store_row_quad_streaming<Aligned>(head + Offset(row) * T, col, T, quad);
}

// Aligned: HS and T are multiples of 4.
template <class Element, bool Aligned>
__global__ void __launch_bounds__(kTileThreads)
trimat_forward3(Element* __restrict__ out, const Element* __restrict__ inp, int T, int NH, int HS, float scale) {
    const TriangleTile tile(T);
    const int first_row = tile.row + threadIdx.x * kSide, first_col = tile.col + threadIdx.y * kSide;
    if (first_row >= T || first_col >= min(first_row + kSide, T)) return;
    const Operands<Element> at(inp, tile, first_row, first_col, T, NH, HS);
    float sums[kSide][kSide] = {};
    for (int d = 0; d < HS; d += kQuad) {
        Quad<Element> k[kSide];
#pragma unroll
        for (int j = 0; j < kSide; ++j) k[j] = load_row_quad<Aligned>(at.k[j], d, HS);
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
            const Quad<Element> q = load_row_quad<Aligned>(at.q[i], d, HS);
#pragma unroll
            for (int j = 0; j < kSide; ++j) {
#pragma unroll
                for (int e = 0; e < kQuad; ++e) sums[i][j] += to_float(q.values[e]) * to_float(k[j].values[e]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; j += kQuad) {
            store_quad<Aligned>(out + tile.out(T), &sums[i][j], first_row + i, first_col + j, T, scale);
        }
    }
}

// ------------------------------------------------------------------------------------- 4: tiles in shared memory

// Aligned: HS and T are multiples of 4.
template <class Element, bool Aligned>
__global__ void __launch_bounds__(kTileThreads, tile_blocks(Aligned))
trimat_forward4(Element* __restrict__ out, const Element* __restrict__ inp, int T, int NH, int HS, float scale) {
    const TriangleTile tile(T);
    Element* head = out + tile.out(T);
    const Offset token = Offset(3) * NH * HS;
    const Element* queries = inp + tile.queries(T, NH, HS);
    float sums[kTileSide][kTileSide] = {};
    add_tile_product<Aligned>(sums, queries + tile.row * token, token, T - tile.row,
                              queries + NH * HS + tile.col * token, token, T - tile.col, HS);
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
#pragma unroll
        for (int j = 0; j < kTileSide; j += kQuad) {
            store_quad<Aligned>(head, &sums[i][j], tile.row + tile_row(i), tile.col + tile_col(j), T, scale);
        }
    }
}
