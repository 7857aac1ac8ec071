"""Statistics of timing samples: pure functions on lists of milliseconds, and the rule that ends sampling.

Nothing here assumes a normal distribution: times of a kernel have a hard floor and a long tail, so
the median and order statistics describe them, the mean and the standard deviation do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median as _median
from statistics import quantiles as _quantiles

NO_SAMPLES = "no valid samples"

# Samples of one measurement. The median's interval narrows with their root: more settle nothing that matters.
MAX_SAMPLES = 1000

# Times jitter by about 1% between neighbouring launches; a fall of more than 2% is the machine still warming up.
_STILL_FALLING = 0.02


@dataclass(frozen=True)
class Interval:
    """A confidence interval of the median. `confidence` is what it really has, not what was asked for."""

    low: float
    high: float
    confidence: float


def valid_samples(samples: Sequence[float]) -> list[float]:
    """The samples that can be the time of work done: finite and above zero, in their order."""
    return [sample for sample in samples if math.isfinite(sample) and sample > 0.0]


def median(samples: Sequence[float]) -> float:
    """The median. Raises ValueError if no sample is valid."""
    return float(_median(_some(samples)))


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, interpolated linearly. Raises ValueError if no sample is valid."""
    valid = _some(samples)
    if len(valid) == 1:
        return valid[0], valid[0]
    first, _, third = _quantiles(valid, n=4, method="inclusive")
    return first, third


def coverage(count: int, rank: int) -> float:
    """How often the median lies between the `rank`-th smallest and `rank`-th largest of `count` samples.

    Each sample falls below the median like a fair coin, so this is a binomial sum, exact for every
    continuous distribution and every count.
    """
    outside = 2 * sum(math.comb(count, below) for below in range(rank))
    return 1.0 - outside / (1 << count)  # Python divides whole numbers of any length


def confidence_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """The narrowest symmetric pair of order statistics that covers the median with this confidence.

    Too few samples for that (five or fewer at 95%): the interval is (min, max), and its `confidence`
    says what that is worth; 0 for a single sample. Raises ValueError if no sample is valid.
    """
    ordered = sorted(_some(samples))
    count = len(ordered)
    rank, covered = _rank(count, confidence)
    return Interval(ordered[rank - 1], ordered[count - rank], covered)


@functools.cache  # asked again after every sample
def _rank(count: int, confidence: float) -> tuple[int, float]:
    """The highest rank whose interval has the confidence (1 if none has), and the confidence that it has."""
    rank = 1
    below = choose = 1  # outcomes of `count` coins with fewer than `rank` heads; with exactly rank - 1
    while True:
        choose = choose * (count - rank + 1) // rank
        if 1.0 - 2 * (below + choose) / (1 << count) < confidence:
            return rank, 1.0 - 2 * below / (1 << count)
        below += choose
        rank += 1


def relative_half_width(samples: Sequence[float], confidence: float = 0.95) -> float:
    """Half the width of the median's interval, as a part of the median; infinite if the samples are too few
    for this confidence."""
    valid = valid_samples(samples)
    if not valid:
        return math.inf
    interval = confidence_interval(valid, confidence)
    if interval.confidence < confidence:
        return math.inf
    return (interval.high - interval.low) / 2 / median(valid)


def settled(times: Sequence[float]) -> bool:
    """True once warm-up times have stopped falling: the newest is no longer clearly the shortest."""
    valid = valid_samples(times)
    return len(valid) >= 2 and valid[-1] >= (1.0 - _STILL_FALLING) * min(valid[:-1])


@dataclass(frozen=True)
class StopRule:
    """When to stop sampling.

    confidence, relative: the median is known well enough once half its interval is within `relative` of it.
    (Looking after every sample makes the interval slightly optimistic; the minimum keeps that small.)
    minimum, maximum: numbers of valid samples. budget_s: wall time in seconds, spent at most once the
    minimum is there. Raises ValueError for values that make no sense.
    """

    confidence: float = 0.95
    relative: float = 0.005
    minimum: int = 10
    maximum: int = 64
    budget_s: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= MAX_SAMPLES:
            raise ValueError(
                f"needs 1 <= minimum <= maximum <= {MAX_SAMPLES} samples, not {self.minimum} and {self.maximum}"
            )
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence must lie between 0 and 1, not {self.confidence}")
        if not (self.relative >= 0.0 and self.budget_s >= 0.0):
            raise ValueError(f"width and budget must not be negative: {self.relative}, {self.budget_s}")

    def done(self, samples: Sequence[float], elapsed: float) -> str:
        """Why to stop now, or "" to go on. `elapsed` is in seconds since the first sample began."""
        count = len(valid_samples(samples))
        if count >= self.maximum:
            return plural(self.maximum, "sample")
        if count < self.minimum:
            return ""
        if relative_half_width(samples, self.confidence) <= self.relative:
            return f"interval within {self.relative:.2%}"
        if elapsed >= self.budget_s:
            return f"{self.budget_s:g} s spent"
        return ""


def _some(samples: Sequence[float]) -> list[float]:
    valid = valid_samples(samples)
    if not valid:
        raise ValueError(NO_SAMPLES)
    return valid


def plural(count: int, noun: str) -> str:
    """ "1 sample", "3 samples"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
