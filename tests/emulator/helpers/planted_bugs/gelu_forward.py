from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the elements after the last packet are left out": Bug(
        "for (int j = place; j < left; ++j)", "for (int j = place; j + kSize < left; ++j)",
        version=2, block=128, sizes={"N": 1003},
    ),
    "the second packet of a thread is the neighbour's first": Bug(
        "const int step = blockDim.x * kSize;", "const int step = kSize;", version=2, block=64, sizes={"N": 60_001}
    ),
    "the exponential of u instead of 2 u": Bug(
        "cubic = float(-2.0 * kScale", "cubic = float(-1.0 * kScale", version=2, block=128, sizes={"N": 64}
    ),
    "one thread too many": Bug(
        "if (i >= count) return;", "if (i > count) return;", version=1, block=64, sizes={"N": 70}
    ),
}  # fmt: skip
