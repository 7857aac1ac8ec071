// Cooperative groups: block, grid (without sync), warp-sized tiles and coalesced groups. CUDA 13's interface.
#pragma once
#include "cuda_emulator.h"

namespace cooperative_groups {

class thread_block {
public:
    static void sync(EMU_WHERE) { emu_barrier(emu::kBarrier, 0, EMU_HERE); }
    static unsigned int size() { return emu::threads_per_block(); }
    static unsigned int num_threads() { return size(); }
    static unsigned int thread_rank() { return emu::self->linear; }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

class grid_group {
public:
    // A grid-wide barrier needs all blocks alive at once; the emulator runs each block to its end.
    static bool is_valid() { return false; }
    [[noreturn]] static void sync(EMU_WHERE) {
        emu_stop("trap", "grid.sync() cannot be emulated (blocks run one after another); mark the version gpu_only",
                 EMU_HERE);
    }
    static unsigned long long num_blocks() {
        return static_cast<unsigned long long>(gridDim.x) * gridDim.y * gridDim.z;
    }
    static unsigned long long block_rank() {
        const dim3 grid = gridDim, index = blockIdx;
        return (static_cast<unsigned long long>(index.z) * grid.y + index.y) * grid.x + index.x;
    }
    static unsigned long long size() { return num_blocks() * emu::threads_per_block(); }
    static unsigned long long num_threads() { return size(); }
    static unsigned long long thread_rank() { return block_rank() * emu::threads_per_block() + emu::self->linear; }
    static dim3 dim_blocks() { return gridDim; }
    static dim3 group_dim() { return gridDim; }
    static dim3 block_index() { return blockIdx; }
};
inline grid_group this_grid() { return {}; }

namespace details {

// Bit i of the result is the i-th set bit of `lanes` as it stands in `bits`: lane numbers become ranks.
inline unsigned pack(unsigned bits, unsigned lanes) {
    unsigned packed = 0;
    for (int rank = 0; lanes != 0; lanes &= lanes - 1, ++rank) packed |= (bits >> __builtin_ctz(lanes) & 1) << rank;
    return packed;
}

// What tiles and coalesced groups share: votes and matches of the lanes in Group::mask(), told as ranks.
template <class Group> class warp_group {
    unsigned mask() const { return static_cast<const Group*>(this)->mask(); }

public:
    void sync(EMU_WHERE) const { emu_warp(emu::kSyncWarp, mask(), 0, 0, 32, EMU_HERE); }
    int any(int predicate, EMU_WHERE) const { return emu::vote(emu::kAny, mask(), predicate != 0, EMU_HERE) != 0; }
    int all(int predicate, EMU_WHERE) const { return emu::vote(emu::kAll, mask(), predicate != 0, EMU_HERE) != 0; }
    unsigned int ballot(int predicate, EMU_WHERE) const {
        return pack(emu::vote(emu::kBallot, mask(), predicate != 0, EMU_HERE), mask());
    }
    template <class T> unsigned int match_any(T value, EMU_WHERE) const {
        return pack(emu::match(emu::kMatchAny, mask(), value, EMU_HERE), mask());
    }
    template <class T> unsigned int match_all(T value, int& all, EMU_WHERE) const {
        const unsigned lanes = emu::match(emu::kMatchAll, mask(), value, EMU_HERE);
        all = lanes != 0;
        return pack(lanes, mask());
    }
};

// A tile of a warp: 1 to 32 neighbouring lanes.
template <class Tile, unsigned int Size> class tile : public warp_group<Tile> {
    static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0,
                  "a tile has 1, 2, 4, 8, 16 or 32 threads; wider ones are not emulated");

public:
    static unsigned int mask() { return (~0u >> (32 - Size)) << (emu::self->lane & ~(Size - 1)); }
    static constexpr unsigned int size() { return Size; }
    static constexpr unsigned int num_threads() { return Size; }
    static unsigned int thread_rank() { return emu::self->linear & (Size - 1); }

