"""Bugs for crossentropy_forward."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "every block computes the rows of the first": Bug(
        "Offset(blockIdx.x) * blockDim.x + threadIdx.x", "threadIdx.x", 1, 32, {"B": 3, "T": 11, "V": 5}
    ),
    "rows lie one element too close": Bug(
        "row * V + targets", "row * (V - 1) + targets", 1, 32, {"B": 2, "T": 9, "V": 7}
    ),
}
