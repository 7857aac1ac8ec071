// Kernels that are each stopped in one way. The lines to be reported are marked.
#include <cuda_runtime.h>

__global__ void good(int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x; }

// One thread of one block, so that block and thread of the report can be told apart from others.
__device__ bool chosen() {
    return blockIdx.x == 1 && blockIdx.y == 2 && blockIdx.z == 0 && threadIdx.x == 3 && threadIdx.y == 1 && threadIdx.z == 0;
}

__global__ void write_past_end(float* out, int n) {
    if (chosen()) out[n] = 1.0f;  // write past end
}

__global__ void read_past_end(float* out, int n) {
    if (chosen()) out[0] += out[n + 5];  // read past end
}

__global__ void write_before_start(float* out, long long n) {
    if (chosen()) out[-n] = 1.0f;  // write before start
}

__global__ void wild(float* out, unsigned long long address) {
    if (chosen()) *reinterpret_cast<float*>(address) = 1.0f;  // wild write
}

__global__ void misaligned(float* out) {
    if (chosen()) *reinterpret_cast<float4*>(out + 1) = *reinterpret_cast<float4*>(out + 4);  // misaligned store
}

__global__ void divergent_barrier(int* out) {
    if (threadIdx.x < 64) __syncthreads();  // barrier of the first half
    else __syncthreads();  // barrier of the second half
    out[threadIdx.x] = 1;
}

__global__ void divergent_warp(int* out) {
    int value = threadIdx.x;
    if (threadIdx.x < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);  // shuffle of one half
    else value = __any_sync(0xffffffffu, value);  // vote of the other half
    out[threadIdx.x] = value;
}

__global__ void reads_lane_outside_mask(int* out) {
    int value = threadIdx.x;
    if (threadIdx.x < 8) value = __shfl_down_sync(0xffu, value, 4);  // lane outside the mask
    out[threadIdx.x] = value;
}

__global__ void reads_exited_lane(int* out) {
    if (threadIdx.x == 5) return;
    out[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 5);  // exited lane
}

__global__ void not_in_own_mask(int* out) {
    out[threadIdx.x] = __shfl_sync(0xffff0000u, int(threadIdx.x), 16);  // not in own mask
}

__global__ void deadlock(int* out) {
    int value = threadIdx.x;
    if (threadIdx.x < 16) value = __shfl_down_sync(0xffffffffu, value, 1, 16);  // waits for the others
    __syncthreads();  // the others wait here
    out[threadIdx.x] = value;
}

__global__ void failed_assert(int* out) {
    assert(!chosen());  // assertion
    out[0] = 1;
}

__global__ void trap(int* out) {
    if (chosen()) __trap();  // trap
    out[0] = 1;
}

__device__ __noinline__ int deep(volatile int* chain, int depth) {
    volatile int local[64];
    local[depth & 63] = depth;
    return depth < 0 ? *chain : deep(chain, depth + 1) + local[depth & 63];  // recursion
}

__global__ void recursion(int* out) {
    if (chosen()) out[0] = deep(out, 0);
}

// Larger than the stack: must be caught before it reaches the stack of another thread.
__global__ void huge_local(int* out, int n) {
    volatile int local[1 << 17];  // huge array
    if (chosen()) local[n] = 1;
    out[0] = local[n];
}

__global__ void division(int* out, int divisor) {
    if (chosen()) out[0] = (out[0] + 100) / divisor;  // division by zero
}

__global__ void endless(int* out) {
    volatile int* flag = out;
    while (chosen() && *flag == 0) {  // endless loop
        int i = *flag; (void)i;  // endless body
    }
}

__global__ void endless_barriers(int* out) {
    volatile int* flag = out;
    while (*flag == 0) __syncthreads();  // endless barriers
}

__global__ void slow_blocks(int* out, int n) {
    volatile int sink = 0;
    for (int i = 0; i < n; ++i) sink = sink + i;
}

__global__ void dynamic_shared(int* out, int index) {
    extern __shared__ int dynamic[];
    dynamic[index] = 1;  // past dynamic shared memory
    out[0] = dynamic[0];
}

__device__ void helper(float* out, int n) {
    out[n] = 2.0f;  // in a helper
}

__global__ void inlined_helper(float* out, int n) {
    if (chosen()) helper(out, n);
}

__global__ void clears_too_much(float* out, unsigned long long bytes) {
    if (chosen()) memset(out, 0, bytes);  // memset
}

__global__ void prints_bad_pointer(int* out) {
    if (chosen()) printf("%s\n", reinterpret_cast<const char*>(16));
    out[0] = 1;
}
