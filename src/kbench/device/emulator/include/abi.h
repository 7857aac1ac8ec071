// What kernel code compiled for the CPU and the emulator's runtime know of each other. Nothing else crosses.
//
// The runtime is a shared library of its own (never linked into the kernel's): it fills a kernel module's
// thread-local storage, which is where __shared__ lives, and must not lose its own variables by that.
#pragma once
#include <cstddef>
#include <cstdint>

#define EMU_API extern "C" __attribute__((visibility("default")))
// Read at every threadIdx: the few bytes fit into the static TLS block, so this is one instruction.
#define EMU_THREAD_LOCAL __thread __attribute__((tls_model("initial-exec")))

namespace emu {

struct Index {
    unsigned x, y, z;
};

// The head of the runtime's record of one CUDA thread: what kernel code reads.
struct Thread {
    Index index;      // threadIdx
    unsigned linear;  // threadIdx as one number, x fastest
    unsigned lane;    // linear % 32
    unsigned warp;    // linear / 32
};

struct Block {
    Index index;  // blockIdx
    Index dim;    // blockDim
    Index grid;   // gridDim
    char* dynamic_shared;
    unsigned dynamic_shared_bytes;
};

extern __attribute__((visibility("default"))) EMU_THREAD_LOCAL Thread* self;
extern __attribute__((visibility("default"))) EMU_THREAD_LOCAL Block* block;

enum BarrierKind { kBarrier, kBarrierCount, kBarrierAnd, kBarrierOr };

enum WarpOp {
    kShuffle, kShuffleUp, kShuffleDown, kShuffleXor,
    kBallot, kAny, kAll, kSyncWarp, kMatchAny, kMatchAll,
    kReduceAdd, kReduceMinSigned, kReduceMaxSigned, kReduceMin, kReduceMax, kReduceAnd, kReduceOr, kReduceXor,
    kWarpCall,
};

// One exported kernel; Python finds it as the symbol emu_kernel_<number>.
struct Kernel {
    const char* name;        // the name expression
    void (*call)(void** parameters);  // parameters[i] points to the i-th argument, as in cuLaunchKernel
    const char* signature;   // see device/signature.h
};

}  // namespace emu

// block->dynamic_shared once more, as a variable of its own: `extern __shared__` outside of functions is declared
// under this assembler name, with the user's name and type.
extern "C" __attribute__((visibility("default"))) EMU_THREAD_LOCAL char* emu_dynamic_shared;

// file and line are those of the call in the .cu: the compiler may duplicate or merge the code itself.
EMU_API int emu_barrier(int kind, int predicate, const char* file, int line);
// value: the lane's operand, up to 8 bytes. argument: source lane, delta or xor mask. Returns the lane's result.
EMU_API uint64_t emu_warp(int op, unsigned mask, uint64_t value, int argument, int width, const char* file, int line);
// Runs function once, with the pointers of all lanes in mask (null elsewhere), when the last of them arrives.
typedef void (*emu_warp_function)(void** lanes, unsigned mask);
EMU_API void emu_warp_call(emu_warp_function function, void* argument, unsigned mask, const char* file, int line);
// kind is one of kbench.errors.FAULT_KINDS: "assert", "trap".
EMU_API void emu_stop(const char* kind, const char* message, const char* file, int line) __attribute__((noreturn));
EMU_API unsigned emu_active_mask(const char* file, int line);
EMU_API int emu_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// In kernels built for counting, before each atomic operation of CUDA.
EMU_API void emu_count_atomic(const volatile void* address, unsigned bytes);
