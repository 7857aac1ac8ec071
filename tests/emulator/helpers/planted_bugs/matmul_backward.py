"""Bugs that the check must find in matmul_backward."""

from planted_bugs.bug import Bug

_STRETCHES = {"B": 3, "T": 67, "C": 4, "OC": 37, "accumulate": 1, "gelu": 0, "bias": 1}
_ALIGNED = {"B": 1, "T": 33, "C": 12, "OC": 132, "accumulate": 1, "gelu": 0, "bias": 1}
_GELU = {"B": 1, "T": 301, "C": 7, "OC": 5, "accumulate": 1, "gelu": 1, "bias": 1}

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
    "what is left of the last packet does not go back through GELU": Bug(
        "for (Offset i = first; i < count; ++i)", "for (Offset i = first; i < count - 7; ++i)", 1, 256, _GELU
    ),
    "packets past the last element are written": Bug(
        "first + kPacket <= count", "first <= count", 1, 256, _GELU
    ),
    "GELU's derivative lacks the slope of its cubic term": Bug(
        "(kSlope * (1.0f + 3.0f * kCubic * square))", "kSlope", 1, 256, _GELU
    ),
}  # fmt: skip
