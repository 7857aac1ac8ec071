// Stacks for fibers.
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace emu {
namespace {

// A CUDA thread may have up to 512 KiB of local memory, but kernels that use more than a few KiB are unheard of;
// printf of a double needs about 10 KiB. Untouched pages are not backed by memory.
constexpr size_t kStackBytes = 256 * 1024;
// Code with large frames touches the stack at least once in this distance (-fstack-clash-protection: every page, but
// every 64 KiB on aarch64), so it cannot step over the guard unnoticed.
constexpr size_t kGuardBytes = 64 * 1024;
constexpr size_t kStep = kGuardBytes + kStackBytes;
constexpr unsigned kSlab = 64;
// Stacks at equal distances would share the same few cache sets: shift each by another multiple of two lines.
constexpr size_t kColour = 128;
constexpr unsigned kColours = 32;
// Each guard splits a mapping in two, and Linux allows 65,530 mappings in a process. Stacks beyond this number
// (24 workers with 1,024 waiting threads each) do without: an overflow there is not diagnosed.
constexpr unsigned kMaxGuarded = 24 * 1024;
std::atomic<unsigned> guarded{0};

}  // namespace

size_t page_size() {
    static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

size_t FiberPool::stack_bytes() { return kStackBytes; }

bool FiberPool::in_guard(const Fiber* fiber, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(fiber->low) < kGuardBytes;
}

void FiberPool::grow() {
    void* memory = mmap(nullptr, kSlab * kStep, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        // Called from the middle of a kernel: there is nobody to hand an error to.
        std::fprintf(stderr, "kbench emulator: no address space left for the stacks of CUDA threads\n");
        std::abort();
    }
    Fiber* fibers = new Fiber[kSlab];
    slabs_ = new Slab{fibers, slabs_};
    for (unsigned i = kSlab; i-- > 0;) {
        char* low = static_cast<char*>(memory) + i * kStep;
        if (guarded.fetch_add(1, std::memory_order_relaxed) < kMaxGuarded) mprotect(low, kGuardBytes, PROT_NONE);
        fibers[i].low = low;
        fibers[i].bottom = low + kGuardBytes;
        fibers[i].top = low + kStep - (count_++ * 5 % kColours) * kColour;
        give(&fibers[i]);
    }
}

void FiberPool::reclaim() {
    free_ = nullptr;
    for (Slab* slab = slabs_; slab; slab = slab->next)
        for (unsigned i = kSlab; i-- > 0;) give(&slab->fibers[i]);
}

}  // namespace emu
