"""Bugs for crossentropy_softmax_backward."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "a packet keeps the loss gradient of the row in which it begins": Bug(
        "target = targets[row], dloss = dlosses[row];", "target = targets[row];", 1, 32, {"B": 1, "T": 5, "V": 7}
    ),
    "the end of the last packet is not written": Bug(
        "if (i * step + j < left) to[", "if (i * step + j + 1 < left) to[", 1, 64, {"B": 1, "T": 3, "V": 9}
    ),
    "packets of a block all begin in its first row": Bug(
        "row += column / V, column %= V", "column %= V", 1, 64, {"B": 2, "T": 4, "V": 64}
    ),
    "what is left of the tensor is counted from the start of the block": Bug(
        "Offset(kBatch * step))) - first;", "Offset(kBatch * step)));", 1, 32, {"B": 1, "T": 4, "V": 257}
    ),
}
