// A fault in kernel code is written down in the signal handler, which then returns to the scheduler of the worker
// instead of to the kernel. All threads of the block are dropped where they stand: kernel code holds no locks.
#include "faults.h"

#include <sys/mman.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>

#include "registers.h"
#include "state.h"

namespace emu {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kSignalCount = sizeof kSignals / sizeof *kSignals;
constexpr size_t kSignalStack = 64 * 1024;  // a handler formats text; SIGSTKSZ is too small for that
struct sigaction previous[kSignalCount];

// glibc keeps the first real-time signals for itself; some debuggers take the next few.
int interrupt_signal() { return SIGRTMIN + 5; }

const char* access_name(Access access) {
    return access == Access::write ? "write" : access == Access::read ? "read" : "access";
}

enum class Fault { timeout, arithmetic, trap, stack_overflow, dynamic_shared, misaligned, memory };

// Of kbench.errors.FAULT_KINDS. Which tensor a memory fault was near is for Python to find out: see device.py.
constexpr const char* kKinds[] = {"timeout", "arithmetic", "trap", "stack-overflow", "out-of-bounds", "misaligned",
                                  "illegal-access"};

bool address_known(const siginfo_t& info) { return info.si_code > 0 && info.si_code != SI_KERNEL; }

uintptr_t address_of(const siginfo_t& info) { return reinterpret_cast<uintptr_t>(info.si_addr); }

bool near_dynamic_shared(const Worker& worker, uintptr_t address) {
    const uintptr_t low = reinterpret_cast<uintptr_t>(worker.dynamic_low);
    return address >= low - kDynamicGuard && address < low + worker.dynamic_capacity + kDynamicGuard;
}

Fault classify(const Worker& worker, const ThreadState& thread, int signal, const siginfo_t& info, const Registers& registers) {
    if (signal == interrupt_signal()) return Fault::timeout;
    if (signal == SIGFPE) return Fault::arithmetic;
    if (signal == SIGILL) return Fault::trap;
    if (signal == SIGBUS && info.si_code == BUS_ADRALN) return Fault::misaligned;
    if (!address_known(info)) return registers.is_aligned_move() ? Fault::misaligned : Fault::memory;
    if (FiberPool::in_guard(thread.fiber, address_of(info))) return Fault::stack_overflow;
    return near_dynamic_shared(worker, address_of(info)) ? Fault::dynamic_shared : Fault::memory;
}

void write_message(Worker& worker, Fault fault, const siginfo_t& info, Access access) {
    switch (fault) {
        case Fault::timeout:
            set_message(worker, "the kernel ran longer than the time limit of %g s; this thread was running",
                        worker.launch->request.time_limit);
            break;
        case Fault::arithmetic:
            set_message(worker, "integer division by zero, or its quotient does not fit");
            break;
        case Fault::trap:
            set_message(worker, "the kernel reached __builtin_trap() or code that the compiler took for unreachable");
            break;
        case Fault::stack_overflow:
            set_message(worker, "the thread needs more than the emulator's %zu KiB of stack", FiberPool::stack_bytes() / 1024);
            break;
        case Fault::dynamic_shared:
            set_message(worker, "%s %s of dynamic shared memory of %u bytes", access_name(access),
                        address_of(info) < reinterpret_cast<uintptr_t>(worker.dynamic_low) ? "before the start" : "past the end",
                        worker.block.dynamic_shared_bytes);
            break;
        case Fault::misaligned:
            set_message(worker, "a 16-byte access at an address that is not a multiple of 16");
            break;
        case Fault::memory:
            if (address_known(info))
                set_message(worker, "%s of address 0x%zx, which is near no tensor", access_name(access),
                            static_cast<size_t>(address_of(info)));
            else
                set_message(worker, "access to an address that no memory can have");
            worker.launch->report.address = address_known(info) ? address_of(info) : 0;
            if (access != Access::unknown) worker.launch->report.is_write = access == Access::write;
            break;
    }
}

void write_report(Worker& worker, ThreadState& thread, int signal, const siginfo_t& info, const Registers& registers) {
    const Fault fault = classify(worker, thread, signal, info, registers);
    if (!begin_report(worker, &thread, kKinds[static_cast<int>(fault)])) return;
    write_message(worker, fault, info, registers.access());
    // In a function of the C library that has no frame of its own (memset), the kernel's line is that of the call.
    // The stack of a thread that overflowed it cannot be read.
    const bool in_library = !in_kernel_module(worker, registers.pc()) && fault != Fault::stack_overflow;
    set_frames(worker, thread, in_library ? registers.return_address() - 1 : registers.pc(), registers.frame_pointer());
}

// Not ours: let the previous handler see it when the instruction is repeated. A second one means that the previous
// handler came back to us, so the default action is due.
void hand_on(int signal) {
    static bool handed_on = false;
    for (int i = 0; i < kSignalCount; ++i) {
        if (kSignals[i] != signal) continue;
        struct sigaction fallback = {};
        fallback.sa_handler = SIG_DFL;
        sigaction(signal, handed_on ? &fallback : &previous[i], nullptr);
        handed_on = true;
    }
}

void on_signal(int signal, siginfo_t* info, void* context) {
    const int saved_errno = errno;
    Registers registers(context);
    Worker* worker = current_worker;
    const bool in_kernel = worker && self && worker->outcome == Outcome::running;
    if (signal == interrupt_signal()) {
        // In the middle of the runtime or of the C library nothing can be dropped; the next signal comes soon.
        if (!in_kernel || !in_kernel_module(*worker, registers.pc())) {
            errno = saved_errno;
            return;
        }
    } else if (!in_kernel) {
        hand_on(signal);
        return;
    }
    write_report(*worker, current_thread(), signal, *info, registers);
    worker->outcome = Outcome::fault;
    registers.resume_at(worker->scheduler);
    errno = saved_errno;
}

}  // namespace

void install_fault_handlers() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    for (int i = 0; i < kSignalCount; ++i) {
        struct sigaction now;
        sigaction(kSignals[i], nullptr, &now);
        if (now.sa_sigaction == on_signal) continue;
        previous[i] = now;
        sigaction(kSignals[i], &action, nullptr);
    }
    sigaction(interrupt_signal(), &action, nullptr);
}

void prepare_thread_for_faults() {
    stack_t stack = {};
    stack.ss_sp = mmap(nullptr, kSignalStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack.ss_size = kSignalStack;
    sigaltstack(&stack, nullptr);
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int signal : kSignals) sigdelset(&blocked, signal);
    sigdelset(&blocked, interrupt_signal());
    pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
}

void interrupt(pthread_t thread) { pthread_kill(thread, interrupt_signal()); }

}  // namespace emu
