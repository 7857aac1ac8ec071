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
//   3  + as a training step calls it: scalars by pointer, so that a captured graph may be replayed with others; weight
//      decay by group, so that all tensors are one launch; 16-bit parameters rounded at random from a master in fp32
//
// Version 3 reads scalars = rate, beta1, beta2, correction1, correction2, epsilon, scale. Gradients are multiplied by
// the scale; where that is 0, the step is skipped: nothing changes, whatever the gradients hold. Each kGroup parameters
// have a weight decay of their own, so a tensor has to begin at a multiple of kGroup.
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

// ------------------------------------------------------------------------------ 3: as a training step calls it

constexpr int kGroup = 128;  // parameters with the same weight decay: those of one warp

// Element `first` + i of an array, for i in 0..3. Whole: there are four; else `count`, and those past it are 0.
template <bool Whole, class T>
__device__ inline Four<float> load_four(const T* __restrict__ from, int count) {
    Four<float> four;
    if constexpr (!Whole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) four.values[i] = i < count ? to_float(from[i]) : 0.0f;
    } else if constexpr (sizeof(T) == sizeof(float)) {
        const Packet<float> loaded = load_packet_streaming(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) four.values[i] = loaded[i];
    } else {
        const int2 bits = __ldcs(reinterpret_cast<const int2*>(from));
        Four<T> loaded;
        memcpy(&loaded, &bits, sizeof(bits));
#pragma unroll
        for (int i = 0; i < 4; ++i) four.values[i] = to_float(loaded.values[i]);
    }
    return four;
}

// Streaming: what is read and written once a step.
template <bool Whole>
__device__ inline void store_four_streaming(float* to, int count, const Four<float>& four) {
    if constexpr (Whole) {
        store_packet_streaming(to, Packet<float>{{four.values[0], four.values[1], four.values[2], four.values[3]}});
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) to[i] = four.values[i];
        }
    }
}

// Parameters are what the next forward pass begins with, so they may stay in the caches.
template <bool Whole, class T>
__device__ inline void store_four(T* to, int count, const Four<T>& four) {
    if constexpr (Whole) {
        *reinterpret_cast<Four<T>*>(to) = four;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) to[i] = four.values[i];
        }
    }
}

struct Random4 {
    unsigned words[4];
};

// Four random words from a counter and a key: Philox4x32 with 7 rounds, the fewest with which it passes all tests of
// BigCrush (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 5).
__device__ inline Random4 philox(unsigned long long counter, unsigned key) {
    unsigned a = unsigned(counter), b = unsigned(counter >> 32), c = 0, d = 0;
    unsigned key_a = key, key_c = 0;
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long of_a = 0xd2511f53ull * a, of_c = 0xcd9e8d57ull * c;
        a = unsigned(of_c >> 32) ^ b ^ key_a;
        c = unsigned(of_a >> 32) ^ d ^ key_c;
        b = unsigned(of_c);
        d = unsigned(of_a);
        key_a += 0x9e3779b9u;  // the golden ratio, and sqrt(3) - 1
        key_c += 0xbb67ae85u;
    }
    return {{a, b, c, d}};
}

// One of the two neighbours in bf16: the one away from 0 with a probability equal to the fraction of their distance
// that `value` lies from the other. bf16 is the upper half of fp32, so a random lower half is added, and what it
// becomes is cut: a value that bf16 holds stays, 0 and infinity among them. A NaN might be carried into a number.
__device__ inline __nv_bfloat16 stochastically_rounded(float value, unsigned random) {
    const unsigned bits = __float_as_uint(value);
    const float rounded = __uint_as_float((bits + (random >> 16)) & 0xffff0000u);
    return __float2bfloat16_rn(value == value ? rounded : value);
}

// The weights are the parameters, rounded to the nearest.
template <class Element>
struct OwnWeights {
    Element* params;

