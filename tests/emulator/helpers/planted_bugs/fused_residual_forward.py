"""Bugs in the fused residual and LayerNorm: sums that were not rounded, lanes without a packet, a missing barrier."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "statistics of the sum before it was rounded": Bug(
        "        const T element = sum(inp1[i], inp2[i]);\n        residual[i] = element;\n"
        "        total += to_float(element);\n    }\n    const float m = warp_sum",
        "        residual[i] = sum(inp1[i], inp2[i]);\n"
        "        total += to_float(inp1[i]) + to_float(inp2[i]);\n    }\n    const float m = warp_sum",
        3, 64, {"B": 1, "T": 4, "C": 768},
    ),
    "lanes beyond the last packet walk backwards, too": Bug(
        "const int last = ceil_div(packets - lane_index(), kWarpSize) - 1;",
        "const int last = (packets - lane_index()) / kWarpSize;",
        4, 32, {"B": 1, "T": 3, "C": 24},
    ),
    "a team's sum does not wait for its warps": Bug(
        "    __syncthreads();\n    const int first = warp_index() / warps * warps;",
        "    const int first = warp_index() / warps * warps;",
        6, 128, {"B": 1, "T": 3, "C": 1288},
    ),
    "persistent blocks stop after one round": Bug(
        "for (; row - team < end; row += step) {", "for (; row - team < end; row += end) {",
        6, 1024, {"B": 1, "T": 230, "C": 24},
    ),
}  # fmt: skip
