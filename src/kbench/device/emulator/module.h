#pragma once
#include "state.h"

namespace emu {

// The calling thread's storage of the module's thread-local variables; null if it has none.
char* thread_local_storage(const Module& module);

}  // namespace emu
