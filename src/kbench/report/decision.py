"""The answer about one row of a report, and the limits it is judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kbench.errors import UsageError

MIN_ROUNDS = 3  # two say nothing of how rounds differ that one disturbed round would not overturn
MIN_SAMPLES = 30
THRESHOLD = 0.03
# The resolution that CUDA's documentation gives for events: a smaller difference is not seen, whatever its percentage.
FLOOR_MS = 0.0005


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"
    BETTER = "better"  # an exact metric
    WORSE = "worse"
    NEW = "new"
    GONE = "gone"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Rule:
    """The limits of a row. Raises UsageError for values that make no sense.

    threshold: the change that matters, as a part of the better value: 0.03 is 3%. floor: the same in the metric's unit;
    a row has to exceed both. None: half a microsecond for times, 0 for other metrics. A mode that divides a sample by
    the runs in it may divide the floor too.
    min_rounds, min_samples: what each side needs for any verdict.
    """

    threshold: float = THRESHOLD
    floor: float | None = None
    min_rounds: int = MIN_ROUNDS
    min_samples: int = MIN_SAMPLES

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.threshold), ("floor", self.floor or 0.0)):
            if not (math.isfinite(value) and value >= 0.0):
                raise UsageError(f"a report's {name} must be 0 or more, not {value}")
        if self.min_rounds < 1 or self.min_samples < 1:
            raise UsageError(
                f"a report needs at least 1 round and 1 sample a side, not {self.min_rounds} and {self.min_samples}"
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """One row. Values are in the metric's unit; None where unknown.

    before, after: estimates of both sides. ratio: after over before; low, high: its interval, at the confidence that
    all intervals of the report hold together. reason: one line. limit: what the ratio's logarithm had to exceed.
    rounds, samples: of the sides. needed_rounds: further rounds, of as many samples as there are in one, that each side
    needs to settle an unclear row; needed_samples: further samples that each side needs in the rounds it has (to reach
    the least number of samples they may be in new rounds). None: that alone will not settle it.
    suspicious: a gain too large to believe before somebody looked.
    """

    verdict: Verdict
    reason: str
    before: float | None = None
    after: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    rounds: tuple[int, int] = (0, 0)
    samples: tuple[int, int] = (0, 0)
    needed_rounds: int | None = None
    needed_samples: int | None = None
    suspicious: bool = False

    @property
    def regression(self) -> bool:
        return self.verdict in (Verdict.SLOWER, Verdict.WORSE)

    @property
    def improvement(self) -> bool:
        return self.verdict in (Verdict.FASTER, Verdict.BETTER)
