"""Bugs in LayerNorm kernels: one row too many, sums that are not complete, a variance that cancels."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the guard lets one row too many through": Bug(
        "if (row >= rows) return;\n", "if (row > rows) return;\n", 1, 32, {"B": 1, "T": 5, "C": 33}
    ),
    "a step of the tree does not wait for the one before": Bug(
        "        __syncthreads();  // the sums of the step before are there\n", "", 2, 128, {"B": 1, "T": 2, "C": 257}
    ),
    "a single pass without its shift": Bug(
        "shift(to_float(row[0]))", "shift(0.0f)", 5, 64, {"B": 1, "T": 4, "C": 768}
    ),
    "weight and bias are read before they are there": Bug(
        "    __syncthreads();  // weight and bias are there\n", "", 6, 128, {"B": 1, "T": 9, "C": 768}
    ),
    "zeros past the end of a row count as deviations": Bug(
        "Aligned || i * kPacket + j < C ? deviation * deviation : 0.0f", "deviation * deviation", 6, 64,
        {"B": 1, "T": 3, "C": 129},
    ),
}  # fmt: skip
