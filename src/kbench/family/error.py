"""What a reference answers: expected values, and how far a right version may be from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kbench.family.problem import STORAGE, UNIT_ROUNDOFF, Array


@dataclass(frozen=True)
class ErrorModel:
    """Unit roundoffs, for a reference that computes its own error bound.

    storage: of the type that tensors are stored in; gemm: of the type to which a GEMM step rounds its
    operands (0 where it does not round what is stored already); fp32: of the accumulation.
    structured: the inputs are constant or patterned, so rounding errors may all have one sign.
    """

    dtype: str
    structured: bool = False

    @property
    def storage(self) -> float:
        return UNIT_ROUNDOFF[STORAGE[self.dtype]]

    @property
    def gemm(self) -> float:
        return UNIT_ROUNDOFF["tf32"] if self.dtype == "tf32" else 0.0

    @property
    def fp32(self) -> float:
        return UNIT_ROUNDOFF["fp32"]

    def accumulation(self, terms: int) -> float:
        """Relative error, per unit of sum|term|, of adding `terms` products in fp32 in any order.

        The worst case grows with n; errors of random sign grow with sqrt(n), and 4 sqrt(n) is passed
        by one sum in about 16,000 (Higham and Mary, "A New Approach to Probabilistic Rounding Error
        Analysis", 2019, theorem 2.4, lambda = 4).
        """
        terms = max(terms, 1)
        return self.fp32 * (terms if self.structured else min(terms, 4.0 * math.sqrt(terms)))


@dataclass
class Expected:
    """What an output must be: `value` in float64, and `bound`, the largest absolute error that a right
    version may have per element (an array of the same shape, or a scalar). Rounding the result to the
    output's own type is added by the check and is not part of `bound`."""

    value: Array
    bound: Array | float = 0.0


def rounded(values: Array, storage: str, xp: Any) -> Array:
    """float64 numbers rounded to fp32, bf16 or fp16, to the nearest, ties to even, as float64 again: for a reference
    whose operation rounds on the way. By way of fp32: for a sum of two numbers of the type that changes nothing
    (Figueroa, "When is double rounding innocuous?", 1995)."""
    single = values.astype(xp.float32)
    if storage == "fp16":
        single = single.astype(xp.float16)
    if storage == "bf16":
        # bf16 is the upper half of fp32: add half of its last place, or a little less where a tie goes down, and cut.
        bits = single.view(xp.uint32)
        bits += ((bits >> xp.uint32(16)) & xp.uint32(1)) + xp.uint32(0x7FFF)
        bits &= xp.uint32(0xFFFF0000)
    return single.astype(xp.float64)
