from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the elements after the last packet are left out": Bug(
        "for (Offset i = first; i < count; ++i)", "for (Offset i = first; i + size < count; ++i)",
        version=2, block=128, sizes={"N": 1003},
    ),
    "infinity times 0 where inp is far below 0": Bug(
        "largest_exponent = 125.0f", "largest_exponent = 1e9f", version=2, block=64, sizes={"N": 4099}
    ),
    "the packet after the last whole one is stored whole": Bug(
        "if (first + size <= count) {", "if (first < count) {", version=2, block=64, sizes={"N": 1003}
    ),
    "the slope of x^3 is 2 x^2": Bug(
        "float(3.0 * kCubic) * x * x", "float(2.0 * kCubic) * x * x", version=1, block=128, sizes={"N": 64}
    ),
}  # fmt: skip
