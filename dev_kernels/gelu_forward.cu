// GELU in its tanh form: out = gelu(inp), element by element.
//
//     gelu(x) = x / 2 * (1 + tanh(u)),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per element
//   2  + 16 bytes per access, two of them under way in each thread; an exponential in place of the tanh
//
// Where N is so small that the GPU holds a thread for every 16 bytes, a thread of version 2 has one access only.
//
// out may be inp: every thread loads all that it needs before it stores anything, and only what it stores itself.
#include "common.cuh"

constexpr double kScale = 0.79788456080286536;  // sqrt(2 / pi)
constexpr double kCubic = 0.044715;

// -------------------------------------------------------------------------------------- 1: a thread per element

template <class Element>
__global__ void gelu_forward1(Element* out, const Element* inp, Offset count) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float x = to_float(inp[i]);
    const float u = float(kScale) * (x + float(kCubic) * x * x * x);
    out[i] = from_float<Element>(0.5f * x * (1.0f + tanhf(u)));
}

// ------------------------------------------------------------------------------------------- 2: packets per thread

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)): an exponential and a quotient, which the special function unit does, where
// tanhf is some 20 instructions: too many for two bytes read and two written. Large x give 1 + 0, and -large x give
// x / infinity = -0.
__device__ inline float gelu(float x) {
    // exp(-2 u) = 2^(x * (linear + cubic * x^2))
    constexpr double log2_e = 1.44269504088896341;
    constexpr float linear = float(-2.0 * kScale * log2_e), cubic = float(-2.0 * kScale * log2_e * kCubic);
    return __fdividef(x, 1.0f + exp2f(x * fmaf(x * x, cubic, linear)));
}

// Packets: how many each thread has, a block's width apart. What is left of the last one goes element by element.
// More than two need more registers than leave room for a second block of 1024 threads.
template <class Element, int Packets>
__global__ void __launch_bounds__(1024, Packets > 2 ? 1 : 2)
gelu_forward2(Element* out, const Element* inp, Offset count) {
    constexpr int kSize = Packet<Element>::size;
    const int step = blockDim.x * kSize;
    const Offset first = Offset(blockIdx.x) * Packets * step;
    const int left = min(count - first, Offset(Packets * step));  // for this block: offsets within it fit into an int
    out += first, inp += first;

    Packet<Element> x[Packets];
#pragma unroll
    for (int i = 0; i < Packets; ++i) {
        const int place = i * step + threadIdx.x * kSize;
        if (place + kSize <= left) x[i] = load_packet_streaming(inp + place);
    }
#pragma unroll
    for (int i = 0; i < Packets; ++i) {
        const int place = i * step + threadIdx.x * kSize;
        if (place + kSize <= left) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) x[i][j] = from_float<Element>(gelu(to_float(x[i][j])));
            store_packet(out + place, x[i]);  // not streaming: the next layer reads it
        } else {
            for (int j = place; j < left; ++j) out[j] = from_float<Element>(gelu(to_float(inp[j])));
        }
    }
}
