// The runtime's own records: CUDA threads, warps, and the worker (an OS thread) that runs one block at a time.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "fiber.h"
#include "include/abi.h"
#include "report.h"

namespace emu {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;  // per block: CUDA's limit
constexpr unsigned kMaxWarps = kMaxThreads / kWarpSize;

// Address space on either side of dynamic shared memory that faults: several times the most that a block may have.
constexpr size_t kDynamicGuard = 1 << 20;

// The order in which threads, warps and blocks get their turn. A kernel that lacks a barrier may be right in one.
enum Order : int32_t { kForward, kReverse, kRandom };

struct ThreadState : Thread {
    Context context;  // where it goes on; valid while it waits or is ready
    Fiber* fiber;
    // What it waits for, for reports.
    const char* operation;
    const char* file;
    int line;
    unsigned mask;
};

// Lanes of a warp that wait for one another at a warp operation with the same mask. Several masks can be in
// flight in one warp: tiles, halves of a divergent branch.
struct WarpGroup {
    unsigned mask;
    unsigned arrived;
    int op;
    int line;
    const char* file;
    emu_warp_function function;  // of kWarpCall
};

// Bit i of a mask is lane i.
struct Warp {
    uint32_t ready;       // suspended, may go on
    uint32_t unstarted;
    uint32_t alive;       // have not returned from the kernel
    uint32_t at_barrier;
    uint32_t converging;  // in __activemask, see warp.cpp
    unsigned first;       // thread number of lane 0
    unsigned groups_used;
    WarpGroup groups[kWarpSize];
    // Operands and results of the lanes. A lane that runs ahead overwrites its operands but not others' results.
    uint64_t value[kWarpSize];
    uint64_t result[kWarpSize];
    int argument[kWarpSize];
    int width[kWarpSize];
};

struct Barrier {
    unsigned waiting;
    unsigned predicates;  // how many came with a predicate other than 0
    int kind;
    int result;
    const char* file;
    int line;
};

// The loaded library that a kernel is in.
struct Module {
    uintptr_t base;       // load address: what debug information counts from
    uintptr_t low, high;  // extent in memory
    size_t tls_id;        // 0: it has no thread-local variables, that is no __shared__ ones
    size_t tls_bytes;
};

class Counter;

// What Python asks for. Mirrored by runtime.py.
struct Request {
    const Kernel* kernel;
    const Module* module;
    void** parameters;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    uint32_t workers;
    int32_t order;
    uint32_t seed;
    double time_limit;  // seconds
    Counter* counter;   // null: nothing is counted. Else there is one worker, so that the counts are the same each time
};

struct Launch {
    Request request;
    Report report;
    uint64_t blocks;
    uint64_t stride, offset;  // of the random order of blocks
    // Alone on its cache line: every worker adds to it, and reads the rest all the time.
    alignas(64) std::atomic<uint64_t> next_block;
    alignas(64) std::atomic<bool> stopped;  // start no further block
    std::atomic<bool> out_of_time;
    std::atomic<bool> reported;
};

enum class Outcome { running, finished, deadlock, fault };

struct Worker {
    ThreadState threads[kMaxThreads];
    Warp warps[kMaxWarps];
    uint32_t runnable_warps;  // bit i: warp i has ready or unstarted lanes
    unsigned thread_count;
    unsigned warp_count;
    unsigned alive;
    Barrier barrier;
    Order order;
    uint32_t random;
    Outcome outcome;
    Context scheduler;  // run_block, which every block ends in, whether well or not
    FiberPool fibers;
    Block block;
    Launch* launch;
    Counter* counter;     // null unless the block that runs is counted
    char* shared_memory;  // static __shared__ variables of the kernel's module: its thread-local storage
    char* dynamic_low;    // mapping of dynamic shared memory, between guards of kDynamicGuard bytes
    size_t dynamic_capacity;
    uint32_t threads_dim[3];  // block dimensions for which `threads` is filled in
};

// The worker that runs on this OS thread; null on any other thread.
extern EMU_THREAD_LOCAL Worker* current_worker;

inline ThreadState& current_thread() { return *static_cast<ThreadState*>(self); }

}  // namespace emu
