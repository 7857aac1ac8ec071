// The registers of interrupted code, as a signal handler sees them.
#pragma once
#include <csignal>
#include <cstdint>
#include <ucontext.h>

#include "fiber.h"

namespace emu {

enum class Access { unknown, read, write };

class Registers {
public:
    explicit Registers(void* context) : context_(*static_cast<ucontext_t*>(context)) {}

#if defined(__x86_64__)

    uintptr_t pc() const { return static_cast<uintptr_t>(context_.uc_mcontext.gregs[REG_RIP]); }
    uintptr_t frame_pointer() const { return static_cast<uintptr_t>(context_.uc_mcontext.gregs[REG_RBP]); }
    // Where a function that has no frame of its own yet, such as memset, will return to.
    uintptr_t return_address() const { return *reinterpret_cast<const uintptr_t*>(context_.uc_mcontext.gregs[REG_RSP]); }
    Access access() const {
        constexpr greg_t kPageFault = 14, kWrite = 2;  // trap number, and the bit of its error code
        if (context_.uc_mcontext.gregs[REG_TRAPNO] != kPageFault) return Access::unknown;
        return context_.uc_mcontext.gregs[REG_ERR] & kWrite ? Access::write : Access::read;
    }
    // A general protection fault comes without an address: a 16-byte move from or to one that is not a multiple of
    // 16, or an address that no memory can have. The instruction tells them apart.
    bool is_aligned_move() const {
        const unsigned char* code = reinterpret_cast<const unsigned char*>(pc());
        bool operand_size = false;
        for (; *code == 0x66 || (*code & 0xf0) == 0x40; ++code) operand_size |= *code == 0x66;
        if (code[0] == 0xc5) return is_aligned_opcode(code[2], (code[1] & 3) == 1);  // VEX, two bytes
        return code[0] == 0x0f && is_aligned_opcode(code[1], operand_size);
    }
    void resume_at(const Context& context) {
        context_.uc_mcontext.gregs[REG_RSP] = reinterpret_cast<greg_t>(context.stack_pointer);
        context_.uc_mcontext.gregs[REG_RBP] = reinterpret_cast<greg_t>(context.frame_pointer);
        context_.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(context.resume);
    }

private:
    static bool is_aligned_opcode(unsigned char opcode, bool operand_size) {
        if (opcode == 0x28 || opcode == 0x29 || opcode == 0x2b) return true;                        // movaps, movntps
        return operand_size && (opcode == 0x6f || opcode == 0x7f || opcode == 0xe7);                // movdqa, movntdq
    }

#elif defined(__aarch64__)

    uintptr_t pc() const { return context_.uc_mcontext.pc; }
    uintptr_t frame_pointer() const { return context_.uc_mcontext.regs[29]; }
    uintptr_t return_address() const { return context_.uc_mcontext.regs[30]; }
    // The kernel appends the exception syndrome register as a tagged record.
    Access access() const {
        constexpr uint32_t kSyndrome = 0x45535201;
        constexpr uint64_t kWrite = 1u << 6;
        const unsigned char* record = context_.uc_mcontext.__reserved;
        for (;;) {
            const uint32_t* head = reinterpret_cast<const uint32_t*>(record);
            if (!head[0] || !head[1]) return Access::unknown;
            if (head[0] == kSyndrome)
                return *reinterpret_cast<const uint64_t*>(record + 8) & kWrite ? Access::write : Access::read;
            record += head[1];
        }
    }
    bool is_aligned_move() const { return false; }
    void resume_at(const Context& context) {
        context_.uc_mcontext.sp = reinterpret_cast<uintptr_t>(context.stack_pointer);
        context_.uc_mcontext.regs[29] = reinterpret_cast<uintptr_t>(context.frame_pointer);
        context_.uc_mcontext.pc = reinterpret_cast<uintptr_t>(context.resume);
    }

private:
#endif
    ucontext_t& context_;
};

}  // namespace emu
