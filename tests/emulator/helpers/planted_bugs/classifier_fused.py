"""Bugs for classifier_fused."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "in place, the target's logit may be overwritten before it is read": Bug(
        "if (thread == 0) *loss = loss_of(all, logit_of_target);",
        "if (thread == 0) *loss = loss_of(all, to_float(source[target]));",
        4, 32, {"B": 2, "T": 5, "V": 120, "P": 128},
    ),
    "padding is taken for logits": Bug(
        "if (g * Count + i < V) mine.add", "if (g * Count + i < P) mine.add", 2, 32, {"B": 1, "T": 3, "V": 33, "P": 40}
    ),
    "padding is not cleared": Bug(
        "if (stores) zero_padding<!Backwards>(result, V, P);", "", 5, 64, {"B": 1, "T": 2, "V": 61, "P": 64}
    ),
    "the target is an element like any other": Bug(
        "if (0 <= target && target < Packet<T>::size) packet", "if (false) packet",
        5, 64, {"B": 2, "T": 3, "V": 120, "P": 120},
    ),
    "the last row first, but with the first one's target": Bug(
        "int target = targets[place_of(blockIdx.x)];", "int target = targets[blockIdx.x];",
        6, 64, {"B": 1, "T": 5, "V": 61, "P": 64},
    ),
    "going backwards, the loss of one row becomes that of another": Bug(
        "losses[place] = loss_of", "losses[row] = loss_of", 6, 64, {"B": 1, "T": 5, "V": 61, "P": 64}
    ),
}  # fmt: skip
