// Warp operations. One warp unless said otherwise; a result takes row r of `out`, 32 (or blockDim.x) wide.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> __global__ void shuffles(T* out, const T* in, int argument, int width) {
    const unsigned all = 0xffffffffu, lane = threadIdx.x;
    const T value = in[lane];
    out[lane] = __shfl_sync(all, value, argument, width);
    out[32 + lane] = __shfl_up_sync(all, value, argument, width);
    out[64 + lane] = __shfl_down_sync(all, value, argument, width);
    out[96 + lane] = __shfl_xor_sync(all, value, argument, width);
    out[128 + lane] = __shfl_sync(all, value, 31 - (int)lane);
}

// Different halves of a warp, with their own masks, at different times.
__global__ void partial(int* out, const int* in) {
    const unsigned lane = threadIdx.x;
    int value = in[lane];
    if (lane < 16) {
        value += __shfl_xor_sync(0x0000ffffu, value, 8);
        value += __shfl_down_sync(0x0000ffffu, value, 4, 16);
    } else {
        value = __reduce_max_sync(0xffff0000u, value);
        __syncwarp(0xffff0000u);
    }
    __syncwarp();
    out[lane] = value + (__any_sync(0xffffffffu, value > 1000000) ? 1 : 0);
}

__global__ void votes(unsigned int* out, const int* in, const float* reals) {
    const unsigned all = 0xffffffffu, lane = threadIdx.x;
    int same = -1;
    const int value = in[lane];
    const unsigned results[] = {
        __ballot_sync(all, value > 0), (unsigned)__any_sync(all, value > 90), (unsigned)__all_sync(all, value > -101),
        (unsigned)__uni_sync(all, value > 0), __match_any_sync(all, value / 40), __match_any_sync(all, reals[lane]),
        __match_any_sync(all, (long long)value << 33 >> 35), __match_all_sync(all, 7.5, &same), (unsigned)same,
        __match_all_sync(all, value, &same), (unsigned)same, (unsigned)__reduce_add_sync(all, value),
        (unsigned)__reduce_min_sync(all, value), (unsigned)__reduce_max_sync(all, value),
        __reduce_add_sync(all, (unsigned)value), __reduce_min_sync(all, (unsigned)value),
        __reduce_max_sync(all, (unsigned)value), __reduce_and_sync(all, (unsigned)value),
        __reduce_or_sync(all, (unsigned)value), __reduce_xor_sync(all, (unsigned)value), __activemask()};
    for (int r = 0; r < 21; ++r) out[32 * r + lane] = results[r];
}