    template <class T> T shfl(T value, int rank, EMU_WHERE) const {
        return emu::shuffle(emu::kShuffle, mask(), value, rank, Size, EMU_HERE);
    }
    template <class T> T shfl_up(T value, unsigned int delta, EMU_WHERE) const {
        return emu::shuffle(emu::kShuffleUp, mask(), value, static_cast<int>(delta), Size, EMU_HERE);
    }
    template <class T> T shfl_down(T value, unsigned int delta, EMU_WHERE) const {
        return emu::shuffle(emu::kShuffleDown, mask(), value, static_cast<int>(delta), Size, EMU_HERE);
    }
    template <class T> T shfl_xor(T value, unsigned int ranks, EMU_WHERE) const {
        return emu::shuffle(emu::kShuffleXor, mask(), value, static_cast<int>(ranks), Size, EMU_HERE);
    }
};

// Inclusive, over ranks, by doubling distances: the order of CUDA's scans and of its reductions of part of a warp.
template <class Group, class T, class Op>
inline T doubling_scan(const Group& group, T value, Op& op, const char* file, int line) {
    const unsigned rank = group.thread_rank();
    for (unsigned distance = 1; distance < group.size(); distance *= 2) {
        const T earlier = group.shfl_up(value, distance, file, line);
        if (rank >= distance) value = op(value, earlier);
    }
    return value;
}

}  // namespace details

template <unsigned int Size, class Parent = void>
class thread_block_tile : public details::tile<thread_block_tile<Size, Parent>, Size> {
public:
    static unsigned int meta_group_rank() { return Parent::thread_rank() / Size; }
    static unsigned int meta_group_size() { return (Parent::size() + Size - 1) / Size; }
};
// A tile that has forgotten the type of its parent, but not its place in it.
template <unsigned int Size>
class thread_block_tile<Size, void> : public details::tile<thread_block_tile<Size, void>, Size> {
    unsigned meta_rank_ = 0, meta_size_ = 1;

public:
    thread_block_tile() = default;
    template <class Parent>
    thread_block_tile(const thread_block_tile<Size, Parent>& tile)
        : meta_rank_(tile.meta_group_rank()), meta_size_(tile.meta_group_size()) {}
    unsigned int meta_group_rank() const { return meta_rank_; }
    unsigned int meta_group_size() const { return meta_size_; }
};

template <unsigned int Size> inline thread_block_tile<Size, thread_block> tiled_partition(const thread_block&) {
    return {};
}
template <unsigned int Size, unsigned int ParentSize, class Grandparent>
inline thread_block_tile<Size, thread_block_tile<ParentSize, Grandparent>> tiled_partition(
    const thread_block_tile<ParentSize, Grandparent>&) {
    static_assert(Size < ParentSize, "a tile is smaller than the tile that it divides");
    return {};
}
inline thread_block_tile<1> this_thread() { return {}; }

// Some lanes of a warp. Which lanes are active together has no exact meaning outside a GPU: the runtime answers
// __activemask() with the lanes that it has not seen leave.
class coalesced_group : public details::warp_group<coalesced_group> {
    unsigned mask_, meta_rank_ = 0, meta_size_ = 1;

    unsigned lane_of(unsigned rank) const { return __fns(mask_, 0, static_cast<int>(rank) + 1); }

public:
    explicit coalesced_group(unsigned mask, unsigned meta_rank = 0, unsigned meta_size = 1)
        : mask_(mask), meta_rank_(meta_rank), meta_size_(meta_size) {}

    unsigned int mask() const { return mask_; }
    unsigned int size() const { return static_cast<unsigned>(__popc(mask_)); }
    unsigned int num_threads() const { return size(); }
    unsigned int thread_rank() const { return static_cast<unsigned>(__popc(mask_ & ((1u << emu::self->lane) - 1))); }
    unsigned int meta_group_rank() const { return meta_rank_; }
    unsigned int meta_group_size() const { return meta_size_; }

    template <class T> T shfl(T value, unsigned int rank, EMU_WHERE) const {
        return emu::shuffle(emu::kShuffle, mask_, value, static_cast<int>(lane_of(rank % size())), 32, EMU_HERE);
    }
    // Past either end a thread keeps its own value.
    template <class T> T shfl_up(T value, unsigned int delta, EMU_WHERE) const {
        const unsigned rank = thread_rank(), source = rank >= delta ? rank - delta : rank;
        return emu::shuffle(emu::kShuffle, mask_, value, static_cast<int>(lane_of(source)), 32, EMU_HERE);
    }
    template <class T> T shfl_down(T value, unsigned int delta, EMU_WHERE) const {
        const unsigned rank = thread_rank(), source = delta < size() - rank ? rank + delta : rank;
        return emu::shuffle(emu::kShuffle, mask_, value, static_cast<int>(lane_of(source)), 32, EMU_HERE);
    }
};
inline coalesced_group coalesced_threads(EMU_WHERE) { return coalesced_group(emu_active_mask(EMU_HERE)); }

// The threads of a group that agree with this one.
template <class Group> inline coalesced_group binary_partition(const Group& group, bool predicate, EMU_WHERE) {
    const unsigned yes = emu::vote(emu::kBallot, group.mask(), predicate, EMU_HERE);
    return coalesced_group(predicate ? yes : group.mask() & ~yes, predicate ? 0 : 1, 2);
}
template <class Group, class Label>
inline coalesced_group labeled_partition(const Group& group, Label label, EMU_WHERE) {
    const unsigned same = emu::match(emu::kMatchAny, group.mask(), label, EMU_HERE);
    // Groups are counted by their first lanes.
    const unsigned lead = same & (0u - same);
    const unsigned leaders = emu::vote(emu::kBallot, group.mask(), 1u << emu::self->lane == lead, EMU_HERE);
    const unsigned rank = static_cast<unsigned>(__popc(leaders & (lead - 1)));
    return coalesced_group(same, rank, static_cast<unsigned>(__popc(leaders)));
}

template <class Group> inline void sync(const Group& group, EMU_WHERE) { group.sync(EMU_HERE); }
template <class Group> inline auto thread_rank(const Group& group) { return group.thread_rank(); }
template <class Group> inline auto group_size(const Group& group) { return group.size(); }

template <class T> struct plus {
    T operator()(T a, T b) const { return a + b; }
};
template <class T> struct less {
    T operator()(T a, T b) const { return b < a ? b : a; }
};
template <class T> struct greater {
    T operator()(T a, T b) const { return a < b ? b : a; }
};
template <class T> struct bit_and {
    T operator()(T a, T b) const { return a & b; }
};
template <class T> struct bit_or {
    T operator()(T a, T b) const { return a | b; }
};
template <class T> struct bit_xor {
    T operator()(T a, T b) const { return a ^ b; }
};

}  // namespace cooperative_groups
