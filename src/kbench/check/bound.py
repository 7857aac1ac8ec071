"""How far an output may be from its reference: the family's bound, and rounding to the output's own type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.errors import UsageError
from kbench.family import UNIT_ROUNDOFF, Array, Tensor

INTEGERS = ("int32", "uint32", "uint8")

# Exponent of the smallest normal number of each type: below it, the distance between neighbours stays the same.
_SMALLEST_EXPONENT = {"fp32": -126, "bf16": -126, "fp16": -14, "fp64": -1022}

# Sign and significand removed, a float64 is the power of two at or below its magnitude.
_EXPONENT_BITS = np.int64(0x7FF0_0000_0000_0000)


@dataclass(frozen=True)
class Tolerance:
    """What --rtol and --atol put in place of the bound: atol + rtol * |reference|, rounding included."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--rtol", self.rtol), ("--atol", self.atol)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} {value} must be a finite number, 0 or more")


def is_exact(tensor: Tensor) -> bool:
    """True where only the very same bits are right: copies and integers."""
    return tensor.exact or tensor.dtype in INTEGERS


# Results below the smallest normal number may be flushed to zero: by GEMM libraries, and on a GPU by the comparison
# itself, whose kernels CuPy compiles that way. Twice that number, since what lies just above it may be computed to lie
# just below. A zero that must be exact (reference and bound 0) stays exact.
_FLUSHED = {"fp32": 2.0**-125, "bf16": 2.0**-125}


def half_ulp(magnitude: Array, dtype: str, xp: Any) -> Array:
    """Half the distance between neighbours of a floating-point type at each magnitude.

    `magnitude`: a contiguous float64 array of numbers >= 0. Subnormal numbers have the spacing of the
    smallest normal one.
    """
    powers = (magnitude.view(xp.int64) & _EXPONENT_BITS).view(xp.float64)
    return xp.maximum(powers, 2.0 ** _SMALLEST_EXPONENT[dtype]) * UNIT_ROUNDOFF[dtype]


def final_bound(
    tensor: Tensor, value: Array, bound: Array | float, xp: Any, tolerance: Tolerance | None
) -> Array | float:
    """The largest error per element that passes.

    `value`: contiguous float64 reference; `bound`: the family's, of the same shape or a number. An exact
    tensor has the bound 0 whatever the tolerance: a tolerance is about rounding, and there is none.
    """
    if is_exact(tensor):
        return 0.0
    magnitude = xp.abs(value)
    if tolerance is not None:
        return tolerance.atol + tolerance.rtol * magnitude
    # The result may be as large as |value| + bound before it is rounded, and its neighbours that far apart.
    reach = magnitude + bound
    return bound + half_ulp(reach, tensor.dtype, xp) + _FLUSHED.get(tensor.dtype, 0.0) * (reach > 0)
