"""May the reference computed on a GPU stand in for numpy's? Only once both have given the same answer."""

from __future__ import annotations

import numpy as np

from kbench.check.arrays import parts, to_host
from kbench.check.bound import final_bound
from kbench.check.case import Case
from kbench.family import Array

# Two float64 evaluations differ by the order of their sums, some 1e-9 of an fp32 bound: a thousandth of the bound
# is far more than that, and far less than could change a verdict.
_SHARE = 1e-3


def disagreement(trusted: Case, other: Case) -> str:
    """Where two judges' answers to the same case differ; "" if they agree to a thousandth of every bound.

    trusted: made with numpy. other: made with another array module from the same problem and seed.
    """
    for name, expected in trusted.expected.items():
        mine, theirs = expected.value.reshape(-1), to_host(other.expected[name].value).reshape(-1)
        tensor, bound = trusted.tensors[name], _flat(expected.bound)
        for part in parts(mine.size, np):
            limit = final_bound(tensor, mine[part], bound if isinstance(bound, float) else bound[part], np, None)
            apart = np.flatnonzero(~(np.abs(mine[part] - theirs[part]) <= _SHARE * limit))
            if apart.size:
                at = part.start + int(apart[0])
                place = [int(i) for i in np.unravel_index(at, tensor.shape)]
                return f"{name} at {place}: {trusted.judge} says {mine[at]:.10g}, {other.judge} says {theirs[at]:.10g}"
    return ""


def _flat(bound: Array | float) -> Array | float:
    return bound.reshape(-1) if isinstance(bound, np.ndarray) and bound.ndim else float(bound)
