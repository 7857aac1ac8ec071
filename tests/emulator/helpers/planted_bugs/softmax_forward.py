"""Bugs for softmax_forward."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "no barrier between reading the largest and writing sums": Bug(
        "__syncthreads();  // an earlier result has been read by everybody", "", 2, 64, {"N": 3, "C": 97}
    ),
    "the sum is not rescaled when a larger element comes": Bug(
        "sum.scale(expf(largest - value));", "", 5, 32, {"N": 9, "C": 40}
    ),
    "lanes without an element begin at -infinity": Bug(
        "    SoftmaxSum all;\n", "    SoftmaxSum all;\n    all.largest = -infinity();\n", 6, 32, {"N": 2, "C": 5}
    ),
    "a packet is read that has not arrived": Bug(
        "const int4& arrived = ring.arrived();", "const int4& arrived = ring.leaving();", 7, 64, {"N": 5, "C": 700}
    ),
    "the last row of each block is never stored": Bug(
        "row < Offset(N) + gridDim.x;", "row < N;", 7, 256, {"N": 5, "C": 300}
    ),
    "elements before the first packet and after the last are forgotten": Bug(
        "if (thread < last.edges) target", "if (thread < 0) target", 7, 64, {"N": 3, "C": 129}
    ),
}
