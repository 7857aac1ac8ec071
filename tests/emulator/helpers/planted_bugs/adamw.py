from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "the parameters after the last four are left out": Bug(
        "for (Offset i = first; i < count; ++i)", "for (Offset i = first; i + 4 < count; ++i)",
        version=2, block=128, sizes={"N": 1031},
    ),
    "no weight decay": Bug("fmaf(decay, param, direction)", "direction", version=2, block=64, sizes={"N": 64}),
    "the moment is corrected twice": Bug(
        "const float m_hat = m[i] / correction1;", "const float m_hat = m[i] = m[i] / correction1;",
        version=1, block=256, sizes={"N": 300},
    ),
    "epsilon and all for v that is corrected by the factor of m": Bug(
        "v[i] / correction2;", "v[i] / correction1;", version=1, block=64, sizes={"N": 64}, dtype="bf16"
    ),
}  # fmt: skip
