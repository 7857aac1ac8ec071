// reduce, in the GPU's order: rounding errors of a float reduction are the same as there.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

template <unsigned int Size, class Parent, class T, class Op>
inline T reduce(const thread_block_tile<Size, Parent>& tile, T value, Op&& op, EMU_WHERE) {
    for (unsigned distance = Size / 2; distance > 0; distance /= 2)
        value = op(value, tile.shfl_xor(value, distance, EMU_HERE));
    return value;
}

// A full warp is reduced like a tile; other groups are scanned, and the last thread has the result.
template <class T, class Op> inline T reduce(const coalesced_group& group, T value, Op&& op, EMU_WHERE) {
    if (group.size() == 32) return reduce(thread_block_tile<32>(), value, op, EMU_HERE);
    return group.shfl(details::doubling_scan(group, value, op, EMU_HERE), group.size() - 1, EMU_HERE);
}

}  // namespace cooperative_groups