    template <bool Whole>
    __device__ Four<float> load(Offset first, int count) const {
        return load_four<Whole>(params + first, count);
    }
    template <bool Whole>
    __device__ void store(Offset first, int count, const Four<float>& weights) const {
        Four<Element> rounded;
#pragma unroll
        for (int i = 0; i < 4; ++i) rounded.values[i] = from_float<Element>(weights.values[i]);
        store_four<Whole>(params + first, count, rounded);
    }
};

// The weights are the master's; parameters are only written. The element's index and the seed decide how it is rounded.
struct MasterWeights {
    __nv_bfloat16* params;
    float* master;
    unsigned seed;

    template <bool Whole>
    __device__ Four<float> load(Offset first, int count) const {
        return load_four<Whole>(master + first, count);
    }
    template <bool Whole>
    __device__ void store(Offset first, int count, const Four<float>& weights) const {
        const Random4 random = philox(first / 4, seed);
        Four<__nv_bfloat16> rounded;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rounded.values[i] = stochastically_rounded(weights.values[i], random.words[i]);
        }
        store_four_streaming<Whole>(master + first, count, weights);
        store_four<Whole>(params + first, count, rounded);
    }
};

template <bool Whole, class Weights, class Element>
__device__ inline void update_four(const Weights& weights, const Element* __restrict__ grads, float* __restrict__ m,
                                   float* __restrict__ v, Offset first, int count, const float* __restrict__ scalars,
                                   const float* __restrict__ decays) {
    // The same 32 bytes for all threads: but for the first warp of a multiprocessor, L1 has them.
    const Packet<float> head = load_packet(scalars), tail = load_packet(scalars + 4);
    const float scale = tail[2];
    if (scale == 0.0f) return;
    Four<float> weight = weights.template load<Whole>(first, count);
    const Four<float> grad = load_four<Whole>(grads + first, count);
    Four<float> m4 = load_four<Whole>(m + first, count), v4 = load_four<Whole>(v + first, count);
    const AdamW adamw = {head[0], head[1], head[2], __fdividef(1.0f, head[3]), __fdividef(1.0f, tail[0]), tail[1],
                         decays[first / kGroup]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        weight.values[i] = adamw.step(weight.values[i], scale * grad.values[i], m4.values[i], v4.values[i]);
    }
    store_four_streaming<Whole>(m + first, count, m4);
    store_four_streaming<Whole>(v + first, count, v4);
    weights.template store<Whole>(first, count, weight);
}

template <class Weights, class Element>
__device__ inline void update(const Weights& weights, const Element* __restrict__ grads, float* __restrict__ m,
                              float* __restrict__ v, Offset count, const float* __restrict__ scalars,
                              const float* __restrict__ decays) {
    const Offset first = (Offset(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (first + 4 <= count) {
        update_four<true>(weights, grads, m, v, first, 4, scalars, decays);
    } else if (first < count) {
        update_four<false>(weights, grads, m, v, first, int(count - first), scalars, decays);
    }
}

// One block per multiprocessor is enough, says the 1: else the compiler saves registers so as to fit two of 1024
// threads, and delays half of the loads for that.
template <class Element>
__global__ void __launch_bounds__(1024, 1)
adamw3(Element* __restrict__ params, const Element* __restrict__ grads, float* __restrict__ m, float* __restrict__ v,
       Offset count, const float* __restrict__ scalars, const float* __restrict__ decays) {
    update(OwnWeights<Element>{params}, grads, m, v, count, scalars, decays);
}

__global__ void __launch_bounds__(1024, 1)
adamw3_master(__nv_bfloat16* __restrict__ params, float* __restrict__ master, const __nv_bfloat16* __restrict__ grads,
              float* __restrict__ m, float* __restrict__ v, Offset count, const float* __restrict__ scalars,
              const float* __restrict__ decays, const unsigned* __restrict__ seed) {
    update(MasterWeights{params, master, *seed}, grads, m, v, count, scalars, decays);
}
