// What Python is told of a launch that was stopped. Mirrored by runtime.py: keep both in step.
#pragma once
#include <cstdint>

namespace emu {

constexpr int kMaxFrames = 8;

struct Report {
    char kind[24];            // one of kbench.errors.FAULT_KINDS; empty: the launch went well
    char message[2048];       // one line; file names without folders
    char file[1024];          // of the place, where the runtime was told it by a synchronising call
    int32_t line;
    int32_t has_thread;       // 0: no single thread is to blame (a deadlock)
    uint32_t block[3];
    uint32_t thread[3];
    int32_t frames;           // otherwise the place follows from these: code addresses relative to the kernel
    int32_t is_write;         // module, innermost first. For memory faults, whether it was a write (-1: not known)
    uint64_t pc[kMaxFrames];
    uint64_t address;         // and which address
};

struct Worker;
struct ThreadState;

// Each of these writes the report of the running launch if it is the first fault of it, and leaves the block.
// `thread` is the thread to blame. Not for signal handlers: they cannot jump.
[[noreturn]] void stop_at(Worker& worker, ThreadState& thread, const char* kind, const char* file, int line,
                          const char* format, ...) __attribute__((format(printf, 6, 7)));

// True for the first fault of the launch, with kind, block and thread (if not null) filled in: only then may the
// caller write the rest.
bool begin_report(Worker& worker, const ThreadState* thread, const char* kind);
void set_message(Worker& worker, const char* format, ...) __attribute__((format(printf, 2, 3)));
void set_place(Worker& worker, const char* file, int line);
// Adds the code address `pc` and those of its callers, as far as they lie in the kernel's module.
void set_frames(Worker& worker, const ThreadState& thread, uintptr_t pc, uintptr_t frame_pointer);
bool in_kernel_module(const Worker& worker, uintptr_t pc);
void report_deadlock(Worker& worker);

const char* base_name(const char* path);

}  // namespace emu
