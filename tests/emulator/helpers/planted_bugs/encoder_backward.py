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
}  # fmt: skip
