"""Statistics of an A/B comparison: pure functions on log ratios of times, and the plan of how many to take.

The unit is the round. What is drawn anew between rounds (where the buffers lie, what the clocks do) differs from one
round to the next and hardly within one, so a thousand pairs of a single round know no more of it than ten. Each round
is reduced to one number, and the interval is that of the signed ranks over the rounds' numbers: exact for every
symmetric distribution, whatever its width or tails. Symmetry is what the design gives: both sides visit every position
and every place in memory equally often, so that a disturbance is as likely to hit the one as the other.

A round's number is the mean, over the two places of A, of the Hodges-Lehmann estimates of the pairs' log ratios. What
one place has over the other is in the two with opposite signs, and cancels.

How much to take is fixed from a pilot whose times enter nothing else (Stein's two stages), so that looking at the data
cannot choose its moment: the stated confidence holds as it is, without a correction for repeated looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from statistics import NormalDist, quantiles

from kbench.measure.statistics import Interval

# The spread of normal values in units of the distance between their quartiles.
_QUARTILES = 2 * NormalDist().inv_cdf(0.75)
# How often a difference of the "smallest visible" size is found.
POWER = 0.95
# Rounds beyond those without which there is no interval at all: with the fewest it reaches from the smallest to the
# largest number; five more cut its width by a third.
_MORE_ROUNDS = 5
# What a spread estimated from a pilot of a dozen blocks may be too small by.
_PILOT_MARGIN = 1.3

Block = tuple[float, float]
"""Log ratios, A over B, of two neighbouring pairs: with A in the first place in memory, and in the second."""


@dataclass(frozen=True)
class Rule:
    """What a comparison has to decide, and what it may cost.

    confidence: of the interval. least: relative differences below it are of no interest. resolution: half the interval
    that is aimed at: half of `least`, so that a difference of that size stands clear of 1. minimum, maximum: pairs of
    samples in all. budget_s: seconds of sampling; a slow plan gets its fewest rounds even beyond them.
    Raises ValueError for values that make no sense.
    """

    confidence: float = 0.999
    least: float = 0.005
    resolution: float = 0.0025
    minimum: int = 512
    maximum: int = 4096
    budget_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence <= 1 - 1e-9:
            raise ValueError(f"confidence must lie between 0.5 and 1, not {self.confidence}")
        if not (self.least >= 0 and self.resolution > 0 and self.budget_s > 0):
            raise ValueError("least must not be negative, resolution and budget must be above 0")
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"needs 1 <= minimum <= maximum pairs, not {self.minimum} and {self.maximum}")


@dataclass(frozen=True)
class Design:
    """How much to take: rounds, and blocks of two pairs in each."""

    rounds: int
    blocks: int


@dataclass(frozen=True)
class Estimate:
    """What a comparison found. ratio: time of A over time of B, between low and high with `confidence`, which is less
    than what was asked for where the rounds are too few. visible: the relative difference that a comparison as noisy
    as this one finds 95 times of 100. differs: the interval excludes 1, and the ratio is at least `least` from it."""

    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int
    rounds: int
    visible: float
    differs: bool


def hodges_lehmann(values: Sequence[float]) -> float:
    """The median of all means of two values: nearly as sharp as the mean on normal data (95.5%), and a quarter of the
    values may be anything (Hodges and Lehmann, "Estimates of Location Based on Rank Tests", 1963)."""
    import numpy as np  # of a round's 128 blocks there are 8256 means; not at the top, so that --help stays quick

    array = np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(len(array))
    return float(np.median((array[first] + array[second]) / 2))


def signed_rank_interval(values: Sequence[float], confidence: float) -> Interval:
    """The interval that Wilcoxon's signed-rank test leaves: from the c-th smallest to the c-th largest mean of two
    values. Exact where the values are drawn from symmetric distributions around one centre.

    Too few values for this confidence (ten or fewer at 99.9%): from the smallest to the largest, and its `confidence`
    says what that is worth.
    """
    averages = sorted((first + second) / 2 for first, second in combinations_with_replacement(values, 2))
    sums = _signed_rank_counts(len(values))
    total = 2 ** len(values)
    below = sums[0]  # how many sign patterns have a rank sum of less than `rank`
    rank = 1
    while rank < len(sums) and 2 * (below + sums[rank]) <= (1 - confidence) * total:
        below += sums[rank]
        rank += 1
    return Interval(averages[rank - 1], averages[-rank], 1 - 2 * below / total)


def rounds_needed(confidence: float) -> int:
    """The fewest rounds that have an interval of this confidence: all of them on one side of the truth is a
    coincidence of 2^(1-n)."""
    return max(2, math.ceil(1 - math.log2(1 - confidence) - 1e-9))


def centre(blocks: Sequence[Block]) -> float:
    """The log ratio of one round."""
    return sum(hodges_lehmann(place) for place in zip(*blocks, strict=True)) / 2


def estimate(rounds: Sequence[Sequence[Block]], rule: Rule) -> Estimate:
    """The ratio from the blocks of each round. Raises ValueError without any."""
    centres = [centre(blocks) for blocks in rounds if blocks]
    if not centres:
        raise ValueError("no log ratios")
    middle, interval = hodges_lehmann(centres), signed_rank_interval(centres, rule.confidence)
    enough = interval.confidence >= rule.confidence
    return Estimate(
        ratio=math.exp(middle),
        low=math.exp(interval.low),
        high=math.exp(interval.high),
        confidence=interval.confidence,
        pairs=2 * sum(map(len, rounds)),
        rounds=len(centres),
        visible=_visible((interval.high - interval.low) / 2, rule) if enough else math.inf,
        differs=enough and not interval.low <= 0 <= interval.high and abs(math.expm1(middle)) >= rule.least,
    )


def _visible(half: float, rule: Rule) -> float:
    """From half the interval of a log ratio. A difference is found where the estimate is farther from 0 than both that
    half and `least`; to be so in 95 of 100 cases the truth must lie 1.64 standard errors beyond."""
    normal = NormalDist()
    error = half / normal.inv_cdf((1 + rule.confidence) / 2)
    return math.expm1(max(half, math.log1p(rule.least)) + normal.inv_cdf(POWER) * error)


def design(pilot: Sequence[Block], block_s: float, round_s: float, left_s: float, rule: Rule) -> Design:
    """How much to take, from the blocks of a pilot.

    block_s: seconds of one block. round_s: seconds that a round takes besides its blocks. left_s: of the budget.
    """
    fewest = rounds_needed(rule.confidence)
    rounds = fewest + _MORE_ROUNDS
    # Where the budget does not even have room for a block in each, what can be saved is rounds.
    if rounds * block_s > left_s:
        rounds = fewest
    low, high = math.ceil(rule.minimum / (2 * rounds)), max(1, rule.maximum // (2 * rounds))
    wanted = _blocks_for(rule.resolution, _spread(pilot), rounds, rule.confidence)
    # A pilot takes longer to prepare than the rounds after it: that alone is no reason to take less than the minimum.
    room = left_s / rounds
    affordable = max(int((room - round_s) / block_s), min(low, int(room / block_s)))
    return Design(rounds, max(1, min(max(low, wanted), high, affordable)))


def _blocks_for(resolution: float, spread: float, rounds: int, confidence: float) -> int:
    """Blocks a round so that half the interval over the rounds is about `resolution`, where rounds differ by the
    noise of their pairs alone. spread: standard deviation of one pair's log ratio."""
    of_block = spread / math.sqrt(2)
    half = _PILOT_MARGIN * _student((1 + confidence) / 2, rounds - 1) * of_block / math.sqrt(rounds)
    return max(1, math.ceil((half / resolution) ** 2))


def _spread(blocks: Sequence[Block]) -> float:
    """The standard deviation of normal pairs with the quartiles of these, which outliers do not move."""
    if len(blocks) < 4:  # of a slow plan: the budget decides, not the noise
        return max((abs(first - second) for first, second in blocks), default=math.inf)
    quarters = [quantiles(place, n=4, method="inclusive") for place in zip(*blocks, strict=True)]
    return sum(third - first for first, _, third in quarters) / len(quarters) / _QUARTILES


def _student(probability: float, freedom: int) -> float:
    """Student's quantile by its expansion in 1/freedom (Abramowitz and Stegun, 26.7.5); 1% low at 15."""
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@cache
def _signed_rank_counts(count: int) -> tuple[int, ...]:
    """How many of the 2^count sign patterns have each sum of positive ranks."""
    sums = [1]
    for rank in range(1, count + 1):
        longer = sums + [0] * rank
        for total, patterns in enumerate(sums):
            longer[total + rank] += patterns
        sums = longer
    return tuple(sums)
