"""One side of a row of a report: its raw samples, and what makes samples unusable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

# A number as JSON or a timer gives it. Not bool, which is an int, and not str, which numpy would read as a number.
NUMBERS = frozenset({float, int, np.float64, np.float32, np.int64, np.int32})
Samples = list[float] | tuple[float, ...] | np.ndarray
LISTS = (list, tuple, np.ndarray)


@dataclass(frozen=True, slots=True)
class Side:
    """Raw samples of one version at one problem, in the metric's unit (milliseconds for times).

    rounds: samples of one round were taken one after another, in the same surroundings (clocks, temperature, placement
    in memory); rounds lie apart in time, so that surroundings differ. A round without samples does not count.
    """

    rounds: Sequence[Samples]

    @property
    def samples(self) -> int:
        return sum(map(len, self.rounds))


def fault_of(side: Side) -> str:
    """Why nothing can be computed from these samples, naming the first bad one; "" if something can."""
    if not isinstance(side.rounds, LISTS):
        return f"samples are not a list of rounds, but {_shown(side.rounds)}"
    for number, samples in enumerate(side.rounds, 1):
        if not isinstance(samples, LISTS):
            return f"round {number} is not a list of samples, but {_shown(samples)}"
        for place, sample in enumerate(samples, 1):
            if fault := _fault_of_sample(sample):
                return f"sample {place} of round {number} is {fault}"
    return "" if any(len(samples) for samples in side.rounds) else "no samples"


def _fault_of_sample(sample: object) -> str:
    if type(sample) not in NUMBERS:
        return f"not a number: {_shown(sample)}"
    assert isinstance(sample, int | float | np.number)
    try:
        value = float(sample)
    except OverflowError:
        return "too large for a number"
    if not math.isfinite(value):
        return f"not finite: {value}"
    if value <= 0.0:
        return f"not above zero: {value:g}"
    return ""


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def flat(rounds: Iterable[Samples]) -> np.ndarray | None:
    """All samples in one array, None if some may be unusable: quick, for sides by the hundred thousand."""
    try:
        rounds = list(rounds)
        if rounds and all(isinstance(samples, np.ndarray) and samples.dtype == np.float64 for samples in rounds):
            values = np.concatenate(rounds)
        else:
            if not all(isinstance(samples, LISTS) for samples in rounds):
                return None
            if not set(map(type, chain.from_iterable(rounds))) <= NUMBERS:
                return None
            values = np.fromiter(chain.from_iterable(rounds), np.float64, sum(map(len, rounds)))
    except (TypeError, ValueError, OverflowError):
        return None
    return values if bool(np.all(np.isfinite(values) & (values > 0.0))) else None
