#include "counter.h"

#include <algorithm>

namespace emu {
namespace {

constexpr uint64_t kSector = 32;    // bytes: what L2 hands out
constexpr uint64_t kWord = 4;       // bytes of one bank of shared memory
constexpr unsigned kBanks = 32;
// Dynamic shared memory is another variable than the static ones, and must not look like their neighbour.
constexpr uint64_t kDynamicBase = uint64_t{1} << 20;

uint64_t first_of(uint64_t part, uint64_t parts, uint64_t blocks) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(part) * blocks + parts - 1) / parts);
}

// Sorts few values, which mostly are in order already; returns how many are different.
unsigned distinct(uint64_t* values, unsigned count) {
    if (!std::is_sorted(values, values + count)) std::sort(values, values + count);
    return static_cast<unsigned>(std::unique(values, values + count) - values);
}

// How many lanes shared memory serves at once: all of a warp for accesses of up to 4 bytes, half of them for 8 bytes, a
// quarter for 16; twice as many of the wide ones where each lane agrees with its neighbour, or each with the next but
// one, so that no more different words are asked for.
unsigned lanes_at_once(const uint64_t (&address)[kWarpSize], uint32_t active, unsigned size) {
    if (size <= kWord) return kWarpSize;
    const auto agree = [&](unsigned distance) {
        for (unsigned lane = 0; lane < kWarpSize; ++lane) {
            const unsigned other = lane ^ distance;
            if ((active >> lane & 1) && (active >> other & 1) && address[lane] != address[other]) return false;
        }
        return true;
    };
    const unsigned usual = size <= 2 * kWord ? kWarpSize / 2 : kWarpSize / 4;
    return agree(1) || agree(2) ? 2 * usual : usual;
}

}  // namespace

bool Counter::chooses(uint64_t block, uint64_t blocks) const {
    if (blocks <= samples_) return true;
    const uint64_t part = static_cast<uint64_t>(static_cast<unsigned __int128>(block) * samples_ / blocks);
    const uint64_t first = first_of(part, samples_, blocks), size = first_of(part + 1, samples_, blocks) - first;
    // The first and the last block of the grid, which may be special; between them a place that differs from part to
    // part, so that a period of the grid does not show the same column of it each time.
    const uint64_t place = part == 0 ? 0 : part + 1 == samples_ ? size - 1 : part * 0x9e3779b97f4a7c15u % size;
    return block == first + place;
}

void Counter::begin_block(Worker& worker) {
    std::fill(calls_, calls_ + worker.thread_count, 0);
    for (unsigned i = 0; i < worker.thread_count; ++i) traces_[i].clear();
    const Module& module = *worker.launch->request.module;
    module_base_ = module.base;
    module_bytes_ = module.high - module.base;
    events_ = 0;
    ++blocks_;
}

void Counter::end_block(Worker& worker) {
    for (unsigned warp = 0; warp < worker.warp_count; ++warp) replay(warp);
}

// ------------------------------------------------------------------------------------------------ traces

uint32_t Counter::site_of(uint32_t parent, uintptr_t pc) {
    const uintptr_t place = pc - module_base_ < module_bytes_ ? pc - module_base_ : 0;
    const uint64_t key = uint64_t{parent} << 32 | static_cast<uint32_t>(place);  // no module has 4 GiB of code
    const auto [found, is_new] = site_index_.try_emplace(key, static_cast<uint32_t>(sites_.size()));
    if (is_new) sites_.push_back({parent, place});
    return found->second;
}

void Counter::enter(ThreadState& thread, uintptr_t call) {
    uint32_t& site = calls_[thread.linear];
    site = site_of(site, call);
}

void Counter::leave(ThreadState& thread) {
    uint32_t& site = calls_[thread.linear];
    site = sites_[site].parent;
}

void Counter::add(const ThreadState& thread, uint32_t site, uint64_t address, int tensor, unsigned size, EventKind kind) {
    if (__builtin_expect(events_ >= most_events_, 0)) {
        overflowed_ = true;
        return;
    }
    ++events_;
    Event event = {address, site, static_cast<int16_t>(tensor), static_cast<uint8_t>(size), kind, 0};
    event.lane = thread.lane & 31;
    traces_[thread.linear].push_back(event);
}

void Counter::step(ThreadState& thread, uintptr_t pc) {
    add(thread, site_of(calls_[thread.linear], pc), 0, 0, 0, kStep);
}

