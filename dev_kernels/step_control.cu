// The numbers of a training step, between the norm of the gradients and the optimiser: loss, clip scale, test for
// outliers, learning rate, seed. All that changes from step to step stands in memory and is advanced here, so that a
// captured graph may be replayed without the host. Names of what is read and written are those of step_control.py.
//
//   loss = weight * sum of losses,   norm = sqrt(squares),   z = (value - mean) / standard deviation of its window
//   scale = 0                        where loss or norm is not finite or its z is over the limit: skip the step
//           min(1, max_norm / norm)  else
//
// Versions:
//
//   1  one block: packets of losses, four under way per thread; means and deviations afresh from the windows
#include "common.cuh"

// ------------------------------------------------------------------------------------------------------- state

// The layout of the small tensors.
struct Settings {
    float loss_weight, max_norm, loss_limit, norm_limit, beta1, beta2, epsilon, unused;
};
struct ScheduleRow {
    float rate, correction1, correction2;
};
struct Scalars {
    float rate, beta1, beta2, correction1, correction2, epsilon, scale, unused;
};
struct Report {
    float loss, norm, rate, scale, loss_z, norm_z, step, skipped;
};

// A bijection of 32 bits in which each bit of the argument changes each bit of the result about half of the time: the
// finaliser of MurmurHash3 (Appleby, 2011).
__device__ inline unsigned mixed(unsigned bits) {
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    return bits ^ bits >> 16;
}

// No two steps of a run have the same: an odd factor and `mixed` are bijections.
__device__ inline unsigned seed_of_step(unsigned base, unsigned step) { return mixed(base + 0x9e3779b9u * step); }

__device__ inline bool is_finite(float value) { return fabsf(value) < infinity(); }

// -------------------------------------------------------------------------------------------------- sum of losses

__device__ inline float sum_of(const Packet<float>& packet) {
    return (packet[0] + packet[1]) + (packet[2] + packet[3]);
}

// In every thread. The block's packets are the same in every launch, so the sum is, too.
__device__ inline float block_sum_of_losses(const float* __restrict__ losses, Offset count) {
    constexpr int kUnderWay = 4;
    const Offset packets = count / 4, step = blockDim.x;
    Offset packet = threadIdx.x;
    float sum = 0.0f;
    for (; packet + (kUnderWay - 1) * step < packets; packet += kUnderWay * step) {
        Packet<float> loaded[kUnderWay];
#pragma unroll
        for (int i = 0; i < kUnderWay; ++i) loaded[i] = load_packet_streaming(losses + (packet + i * step) * 4);
#pragma unroll
        for (int i = 0; i < kUnderWay; ++i) sum += sum_of(loaded[i]);
    }
    for (; packet < packets; packet += step) sum += sum_of(load_packet_streaming(losses + packet * 4));
    const Offset rest = packets * 4 + threadIdx.x;  // at most three elements
    if (rest < count) sum += losses[rest];
    return any_block_sum(sum);
}

// -------------------------------------------------------------------------------------------------------- outliers

// How many standard deviations `value` is above the mean of a window in which it takes the place of element `place`; 0
// where all are the same. Elements are shifted by `value`, so that what is squared is no larger than their spread. All
// threads must call it.
__device__ inline float block_z(const float* __restrict__ window, int size, int place, float value) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x) sum += i == place ? 0.0f : window[i] - value;
    const float mean = any_block_sum(sum) / size;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const float deviation = (i == place ? 0.0f : window[i] - value) - mean;
        squares += deviation * deviation;
    }
    const float deviation = sqrtf(any_block_sum(squares) / size);
    return deviation > 0.0f ? -mean / deviation : 0.0f;
}

__device__ inline bool is_outlier(float z, float limit) { return limit > 0.0f && z > limit; }

// ------------------------------------------------------------------------------------------------------------ 1

// One block is all there is, says the 1: else the compiler saves registers for a second.
__global__ void __launch_bounds__(1024, 1)
step_control1(const float* __restrict__ losses, Offset count, const float* __restrict__ squares,
              const ScheduleRow* __restrict__ schedule, unsigned steps, const Settings* __restrict__ settings,
              unsigned* __restrict__ step, float* __restrict__ window, int size, unsigned* __restrict__ filled,
              Scalars* __restrict__ scalars, unsigned* __restrict__ seed, Report* __restrict__ report) {
    const Settings of = *settings;
    const unsigned index = step[0], base = step[1], pushed = *filled;
    const float norm = sqrtf(*squares);
    const float loss = of.loss_weight * block_sum_of_losses(losses, count);
    const bool finite = is_finite(loss) && is_finite(norm);
    const int place = pushed % unsigned(size);
    float loss_z = 0.0f, norm_z = 0.0f;
    if (finite && pushed >= unsigned(size)) {  // the same in all threads
        loss_z = block_z(window, size, place, loss);
        norm_z = block_z(window + size, size, place, norm);
    }
    // The sums had barriers, so everybody has read what changes below.
    if (threadIdx.x != 0) return;

    const bool skipped = !finite || is_outlier(loss_z, of.loss_limit) || is_outlier(norm_z, of.norm_limit);
    const float clipped = of.max_norm > 0.0f && norm > of.max_norm ? of.max_norm / norm : 1.0f;
    const float scale = skipped ? 0.0f : clipped;
    const ScheduleRow now = schedule[min(index, steps - 1)];
    *scalars = {now.rate, of.beta1, of.beta2, now.correction1, now.correction2, of.epsilon, scale, 0.0f};
    *seed = seed_of_step(base, index);
    *report = {loss, norm, now.rate, scale, loss_z, norm_z, float(index), skipped ? 1.0f : 0.0f};
    step[0] = index + 1;
    if (finite) {
        window[place] = loss;
        window[size + place] = norm;
        *filled = pushed + 1;
    }
}
