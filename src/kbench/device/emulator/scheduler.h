// Which CUDA thread of a block runs next. The hot paths, inlined into the barrier and the warp operations.
#pragma once
#include "state.h"

namespace emu {

// Gives every lane that waits in __activemask its answer and makes it ready. See warp.cpp.
void resolve_active_masks(Worker& worker, Warp& warp);
// A thread has returned from the kernel: whoever waits for it need not any more. See scheduler.cpp.
void retire(Worker& worker, ThreadState& thread);
// Called by a thread that is about to wait when the time limit has passed.
[[noreturn]] void stop_out_of_time(Worker& worker, ThreadState& thread);
// Where a new fiber starts: runs CUDA threads one after another until one has to wait.
void fiber_main();

inline uint32_t bit(unsigned index) { return 1u << index; }

// One bit of `mask`, which is not 0.
inline unsigned choose(Worker& worker, uint32_t mask) {
    if (__builtin_expect(worker.order == kForward, 1)) return static_cast<unsigned>(__builtin_ctz(mask));
    if (worker.order == kReverse) return 31u - static_cast<unsigned>(__builtin_clz(mask));
    worker.random = worker.random * 1664525u + 1013904223u;  // Numerical Recipes' generator; its high bits are good
    const unsigned turn = worker.random >> 27;
    const uint32_t rotated = turn ? mask >> turn | mask << (32 - turn) : mask;
    return (static_cast<unsigned>(__builtin_ctz(rotated)) + turn) % 32;
}

inline void make_ready(Worker& worker, unsigned warp, uint32_t lanes) {
    worker.warps[warp].ready |= lanes;
    worker.runnable_warps |= bit(warp);
}

// The thread that runs next, or null if none can. Stays in warp `hint` while that has work: its data are in cache.
inline ThreadState* pick(Worker& worker, unsigned hint) {
    Warp* warp = &worker.warps[hint];
    if (__builtin_expect(warp->converging && !(warp->ready | warp->unstarted), 0)) resolve_active_masks(worker, *warp);
    uint32_t lanes = warp->ready | warp->unstarted;
    if (__builtin_expect(!lanes || worker.order == kRandom, 0)) {
        if (!worker.runnable_warps) return nullptr;
        warp = &worker.warps[choose(worker, worker.runnable_warps)];
        lanes = warp->ready | warp->unstarted;
    }
    return &worker.threads[warp->first + choose(worker, lanes)];
}

// Marks a picked thread as running. True: it was suspended, go on at its context; false: it has not started.
inline bool take(Worker& worker, ThreadState& thread) {
    Warp& warp = worker.warps[thread.warp];
    const uint32_t lane = bit(thread.lane);
    const bool suspended = warp.ready & lane;
    warp.ready &= ~lane;
    warp.unstarted &= ~lane;
    if (!(warp.ready | warp.unstarted)) worker.runnable_warps &= ~bit(thread.warp);
    return suspended;
}

// Leaves `thread`, which has been entered into whatever it waits for, until somebody makes it ready and it is picked.
inline void suspend(Worker& worker, ThreadState& thread) {
    if (__builtin_expect(worker.launch->out_of_time.load(std::memory_order_relaxed), 0)) stop_out_of_time(worker, thread);
    ThreadState* next = pick(worker, thread.warp);
    if (__builtin_expect(!next, 0)) {
        worker.outcome = Outcome::deadlock;
        switch_context(&thread.context, &worker.scheduler);
        __builtin_unreachable();
    }
    self = next;
    if (__builtin_expect(take(worker, *next), 1)) {
        if (next != &thread) switch_context(&thread.context, &next->context);
        return;
    }
    next->fiber = worker.fibers.take();
    const Context start = new_context(next->fiber->top, fiber_main);
    switch_context(&thread.context, &start);
}

}  // namespace emu
