"""Bugs that the check must find in trimat_forward."""

from planted_bugs.bug import Bug

_ALIGNED = {"B": 1, "T": 132, "C": 16, "NH": 2}
_ODD = {"B": 2, "T": 7, "C": 15, "NH": 3}

BUGS = {
    "the scale is left out where a thread has four columns": Bug(
        "from_float<Element>(scale * sums[i]);", "from_float<Element>(sums[i]);", 4, 256, _ALIGNED
    ),
    "tiles are counted as if both triangles had some": Bug(
        "per_head = tiles * (tiles + 1) / 2;", "per_head = tiles * tiles;", 4, 256, _ALIGNED
    ),
    "the diagonal is taken for above the diagonal": Bug(
        "if (row >= T || col > row) return;", "if (row >= T || col >= row) return;", 3, 256, _ODD
    ),
    "rows past the end are stored": Bug(
        "if (row >= T || col > row) continue;", "if (col > row) continue;", 2, 256, _ODD
    ),
}
