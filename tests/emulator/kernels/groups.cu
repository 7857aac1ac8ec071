// Cooperative groups. A result takes row r of `out`, blockDim.x wide.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

__global__ void identities(unsigned int* out) {
    const cg::thread_block block = cg::this_thread_block();
    const cg::grid_group grid = cg::this_grid();
    const auto warp = cg::tiled_partition<32>(block);
    const auto tile = cg::tiled_partition<8>(warp);
    const cg::thread_block_tile<8> plain = tile;
    const unsigned results[] = {
        block.thread_rank(), block.size(), block.num_threads(), block.thread_index().y, block.group_index().x,
        block.dim_threads().x, (unsigned)grid.thread_rank(), (unsigned)grid.size(), (unsigned)grid.block_rank(),
        (unsigned)grid.num_blocks(), warp.thread_rank(), warp.size(), warp.meta_group_rank(), warp.meta_group_size(),
        tile.thread_rank(), tile.num_threads(), tile.meta_group_rank(), tile.meta_group_size(),
        plain.meta_group_rank(), (unsigned)cg::thread_rank(block), (unsigned)cg::group_size(tile)};
    const unsigned threads = (unsigned)grid.size();
    for (int r = 0; r < 21; ++r) out[r * threads + grid.thread_rank()] = results[r];
}

__device__ float larger(float a, float b) { return a > b ? a : b; }

template <int N> __global__ void tiles(float* out, const float* in) {
    const cg::thread_block block = cg::this_thread_block();
    const cg::thread_block_tile<N> tile = cg::tiled_partition<N>(block);
    const unsigned id = block.thread_rank(), threads = block.size();
    const float value = in[id];
    int same = 0;
    const int key = (int)(value * 2);
    const float results[] = {
        cg::reduce(tile, value, cg::plus<float>()), cg::reduce(tile, value, cg::greater<float>()),
        cg::reduce(tile, value, cg::less<float>()), cg::reduce(tile, value, larger),
        cg::reduce(tile, value, [](float a, float b) { return a + b; }),
        (float)cg::reduce(tile, key, cg::bit_xor<int>()), cg::inclusive_scan(tile, value),
        cg::exclusive_scan(tile, value, cg::plus<float>()), (float)cg::inclusive_scan(tile, key, cg::greater<int>()),
        tile.shfl(value, N - 1), tile.shfl_up(value, 1), tile.shfl_down(value, 1), tile.shfl_xor(value, N / 2),
        (float)tile.any(value > 0.9f), (float)tile.all(value > 0.1f), (float)(tile.ballot(value > 0) & 0xffff),
        (float)(tile.match_any(key) & 0xffff), (float)(tile.match_all(3, same) & 0xffff) + same};
    for (int r = 0; r < 18; ++r) out[r * threads + id] = results[r];
    tile.sync();
    cg::sync(block);
}

struct Moment {
    double mean;
    int count;
    float spread;
};

__global__ void structures(float* out) {
    const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    Moment mine = {(double)threadIdx.x, (int)threadIdx.x * 2, threadIdx.x * 0.5f};
    const Moment next = warp.shfl_down(mine, 1);
    out[threadIdx.x] = (float)next.mean, out[32 + threadIdx.x] = (float)next.count, out[64 + threadIdx.x] = next.spread;
}

// The odd lanes only: ranks are not lanes.
__global__ void coalesced(int* out, const int* in) {
    const unsigned lane = threadIdx.x;
    for (int r = 0; r < 8; ++r) out[32 * r + lane] = -1;
    const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    const auto odd = cg::binary_partition(warp, lane % 2 == 1);
    const auto thirds = cg::labeled_partition(warp, (int)lane % 3);
    const int value = in[lane];
    if (lane % 2 == 1) {
        out[lane] = (int)odd.thread_rank();
        out[32 + lane] = (int)odd.size();
        out[64 + lane] = cg::reduce(odd, value, cg::plus<int>());
        out[96 + lane] = odd.shfl(value, 2);
        out[128 + lane] = odd.shfl_up(value, 1);
        out[160 + lane] = (int)odd.ballot(value > 0);
    }
    warp.sync();
    out[192 + lane] = cg::inclusive_scan(thirds, value, cg::plus<int>());
    out[224 + lane] = (int)(thirds.meta_group_rank() * 10 + thirds.meta_group_size());
}

__global__ void whole_warp_coalesced(float* out, const float* in) {
    const auto active = cg::coalesced_threads();
    out[threadIdx.x] = cg::reduce(active, in[threadIdx.x], cg::plus<float>());
}
