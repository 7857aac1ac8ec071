// Guarded memory, for tensors and for dynamic shared memory.
#include "memory.h"

#include <sys/mman.h>

#include "fiber.h"
#include "include/abi.h"

namespace emu {

char* reserve(size_t bytes, size_t guard) {
    void* whole = mmap(nullptr, guard + bytes + guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return nullptr;
    char* memory = static_cast<char*>(whole) + guard;
    if (mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) {
        munmap(whole, guard + bytes + guard);
        return nullptr;
    }
    return memory;
}

void release(char* memory, size_t bytes, size_t guard) { munmap(memory - guard, guard + bytes + guard); }

}  // namespace emu

EMU_API char* emu_reserve(size_t bytes, size_t guard) { return emu::reserve(bytes, guard); }
EMU_API void emu_release(char* memory, size_t bytes, size_t guard) { emu::release(memory, bytes, guard); }
EMU_API size_t emu_page_size() { return emu::page_size(); }
