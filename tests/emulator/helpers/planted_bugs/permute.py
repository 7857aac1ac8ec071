from __future__ import annotations

from planted_bugs.bug import Bug


def sizes(D1: int, D2: int, D3: int, D4: int) -> dict[str, int]:
    return {"D1": D1, "D2": D2, "D3": D3, "D4": D4}


BUGS = {
    "a tile is read before all of it is there": Bug(
        "    __syncthreads();\n", "", version=1, block=256, sizes=sizes(8, 16, 16, 8)
    ),
    "rows of the output past the last are written": Bug(
        "at.row < columns && at.first < rows", "at.first < rows", version=1, block=128, sizes=sizes(5, 13, 8, 9)
    ),
    "only the last two dimensions are swapped": Bug(
        "Offset(k % d4) * d3 + k / d4", "k", version=1, block=128, sizes=sizes(3, 5, 7, 2)
    ),
}  # fmt: skip
