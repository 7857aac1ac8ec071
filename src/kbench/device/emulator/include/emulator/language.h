// The words that CUDA adds to C++.
#pragma once

// For device code to choose another body where it holds PTX or waits for another block.
#define KBENCH_EMULATOR 1

// As nvcc 13.0 for sm_90 would say; device code selects features by them.
#define __CUDACC__ 1
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDA_ARCH__ 900
#define CUDA_VERSION 13000
#define CUDART_VERSION 13000

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __block_size__(...)
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// Not always_inline: g++ refuses that for a function that is also called through a pointer, as cg::reduce does.
#define __forceinline__ inline

// A block never leaves its operating-system thread, so thread-local storage is per-block storage; the runtime
// fills it with NaN before each block. `extern __shared__ T name[];` cannot be expressed by a macro: kbench
// rewrites it before compiling, inside a function to `T* name = (T*)EMU_DYNAMIC_SHARED;`.
#define __shared__ static thread_local
#define EMU_DYNAMIC_SHARED (emu::block->dynamic_shared)

// Where a function that may wait was called, for reports: the last two parameters of each of them. Default
// arguments see the line of the call even where the compiler duplicates or merges code.
#define EMU_WHERE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_HERE emu_file, emu_line

#ifndef __clang__
#define __builtin_assume(condition) ((condition) ? void() : __builtin_unreachable())
#endif
#define __assume(condition) __builtin_assume(condition)
