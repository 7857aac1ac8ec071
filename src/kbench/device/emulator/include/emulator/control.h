// Barriers, fences, and the ways a thread stops, waits, prints and reads the clock.
#pragma once

inline void __syncthreads(EMU_WHERE) { emu_barrier(emu::kBarrier, 0, EMU_HERE); }
inline int __syncthreads_count(int predicate, EMU_WHERE) {
    return emu_barrier(emu::kBarrierCount, predicate != 0, EMU_HERE);
}
inline int __syncthreads_and(int predicate, EMU_WHERE) {
    return emu_barrier(emu::kBarrierAnd, predicate != 0, EMU_HERE);
}
inline int __syncthreads_or(int predicate, EMU_WHERE) {
    return emu_barrier(emu::kBarrierOr, predicate != 0, EMU_HERE);
}

// Blocks run on several cores: a fence between them is a real one. The threads of a block share one core, so
// within a block it is enough that the compiler does not move accesses across it.
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

[[noreturn]] inline void __trap(EMU_WHERE) { emu_stop("trap", "__trap()", EMU_HERE); }
inline void __brkpt() {}
inline void __prof_trigger(int) {}
// Waiting lets no other thread run here, and a kernel must not depend on it.
inline void __nanosleep(unsigned int) {}

#if defined(__x86_64__)
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
#elif defined(__aarch64__)
inline long long clock64() {
    long long ticks;
    asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
}
#else
#error "the emulator runs on x86-64 and aarch64"
#endif
// clock() is the C library's: same name, same type, also a counter.

namespace emu {
// What the PTX register %globaltimer holds: nanoseconds.
inline unsigned long long global_timer() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull + static_cast<unsigned long long>(now.tv_nsec);
}
}  // namespace emu

namespace std {
using ::emu_printf;  // std::printf becomes std::emu_printf
}
#define printf emu_printf

#include "../assert.h"
