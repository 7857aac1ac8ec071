// Memory between stretches of address space that fault when touched.
#pragma once
#include <cstddef>

namespace emu {

// Readable and writable memory of `bytes`, a multiple of the page size, with `guard` bytes before and after it that
// fault. Null if the system has no more.
char* reserve(size_t bytes, size_t guard);
void release(char* memory, size_t bytes, size_t guard);

}  // namespace emu
