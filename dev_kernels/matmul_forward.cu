// A linear layer, with or without bias, with or without GELU.
//
// out[n, o] = inp[n, :] . weight[o, :] + bias[o], for N = B * T rows n, C input and OC output channels. Where asked,
// GELU in its tanh form follows: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Without a bias, kernels are given
// some other pointer in its place, which they do not follow.
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per output, in square blocks. Neighbouring threads have neighbouring rows n, so their accesses lie a
//      whole row apart
//   2  the library's GEMM, then a kernel for bias and GELU, in place
//   3  + bias and GELU in the epilogue of the library's GEMM: out is written once, and there is no kernel of ours
//   4  by hand again, to see how near to the library one comes: 128 x 128 tiles, for which inp and weight are staged in
//      shared memory, transposed; 8 x 8 outputs per thread, in registers
//   5  as 3, and the same epilogue keeps what GELU is applied to, which the backward pass needs
//
// All sizes are whatever they are. Grids have one dimension: it alone may exceed 65535 blocks.
#include "tiles.cuh"

// By (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), which cancels nothing where tanh(u) is near -1. The fast division is
// 2 ulp off, and 0 for divisors above 2^126, as it should be.
__device__ inline float gelu(float x) {
    constexpr float kSlope = 0.7978845608f;  // sqrt(2 / pi)
    return __fdividef(x, 1.0f + expf(-2.0f * kSlope * (x + 0.044715f * x * x * x)));
}

// ------------------------------------------------------------------------------------ 1: a thread per output

template <class Element>
__global__ void matmul_forward1(Element* __restrict__ out, const Element* __restrict__ inp,
                                const Element* __restrict__ weight, const Element* __restrict__ bias, int N, int C,
                                int OC, int with_bias, int with_gelu) {
    const int across = ceil_div(N, blockDim.x);  // blocks that share their channels
    const int n = blockIdx.x % across * blockDim.x + threadIdx.x;
    const int o = blockIdx.x / across * blockDim.y + threadIdx.y;
    if (n >= N || o >= OC) return;
    const Element* row = inp + Offset(n) * C;
    const Element* column = weight + Offset(o) * C;
    float sum = with_bias ? to_float(bias[o]) : 0.0f;
    for (int c = 0; c < C; ++c) sum += to_float(row[c]) * to_float(column[c]);
    out[Offset(n) * OC + o] = from_float<Element>(with_gelu ? gelu(sum) : sum);
}

// ------------------------------------------------------------------------------------- 2: after the library's GEMM

// A block has one packet per thread of one row. Aligned: rows are whole packets.
template <class Element, bool Aligned>
__global__ void add_bias(Element* out, const Element* __restrict__ bias, int OC, int with_bias, int with_gelu) {
    constexpr int kPacket = Packet<Element>::size;
    const int across = ceil_div(OC, blockDim.x * kPacket);  // blocks that share a row
    const int o = (blockIdx.x % across * blockDim.x + threadIdx.x) * kPacket;
    if (o >= OC) return;
    Element* row = out + Offset(blockIdx.x / across) * OC;
    const Element zero = from_float<Element>(0.0f);
    Packet<Element> values = load_row_packet_streaming<Aligned>(row, o, OC, zero);
    Packet<Element> added = {};
    if (with_bias) added = load_row_packet<Aligned>(bias, o, OC, zero);
#pragma unroll
    for (int i = 0; i < kPacket; ++i) {
        const float sum = to_float(values[i]) + to_float(added[i]);
        values[i] = from_float<Element>(with_gelu ? gelu(sum) : sum);
    }
    store_row_packet_streaming<Aligned>(row, o, OC, values);
}

// ------------------------------------------------------------------------------------------- 4: tiles by hand

// Aligned: C and OC are multiples of 4. WithBias is no argument: that would take a register too many.
template <class Element, bool Aligned, bool WithBias, bool WithGelu>
__global__ void __launch_bounds__(kTileThreads, tile_blocks(Aligned))
matmul_forward4(Element* __restrict__ out, const Element* __restrict__ inp, const Element* __restrict__ weight,
                const Element* __restrict__ bias, int N, int C, int OC) {
    // Blocks that run at the same time share rows of inp, and pass over all of weight, which fits into the L2.
    const int across = ceil_div(OC, kTile);
    const int first_n = blockIdx.x / across * kTile, first_o = blockIdx.x % across * kTile;

    float sums[kTileSide][kTileSide] = {};
#pragma unroll
    for (int j = 0; WithBias && j < kTileSide; j += kQuad) {
        const Quad<Element> of_bias = load_row_quad<Aligned>(bias, first_o + tile_col(j), OC);
#pragma unroll
        for (int i = 0; i < kTileSide; ++i) {
#pragma unroll
            for (int e = 0; e < kQuad; ++e) sums[i][j + e] = to_float(of_bias.values[e]);
        }
    }
    add_tile_product<Aligned>(sums, inp + Offset(first_n) * C, C, N - first_n, weight + Offset(first_o) * C, C,
                              OC - first_o, C);
#pragma unroll
    for (int i = 0; i < kTileSide; ++i) {
        const int n = first_n + tile_row(i);
        if (n >= N) continue;
#pragma unroll
        for (int j = 0; j < kTileSide; j += kQuad) {
            Quad<Element> quad;
#pragma unroll
            for (int e = 0; e < kQuad; ++e) {
                quad.values[e] = from_float<Element>(WithGelu ? gelu(sums[i][j + e]) : sums[i][j + e]);
            }
            store_row_quad_streaming<Aligned>(out + Offset(n) * OC, first_o + tile_col(j), OC, quad);
        }
    }
}
