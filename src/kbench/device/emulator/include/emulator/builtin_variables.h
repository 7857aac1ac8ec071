// threadIdx, blockIdx, blockDim, gridDim, warpSize: read from the runtime's record of the running thread.
#pragma once

namespace emu {

inline uint3 thread_index() { return {self->index.x, self->index.y, self->index.z}; }
inline uint3 block_index() { return {block->index.x, block->index.y, block->index.z}; }
inline dim3 block_dim() { return {block->dim.x, block->dim.y, block->dim.z}; }
inline dim3 grid_dim() { return {block->grid.x, block->grid.y, block->grid.z}; }
inline unsigned threads_per_block() { return block->dim.x * block->dim.y * block->dim.z; }

}  // namespace emu

// Not variables: another thread may run on this stack's operating-system thread between two reads.
#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_dim())
#define gridDim (emu::grid_dim())
inline constexpr int warpSize = 32;
