from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the elements after the last packet are left out": Bug(
        "if (rest < count) {", "if (rest < whole) {", version=3, block=128, sizes={"N": 1031}
    ),
    "a warp reads sums that others have not written yet": Bug(
        "of_warp[warp_index()] = sum;\n    __syncthreads();", "of_warp[warp_index()] = sum;",
        version=1, block=256, sizes={"N": 4613},
    ),
    "one packet per thread after the last whole batch": Bug(
        "for (; at < whole; at += step) add_squares(", "if (at < whole) add_squares(",
        version=4, block=64, sizes={"N": 100003},
    ),
    "the first block to end adds up what others have not written yet": Bug(
        "atomicAdd(counter, 1u) == gridDim.x - 1", "atomicAdd(counter, 1u) == 0",
        version=5, block=64, sizes={"N": 4613},
    ),
    "only one batch of partial sums per thread": Bug(
        "first < gridDim.x; first += kBatch * blockDim.x", "first < gridDim.x; first += gridDim.x",
        version=5, block=32, sizes={"N": 60000},
    ),
}  # fmt: skip
