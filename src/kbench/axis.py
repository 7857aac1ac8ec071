"""Axes of pictures: from numbers to pixels, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

TICKS = 6  # about as many on each axis


class Axis:
    """Numbers from low to high on a line from pixel `start` to pixel `end`, with ticks at round numbers."""

    def __init__(self, low: float, high: float, start: float, end: float, spacing: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end
        first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
        self.ticks = [count * spacing for count in range(first, last + 1)]
        self.decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, whole: bool = False) -> Axis:
        """An axis that holds all the values. whole: ticks at whole numbers only, and the ends where the values end."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high - low < 1e-9 * max(abs(low), abs(high), 1e-30):  # one value, or so close that no tick tells them apart
            pad = 0.5 if whole else max(0.05 * abs(low), 1e-3)
            low, high = low - pad, high + pad
        spacing = round_spacing((high - low) / TICKS)
        if whole:
            return cls(low, high, start, end, max(spacing, 1.0))
        return cls(math.floor(low / spacing) * spacing, math.ceil(high / spacing) * spacing, start, end, spacing)

    def pixel(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_spacing(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


class LogAxis:
    """Positive numbers on a line from pixel `start` to pixel `end`, equal ratios being equally far apart."""

    def __init__(self, low: float, high: float, start: float, end: float, ticks: Sequence[float]) -> None:
        self.low, self.high, self.start, self.end, self.ticks = low, high, start, end, list(ticks)

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, pad: float = 1.1) -> LogAxis:
        """An axis that holds all the values, and `pad` times as much on both sides."""
        low, high = (min(values) / pad, max(values) * pad) if values else (1.0, 10.0)
        return cls(low, high, start, end, round_numbers(low, high))

    def pixel(self, value: float) -> float:
        return self.start + math.log(value / self.low) / math.log(self.high / self.low) * (self.end - self.start)


def round_numbers(low: float, high: float) -> list[float]:
    """Three round numbers or more between two positive ones: powers of ten, else 1, 2 and 5 times these, else evenly
    spaced ones."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 2.0, 5.0)):
        found = [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]
        if len(found) >= 3:
            return found
    return Axis(low, high, 0, 1, round_spacing((high - low) / TICKS)).ticks
