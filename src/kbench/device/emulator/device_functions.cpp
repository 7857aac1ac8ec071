// What a kernel calls apart from barriers and warp operations: assert, __trap, printf.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "state.h"

void emu_stop(const char* kind, const char* message, const char* file, int line) {
    using namespace emu;
    stop_at(*current_worker, current_thread(), kind, file, line, "%s", message);
}

// Formatted on the stack and written at once, without stdio's lock: a thread may be dropped in the middle of this,
// when a bad pointer is printed.
int emu_printf(const char* format, ...) {
    char text[1024];  // CUDA's own buffer is of this order; a longer line is cut
    va_list arguments;
    va_start(arguments, format);
    const int wanted = std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (wanted < 0) return wanted;
    const size_t length = static_cast<size_t>(wanted) < sizeof text ? static_cast<size_t>(wanted) : sizeof text - 1;
    if (write(STDERR_FILENO, text, length) < 0) return -1;
    return wanted;
}
