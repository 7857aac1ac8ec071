from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the tree of sums is for powers of two": Bug(
        "const int half = (count + 1) / 2;", "const int half = count / 2;",
        version=1, block=96 * 8, sizes={"B": 31, "T": 103, "OC": 3, "accumulate": 0},
    ),
    "atomics in shared memory begin before it is clear": Bug(
        "of_block[i] = 0.0f;\n    __syncthreads();", "of_block[i] = 0.0f;",
        version=7, block=256, sizes={"B": 1, "T": 97, "OC": 136, "accumulate": 1},
    ),
    "the rows of a last, partial round are left out": Bug(
        "int left = (rows - 1 - first) / step + 1;", "int left = (rows - first) / step;",
        version=9, block=64, sizes={"B": 1, "T": 33, "OC": 8, "accumulate": 0},
    ),
    "the last row is added once per load of it": Bug(
        "Whole || i < count ? value : 0.0f", "value",
        version=8, block=32, sizes={"B": 1, "T": 7, "OC": 5, "accumulate": 1},
    ),
    "lanes are joined as if each warp read whole lines": Bug(
        "for (int distance = Across;", "for (int distance = 8;",
        version=10, block=256, sizes={"B": 1, "T": 97, "OC": 136, "accumulate": 1},
    ),
}  # fmt: skip
