// Kernels whose results show whether threads, warps and blocks behave as CUDA says.
#include <cuda_runtime.h>
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

// The position of every thread of a three-dimensional launch.
__global__ void positions(int* out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int size = blockDim.x * blockDim.y * blockDim.z;
    int* mine = out + 6 * (block * size + thread);
    mine[0] = blockIdx.x, mine[1] = blockIdx.y, mine[2] = blockIdx.z;
    mine[3] = threadIdx.x, mine[4] = threadIdx.y, mine[5] = threadIdx.z;
}

__global__ void block_sum(float* out, const float* in, int n) {
    extern __shared__ float partial[];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

// Neighbours exchange values without the barrier that this needs.
__global__ void missing_barrier(int* out, int step) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[(threadIdx.x + step) & 63];
}

// Shared memory as a block finds it, which it then dirties for the next.
__global__ void fresh_shared(unsigned* out) {
    __shared__ unsigned fixed[32];
    extern __shared__ unsigned dynamic[];
    unsigned found = fixed[threadIdx.x] & dynamic[threadIdx.x];
    fixed[threadIdx.x] = dynamic[threadIdx.x] = 0;
    out[blockIdx.x * 32 + threadIdx.x] = found;
}

// Quarters of a warp with masks of their own, of different lengths, in flight at once.
__global__ void quarters(int* out) {
    int quarter = threadIdx.x / 8;
    unsigned mask = 0xffu << (8 * quarter);
    int value = threadIdx.x;
    for (int i = 0; i <= quarter; ++i) value = __shfl_xor_sync(mask, value, 1) + 1;
    out[threadIdx.x] = value;
}

// Both halves of a branch do other operations with other masks; even and odd lanes within one of them, too.
__global__ void halves(int* out) {
    int lane = threadIdx.x;
    int value;
    if (lane < 16) {
        value = __reduce_add_sync(0x0000ffffu, lane);
    } else if (lane % 2) {
        value = __ballot_sync(0xaaaa0000u, lane > 20) != 0;
        value += __shfl_sync(0xaaaa0000u, lane, 17);
    } else {
        value = __popc(__match_any_sync(0x55550000u, lane / 4));
    }
    out[lane] = value;
}

__global__ void tiles(int* out) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int value = threadIdx.x;
    for (int i = tile.size() / 2; i > 0; i /= 2) value += tile.shfl_xor(value, i);
    tile.sync();
    out[threadIdx.x] = value + 1000 * tile.thread_rank();
}

__global__ void sources(int* out, int width) {
    int lane = threadIdx.x;
    out[lane] = __shfl_up_sync(0xffffffffu, lane, 3, width);
    out[lane + 32] = __shfl_down_sync(0xffffffffu, lane, 3, width);
    out[lane + 64] = __shfl_xor_sync(0xffffffffu, lane, 5, width);
    out[lane + 96] = __shfl_sync(0xffffffffu, lane, lane + 1, width);
}

// The same operation reached from two lines is one operation, as for hardware.
__global__ void converging_lines(int* out) {
    int value = threadIdx.x;
    if (threadIdx.x < 16) value = __shfl_xor_sync(0xffffffffu, value, 16);
    else value = -__shfl_xor_sync(0xffffffffu, value, 16);
    out[threadIdx.x] = value;
}

__global__ void active_lanes(unsigned* out) {
    unsigned lanes;
    if (threadIdx.x % 3 == 0) lanes = __activemask();
    else lanes = __activemask();
    __syncwarp();
    out[threadIdx.x] = lanes & __activemask();
}

__global__ void counters(int* out, int rounds) {
    for (int i = 0; i < rounds; ++i) {
        atomicAdd(&out[0], 1);
        atomicMax(&out[1], int(blockIdx.x * blockDim.x + threadIdx.x));
        int seen = out[2], assumed;
        do {
            assumed = seen;
            seen = atomicCAS(&out[2], assumed, assumed + 2);
        } while (seen != assumed);
    }
}

// Threads that have returned count as arrived.
__global__ void early_exit(int* out, int stay) {
    if (threadIdx.x >= stay) return;
    __syncthreads();
    int others = __syncthreads_count(threadIdx.x % 2);
    int all = __syncthreads_and(threadIdx.x < 1000), any = __syncthreads_or(threadIdx.x == 7);
    out[threadIdx.x] = others + 1000 * all + 2000 * any;
}

// Lanes may be waiting for one that returns instead of coming.
__global__ void vote_without(unsigned* out, int leaver) {
    if (threadIdx.x == leaver) return;
    out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}

__global__ void speaks(int* out) {
    if (blockIdx.x == 0 && threadIdx.x == 0) printf("value %d %.2f %s\n", 42, 1.5, "text");
}

__global__ void many(int* a, int b, unsigned c, long long d, float e, double f, bool g, unsigned char h) {
    a[0] = b, a[1] = c, a[2] = d >> 32, a[3] = e * 2, a[4] = f * 4, a[5] = g, a[6] = h;
}

// A race that is right from either end: the first and the last thread write the same.
__global__ void written_from_both_ends(float* out) {
    __shared__ float scale;
    if (threadIdx.x == 0 || threadIdx.x == blockDim.x - 1) scale = 3;
    out[blockIdx.x * blockDim.x + threadIdx.x] = scale;
}
