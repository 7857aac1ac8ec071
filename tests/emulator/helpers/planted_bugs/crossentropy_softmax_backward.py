"""Bugs for crossentropy_softmax_backward."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "a packet keeps the loss gradient of the row in which it begins": Bug(
        "target = targets[row], dloss = dlosses[row];", "target = targets[row];", 1, 32, {"B": 1, "T": 5, "V": 7}
    ),
    "the end of the last packet is not written": Bug(
        "if (start + j < count) dlogits", "if (start + j + 1 < count) dlogits", 1, 64, {"B": 1, "T": 3, "V": 9}
    ),
    "packets of a block all begin in its first row": Bug(
        "block_row + column / V", "block_row", 1, 64, {"B": 2, "T": 4, "V": 64}
    ),
}
