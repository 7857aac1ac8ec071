// A CUDA thread that has to wait keeps its own stack: a fiber. This file switches between stacks.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

// Where a suspended thread goes on. The switch declares every other register lost, so the compiler saves those
// that are live and nothing else: about 1 ns, where saving all of them and returning costs ten times that
// (the return misses the return predictor) and ucontext three hundred (it enters the kernel twice).
struct Context {
    void* stack_pointer;
    void* frame_pointer;
    void* resume;
};
static_assert(offsetof(Context, frame_pointer) == 8 && offsetof(Context, resume) == 16, "the assembly below counts on it");

#if defined(__x86_64__)

inline __attribute__((always_inline)) void switch_context(Context* from, const Context* to) {
    asm volatile(
        "leaq 1f(%%rip), %%rax\n\t"
        "movq %%rsp, (%[from])\n\t"
        "movq %%rbp, 8(%[from])\n\t"
        "movq %%rax, 16(%[from])\n\t"
        "movq (%[to]), %%rsp\n\t"
        "movq 8(%[to]), %%rbp\n\t"
        "jmpq *16(%[to])\n"
        "1:"
        : [from] "+D"(from), [to] "+S"(to)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
          "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
          "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
}

[[noreturn]] inline void jump_to(const Context* to) {
    asm volatile(
        "movq (%[to]), %%rsp\n\t"
        "movq 8(%[to]), %%rbp\n\t"
        "jmpq *16(%[to])"
        :
        : [to] "S"(to)
        : "memory");
    __builtin_unreachable();
}

#elif defined(__aarch64__)

inline __attribute__((always_inline)) void switch_context(Context* from, const Context* to) {
    register Context* from_register asm("x0") = from;
    register const Context* to_register asm("x1") = to;
    asm volatile(
        "adr x2, 1f\n\t"
        "mov x3, sp\n\t"
        "stp x3, x29, [x0]\n\t"
        "str x2, [x0, #16]\n\t"
        "ldp x3, x29, [x1]\n\t"
        "ldr x2, [x1, #16]\n\t"
        "mov sp, x3\n\t"
        "br x2\n"
        "1:"
        : "+r"(from_register), "+r"(to_register)
        :
        // x18 too: Linux leaves it to the compiler like any other.
        : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17",
          "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30",
          "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",
          "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
          "v31", "memory", "cc");
}

[[noreturn]] inline void jump_to(const Context* to) {
    asm volatile(
        "ldp x3, x29, [%[to]]\n\t"
        "ldr x2, [%[to], #16]\n\t"
        "mov sp, x3\n\t"
        "br x2"
        :
        : [to] "r"(to)
        : "x2", "x3", "memory");
    __builtin_unreachable();
}

#else
#error "the kbench emulator switches stacks in assembly for x86-64 and aarch64 only"
#endif

// A context that calls `entry`, which must never return, on the stack that ends below `top`.
// The frame pointer of zero ends the walk over stack frames that a fault report makes.
inline Context new_context(char* top, void (*entry)()) {
    uintptr_t stack = reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15};
#if defined(__x86_64__)
    stack -= 16;  // as after a call: 8 bytes off the 16-byte boundary, with a return address of zero
    reinterpret_cast<uintptr_t*>(stack)[0] = 0;
    reinterpret_cast<uintptr_t*>(stack)[1] = 0;
    stack += 8;
#endif
    return {reinterpret_cast<void*>(stack), nullptr, reinterpret_cast<void*>(entry)};
}

// One stack. It grows down from `top` to `bottom`; below that, from `low` on, is its guard.
struct Fiber {
    char* low;
    char* bottom;
    char* top;
    Fiber* next;
};

size_t page_size();

// The stacks of one worker. Stacks are mapped 64 at a time and kept; pages that are never touched cost nothing.
class FiberPool {
public:
    Fiber* take() {
        if (!free_) grow();
        Fiber* fiber = free_;
        free_ = fiber->next;
        return fiber;
    }
    void give(Fiber* fiber) {
        fiber->next = free_;
        free_ = fiber;
    }
    // After a fault: no thread of the block goes on, so every stack is free again.
    void reclaim();

    static bool in_guard(const Fiber* fiber, uintptr_t address);
    static size_t stack_bytes();

private:
    void grow();
    struct Slab {
        Fiber* fibers;
        Slab* next;
    };
    Fiber* free_ = nullptr;
    Slab* slabs_ = nullptr;
    unsigned count_ = 0;
};

}  // namespace emu
