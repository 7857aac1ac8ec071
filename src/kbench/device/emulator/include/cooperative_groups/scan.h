// inclusive_scan and exclusive_scan, adding in the order in which CUDA's do: by doubling distances.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

template <class Group, class T, class Op>
inline T inclusive_scan(const Group& group, T value, Op&& op, EMU_WHERE) {
    return details::doubling_scan(group, value, op, EMU_HERE);
}
template <class Group, class T> inline T inclusive_scan(const Group& group, T value, EMU_WHERE) {
    return inclusive_scan(group, value, plus<T>(), EMU_HERE);
}

// The first thread gets T{}, whatever the operation.
template <class Group, class T, class Op>
inline T exclusive_scan(const Group& group, T value, Op&& op, EMU_WHERE) {
    const T scanned = inclusive_scan(group, value, op, EMU_HERE);
    const T earlier = group.shfl_up(scanned, 1, EMU_HERE);
    return group.thread_rank() == 0 ? T{} : earlier;
}
template <class Group, class T> inline T exclusive_scan(const Group& group, T value, EMU_WHERE) {
    return exclusive_scan(group, value, plus<T>(), EMU_HERE);
}

}  // namespace cooperative_groups
