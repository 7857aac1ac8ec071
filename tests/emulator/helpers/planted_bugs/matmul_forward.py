"""Bugs that the check must find in matmul_forward."""

from planted_bugs.bug import Bug

_ODD = {"B": 1, "T": 33, "C": 13, "OC": 35, "gelu": 1, "bias": 1}
_TILES = {"B": 1, "T": 130, "C": 8, "OC": 132, "gelu": 0, "bias": 1}
_BARE = {"B": 1, "T": 7, "C": 8, "OC": 16, "gelu": 1, "bias": 0}

BUGS = {
    "no guard against rows past the end": Bug("if (n >= N || o >= OC) return;", "if (o >= OC) return;", 1, 64, _ODD),
    "GELU's cubic term is left out": Bug("(x + 0.044715f * x * x * x)", "x", 4, 256, _ODD),
    "GELU's cubic factor is cut": Bug("0.044715f", "0.0445f", 1, 256, _ODD),
    "the bias of the tile's first channels is added everywhere": Bug(
        "load_row_quad<Aligned>(bias, first_o + tile_col(j), OC)",
        "load_row_quad<Aligned>(bias, tile_col(j), OC)",
        4,
        256,
        _TILES,
    ),
    "tiles past the first have no rows of inp of their own": Bug(
        "inp + Offset(first_n) * C, C,", "inp + Offset(first_n) * 0, C,", 4, 256, _TILES
    ),
    "what stands in the place of a missing bias is added": Bug(
        "with_bias ? to_float(bias[o]) : 0.0f", "0.0f * with_bias + to_float(bias[o])", 1, 64, _BARE
    ),
    "the bias kernel adds a bias that is not there": Bug(
        "if (with_bias) added =", "if (with_bias + 1) added =", 2, 64, _BARE
    ),
    "the bias kernel overwrites the product": Bug(
        "const float sum = to_float(values[i]) + to_float(added[i]);",
        "const float sum = to_float(added[i]);",
        2,
        64,
        _ODD,
    ),
}
