from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the parameters after the last four are left out": Bug(
        "for (Offset i = first; i < count; ++i)", "for (Offset i = first; i + 4 < count; ++i)",
        version=2, block=128, sizes={"N": 1031, "training": 0},
    ),
    "no weight decay": Bug(
        "fmaf(decay, param, direction)", "direction", version=2, block=64, sizes={"N": 64, "training": 0}
    ),
    "the moment is corrected twice": Bug(
        "const float m_hat = m[i] / correction1;", "const float m_hat = m[i] = m[i] / correction1;",
        version=1, block=256, sizes={"N": 300, "training": 0},
    ),
    "epsilon and all for v that is corrected by the factor of m": Bug(
        "v[i] / correction2;", "v[i] / correction1;", version=1, block=64, sizes={"N": 64, "training": 0}, dtype="bf16"
    ),
    "gradients are not scaled": Bug(
        "scale * grad.values[i]", "grad.values[i]", version=3, block=64, sizes={"N": 64, "training": 1}
    ),
    "all parameters have the decay of the first group": Bug(
        "decays[first / kGroup]", "decays[0]", version=3, block=128, sizes={"N": 1031, "training": 1}, dtype="bf16"
    ),
    "rounded to the neighbour of a neighbour": Bug(
        "(random >> 16)", "(random >> 15)", version=3, block=128, sizes={"N": 1031, "training": 1}, dtype="bf16"
    ),
    "the master is not written back": Bug(
        "store_four_streaming<Whole>(master + first, count, weights);", "",
        version=3, block=128, sizes={"N": 300, "training": 1}, dtype="bf16",
    ),
    "less than four parameters are left out": Bug(
        "} else if (first < count) {", "} else if (first > count) {",
        version=3, block=32, sizes={"N": 1031, "training": 1},
    ),
}  # fmt: skip
