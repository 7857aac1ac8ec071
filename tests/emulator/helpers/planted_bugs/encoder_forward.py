from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the place is that of the position in the batch": Bug(
        "wpe += position % T * C;", "wpe += position / T * C;",
        version=1, block=64, sizes={"B": 3, "T": 5, "C": 7, "V": 11},
    ),
    "a row of the batch past the last is written": Bug(
        "if (i < rows) *reinterpret_cast", "*reinterpret_cast",
        version=3, block=64, sizes={"B": 5, "T": 49, "C": 43, "V": 90},
    ),
    "all rows of a thread get the token of the first": Bug(
        "inp[(b + min(i, rows - 1)) * T + t]", "inp[b * T + t]",
        version=3, block=256, sizes={"B": 7, "T": 51, "C": 264, "V": 90},
    ),
    "the elements after the last whole block are left out": Bug(
        "if (i >= Offset(positions) * C) return;", "if (i + threadIdx.x >= Offset(positions) * C) return;",
        version=2, block=128, sizes={"B": 2, "T": 37, "C": 24, "V": 50},
    ),
}  # fmt: skip
