// Running a kernel: its blocks are dealt out to worker threads, which stay and wait for the next launch.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "counter.h"
#include "faults.h"
#include "memory.h"
#include "module.h"
#include "scheduler.h"

namespace emu {
namespace {

// Shared memory starts with a NaN in every floating-point type: a kernel that reads what it never wrote shows it.
constexpr int kPoison = 0xff;
constexpr size_t kSharedAlignment = 16;  // of dynamic shared memory, so that an overrun by one float4 hits the guard
// Between two signals to a worker that was not in kernel code when the first one came.
constexpr auto kInterruptInterval = std::chrono::milliseconds(5);

// ------------------------------------------------------------------------------------------------ one block

uint64_t block_number(const Launch& launch, uint64_t turn) {
    switch (launch.request.order) {
        case kReverse: return launch.blocks - 1 - turn;
        case kRandom:
            return static_cast<uint64_t>((static_cast<unsigned __int128>(turn) * launch.stride + launch.offset) % launch.blocks);
        default: return turn;
    }
}

void reset(Worker& worker, uint64_t number) {
    const Request& request = worker.launch->request;
    worker.block.index = {static_cast<unsigned>(number), 0, 0};
    if (number >= request.grid[0]) {  // 64-bit divisions are a third of the cost of an empty block
        const uint64_t row = number / request.grid[0];
        worker.block.index = {static_cast<unsigned>(number % request.grid[0]), static_cast<unsigned>(row % request.grid[1]),
                              static_cast<unsigned>(row / request.grid[1])};
    }
    worker.alive = worker.thread_count;
    worker.barrier = {};
    worker.random = request.seed * 2654435761u ^ static_cast<uint32_t>(number) * 40503u;  // Knuth's multipliers
    worker.runnable_warps = worker.warp_count == 32 ? ~0u : bit(worker.warp_count) - 1;
    for (unsigned i = 0; i < worker.warp_count; ++i) {
        Warp& warp = worker.warps[i];
        const unsigned lanes = worker.thread_count - i * kWarpSize;
        warp.ready = warp.at_barrier = warp.converging = 0;
        warp.groups_used = 0;
        warp.unstarted = warp.alive = lanes >= kWarpSize ? ~0u : bit(lanes) - 1;
        warp.first = i * kWarpSize;
    }
    if (worker.shared_memory) std::memset(worker.shared_memory, kPoison, request.module->tls_bytes);
    const size_t dynamic = static_cast<size_t>(worker.dynamic_low + worker.dynamic_capacity - worker.block.dynamic_shared);
    // Not for 0 bytes: at a guard page, even an AVX-512 store of nothing costs 100 ns.
    if (dynamic) std::memset(worker.block.dynamic_shared, kPoison, dynamic);
}

// The bytes between the end of dynamic shared memory and its guard page must still be poisoned.
void check_dynamic_slack(Worker& worker) {
    const char* byte = worker.block.dynamic_shared + worker.block.dynamic_shared_bytes;
    const char* const end = worker.dynamic_low + worker.dynamic_capacity;
    for (; byte < end; ++byte) {
        if (static_cast<unsigned char>(*byte) == kPoison) continue;
        worker.outcome = Outcome::fault;
        if (begin_report(worker, nullptr, "out-of-bounds"))
            set_message(worker, "write past the end of dynamic shared memory of %u bytes, found when the block ended",
                        worker.block.dynamic_shared_bytes);
        return;
    }
}

// Not inlined: the context switch loses all registers, which is cheapest where few are live.
__attribute__((noinline)) void run_block(Worker& worker, uint64_t number) {
    reset(worker, number);
    Counter* const counter = worker.launch->request.counter;
    worker.counter = counter && counter->chooses(number, worker.launch->blocks) ? counter : nullptr;
    if (worker.counter) counter->begin_block(worker);
    const unsigned first_warp = worker.order == kReverse ? worker.warp_count - 1 : 0;
    ThreadState* first = pick(worker, first_warp);
    take(worker, *first);
    first->fiber = worker.fibers.take();
    const Context start = new_context(first->fiber->top, fiber_main);
    worker.outcome = Outcome::running;
    self = first;
    switch_context(&worker.scheduler, &start);
    self = nullptr;
    if (worker.outcome == Outcome::deadlock) report_deadlock(worker);
    if (worker.outcome == Outcome::finished) check_dynamic_slack(worker);
    else worker.fibers.reclaim();
    if (worker.counter && worker.outcome == Outcome::finished) counter->end_block(worker);
    worker.counter = nullptr;
}

// ------------------------------------------------------------------------------------------------ one worker's share

void number_threads(Worker& worker, const uint32_t (&dim)[3]) {
    if (!std::memcmp(worker.threads_dim, dim, sizeof dim)) return;
    std::memcpy(worker.threads_dim, dim, sizeof dim);
    worker.thread_count = dim[0] * dim[1] * dim[2];
    worker.warp_count = (worker.thread_count + kWarpSize - 1) / kWarpSize;
    for (unsigned i = 0; i < worker.thread_count; ++i) {
        ThreadState& thread = worker.threads[i];
        thread.index = {i % dim[0], i / dim[0] % dim[1], i / dim[0] / dim[1]};
        thread.linear = i;
        thread.lane = i % kWarpSize;
        thread.warp = i / kWarpSize;
    }
}

// Dynamic shared memory ends where its guard begins, up to alignment.
void make_dynamic_shared(Worker& worker, uint32_t bytes) {
    const size_t page = page_size();
    const size_t needed = std::max<size_t>((bytes + page - 1) / page * page, page);
    if (worker.dynamic_capacity != needed) {  // exactly, so that the guard before it is near, too
        if (worker.dynamic_low) release(worker.dynamic_low, worker.dynamic_capacity, kDynamicGuard);
        worker.dynamic_low = reserve(needed, kDynamicGuard);
        worker.dynamic_capacity = needed;
    }
    const size_t aligned = (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
    worker.block.dynamic_shared = worker.dynamic_low + worker.dynamic_capacity - aligned;
    worker.block.dynamic_shared_bytes = bytes;
}

void run_share(Worker& worker, Launch& launch) {
    const Request& request = launch.request;
    worker.launch = &launch;
    worker.order = static_cast<Order>(request.order);
    worker.shared_memory = thread_local_storage(*request.module);
    worker.block.dim = {request.block[0], request.block[1], request.block[2]};
    worker.block.grid = {request.grid[0], request.grid[1], request.grid[2]};
    number_threads(worker, request.block);
    make_dynamic_shared(worker, request.shared_bytes);
    emu_dynamic_shared = worker.block.dynamic_shared;
    while (!launch.stopped.load(std::memory_order_relaxed)) {
        const uint64_t turn = launch.next_block.fetch_add(1, std::memory_order_relaxed);
        if (turn >= launch.blocks) break;
        run_block(worker, block_number(launch, turn));
    }
}

// ------------------------------------------------------------------------------------------------ all workers

// Worker threads and the one launch that they work at. Never destroyed: its threads wait in it until the process ends.
class Pool {
public:
    void start(const Request& request) {
        std::lock_guard<std::mutex> lock(mutex_);
        launch_.request = request;
        launch_.report = {};
        launch_.blocks = uint64_t{request.grid[0]} * request.grid[1] * request.grid[2];
        choose_random_order();
        launch_.next_block = 0;
        launch_.stopped = launch_.out_of_time = launch_.reported = false;
        deadline_ = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                           std::chrono::duration<double>(request.time_limit));
        const uint64_t wanted = std::min<uint64_t>(std::max(request.workers, 1u), launch_.blocks);
        while (members_.size() < wanted) add_member();
        busy_ = static_cast<unsigned>(wanted);
        for (uint64_t i = 0; i < wanted; ++i) {
            members_[i]->has_work = true;
            members_[i]->wake.notify_one();
        }
    }

    // True when the launch is over. Waits for at most `seconds`; ends the launch when its time limit has passed.
    bool wait(double seconds, Report* report) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto until = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                                  std::chrono::duration<double>(seconds));
        const auto over = [this] { return busy_ == 0; };
        if (!over() && !done_.wait_until(lock, std::min(until, deadline_), over) &&
            std::chrono::steady_clock::now() >= deadline_)
            end_now(lock);
        if (!over()) return false;
        *report = launch_.report;
        return true;
    }