void Counter::access(const Worker& worker, ThreadState& thread, uintptr_t address, unsigned size, EventKind kind, uintptr_t pc) {
    const uint64_t at_static = address - reinterpret_cast<uintptr_t>(worker.shared_memory);
    const uint64_t at_dynamic = address - reinterpret_cast<uintptr_t>(worker.block.dynamic_shared);
    uint64_t offset;
    int tensor = -1;
    if (worker.shared_memory && at_static < worker.launch->request.module->tls_bytes) {
        for (const MemoryRange& hole : holes_)
            if (at_static >= hole.begin && at_static < hole.end) return;
        offset = at_static;
    } else if (at_dynamic < worker.block.dynamic_shared_bytes) {
        offset = kDynamicBase + at_dynamic;
    } else {
        if (ranges_.empty()) return;
        const auto holds = [&](size_t i) { return address >= ranges_[i].begin && address < ranges_[i].end; };
        if (!holds(last_range_)) {
            const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                                [](uint64_t at, const MemoryRange& range) { return at < range.begin; });
            if (after == ranges_.begin()) return;  // a thread's own stack, or the runtime's own variables
            const size_t index = static_cast<size_t>(after - ranges_.begin()) - 1;
            if (!holds(index)) return;
            last_range_ = index;
        }
        tensor = static_cast<int>(last_range_);
        offset = address - ranges_[last_range_].begin;
    }
    add(thread, site_of(calls_[thread.linear], pc), offset, tensor, size, kind);
}

void Counter::barrier(const Worker& worker, ThreadState& thread, uintptr_t pc) {
    if (!worker.barrier.waiting) {
        CountRow& row = row_of(site_of(calls_[thread.linear], pc), -1, kBarrierPassed);
        ++row.accesses;
        row.lanes += worker.alive;
    }
    const Warp& warp = worker.warps[thread.warp];
    if ((warp.at_barrier | 1u << thread.lane) == warp.alive) replay(thread.warp);
}

// ------------------------------------------------------------------------------------------------ replay

std::vector<uintptr_t> Counter::path(uint32_t site) const {
    std::vector<uintptr_t> pcs;
    for (; site; site = sites_[site].parent) pcs.push_back(sites_[site].pc);
    std::reverse(pcs.begin(), pcs.end());
    return pcs;
}

// Sites in the order of the code: a function's body stands where it is called.
void Counter::rank_sites() {
    std::vector<std::vector<uintptr_t>> paths(sites_.size());
    std::vector<uint32_t> order(sites_.size());
    for (uint32_t i = 0; i < sites_.size(); ++i) paths[i] = path(i), order[i] = i;
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return paths[a] < paths[b]; });
    ranks_.resize(sites_.size());
    for (uint32_t i = 0; i < order.size(); ++i) ranks_[order[i]] = i;
}

void Counter::replay(unsigned warp) {
    if (ranks_.size() != sites_.size()) rank_sites();
    Trace* const traces = traces_ + warp * kWarpSize;
    size_t next[kWarpSize] = {};
    uint32_t live = 0;
    for (unsigned lane = 0; lane < kWarpSize; ++lane)
        if (!traces[lane].empty()) live |= 1u << lane;
    while (live) {
        const Event* together[kWarpSize];
        uint32_t best = UINT32_MAX, lanes = 0;
        unsigned number = 0;
        for (uint32_t rest = live; rest; rest &= rest - 1) {
            const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
            const Event& event = traces[lane][next[lane]];
            const uint32_t rank = ranks_[event.site];
            if (rank > best) continue;
            if (rank < best) best = rank, number = 0, lanes = 0;
            together[number++] = &event;
            lanes |= 1u << lane;
        }
        if (together[0]->kind != kStep) count(together, number);
        for (; lanes; lanes &= lanes - 1) {
            const unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
            if (++next[lane] == traces[lane].size()) live &= ~(1u << lane);
        }
    }
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        events_ -= traces[lane].size();
        traces[lane].clear();
    }
}

CountRow& Counter::row_of(uint32_t site, int tensor, EventKind kind) {
    const uint64_t key = uint64_t{site} << 24 | static_cast<uint64_t>(tensor + 1) << 4 | kind;
    const auto [found, is_new] = row_index_.try_emplace(key, static_cast<uint32_t>(rows_.size()));
    if (is_new) rows_.push_back({site, tensor, kind, 0, 0, 0, 0, 0, 0, 0, 0});
    return rows_[found->second];
}

