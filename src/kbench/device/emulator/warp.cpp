// Warp operations: shuffles, votes, matches, reductions. The lanes that a mask names meet here; the last of them to
// come computes the results of all and goes on, the others become ready.
#include <cstring>

#include "counter.h"
#include "scheduler.h"

namespace emu {
namespace {

constexpr const char* kNames[] = {
    "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
    "__ballot_sync", "__any_sync", "__all_sync", "__syncwarp", "__match_any_sync", "__match_all_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
    "a warp-wide matrix operation",
};
static_assert(sizeof kNames / sizeof *kNames == kWarpCall + 1, "one name for each operation of abi.h");

// Calls body(lane) for each bit of lanes, lowest first.
template <class Body>
inline void for_each_lane(uint32_t lanes, Body body) {
    for (; lanes; lanes &= lanes - 1) body(static_cast<unsigned>(__builtin_ctz(lanes)));
}

// The lane that a shuffle reads. As in PTX: the offset counts modulo 32, and a lane whose source would lie outside
// its segment of `width` lanes reads itself (for xor, only if it lies beyond the segment's end).
inline unsigned shuffle_source(int op, unsigned lane, int argument, int width) {
    const int own = static_cast<int>(lane);
    const int first = own & ~(width - 1), last = first + width - 1;
    int source;
    switch (op) {
        case kShuffle: return static_cast<unsigned>(first | (argument & (width - 1)));
        case kShuffleUp: source = own - (argument & 31); break;
        case kShuffleDown: source = own + (argument & 31); break;
        default: source = own ^ (argument & 31); break;
    }
    const bool inside = op == kShuffleUp ? source >= first : source <= last;
    return static_cast<unsigned>(inside ? source : own);
}

void shuffle(Worker& worker, Warp& warp, const WarpGroup& group, uint32_t lanes) {
    for_each_lane(lanes, [&](unsigned lane) {
        const unsigned source = shuffle_source(group.op, lane, warp.argument[lane], warp.width[lane]);
        if (__builtin_expect(!(lanes & bit(source)), 0))
            stop_at(worker, worker.threads[warp.first + lane], "inactive-lane", group.file, group.line,
                    "%s with mask 0x%08x: lane %u reads lane %u, which %s", kNames[group.op], group.mask, lane, source,
                    group.mask & bit(source) ? "has exited or does not exist" : "is not in the mask");
        warp.result[lane] = warp.value[source];
    });
}

uint32_t voters(const Warp& warp, uint32_t lanes) {
    uint32_t votes = 0;
    for_each_lane(lanes, [&](unsigned lane) { votes |= warp.value[lane] ? bit(lane) : 0; });
    return votes;
}

uint32_t lanes_with_value(const Warp& warp, uint32_t lanes, uint64_t value) {
    uint32_t equal = 0;
    for_each_lane(lanes, [&](unsigned lane) { equal |= warp.value[lane] == value ? bit(lane) : 0; });
    return equal;
}

uint32_t combine(int op, uint32_t a, uint32_t b) {
    const int32_t signed_a = static_cast<int32_t>(a), signed_b = static_cast<int32_t>(b);
    switch (op) {
        case kReduceAdd: return a + b;
        case kReduceMinSigned: return signed_a < signed_b ? a : b;
        case kReduceMaxSigned: return signed_a > signed_b ? a : b;
        case kReduceMin: return a < b ? a : b;
        case kReduceMax: return a > b ? a : b;
        case kReduceAnd: return a & b;
        case kReduceOr: return a | b;
        default: return a ^ b;
    }
}

uint32_t reduce(const Warp& warp, int op, uint32_t lanes) {
    uint32_t total = static_cast<uint32_t>(warp.value[__builtin_ctz(lanes)]);
    for_each_lane(lanes & (lanes - 1),
                  [&](unsigned lane) { total = combine(op, total, static_cast<uint32_t>(warp.value[lane])); });
    return total;
}

void call_for_warp(const Warp& warp, const WarpGroup& group, uint32_t lanes) {
    void* pointers[kWarpSize] = {};
    for_each_lane(lanes, [&](unsigned lane) { pointers[lane] = reinterpret_cast<void*>(warp.value[lane]); });
    group.function(pointers, lanes);
}

void give_all(Warp& warp, uint32_t lanes, uint64_t result) {
    for_each_lane(lanes, [&](unsigned lane) { warp.result[lane] = result; });
}

void compute(Worker& worker, Warp& warp, const WarpGroup& group, uint32_t lanes) {
    switch (group.op) {
        case kShuffle: case kShuffleUp: case kShuffleDown: case kShuffleXor:
            shuffle(worker, warp, group, lanes);
            break;
        case kSyncWarp: break;
        case kBallot: give_all(warp, lanes, voters(warp, lanes)); break;
        case kAny: give_all(warp, lanes, voters(warp, lanes) != 0); break;
        case kAll: give_all(warp, lanes, voters(warp, lanes) == lanes); break;
        case kMatchAny:
            for_each_lane(lanes, [&](unsigned lane) {
                warp.result[lane] = lanes_with_value(warp, lanes, warp.value[lane]);
            });
            break;
        case kMatchAll: {
            const uint32_t equal = lanes_with_value(warp, lanes, warp.value[__builtin_ctz(lanes)]);
            give_all(warp, lanes, equal == lanes ? lanes : 0);
            break;
        }
        case kWarpCall: call_for_warp(warp, group, lanes); break;
        default: give_all(warp, lanes, reduce(warp, group.op, lanes)); break;
    }
}

// All lanes of the group are there. Makes them ready; the caller takes itself out again. Frees the group's slot.
void complete(Worker& worker, Warp& warp, WarpGroup& group) {
    const uint32_t lanes = group.arrived;
    compute(worker, warp, group, lanes);
    group = warp.groups[--warp.groups_used];
    make_ready(worker, warp.first / kWarpSize, lanes);
}

WarpGroup& join_group(Worker& worker, Warp& warp, ThreadState& thread, int op, unsigned mask,
                      emu_warp_function function, const char* file, int line) {
    for (unsigned i = 0; i < warp.groups_used; ++i) {
        WarpGroup& group = warp.groups[i];
        if (group.mask != mask) continue;
        // The same operation from another line is legal: CUDA asks for the same intrinsic, not the same place.
        if (__builtin_expect(group.op != op || group.function != function, 0))
            stop_at(worker, thread, "warp-divergence", file, line,
                    "%s with mask 0x%08x, but other lanes of that mask wait in %s at %s:%d", kNames[op], mask,
                    kNames[group.op], base_name(group.file), group.line);
        return group;
    }
    WarpGroup& group = warp.groups[warp.groups_used++];
    group = {mask, 0, op, line, file, function};
    return group;
}

uint64_t meet(int op, unsigned mask, uint64_t value, int argument, int width, emu_warp_function function,
              const char* file, int line) {
    Worker& worker = *current_worker;
    ThreadState& thread = current_thread();
    Warp& warp = worker.warps[thread.warp];
    const unsigned lane = thread.lane;
    if (__builtin_expect(!(mask & bit(lane)), 0))
        stop_at(worker, thread, "inactive-lane", file, line, "lane %u calls %s with mask 0x%08x, which does not name it",
                lane, kNames[op], mask);
    if (__builtin_expect(op <= kShuffleXor && (width < 1 || width > 32 || (width & (width - 1))), 0))
        stop_at(worker, thread, "trap", file, line, "%s with width %d, which is not a power of two up to 32", kNames[op],
                width);
    WarpGroup& group = join_group(worker, warp, thread, op, mask, function, file, line);
    warp.value[lane] = value;
    warp.argument[lane] = argument;
    warp.width[lane] = width;
    group.arrived |= bit(lane);
    if (group.arrived == (mask & warp.alive)) {
        if (__builtin_expect(worker.counter && group.arrived == warp.alive, 0)) worker.counter->replay(thread.warp);
        complete(worker, warp, group);
        take(worker, thread);
        return warp.result[lane];
    }
    thread.operation = kNames[op];
    thread.mask = mask;
    thread.file = file;
    thread.line = line;
    suspend(worker, thread);
    return warp.result[lane];
}

}  // namespace

// Lanes may have been waiting only for the one that has just returned.
void complete_groups_after_exit(Worker& worker, Warp& warp) {
    for (unsigned i = 0; i < warp.groups_used;) {
        WarpGroup& group = warp.groups[i];
        if (group.arrived == (group.mask & warp.alive))
            complete(worker, warp, group);  // another group moves into slot i
        else
            ++i;
    }
}

// __activemask asks which lanes run together, which a scheduler of single threads does not know. So a lane that asks
// waits until no other lane of its warp can run; those that then wait at one place are the answer: the lanes that a
// GPU would have brought together at most.
void resolve_active_masks(Worker& worker, Warp& warp) {
    uint32_t asking = warp.converging;
    warp.converging = 0;
    make_ready(worker, warp.first / kWarpSize, asking);
    while (asking) {
        const ThreadState& first = worker.threads[warp.first + static_cast<unsigned>(__builtin_ctz(asking))];
        uint32_t together = 0;
        for_each_lane(asking, [&](unsigned lane) {
            const ThreadState& other = worker.threads[warp.first + lane];
            if (other.line == first.line && !std::strcmp(other.file, first.file)) together |= bit(lane);
        });
        give_all(warp, together, together);
        asking &= ~together;
    }
}

}  // namespace emu

uint64_t emu_warp(int op, unsigned mask, uint64_t value, int argument, int width, const char* file, int line) {
    return emu::meet(op, mask, value, argument, width, nullptr, file, line);
}

void emu_warp_call(emu_warp_function function, void* argument, unsigned mask, const char* file, int line) {
    emu::meet(emu::kWarpCall, mask, reinterpret_cast<uint64_t>(argument), 0, 32, function, file, line);
}

unsigned emu_active_mask(const char* file, int line) {
    using namespace emu;
    Worker& worker = *current_worker;
    ThreadState& thread = current_thread();
    Warp& warp = worker.warps[thread.warp];
    warp.converging |= bit(thread.lane);
    thread.operation = "__activemask";
    thread.file = file;
    thread.line = line;
    suspend(worker, thread);
    return static_cast<unsigned>(warp.result[thread.lane]);
}
