from __future__ import annotations

from planted_bugs.bug import Bug


def sizes(B: int, T: int, C: int, V: int, accumulate: int = 1) -> dict[str, int]:
    return {"B": B, "T": T, "C": C, "V": V, "accumulate": accumulate}


BUGS = {
    "additions that are not atomic": Bug(
        "atomicAdd(sums + i, to_float(part.values[i]));", "sums[i] = to_float(part.values[i]);",
        version=1, block=64, sizes=sizes(3, 5, 7, 2),
    ),
    "what stood in dwpe is added though it is to be replaced": Bug(
        "load_start(of_place, dwpe, accumulate)", "load_start(of_place, dwpe, true)",
        version=1, block=64, sizes=sizes(2, 3, 8, 4, accumulate=0),
    ),
    "the last batch row is added twice where rows are an odd number": Bug(
        "if (first + i < B) {", "{", version=1, block=128, sizes=sizes(5, 7, 8, 2)
    ),
    "sums are rounded after every position": Bug(
        "rows[position] = last[inp[position]];", "rows[position] = int(position);",
        version=2, block=32, sizes=sizes(4, 9, 8, 3), dtype="bf16",
    ),
    "positions of a run that goes on after its piece are lost": Bug(
        "    if (goes_on) store_part(", "    if (goes_on && !began_before) store_part(",
        version=3, block=64, sizes=sizes(3, 31, 4, 1),
    ),
    "a piece takes a run that began before it for a run of its own": Bug(
        "bool began_before = begin > 0 && tokens[begin - 1] == tokens[begin];", "bool began_before = false;",
        version=3, block=64, sizes=sizes(3, 31, 4, 5),
    ),
    "positions with the same digit change their order, which the pass before gave them": Bug(
        "__popc(same & ((1u << lane_index()) - 1));", "__popc(same & ~((2u << lane_index()) - 1));",
        version=3, block=64, sizes=sizes(1, 500, 3, 300),
    ),
    "parts are read before all warps have stored theirs": Bug(
        "lane_index() * N, sums);\n    __syncthreads();", "lane_index() * N, sums);",
        version=3, block=64, sizes=sizes(3, 63, 4, 1),
    ),
}  # fmt: skip