// One access of a warp. Through a pointer that may point anywhere, some lanes may be in one memory and some in another:
// each memory is asked on its own.
void Counter::count(const Event* const* lanes, unsigned number) {
    uint32_t left = number == 32 ? ~0u : (1u << number) - 1;
    while (left) {
        const Event* same[kWarpSize];
        unsigned found = 0;
        const int tensor = lanes[__builtin_ctz(left)]->tensor;
        for (uint32_t rest = left; rest; rest &= rest - 1) {
            const unsigned i = static_cast<unsigned>(__builtin_ctz(rest));
            if (lanes[i]->tensor != tensor) continue;
            same[found++] = lanes[i];
            left &= ~(1u << i);
        }
        CountRow& row = row_of(same[0]->site, tensor, static_cast<EventKind>(same[0]->kind));
        ++row.accesses;
        row.lanes += found;
        for (unsigned i = 0; i < found; ++i) {
            row.bytes += same[i]->size;
            row.size = std::max<uint32_t>(row.size, same[i]->size);
        }
        if (tensor >= 0) count_global(row, same, found);
        else count_shared(row, same, found);
    }
}

void Counter::count_global(CountRow& row, const Event* const* lanes, unsigned number) {
    uint64_t sectors[2 * kWarpSize];  // no access is longer than 16 bytes, so none meets a third sector
    unsigned count = 0;
    const Event* sorted[kWarpSize];
    std::copy(lanes, lanes + number, sorted);
    const auto before = [](const Event* a, const Event* b) { return a->address < b->address; };
    if (!std::is_sorted(sorted, sorted + number, before)) std::sort(sorted, sorted + number, before);
    uint64_t end = 0;
    for (unsigned i = 0; i < number; ++i) {
        const uint64_t first = sorted[i]->address, last = first + sorted[i]->size - 1;
        sectors[count++] = first / kSector;
        if (last / kSector != first / kSector) sectors[count++] = last / kSector;
        row.used += last < end ? 0 : last + 1 - std::max(first, end);
        end = std::max(end, last + 1);
    }
    row.sectors += distinct(sectors, count);
}

void Counter::count_shared(CountRow& row, const Event* const* lanes, unsigned number) {
    uint64_t address[kWarpSize];
    uint32_t active = 0;
    unsigned size = 0;
    for (unsigned i = 0; i < number; ++i) {
        const unsigned lane = lanes[i]->lane;
        address[lane] = lanes[i]->address;
        active |= 1u << lane;
        size = std::max<unsigned>(size, lanes[i]->size);
    }
    const unsigned group = lanes_at_once(address, active, size);
    for (unsigned first = 0; first < kWarpSize; first += group) {
        uint64_t words[kWarpSize * 4];
        unsigned count = 0;
        for (unsigned lane = first; lane < first + group; ++lane) {
            if (!(active >> lane & 1)) continue;
            for (uint64_t word = address[lane] / kWord; word <= (address[lane] + size - 1) / kWord; ++word) words[count++] = word;
        }
        if (!count) continue;
        count = distinct(words, count);
        unsigned in_bank[kBanks] = {}, most = 0;
        for (unsigned i = 0; i < count; ++i) most = std::max(most, ++in_bank[words[i] % kBanks]);
        row.wavefronts += most;
        row.ideal += 1;
    }
}

size_t Counter::chain(uint32_t site, uint64_t* out, size_t room) const {
    size_t count = 0;
    for (; site && count < room; site = sites_[site].parent) out[count++] = sites_[site].pc;
    return count;
}

}  // namespace emu

// ------------------------------------------------------------------------------------------------ for Python

// samples: the most blocks of a launch that are counted. most_events: kept at a time.
EMU_API emu::Counter* emu_counter_new(uint32_t samples, size_t most_events) { return new emu::Counter(samples, most_events); }
EMU_API void emu_counter_range(emu::Counter* counter, uint64_t begin, uint64_t end) { counter->add_range({begin, end}); }
EMU_API void emu_counter_hole(emu::Counter* counter, uint64_t begin, uint64_t end) { counter->add_hole({begin, end}); }
EMU_API void emu_counter_delete(emu::Counter* counter) { delete counter; }
EMU_API size_t emu_counter_rows(const emu::Counter* counter, const emu::CountRow** rows) {
    *rows = counter->rows().data();
    return counter->rows().size();
}
EMU_API size_t emu_counter_chain(const emu::Counter* counter, uint32_t site, uint64_t* out, size_t room) {
    return counter->chain(site, out, room);
}
EMU_API uint64_t emu_counter_blocks(const emu::Counter* counter) { return counter->blocks(); }
EMU_API int emu_counter_overflowed(const emu::Counter* counter) { return counter->overflowed(); }
