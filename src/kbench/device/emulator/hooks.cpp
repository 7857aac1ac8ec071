// What kernel code built for counting calls: -fsanitize=thread puts a call before every load and store, and around
// every function, -fsanitize-coverage=trace-pc one into every basic block. The names and parameters are those of
// ThreadSanitizer's and SanitizerCoverage's interfaces; nothing of their libraries is linked.
#include <cstring>

#include "counter.h"

namespace {

using emu::EventKind;

// `pc` lies behind the call: one less is inside the access.
inline __attribute__((always_inline)) void on_access(const volatile void* address, unsigned size, EventKind kind, void* pc) {
    emu::Worker* const worker = emu::current_worker;
    if (!worker || !worker->counter) return;
    worker->counter->access(*worker, emu::current_thread(), reinterpret_cast<uintptr_t>(address), size, kind,
                            reinterpret_cast<uintptr_t>(pc) - 1);
}

// A structure, in the pieces that a GPU would move: as large as its length and its place allow, up to 16 bytes.
inline __attribute__((always_inline)) void on_range(const void* address, size_t bytes, EventKind kind, void* pc) {
    const char* at = static_cast<const char*>(address);
    size_t piece = 16;
    while (bytes % piece || reinterpret_cast<uintptr_t>(at) % piece) piece /= 2;
    for (; bytes; bytes -= piece, at += piece) on_access(at, static_cast<unsigned>(piece), kind, pc);
}

}  // namespace

#define EMU_CALLER __builtin_return_address(0)
#define EMU_ACCESS(name, bytes, kind) \
    EMU_API void __tsan_##name##bytes(void* address) { on_access(address, bytes, emu::kind, EMU_CALLER); }
#define EMU_UPDATE(name, bytes)                                   \
    EMU_API void __tsan_##name##bytes(void* address) {            \
        on_access(address, bytes, emu::kLoad, EMU_CALLER);        \
        on_access(address, bytes, emu::kStore, EMU_CALLER);       \
    }
// An access of packed data may lie anywhere.
#define EMU_SIZE(bytes)                              \
    EMU_ACCESS(read, bytes, kLoad)                   \
    EMU_ACCESS(write, bytes, kStore)                 \
    EMU_ACCESS(volatile_read, bytes, kLoad)          \
    EMU_ACCESS(volatile_write, bytes, kStore)        \
    EMU_ACCESS(unaligned_read, bytes, kLoad)         \
    EMU_ACCESS(unaligned_write, bytes, kStore)       \
    EMU_ACCESS(unaligned_volatile_read, bytes, kLoad)   \
    EMU_ACCESS(unaligned_volatile_write, bytes, kStore) \
    EMU_UPDATE(read_write, bytes)                    \
    EMU_UPDATE(unaligned_read_write, bytes)
EMU_SIZE(1)
EMU_SIZE(2)
EMU_SIZE(4)
EMU_SIZE(8)
EMU_SIZE(16)

EMU_API void __tsan_read_range(void* address, size_t bytes) { on_range(address, bytes, emu::kLoad, EMU_CALLER); }
EMU_API void __tsan_write_range(void* address, size_t bytes) { on_range(address, bytes, emu::kStore, EMU_CALLER); }
EMU_API void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    on_range(from, bytes, emu::kLoad, EMU_CALLER);
    on_range(to, bytes, emu::kStore, EMU_CALLER);
    return std::memcpy(to, from, bytes);
}
EMU_API void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    on_range(from, bytes, emu::kLoad, EMU_CALLER);
    on_range(to, bytes, emu::kStore, EMU_CALLER);
    return std::memmove(to, from, bytes);
}
EMU_API void* __tsan_memset(void* to, int value, size_t bytes) {
    on_range(to, bytes, emu::kStore, EMU_CALLER);
    return std::memset(to, value, bytes);
}

EMU_API void __tsan_func_entry(void* call) {
    emu::Worker* const worker = emu::current_worker;
    if (worker && worker->counter) worker->counter->enter(emu::current_thread(), reinterpret_cast<uintptr_t>(call) - 1);
}
EMU_API void __tsan_func_exit() {
    emu::Worker* const worker = emu::current_worker;
    if (worker && worker->counter) worker->counter->leave(emu::current_thread());
}
EMU_API void __sanitizer_cov_trace_pc() {
    emu::Worker* const worker = emu::current_worker;
    if (worker && worker->counter) worker->counter->step(emu::current_thread(), reinterpret_cast<uintptr_t>(EMU_CALLER) - 1);
}

EMU_API void __tsan_init() {}
EMU_API void __tsan_vptr_update(void**, void*) {}
EMU_API void __tsan_vptr_read(void**) {}

// An atomic operation of CUDA, which may be a loop here, is one event: the headers announce it.
EMU_API void emu_count_atomic(const volatile void* address, unsigned bytes) {
    on_access(address, bytes, emu::kAtomic, EMU_CALLER);
}

// The steps that it is made of are done and not counted. The order of memory operations is the strictest.
#define EMU_CHANGE(bits, T, name) \
    EMU_API T __tsan_atomic##bits##_##name(volatile T* address, T value, int) { \
        return __atomic_##name(address, value, __ATOMIC_SEQ_CST); \
    }
#define EMU_COMPARE(bits, T, name, weak)                                                                       \
    EMU_API int __tsan_atomic##bits##_compare_exchange_##name(volatile T* address, T* expected, T value, int, int) { \
        return __atomic_compare_exchange_n(address, expected, value, weak, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    }
#define EMU_ATOMICS(bits, T)                                                                                   \
    EMU_API T __tsan_atomic##bits##_load(const volatile T* address, int) { return __atomic_load_n(address, __ATOMIC_SEQ_CST); } \
    EMU_API void __tsan_atomic##bits##_store(volatile T* address, T value, int) { __atomic_store_n(address, value, __ATOMIC_SEQ_CST); } \
    EMU_API T __tsan_atomic##bits##_exchange(volatile T* address, T value, int) { return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST); } \
    EMU_CHANGE(bits, T, fetch_add)                                                                             \
    EMU_CHANGE(bits, T, fetch_sub)                                                                             \
    EMU_CHANGE(bits, T, fetch_and)                                                                             \
    EMU_CHANGE(bits, T, fetch_or)                                                                              \
    EMU_CHANGE(bits, T, fetch_xor)                                                                             \
    EMU_COMPARE(bits, T, strong, false)                                                                        \
    EMU_COMPARE(bits, T, weak, true)                                                                           \
    EMU_API T __tsan_atomic##bits##_compare_exchange_val(volatile T* address, T expected, T value, int, int) { \
        __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);     \
        return expected;                                                                                       \
    }
EMU_ATOMICS(8, uint8_t)
EMU_ATOMICS(16, uint16_t)
EMU_ATOMICS(32, uint32_t)
EMU_ATOMICS(64, uint64_t)

EMU_API void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMU_API void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
