"""Change points of a series: which of its runs begin a new level, which begin to creep, and which stand alone.

The model. Let y[i] be the logarithm of run i's median. The series is cut into segments; within one, y is constant, or,
where a segment has RAMP or more runs, may lie on a line over the run's number (a creep). Deviations from that are
normal with the standard deviation

    s[i] = c * max(e[i], FLOOR)

where e[i] is the standard error of the median within run i, FLOOR what runs differ by at least beyond that, and c >= 1
one factor for the series: the median absolute deviation, about their median, of the differences
(y[i+1] - y[i]) / sqrt(u[i]^2 + u[i+1]^2), u = max(e, FLOOR), times 1.4826, which makes it a standard deviation where
they are normal. A step is one difference of many and does not move it, nor does a creep, which moves all alike and so
their median. Where few differences are known, c is multiplied by t(k) / z, Student's quantile over the normal one at
99.5%, for k degrees of freedom: three quarters of their number, and at least two. Three runs know little of their own
noise.

The cut is the one that minimises

    sum over segments of sum (y[i] - fit[i])^2 / s[i]^2   +   PENALTY * log(n) * (segments - 1 + lines)

found exactly, by dynamic programming over the end of the last segment (Auger and Lawrence, Bull. Math. Biol. 51,
1989), in n^2 steps. A change costs a level and a place; the information criterion of Zhang and Siegmund (Biometrics
63, 2007) charges about 3 log(n) / 2 of log likelihood for the two, which is 3 log(n) here, where the sum is twice the
negative log likelihood. A line costs as much.

A segment of one run is no level: the run after it has not confirmed it. Such runs are set aside, named as unconfirmed,
and the others are cut again, until none is left but, perhaps, the last run of all, and the first, which is a level
because the series begins with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from kbench.report.quantiles import t_quantile

# Runs of one and the same code on one quiet card lie half a percent to two percent apart.
FLOOR = 0.01
PENALTY = 3.0
# A line through three runs follows nearly whatever they do.
RAMP = 4
# Of intervals, and of the quantile that few differences are charged with.
CONFIDENCE = 0.99
_NORMAL = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_MAD = 1.4826
# Degrees of freedom that a difference is worth: neighbours share a run, and a median heeds the middle ones only.
EFFICIENCY = 0.75


@dataclass(frozen=True)
class Segment:
    """Runs of one level or one line, by their positions. start, end: the fit at its first and its last run, a
    logarithm; their standard errors."""

    runs: tuple[int, ...]
    start: float
    end: float
    start_error: float
    end_error: float
    ramp: bool = False


@dataclass(frozen=True)
class Change:
    """at: the position of the first run that has it; since: of a creep, the run that it is counted from.

    kind: "step", "creep" or "unconfirmed". ratio: new over old, low..high its interval with CONFIDENCE.
    """

    kind: str
    at: int
    ratio: float
    low: float
    high: float
    since: int | None = None


def scatter(logs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]]) -> float:
    """The factor c of a series, whose stretches are given: runs of different stretches are not compared."""
    found: list[float] = []
    for y, e in zip(logs, errors, strict=True):
        u = np.maximum(np.asarray(e, float), FLOOR)
        found.extend((np.diff(np.asarray(y, float)) / np.sqrt(u[1:] ** 2 + u[:-1] ** 2)).tolist())
    if not found:
        return 1.0
    differences = np.asarray(found)
    spread = _MAD * float(np.median(np.abs(differences - np.median(differences))))
    return max(1.0, spread) * t_quantile((1 - CONFIDENCE) / 2, max(EFFICIENCY * len(found), 2.0)) / _NORMAL


def segments_of(y: Sequence[float], errors: Sequence[float], c: float) -> tuple[list[Segment], list[int]]:
    """The segments of a stretch, and the positions of the runs that were set aside, in their order."""
    places, aside = list(range(len(y))), list[int]()
    while True:
        found = _cut([y[i] for i in places], [errors[i] for i in places], c, places)
        alone = [segment.runs[0] for segment in found[1:-1] if len(segment.runs) == 1]
        if not alone:
            return found, sorted(aside)
        aside += alone
        places = [place for place in places if place not in alone]


def changes_of(y: Sequence[float], errors: Sequence[float], c: float, least: float) -> list[Change]:
    """The changes of a stretch that are at least `least` (0.03: three percent either way), oldest first."""
    if not y:
        return []
    found, aside = segments_of(y, errors, c)
    changes = []
    for segment, following in zip(found, [*found[1:], None], strict=True):
        if segment.ramp:
            changes.append(_change("creep", segment.runs[-1], segment.end - segment.start,
                                   math.hypot(segment.start_error, segment.end_error), segment.runs[0]))  # fmt: skip
        if following is not None:
            kind = "step" if len(following.runs) > 1 else "unconfirmed"
            error = math.hypot(segment.end_error, following.start_error)
            changes.append(_change(kind, following.runs[0], following.start - segment.end, error))
    for place in aside:
        before = max((s for s in found if s.runs[0] < place), key=lambda s: s.runs[0], default=found[0])
        level = float(np.interp(place, (before.runs[0], before.runs[-1]), (before.start, before.end)))
        error = math.hypot(before.end_error, c * max(errors[place], FLOOR))
        changes.append(_change("unconfirmed", place, y[place] - level, error))
    return sorted((change for change in changes if _is_large(change, least)), key=lambda change: change.at)


def _is_large(change: Change, least: float) -> bool:
    size = abs(math.log(change.ratio)) >= math.log1p(least) * (1 - 1e-9)
    return size and not change.low <= 1.0 <= change.high


def _change(kind: str, at: int, size: float, error: float, since: int | None = None) -> Change:
    reach = _NORMAL * error
    return Change(kind, at, math.exp(size), math.exp(size - reach), math.exp(size + reach), since)


def _cut(y: Sequence[float], errors: Sequence[float], c: float, places: Sequence[int]) -> list[Segment]:
    """The cheapest segments of these runs, whose numbers are `places`."""
    n = len(y)
    penalty = PENALTY * math.log(max(n, 2))
    sums = _Sums(
        np.asarray(places, float), np.asarray(y, float), 1.0 / (c * np.maximum(np.asarray(errors, float), FLOOR)) ** 2
    )
    cost = np.zeros(n + 1)
    cost[0] = -penalty
    start, ramp = [0] * (n + 1), [False] * (n + 1)
    for end in range(1, n + 1):
        level = cost[:end] + sums.level(end) + penalty
        line = cost[:end] + sums.line(end) + 2 * penalty
        best, best_line = int(np.argmin(level)), int(np.argmin(line))
        ramp[end] = bool(line[best_line] < level[best])
        start[end] = best_line if ramp[end] else best
        cost[end] = min(line[best_line], level[best])
    found = []
    end = n
    while end:
        found.append(sums.segment(start[end], end, ramp[end], places))
        end = start[end]
    return found[::-1]


class _Sums:
    """Weighted sums over the first runs, from which any segment's fit follows at once."""

    def __init__(self, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> None:
        # About the means: squares of differences keep their digits.
        self._x0, self._y0 = float(np.mean(x)), float(np.mean(y))
        x, y = x - self._x0, y - self._y0
        self._w, self._wx, self._wy, self._wxx, self._wxy, self._wyy = (
            np.concatenate(([0.0], np.cumsum(w * factor))) for factor in (np.ones_like(x), x, y, x * x, x * y, y * y)
        )

    def level(self, end: int) -> np.ndarray:
        """What is left of the scatter about their mean of the runs from each start up to `end`."""
        w, wy, wyy = (sums[end] - sums[:end] for sums in (self._w, self._wy, self._wyy))
        return np.maximum(wyy - wy * wy / w, 0.0)

    def line(self, end: int) -> np.ndarray:
        """The same about a line, infinite where a segment is too short for one."""
        w, wx, wy, wxx, wxy, wyy = (sums[end] - sums[:end] for sums in self._all)
        across = wxx - wx * wx / w
        with np.errstate(divide="ignore", invalid="ignore"):
            explained = (wxy - wx * wy / w) ** 2 / across
        left = np.maximum(wyy - wy * wy / w - explained, 0.0)
        left[max(0, end - RAMP + 1) :] = np.inf
        return np.where(np.isfinite(left), left, np.inf)

    def segment(self, start: int, end: int, ramp: bool, places: Sequence[int]) -> Segment:
        w, wx, wy, wxx, wxy, _ = (float(sums[end] - sums[start]) for sums in self._all)
        runs = tuple(places[start:end])
        middle, mean = wx / w, wy / w
        across = wxx - wx * wx / w
        slope = (wxy - wx * wy / w) / across if ramp else 0.0

        def fit(place: int) -> tuple[float, float]:
            away = place - self._x0 - middle
            return self._y0 + mean + slope * away, math.sqrt(1 / w + (away * away / across if ramp else 0.0))

        (first, first_error), (last, last_error) = fit(runs[0]), fit(runs[-1])
        return Segment(runs, first, last, first_error, last_error, ramp)

    @property
    def _all(self) -> tuple[np.ndarray, ...]:
        return self._w, self._wx, self._wy, self._wxx, self._wxy, self._wyy
