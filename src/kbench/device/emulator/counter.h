// Counting what the warps of a block ask of memory. Kernel code built for it calls the runtime before each access and
// at the start of each basic block (see hooks.cpp); which lanes of a warp access together is found afterwards.
//
// The lanes of a warp run one after another here, each up to the next point where all of them meet. What each did is
// kept in a trace; when they meet, the traces are replayed as a GPU runs a warp: always the lanes that are furthest
// behind in the code go on, together with those at the same place.
#pragma once
#include <unordered_map>
#include <vector>

#include "state.h"

namespace emu {

enum EventKind : uint8_t { kLoad, kStore, kAtomic, kBarrierPassed, kStep };

// Memory of one tensor. Offsets in it stand for addresses: a GPU allocates at multiples of 256 bytes, the emulator does
// not.
struct MemoryRange {
    uint64_t begin, end;
};

// What one place in the code asked of one memory. Mirrored by counter.py.
struct CountRow {
    uint32_t site;
    int32_t tensor;        // index of the range; -1: shared memory
    uint32_t kind;         // EventKind
    uint32_t size;         // largest access of one lane, in bytes
    uint64_t accesses;     // of a warp; for barriers: of a block
    uint64_t lanes;        // that took part, in all
    uint64_t bytes;        // asked for by lanes
    uint64_t used;         // different bytes among them, access by access; global memory only, as the next
    uint64_t sectors;      // of 32 bytes
    uint64_t wavefronts;   // turns that shared memory takes; shared memory only, as the next
    uint64_t ideal;        // the same without conflicts between banks
};

class Counter {
public:
    Counter(uint32_t samples, size_t most_events) : samples_(samples), most_events_(most_events), sites_(1) {}

    // Memory of a tensor; in rising order of addresses.
    void add_range(MemoryRange range) { ranges_.push_back(range); }
    // A part of the module's thread-local storage that is none of the kernel's variables.
    void add_hole(MemoryRange offsets) { holes_.push_back(offsets); }

    // Whether a block of a grid is one of those that are counted: all, or one of each of `samples` equal parts.
    bool chooses(uint64_t block, uint64_t blocks) const;
    void begin_block(Worker& worker);
    void end_block(Worker& worker);

    void enter(ThreadState& thread, uintptr_t call);
    void leave(ThreadState& thread);
    void step(ThreadState& thread, uintptr_t pc);
    void access(const Worker& worker, ThreadState& thread, uintptr_t address, unsigned size, EventKind kind, uintptr_t pc);
    void barrier(const Worker& worker, ThreadState& thread, uintptr_t pc);
    // All lanes of a warp that are still alive have come to the same point.
    void replay(unsigned warp);

    const std::vector<CountRow>& rows() const { return rows_; }
    // The code addresses of a site, innermost first: the access, then the calls that led to it.
    size_t chain(uint32_t site, uint64_t* out, size_t room) const;
    uint64_t blocks() const { return blocks_; }
    bool overflowed() const { return overflowed_; }

private:
    struct Event {
        uint64_t address;  // offset in its memory
        uint32_t site;
        int16_t tensor;
        uint8_t size;
        uint8_t kind : 3;  // EventKind
        uint8_t lane : 5;
    };
    static_assert(kStep < 8 && kWarpSize == 32, "they fit into their bits");
    // A place in the code, with the calls that led there: the parent is the call. 0 is the root.
    struct Site {
        uint32_t parent;
        uintptr_t pc;  // counted from where the kernel's module begins; 0: the runtime's own code
    };
    using Trace = std::vector<Event>;

    uint32_t site_of(uint32_t parent, uintptr_t pc);
    void add(const ThreadState& thread, uint32_t site, uint64_t address, int tensor, unsigned size, EventKind kind);
    void rank_sites();
    std::vector<uintptr_t> path(uint32_t site) const;
    CountRow& row_of(uint32_t site, int tensor, EventKind kind);
    void count(const Event* const* lanes, unsigned number);
    void count_global(CountRow& row, const Event* const* lanes, unsigned number);
    void count_shared(CountRow& row, const Event* const* lanes, unsigned number);

    uintptr_t module_base_ = 0, module_bytes_ = 0;
    std::vector<MemoryRange> ranges_;
    std::vector<MemoryRange> holes_;
    size_t last_range_ = 0;
    uint32_t samples_;
    size_t most_events_;
    std::vector<Site> sites_;
    std::vector<uint32_t> ranks_;  // of sites: their order in the code
    std::unordered_map<uint64_t, uint32_t> site_index_;
    std::vector<CountRow> rows_;
    std::unordered_map<uint64_t, uint32_t> row_index_;
    uint32_t calls_[kMaxThreads] = {};  // by thread: the site of the innermost call
    Trace traces_[kMaxThreads];
    size_t events_ = 0;  // in all traces
    uint64_t blocks_ = 0;
    bool overflowed_ = false;
};

}  // namespace emu
