// Writing down what stopped a launch. Only the first fault of a launch is kept: what follows it is its consequence.
#include "report.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace emu {
namespace {

void copy_text(char* to, size_t size, const char* from) {
    std::strncpy(to, from, size - 1);
    to[size - 1] = '\0';
}

// Text appended to a buffer of fixed size: a report may be written in a signal handler, where nothing is allocated.
struct Text {
    char* out;
    size_t left;

    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        va_list arguments;
        va_start(arguments, format);
        const int wanted = std::vsnprintf(out, left, format, arguments);
        va_end(arguments);
        const size_t written = wanted < 0 ? 0 : static_cast<size_t>(wanted) < left ? static_cast<size_t>(wanted) : left - 1;
        out += written;
        left -= written;
    }
};

enum class Wait { none, barrier, warp, active_mask };

// What a thread waits for. Threads that wait for the same are listed together.
struct Reason {
    Wait wait;
    const char* operation;
    const char* file;
    int line;
    unsigned mask;

    bool operator==(const Reason& other) const {
        return wait == other.wait && (wait == Wait::none || (line == other.line && !std::strcmp(file, other.file))) &&
               (wait != Wait::warp || mask == other.mask);
    }
};

Reason reason_of(const Worker& worker, unsigned number) {
    const ThreadState& thread = worker.threads[number];
    const Warp& warp = worker.warps[thread.warp];
    const uint32_t lane = 1u << thread.lane;
    if (!(warp.alive & lane)) return {Wait::none, "", "", 0, 0};
    const Wait wait = warp.at_barrier & lane ? Wait::barrier : warp.converging & lane ? Wait::active_mask : Wait::warp;
    return {wait, thread.operation, thread.file, thread.line, thread.mask};
}

// "0-3,7,9-31": the threads from `first` on that have this reason, none of which is marked in `listed` yet.
void list_threads(const Worker& worker, unsigned first, const Reason& reason, bool* listed, Text& text) {
    constexpr size_t kEnough = 400;  // bytes that must stay free for the other groups
    const char* comma = "";
    for (unsigned i = first; i < worker.thread_count; ++i) {
        if (listed[i] || !(reason_of(worker, i) == reason)) continue;
        unsigned last = i;
        listed[i] = true;
        while (last + 1 < worker.thread_count && reason_of(worker, last + 1) == reason) listed[++last] = true;
        if (text.left > kEnough) {
            text.add(i == last ? "%s%u" : "%s%u-%u", comma, i, last);
            comma = ",";
        }
        i = last;
    }
}

void list_waiting(const Worker& worker, Text& text) {
    bool listed[kMaxThreads] = {};
    const char* separator = "";
    for (unsigned i = 0; i < worker.thread_count; ++i) {
        if (listed[i]) continue;
        const Reason reason = reason_of(worker, i);
        text.add("%sthreads ", separator);
        list_threads(worker, i, reason, listed, text);
        if (reason.wait == Wait::none) text.add(" have exited");
        else text.add(" wait in %s at %s:%d", reason.operation, base_name(reason.file), reason.line);
        if (reason.wait == Wait::warp) text.add(" (mask 0x%08x)", reason.mask);
        separator = "; ";
    }
}

}  // namespace

const char* base_name(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool begin_report(Worker& worker, const ThreadState* thread, const char* kind) {
    worker.launch->stopped.store(true, std::memory_order_relaxed);
    if (worker.launch->reported.exchange(true)) return false;
    Report& report = worker.launch->report;
    copy_text(report.kind, sizeof report.kind, kind);
    const Index place = worker.block.index;
    report.block[0] = place.x, report.block[1] = place.y, report.block[2] = place.z;
    report.has_thread = thread != nullptr;
    if (thread) report.thread[0] = thread->index.x, report.thread[1] = thread->index.y, report.thread[2] = thread->index.z;
    report.is_write = -1;
    return true;
}

void set_message(Worker& worker, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(worker.launch->report.message, sizeof worker.launch->report.message, format, arguments);
    va_end(arguments);
}

void set_place(Worker& worker, const char* file, int line) {
    copy_text(worker.launch->report.file, sizeof worker.launch->report.file, file);
    worker.launch->report.line = line;
}

bool in_kernel_module(const Worker& worker, uintptr_t pc) {
    const Module& module = *worker.launch->request.module;
    return pc >= module.low && pc < module.high;
}

void set_frames(Worker& worker, const ThreadState& thread, uintptr_t pc, uintptr_t frame_pointer) {
    Report& report = worker.launch->report;
    const auto add = [&](uintptr_t address) {
        if (in_kernel_module(worker, address) && report.frames < kMaxFrames)
            report.pc[report.frames++] = address - worker.launch->request.module->base;
    };
    add(pc);
    const uintptr_t low = reinterpret_cast<uintptr_t>(thread.fiber->bottom);
    const uintptr_t high = reinterpret_cast<uintptr_t>(thread.fiber->top);
    // A frame begins with the caller's frame pointer and the return address; one before that is inside the call.
    while (frame_pointer >= low && frame_pointer + 16 <= high && frame_pointer % 8 == 0 && report.frames < kMaxFrames) {
        const uintptr_t* frame = reinterpret_cast<const uintptr_t*>(frame_pointer);
        add(frame[1] - 1);
        if (frame[0] <= frame_pointer) break;
        frame_pointer = frame[0];
    }
}

void stop_at(Worker& worker, ThreadState& thread, const char* kind, const char* file, int line, const char* format, ...) {
    if (begin_report(worker, &thread, kind)) {
        Report& report = worker.launch->report;
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(report.message, sizeof report.message, format, arguments);
        va_end(arguments);
        set_place(worker, file, line);
    }
    worker.outcome = Outcome::fault;
    jump_to(&worker.scheduler);
}

void report_deadlock(Worker& worker) {
    if (!begin_report(worker, nullptr, "deadlock")) return;
    Report& report = worker.launch->report;
    Text text{report.message, sizeof report.message};
    text.add("no thread of the block can go on: ");
    list_waiting(worker, text);
    for (unsigned i = 0; i < worker.thread_count; ++i) {
        const Reason reason = reason_of(worker, i);
        if (reason.wait == Wait::none) continue;
        set_place(worker, reason.file, reason.line);
        return;
    }
}

}  // namespace emu