    void cancel() {
        std::unique_lock<std::mutex> lock(mutex_);
        if (busy_) end_now(lock);
    }

private:
    struct Member {
        Worker worker = {};
        pthread_t thread = {};
        std::condition_variable wake;
        bool has_work = false;
    };

    void choose_random_order() {
        const uint64_t seed = launch_.request.seed * 0x9e3779b97f4a7c15u + 1;  // 2^64 over the golden ratio: spreads the bits
        launch_.offset = seed % launch_.blocks;
        launch_.stride = (seed >> 20) % launch_.blocks;
        while (std::gcd(launch_.stride, launch_.blocks) != 1) ++launch_.stride;  // coprime: visits every block once
    }

    void add_member() {
        Member* member = new Member;  // with its pages still untouched where no thread needs them
        members_.push_back(member);
        std::thread thread(&Pool::serve, this, member);
        member->thread = thread.native_handle();
        thread.detach();
    }

    void serve(Member* member) {
        prepare_thread_for_faults();
        current_worker = &member->worker;
        emu::block = &member->worker.block;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            member->wake.wait(lock, [member] { return member->has_work; });
            lock.unlock();
            run_share(member->worker, launch_);
            lock.lock();
            member->has_work = false;
            if (--busy_ == 0) done_.notify_all();
        }
    }

    void end_now(std::unique_lock<std::mutex>& lock) {
        launch_.out_of_time = launch_.stopped = true;
        while (busy_) {
            for (Member* member : members_)
                if (member->has_work) interrupt(member->thread);
            done_.wait_for(lock, kInterruptInterval, [this] { return busy_ == 0; });
        }
        if (launch_.reported.exchange(true)) return;
        // Every block that had been started came to its end in the meantime: there were just too many of them.
        std::strcpy(launch_.report.kind, "timeout");
        std::snprintf(launch_.report.message, sizeof launch_.report.message,
                      "the kernel ran longer than the time limit of %g s; %llu of its %llu blocks had been started",
                      launch_.request.time_limit,
                      static_cast<unsigned long long>(std::min(launch_.next_block.load(), launch_.blocks)),
                      static_cast<unsigned long long>(launch_.blocks));
    }

    std::mutex mutex_;
    std::condition_variable done_;
    std::vector<Member*> members_;
    Launch launch_;
    unsigned busy_ = 0;
    std::chrono::steady_clock::time_point deadline_;
};

Pool& pool() {
    static Pool* instance = new Pool;
    static pid_t owner = getpid();
    if (owner != getpid()) {  // a fork has none of its parent's threads
        instance = new Pool;
        owner = getpid();
    }
    return *instance;
}

}  // namespace
}  // namespace emu

// Start, then wait until it says 1. One launch at a time: the caller sees to that.
EMU_API void emu_start(const emu::Request* request) {
    emu::install_fault_handlers();
    emu::pool().start(*request);
}

EMU_API int emu_wait(double seconds, emu::Report* report) { return emu::pool().wait(seconds, report); }

// Ends the launch as if its time limit had passed; returns when it is over.
EMU_API void emu_cancel() { emu::pool().cancel(); }
