"""Bugs that the check must find in layernorm_backward."""

from planted_bugs.bug import Bug

_ROWS = {"B": 1, "T": 211, "C": 3, "accumulate": 1}  # not a multiple of the warps of a block
_TAIL = {"B": 1, "T": 6, "C": 264, "accumulate": 0}  # a chunk of 256 channels, and a packet
_MANY = {"B": 1, "T": 400, "C": 8, "accumulate": 0}

BUGS = {
    "the last chunk of a row is left out": Bug(
        "return ceil_div(C, size) * size; }", "return max(C / size, 1) * size; }", 8, 64, _TAIL
    ),
    "shared memory is not cleared": Bug(
        "        clear(dynamic_shared(), count);\n        return dynamic_shared();",
        "        return dynamic_shared();",
        3,
        256,
        _ROWS,
    ),
    "warps without a row leave the loop with barriers": Bug(
        "for (Offset first = Offset(blockIdx.x) * warps; first < N; first +=",
        "for (Offset first = Offset(blockIdx.x) * warps; first + warp_index() < N; first +=",
        9,
        128,
        _ROWS,
    ),
    "warp 0 reads before all warps have handed over": Bug(
        "                __syncthreads();\n                if (warp_index() == 0) {",
        "                if (warp_index() == 0) {",
        9,
        128,
        _TAIL,
    ),
    "the first group of rows is not added to the second": Bug("if (g > 0) {", "if (g > 1) {", 10, 384, _MANY),
    "every area but the first is left out": Bug(
        "area = warp_index(); area < count; area += kSlices", "area = warp_index(); area < 1; area += kSlices",
        10, 64, _MANY,
    ),
}  # fmt: skip
