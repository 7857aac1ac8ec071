// One step of AdamW, in place: for every parameter with its gradient g and its moments m and v
//
//     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//     param -= rate * (m / correction1 / (sqrt(v / correction2) + epsilon) + decay * param)
//
// with correction1 = 1 - beta1^t and correction2 = 1 - beta2^t in step t. Parameters and gradients are stored as
// Element, moments in fp32: bf16 would round away the 0.1% by which v changes in a step.
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per parameter: the formulas as they stand, moments updated in memory
//   2  + everything in registers, four parameters per thread and access; cheaper arithmetic, too: moments as two FMAs
//      each, a fast root and a fast quotient, products with the inverses of the corrections
#include "common.cuh"

// -------------------------------------------------------------------------------------- 1: a thread per parameter

template <class Element>
__global__ void adamw1(Element* __restrict__ params, const Element* __restrict__ grads, float* __restrict__ m,
                       float* __restrict__ v, Offset count, float rate, float beta1, float beta2, float correction1,
                       float correction2, float epsilon, float decay) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    m[i] = beta1 * m[i] + (1.0f - beta1) * to_float(grads[i]);
    v[i] = beta2 * v[i] + (1.0f - beta2) * to_float(grads[i]) * to_float(grads[i]);
    const float m_hat = m[i] / correction1;
    const float v_hat = v[i] / correction2;
    const float param = to_float(params[i]);
    params[i] = from_float<Element>(param - rate * (m_hat / (sqrtf(v_hat) + epsilon) + decay * param));
}

// ----------------------------------------------------------------------------------- 2: four parameters per thread

// weight * b + (1 - weight) * a
__device__ inline float interpolate(float a, float b, float weight) { return fmaf(weight, b, fmaf(-weight, a, a)); }

struct AdamW {
    float rate, beta1, beta2, inverse1, inverse2, epsilon, decay;

    // The new parameter; m and v become the new moments.
    __device__ float step(float param, float grad, float& m, float& v) const {
        m = interpolate(grad, m, beta1);
        v = interpolate(grad * grad, v, beta2);
        // sqrt(v_hat) as v_hat / sqrt(v_hat): sqrtf would call a subroutine, and with it spill registers. 2^-126, the
        // smallest normal number, keeps 0 from becoming 0 * infinity.
        const float v_hat = v * inverse2;
        const float root = v_hat * rsqrtf(fmaxf(v_hat, 0x1p-126f));
        const float direction = __fdividef(m * inverse1, root + epsilon);
        return fmaf(-rate, fmaf(decay, param, direction), param);
    }
};

template <class T>
struct alignas(4 * sizeof(T)) Four {
    T values[4];
};

// The four loads of a thread are under way together. Gradients and moments are read once per step, so they stream;
// parameters are what the next forward pass begins with.
template <class Element>
__global__ void __launch_bounds__(1024)
adamw2(Element* __restrict__ params, const Element* __restrict__ grads, float* __restrict__ m, float* __restrict__ v,
       Offset count, float rate, float beta1, float beta2, float inverse1, float inverse2, float epsilon, float decay) {
    const AdamW adamw = {rate, beta1, beta2, inverse1, inverse2, epsilon, decay};
    const Offset first = (Offset(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (first + 4 <= count) {
        Four<Element> param = *reinterpret_cast<const Four<Element>*>(params + first);
        const Four<Element> grad = *reinterpret_cast<const Four<Element>*>(grads + first);
        Packet<float> m4 = load_packet_streaming(m + first), v4 = load_packet_streaming(v + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float updated = adamw.step(to_float(param.values[i]), to_float(grad.values[i]), m4[i], v4[i]);
            param.values[i] = from_float<Element>(updated);
        }
        *reinterpret_cast<Four<Element>*>(params + first) = param;
        store_packet_streaming(m + first, m4);
        store_packet_streaming(v + first, v4);
    } else {
        for (Offset i = first; i < count; ++i) {
            params[i] = from_float<Element>(adamw.step(to_float(params[i]), to_float(grads[i]), m[i], v[i]));
        }
    }
}
