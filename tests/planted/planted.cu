// A right kernel and many wrong ones, each in one way, to test that the check finds them.
//
//   out[n][c] = inp[n][c] * scale[n] + 1      affine
//   total[n]  = scale[n] * sum over c of inp  totals, one block per row
//   ids[n]    = tags[n]                       copy_ids
//
// Version 1 launches the three kernels below with kRight. Every other version replaces one of them:
//    2 writes nothing                      17 never ends
//    3 writes zeros                        18 waits for threads that never come
//    4 one NaN, the last element           19 writes to a wild address
//    5 skips the last elements             20 asks for 1 MiB of shared memory
//    6 lacks a barrier                     21 adds to scratch that nobody cleared
//    7 right only with 8 warps             22 takes a maximum with scratch that nobody cleared
//    8 spoils an input                     23 right for six launches, then wrong
//    9 writes one element past the end     24 replays its first result
//   10 writes one element before the start 25 in place, right
//   11 right only at multiples of a block  26 in place, reads what it has overwritten
//   12 skips work that it did before       27 never touches an output
//   13 adds up in no fixed order           28 passes a float for an int
//   14 a failing assert                    29 one element a little too large, the next too small
//   15 traps                               30 everything 0.4% too large
//   16 a barrier in a divergent branch     31 one element off
//   32 one wrong id                        33 spoils one element in a hundred thousand

#ifndef __CUDACC_RTC__  // NVRTC has no host headers, and knows assert without one
#include <assert.h>
#endif

enum Bug {
    kRight, kNothing, kZeros, kLastNan, kTail, kNoBarrier, kEightWarps, kSpoil, kPast, kBefore, kStale, kCancel,
    kScaled, kShifted, kExpires, kWrongId, kOneInMany
};

// State that outlives a launch, one entry per block size so that tests of different sizes do not disturb each other.
__device__ int done[33];
__device__ int launches[33];
__device__ int replay_filled[33];
__device__ float replay[1 << 16];

template <Bug bug>
__global__ void affine(float* out, const float* inp, const float* scale, int N, int C) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long count = (long long)N * C;
    if (bug == kNothing || (bug == kStale && done[blockDim.x / 32])) return;
    if (bug == kTail) count -= count % 4 + 4;
    if (i >= count) return;
    float value = inp[i] * scale[i / C] + 1.0f;
    if (bug == kZeros) value = 0.0f;
    if (bug == kLastNan && i == count - 1) value = 0.0f / (value - value);
    if (bug == kCancel && i < 2) value += i == 0 ? 0.001f : -0.001f;
    if (bug == kScaled) value *= 1.004f;
    if (bug == kShifted && i > 0) value = inp[i - 1] * scale[(i - 1) / C] + 1.0f;
    if (bug == kExpires && i == 0 && launches[blockDim.x / 32] > 6) value = 0.5f * value;
    if (bug == kOneInMany && i % 100000 == 77) value = 2.0f * value;
    out[i] = value;
    if (bug == kSpoil && i == 5) const_cast<float*>(inp)[i] = 0.0f;
    if (bug == kPast && i == 0) out[count] = 1.0f;
    if (bug == kBefore && i == 0) out[-1] = 1.0f;
}

// Every thread sums some columns, then thread 0 sums the threads' partial sums.
template <Bug bug>
__global__ void totals(float* total, const float* inp, const float* scale, int C) {
    __shared__ float partial[1024];
    const float* row = inp + (long long)blockIdx.x * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += row[c];
    if (bug == kNoBarrier) {
        // The other warps are late, as they would be with more work to do.
        if (threadIdx.x >= 32) __nanosleep(20000);
    }
    partial[threadIdx.x] = sum;
    if (bug != kNoBarrier) __syncthreads();
    if (threadIdx.x == 0) {
        int terms = bug == kEightWarps ? 256 : blockDim.x;
        sum = 0.0f;
        for (int k = 0; k < terms; ++k) sum += partial[k];
        total[blockIdx.x] = scale[blockIdx.x] * sum;
    }
}

template <Bug bug>
__global__ void copy_ids(int* ids, const int* tags, int N) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N) ids[n] = bug == kWrongId && n == N / 2 ? tags[n] + 1 : tags[n];
}

// ---------------------------------------------------------------------------------------- other ways to add up

// Several blocks a row, each of their threads adding to the row's total: in whatever order they come.
__global__ void totals_atomic(float* total, const float* inp, const float* scale, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int n = blockIdx.y;
    if (c < C) atomicAdd(&total[n], scale[n] * inp[(long long)n * C + c]);
}

// The sum of a row is added to scratch that the plan never cleared.
__global__ void totals_add_scratch(float* total, float* sums, const float* inp, const float* scale, int C) {
    if (threadIdx.x != 0) return;
    int n = blockIdx.x;
    for (int c = 0; c < C; ++c) sums[n] += inp[(long long)n * C + c];
    total[n] = scale[n] * sums[n];
}

// fmaxf drops a NaN, so memory filled with NaNs does not show that it was read too early.
__global__ void totals_max_scratch(float* total, float* sums, const float* inp, const float* scale, int C) {
    if (threadIdx.x != 0) return;
    int n = blockIdx.x;
    float sum = 0.0f;
    for (int c = 0; c < C; ++c) sum += inp[(long long)n * C + c];
    total[n] = scale[n] * fmaxf(sums[n], sum);
}

// ---------------------------------------------------------------------------------------- state between launches

__global__ void mark_done() { done[blockDim.x / 32] = 1; }

__global__ void count_launch() {
    if (threadIdx.x == 0) launches[blockDim.x / 32] += 1;
}

// Keeps what it computed at the first launch and copies that from then on.
__global__ void affine_replay(float* out, const float* inp, const float* scale, int N, int C) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * C) return;
    if (!replay_filled[blockDim.x / 32]) replay[i] = inp[i] * scale[i / C] + 1.0f;
    out[i] = replay[i];
}

__global__ void mark_replay() { replay_filled[blockDim.x / 32] = 1; }

// ---------------------------------------------------------------------------------------- kernels that are stopped

__global__ void failing_assert(const float* scale) { assert(scale[0] < 0.0f); }

__global__ void trapping(const float* scale) {
    if (scale[0] > 0.0f) __trap();
}

__global__ void divergent_barrier(float* out) {
    if (threadIdx.x < 16) {
        __syncthreads();
    } else {
        out[threadIdx.x] = 1.0f;
        __syncthreads();
    }
}

__global__ void endless(const float* scale) {
    const volatile float* watched = scale;
    while (watched[0] > 0.0f) {
    }
}

// The last lane waits at the barrier for the others, they in the shuffle for the last lane.
__global__ void waits_forever(float* out) {
    float value = 1.0f;
    if (threadIdx.x == blockDim.x - 1) {
        __syncthreads();
    } else if (threadIdx.x >= blockDim.x - 32) {
        value = __shfl_down_sync(0xffffffffu, value, 1);
    }
    __syncthreads();
    out[threadIdx.x] = value;
}

__global__ void wild(float* out) { out[1LL << 40] = 1.0f; }
