"""Bugs that the check must find in matmul_backward."""

from planted_bugs.bug import Bug

_STRETCHES = {"B": 3, "T": 67, "C": 4, "OC": 37, "accumulate": 1}
_ALIGNED = {"B": 1, "T": 33, "C": 12, "OC": 132, "accumulate": 1}

BUGS = {
    "the gradient of the bias is overwritten where it is to be added to": Bug(
        "accumulate ? to_float(dbias[o]) : 0.0f", "0.0f * accumulate", 1, 256, _STRETCHES
    ),
    "the last row counts again in place of those past the end": Bug(
        "n + r * kWarps < end ? to_float(packets[r][i]) : 0.0f", "to_float(packets[r][i])", 1, 256, _ALIGNED
    ),
    "no barrier between the warps' sums and their total": Bug(
        "    __syncthreads();\n    if (warp_index() == 0 && o < OC) {", "    if (warp_index() == 0 && o < OC) {",
        1, 256, _STRETCHES,
    ),
    "channels of a packet are put back in the wrong order": Bug(
        "place % kWarpSize * kPacket + place / kWarpSize", "place", 1, 256, _ALIGNED
    ),
}  # fmt: skip
