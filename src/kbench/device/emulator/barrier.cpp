// __syncthreads and its variants with a predicate.
#include <cstring>

#include "counter.h"
#include "scheduler.h"

namespace emu {
namespace {

constexpr const char* kNames[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"};

bool same_place(const Barrier& barrier, const char* file, int line) {
    return barrier.line == line && (barrier.file == file || !std::strcmp(barrier.file, file));
}

int combined(const Barrier& barrier) {
    switch (barrier.kind) {
        case kBarrierCount: return static_cast<int>(barrier.predicates);
        case kBarrierAnd: return barrier.predicates == barrier.waiting;
        case kBarrierOr: return barrier.predicates != 0;
        default: return 0;
    }
}

}  // namespace

void release_barrier(Worker& worker) {
    Barrier& barrier = worker.barrier;
    // Read by the threads as they go on. None can complete the next barrier before all of them have come there.
    barrier.result = combined(barrier);
    barrier.waiting = 0;
    barrier.predicates = 0;
    for (unsigned i = 0; i < worker.warp_count; ++i) {
        Warp& warp = worker.warps[i];
        if (!warp.at_barrier) continue;
        make_ready(worker, i, warp.at_barrier);
        warp.at_barrier = 0;
    }
}

}  // namespace emu

int emu_barrier(int kind, int predicate, const char* file, int line) {
    using namespace emu;
    Worker& worker = *current_worker;
    ThreadState& thread = current_thread();
    Barrier& barrier = worker.barrier;
    if (__builtin_expect(worker.counter != nullptr, 0))
        worker.counter->barrier(worker, thread, reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1);
    if (!barrier.waiting) {
        barrier.kind = kind;
        barrier.file = file;
        barrier.line = line;
    } else if (__builtin_expect(!same_place(barrier, file, line) || barrier.kind != kind, 0)) {
        // Hardware would let any two meet; that a block does so on purpose is not believed.
        stop_at(worker, thread, "barrier-divergence", file, line,
                "%s reached here while %u other threads of the block wait in %s at %s:%d", kNames[kind],
                barrier.waiting, kNames[barrier.kind], base_name(barrier.file), barrier.line);
    }
    barrier.predicates += predicate != 0;
    if (++barrier.waiting == worker.alive) {  // the last to come goes on without a switch
        release_barrier(worker);
        return barrier.result;
    }
    thread.operation = kNames[kind];
    thread.file = file;
    thread.line = line;
    worker.warps[thread.warp].at_barrier |= bit(thread.lane);
    suspend(worker, thread);
    return barrier.result;
}
