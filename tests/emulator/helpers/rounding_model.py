"""Rounding done slowly and exactly, with fractions: what the emulator's arithmetic is compared with."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

NEAREST, ZERO, UP, DOWN = "rn", "rz", "ru", "rd"


@dataclass(frozen=True)
class Format:
    """A 16-bit format. magnitudes[i] is the value of the bits i, up to the one where infinity stands, whose place
    is taken by the next value that the exponent would allow."""

    name: str
    dtype: Any
    infinity: int
    magnitudes: tuple[float, ...]

    def widen(self, bits: Any) -> Any:
        return np.asarray(bits, np.uint16).view(self.dtype).astype(np.float32)

    def round(self, value: Fraction, mode: str = NEAREST, negative_zero: bool = False) -> int:
        """The bits of `value` rounded."""
        negative = value < 0 or (value == 0 and negative_zero)
        size = abs(value)
        low = min(bisect.bisect_right(self.magnitudes, size) - 1, self.infinity)
        bits = low if low == self.infinity or size == self.magnitudes[low] else self._choose(size, low, mode, negative)
        if low == self.infinity and mode in (ZERO, DOWN if not negative else UP):
            bits = self.infinity - 1
        return bits | (0x8000 if negative else 0)

    def _choose(self, size: Fraction, low: int, mode: str, negative: bool) -> int:
        if mode == NEAREST:
            middle = (Fraction(self.magnitudes[low]) + Fraction(self.magnitudes[low + 1])) / 2
            return low + (size > middle or (size == middle and low % 2 == 1))
        away = mode == (DOWN if negative else UP)
        return low + away


def _format(name: str, dtype: Any, infinity: int) -> Format:
    values = np.arange(infinity, dtype=np.uint16).view(dtype).astype(np.float64)
    beyond = 2 * values[-1] - values[-2]
    return Format(name, dtype, infinity, (*map(float, values), float(beyond)))


HALF = _format("Half", np.float16, 0x7C00)
BFLOAT = _format("Bfloat", ml_dtypes.bfloat16, 0x7F80)
FORMATS = (HALF, BFLOAT)


def round_float(value: Fraction, mode: str) -> np.float32:
    """`value` (not 0, within float's range) as a float rounded in one of four directions."""
    low = _float_at_most(value)
    if Fraction(float(low)) == value:
        return low
    high = np.nextafter(low, np.float32(np.inf))
    if mode == NEAREST:
        middle = (Fraction(float(low)) + Fraction(float(high))) / 2
        even = low if int(low.view(np.uint32)) % 2 == 0 else high
        return even if value == middle else (low if value < middle else high)
    if mode == ZERO:
        return low if value > 0 else high
    return high if mode == UP else low


def root_float(value: Fraction, mode: str) -> np.float32:
    """The square root of a positive `value` as a float: an integer root with 100 bits more than needed, and a bit
    for what is left over."""
    scaled = value * Fraction(4) ** 200
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(whole) ** 2 == scaled
    return round_float((Fraction(whole) + (0 if exact else Fraction(1, 3))) / Fraction(2) ** 200, mode)


def _float_at_most(value: Fraction) -> np.float32:
    with np.errstate(all="ignore"):
        guess = np.float32(float(value))
        while Fraction(float(guess)) > value:
            guess = np.nextafter(guess, np.float32(-np.inf))
        while Fraction(float(np.nextafter(guess, np.float32(np.inf)))) <= value:
            guess = np.nextafter(guess, np.float32(np.inf))
    return guess
