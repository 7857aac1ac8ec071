// The life of CUDA threads: started on a fiber, run to their end, reported when they cannot go on.
#include "scheduler.h"

#include "counter.h"

EMU_THREAD_LOCAL char* emu_dynamic_shared;

namespace emu {

EMU_THREAD_LOCAL Thread* self;
EMU_THREAD_LOCAL Block* block;
EMU_THREAD_LOCAL Worker* current_worker;

void release_barrier(Worker& worker);                          // barrier.cpp
void complete_groups_after_exit(Worker& worker, Warp& warp);   // warp.cpp

void retire(Worker& worker, ThreadState& thread) {
    Warp& warp = worker.warps[thread.warp];
    warp.alive &= ~bit(thread.lane);
    --worker.alive;
    if (__builtin_expect(worker.counter && !warp.alive, 0)) worker.counter->replay(thread.warp);
    // A thread that has returned counts as arrived everywhere (CUDA since sm_70).
    if (__builtin_expect(warp.groups_used, 0)) complete_groups_after_exit(worker, warp);
    if (__builtin_expect(worker.barrier.waiting, 0) && worker.barrier.waiting == worker.alive) release_barrier(worker);
}

void fiber_main() {
    Worker& worker = *current_worker;
    ThreadState* thread = &current_thread();
    Fiber* const fiber = thread->fiber;
    void (*const call)(void**) = worker.launch->request.kernel->call;
    void** const parameters = worker.launch->request.parameters;
    for (;;) {
        call(parameters);
        retire(worker, *thread);
        ThreadState* next = pick(worker, thread->warp);
        if (!next) {
            worker.fibers.give(fiber);
            worker.outcome = worker.alive ? Outcome::deadlock : Outcome::finished;
            jump_to(&worker.scheduler);
        }
        self = next;
        if (take(worker, *next)) {
            worker.fibers.give(fiber);  // still ours until the jump: nobody else takes stacks of this worker
            jump_to(&next->context);
        }
        // A thread that does not wait costs no fiber: the next one runs on the same stack.
        next->fiber = fiber;
        thread = next;
    }
}

void stop_out_of_time(Worker& worker, ThreadState& thread) {
    stop_at(worker, thread, "timeout", thread.file, thread.line,
            "the kernel ran longer than the time limit of %g s; this thread was at %s",
            worker.launch->request.time_limit, thread.operation);
}

}  // namespace emu
