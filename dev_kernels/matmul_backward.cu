// Backward pass of a linear layer: out = inp weight^T + bias, with N = B * T rows, C input and OC output channels.
//
// From dout (N, OC):
//     dinp    = dout weight                    a GEMM
//     dweight = dout^T inp     (or += it)      a GEMM
//     dbias   = sums over the rows of dout     the kernels below; where there is a bias
//
// Where inp came out of GELU, dinp is the gradient of what went into it, pre: it is multiplied by gelu'(pre).
//
// Versions:
//
//   1  two GEMMs of the library; column sums in two stages, coalesced, without atomics: blocks sum stretches of rows,
//      where neighbouring threads have neighbouring channels, then a small kernel adds up the stretches, all in fp32.
//      GELU's derivative has a kernel of its own, in place
//   2  as 1, GELU's derivative in the epilogue of the GEMM for dinp, which is written once, and not read again
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

// With u = s (x + c x^3), s = sqrt(2 / pi), c = 0.044715, and h = (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)):
// gelu(x) = x h, and h' = 2 h (1 - h) u'. The fast division is 2 ulp off, and 0 for divisors above 2^126, as it should
// be.
__device__ inline float gelu_slope(float x) {
    constexpr float kSlope = 0.7978845608f, kCubic = 0.044715f;
    const float square = x * x;
    const float h = __fdividef(1.0f, 1.0f + expf(-2.0f * kSlope * x * (1.0f + kCubic * square)));
    return h + x * (2.0f * h * (1.0f - h)) * (kSlope * (1.0f + 3.0f * kCubic * square));
}

// dinp *= gelu'(pre). A thread has one packet; what is left of the last one goes element by element.
template <class Element>
__global__ void __launch_bounds__(kBlock)
multiply_by_gelu_slope(Element* __restrict__ dinp, const Element* __restrict__ pre, Offset count) {
    constexpr int kPacket = Packet<Element>::size;
    const Offset first = (Offset(blockIdx.x) * kBlock + threadIdx.x) * kPacket;
    if (first + kPacket <= count) {
        Packet<Element> values = load_packet(dinp + first);
        const Packet<Element> x = load_packet_streaming(pre + first);
#pragma unroll
        for (int i = 0; i < kPacket; ++i) {
            values[i] = from_float<Element>(to_float(values[i]) * gelu_slope(to_float(x[i])));
        }
        store_packet(dinp + first, values);
    } else {
        for (Offset i = first; i < count; ++i) {
            dinp[i] = from_float<Element>(to_float(dinp[i]) * gelu_slope(to_float(pre[i])));
        }
    }
}
