// Backward pass of GELU in its tanh form, element by element: dinp = gelu'(inp) * dout.
//
//     gelu(x)  = x / 2 * (1 + tanh(u)),  u = s * (x + c x^3),  s = sqrt(2 / pi),  c = 0.044715
//     gelu'(x) = (1 + tanh(u)) / 2 + x / 2 * sech(u)^2 * s * (1 + 3 c x^2)
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per element
//   2  + 16 bytes per access; one exponential in place of tanh and cosh
//
// dinp may be dout: every thread loads all that it needs before it stores anything, and only what it stores itself.
#include "common.cuh"

constexpr double kScale = 0.79788456080286536;  // s
constexpr double kCubic = 0.044715;             // c

// -------------------------------------------------------------------------------------- 1: a thread per element

template <class Element>
__global__ void gelu_backward1(Element* dinp, const Element* inp, const Element* dout, Offset count) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float x = to_float(inp[i]);
    const float u = float(kScale) * (x + float(kCubic) * x * x * x);
    const float slope_of_u = float(kScale) * (1.0f + float(3.0 * kCubic) * x * x);
    const float cosh = coshf(u);  // infinite for large x: its inverse is the right 0
    const float slope = 0.5f * (1.0f + tanhf(u)) + 0.5f * x / (cosh * cosh) * slope_of_u;
    dinp[i] = from_float<Element>(slope * to_float(dout[i]));
}

// --------------------------------------------------------------------------------------- 2: a packet per thread

// With e = exp(-2 u) and h = 1 / (1 + e) it is (1 + tanh(u)) / 2 = h and sech(u)^2 / 4 = h (1 - h) = h * (e h), so
// gelu'(x) = h * (1 + x * e h * 2 u'): nothing cancels, and what is left of library functions are two instructions of
// the special function unit.
__device__ inline float gelu_slope(float x) {
    // exp(-2 u) = 2^(x * (linear + cubic * x^2))
    constexpr double log2_e = 1.44269504088896341;
    constexpr float linear = float(-2.0 * kScale * log2_e), cubic = float(-2.0 * kScale * log2_e * kCubic);
    // e h must not become infinity * 0. From 2^126 on __fdividef would give 0 for h.
    constexpr float largest_exponent = 125.0f;
    const float square = x * x;
    const float e = exp2f(fminf(x * fmaf(square, cubic, linear), largest_exponent));
    const float h = __fdividef(1.0f, 1.0f + e);
    const float twice_slope_of_u = fmaf(square, float(6.0 * kScale * kCubic), float(2.0 * kScale));
    return h * fmaf(x * (e * h), twice_slope_of_u, 1.0f);
}

// One packet of each input: with all threads that a multiprocessor can hold, 64 KB are under way there, which is enough
// to hide the latency of memory. What is left of the last packet goes element by element.
template <class Element>
__global__ void __launch_bounds__(1024, 2)
gelu_backward2(Element* dinp, const Element* inp, const Element* dout, Offset count) {
    constexpr int size = Packet<Element>::size;
    const Offset first = (Offset(blockIdx.x) * blockDim.x + threadIdx.x) * size;
    if (first + size <= count) {
        const Packet<Element> x = load_packet_streaming(inp + first);
        Packet<Element> d = load_packet_streaming(dout + first);
#pragma unroll
        for (int i = 0; i < size; ++i) d[i] = from_float<Element>(gelu_slope(to_float(x[i])) * to_float(d[i]));
        store_packet(dinp + first, d);  // not streaming: the layer before reads it
    } else {
        for (Offset i = first; i < count; ++i) {
            dinp[i] = from_float<Element>(gelu_slope(to_float(inp[i])) * to_float(dout[i]));
        }
    }
}
