// Signals that kernel code raises, and the one that ends a launch whose time is up.
#pragma once
#include <pthread.h>

namespace emu {

// Makes this runtime's handlers current. Cheap; called before every launch, as others (Python's faulthandler) may
// have set theirs since. Signals that do not come from kernel code are handed on to the handlers found then.
void install_fault_handlers();
// Readies the calling thread, a worker: an alternate stack, because a thread that overflowed its own cannot run a
// handler on it; and no other signals, which are for the threads of Python.
void prepare_thread_for_faults();
// Stops the kernel code that runs on this thread, if any does at the moment.
void interrupt(pthread_t thread);

}  // namespace emu
