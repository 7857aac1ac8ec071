"""Bugs of attention_backward's version 9 that the check must find; test_attention_backward.py has those of 1 to 8."""

from planted_bugs.bug import Bug

ODD = {"B": 1, "T": 37, "C": 8, "NH": 2}
SEQUENCES = {"B": 3, "T": 72, "C": 8, "NH": 2}
LONG = {"B": 1, "T": 1032, "C": 2, "NH": 1}

BUGS = {
    "what the GEMM left above the diagonal stays": Bug(
        "store_tile<Aligned>(dpreatt, Tile<Element>{}, p * kWidth, count, T);", "", 9, 64, SEQUENCES, "bf16"
    ),
    # Right in version 8, whose datt is memory of its own, and whose dpreatt is written again behind a barrier.
    "zeros written where datt has still to be read": Bug(
        "for (int p = diagonal + 1 + thread;", "for (int p = diagonal + thread;", 9, 64, ODD
    ),
    "a sum of one warp only": Bug(
        "block_sum<BlockSize>(sums);", "for (float& s : sums) s = warp_sum(s);", 9, 256, LONG
    ),
    "scale left out": Bug("const float factor = scale * to_float(", "const float factor = to_float(", 9, 32, ODD),
    "a tile kept for the second pass taken for the next one": Bug(
        "if (!kKept || p > thread) {", "if (!kKept) {", 9, 32, LONG
    ),
}
