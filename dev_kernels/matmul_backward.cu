// Backward pass of a linear layer: out = inp weight^T + bias, with N = B * T rows, C input and OC output channels.
//
// From dout (N, OC):
//     dinp    = dout weight                    a GEMM
//     dweight = dout^T inp     (or += it)      a GEMM
//     dbias   = sums over the rows of dout     the kernels below
//
// There is one version:
//
//   1  two GEMMs of the library; column sums in two stages, coalesced, without atomics: blocks sum stretches of rows,
//      where neighbouring threads have neighbouring channels, then a small kernel adds up the stretches, all in fp32
//
// Whether dweight and dbias are replaced or added to is up to the flag `accumulate`.
#include "common.cuh"

constexpr int kWarps = 8;  // per block
constexpr int kBlock = kWarps * kWarpSize;

// partials[stretch, o] = sum of dout[n, o] over the rows n of the stretch. A warp has a packet of channels per lane and
// every eighth row. Aligned: rows are whole packets.
template <class Element, bool Aligned>
__global__ void __launch_bounds__(kBlock)
sum_stretches(float* __restrict__ partials, const Element* __restrict__ dout, int N, int OC, int rows_per_stretch) {
    constexpr int kPacket = Packet<Element>::size;
    constexpr int kChannels = kWarpSize * kPacket;  // per block
    constexpr int kRowsAtOnce = 4;                  // per thread: loads that are under way at the same time
    __shared__ float of_warp[kWarps][kChannels];
    const int across = ceil_div(OC, kChannels);
    const int stretch = blockIdx.x / across, first = blockIdx.x % across * kChannels;
    const int o = first + lane_index() * kPacket;
    const int end = min(N, (stretch + 1) * rows_per_stretch);
    const Element zero = from_float<Element>(0.0f);

    float sums[kPacket] = {};
    for (int n = stretch * rows_per_stretch + warp_index(); o < OC && n < end; n += kRowsAtOnce * kWarps) {
        Packet<Element> packets[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            // Past the end the last row is loaded once more, and not added: no branch keeps a load waiting. Not
            // streaming: the GEMMs read dout, too.
            const int row = min(n + r * kWarps, end - 1);
            packets[r] = load_row_packet<Aligned>(dout + Offset(row) * OC, o, OC, zero);
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
            for (int i = 0; i < kPacket; ++i) sums[i] += n + r * kWarps < end ? to_float(packets[r][i]) : 0.0f;
        }
    }
    // Channels of a packet lie 32 apart, so that the lanes of a warp meet all banks.
#pragma unroll
    for (int i = 0; i < kPacket; ++i) of_warp[warp_index()][i * kWarpSize + lane_index()] = sums[i];
    __syncthreads();
    for (int place = threadIdx.x; place < kChannels; place += kBlock) {
        const int channel = first + place % kWarpSize * kPacket + place / kWarpSize;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp][place];
        if (channel < OC) partials[Offset(stretch) * OC + channel] = sum;
    }
}

// dbias[o] = sum of partials[:, o], or += it. A block has 32 channels; each warp has every eighth stretch of them.
template <class Element>
__global__ void __launch_bounds__(kBlock)
add_stretches(Element* __restrict__ dbias, const float* __restrict__ partials, int stretches, int OC, int accumulate) {
    __shared__ float of_warp[kWarps][kWarpSize];
    const int o = blockIdx.x * kWarpSize + lane_index();
    float sum = 0.0f;
    if (o < OC) {
#pragma unroll 8
        for (int s = warp_index(); s < stretches; s += kWarps) sum += partials[Offset(s) * OC + o];
    }
    of_warp[warp_index()][lane_index()] = sum;
    __syncthreads();
    if (warp_index() == 0 && o < OC) {
        float total = accumulate ? to_float(dbias[o]) : 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) total += of_warp[warp][lane_index()];
        dbias[o] = from_float<Element>(total);
    }
}
