"""Statistics of comparisons: against enumeration, against known tables, and on simulated kernels."""

import itertools
import math
import random
from statistics import NormalDist

import pytest

from kbench.measure.ab_statistics import (
    Rule,
    design,
    estimate,
    hodges_lehmann,
    rounds_needed,
    signed_rank_interval,
)


def test_the_estimate_is_the_median_of_the_means_of_two():
    assert hodges_lehmann([1.0]) == 1.0
    assert hodges_lehmann([1.0, 2.0, 6.0]) == 2.75  # of 1, 1.5, 2, 3.5, 4, 6


def test_a_quarter_of_the_values_may_be_anything():
    rng = random.Random(1)
    values = [rng.gauss(0, 1) for _ in range(40)]
    assert abs(hodges_lehmann([*values[:31], *[1e9] * 9])) < 1.5


@pytest.mark.parametrize("count", [5, 8, 11])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95])
def test_the_interval_covers_as_often_as_it_says(count, confidence):
    """Values of given sizes and all signs: the distribution of every symmetric noise, given the sizes."""
    rng = random.Random(count)
    sizes = [rng.random() for _ in range(count)]
    found = [
        signed_rank_interval([s * z for s, z in zip(signs, sizes, strict=True)], confidence)
        for signs in itertools.product((-1, 1), repeat=count)
    ]
    covered = sum(interval.low <= 0 <= interval.high for interval in found) / len(found)
    assert covered == pytest.approx(found[0].confidence)
    assert covered >= confidence or confidence > 1 - 2 ** (1 - count)


@pytest.mark.parametrize(("count", "rank"), [(16, 9), (20, 22), (25, 46)])
def test_the_interval_has_the_rank_of_the_published_tables(count, rank):
    """Critical values of the two-sided signed-rank test at 0.001 are 8, 21 and 45: the interval starts at the next."""
    values = [float(2**i) for i in range(count)]
    averages = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    interval = signed_rank_interval(values, 0.999)
    assert (interval.low, interval.high) == (averages[rank - 1], averages[-rank])
    assert interval.confidence >= 0.999


def test_too_few_values_say_what_their_interval_is_worth():
    interval = signed_rank_interval([3.0, 1.0, 2.0], 0.999)
    assert (interval.low, interval.high, interval.confidence) == (1.0, 3.0, 0.75)


@pytest.mark.parametrize(("confidence", "rounds"), [(0.75, 3), (0.95, 6), (0.99, 8), (0.999, 11), (0.999999, 21)])
def test_the_fewest_rounds_that_have_an_interval(confidence, rounds):
    assert rounds_needed(confidence) == rounds
    values = [float(i) for i in range(rounds)]
    assert signed_rank_interval(values, confidence).confidence >= confidence
    assert signed_rank_interval(values[1:], confidence).confidence < confidence


def test_a_place_that_is_slower_cancels():
    blocks = [(0.01 + 0.03, 0.01 - 0.03)] * 4
    assert estimate([blocks] * 16, Rule()).ratio == pytest.approx(math.exp(0.01))


def test_a_difference_below_the_least_is_none_however_clear():
    clear = estimate([[(0.003, 0.003)] * 4] * 16, Rule())
    assert clear.low > 1 and not clear.differs
    assert estimate([[(0.003, 0.003)] * 4] * 16, Rule(least=0.002)).differs
    assert estimate([[(-0.02, -0.02)] * 4] * 16, Rule()).differs


def test_too_few_rounds_decide_nothing():
    found = estimate([[(0.5, 0.5)]] * 10, Rule())
    assert not found.differs and found.visible == math.inf and found.confidence < 0.999


def test_what_would_have_been_seen_is_never_below_the_least():
    assert estimate([[(0.0, 0.0)]] * 16, Rule()).visible == pytest.approx(0.005)


# --------------------------------------------------------------------------------------------- how much to take


def pilot(spread, count=16):
    rng = random.Random(5)
    return [(rng.gauss(0, spread), rng.gauss(0, spread)) for _ in range(count)]


def test_more_noise_asks_for_more_blocks_up_to_the_maximum():
    quiet, loud, wild = (design(pilot(spread), 1e-3, 0.01, 1e9, Rule()).blocks for spread in (0.001, 0.02, 0.2))
    assert quiet == 512 // 32 < loud < wild == 4096 // 32


def test_the_budget_caps_the_blocks_and_slow_plans_get_the_fewest_rounds():
    assert design(pilot(0.2), 0.1, 0.02, 10.0, Rule()).blocks == 6  # 16 rounds of 0.625 s
    assert design(pilot(0.001), 1e-3, 9.0, 10.0, Rule()).blocks == 16  # a slow start is no slow kernel
    slow = design(pilot(0.2, 1), 4.0, 0.1, 10.0, Rule())
    assert (slow.rounds, slow.blocks) == (11, 1)


@pytest.mark.parametrize(
    "wrong", [{"confidence": 1.0}, {"least": -0.1}, {"resolution": 0}, {"minimum": 0}, {"minimum": 9, "maximum": 8}]
)
def test_rules_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError):
        Rule(**wrong)


# --------------------------------------------------------------------------------------------- simulated kernels


def simulated(seed, slowdown, jitter, between, outliers):
    """What comparing two kernels of 0.1 ms gives: jitter of each launch, clocks that drift by 1% in a second, a
    difference between the sides that each round draws anew, places of which one is 1% slower, and launches that
    something else disturbs."""
    rng = random.Random(seed)
    clock = itertools.count()

    def block(offset):
        def take(side, place):
            ms = 0.1 * (1 + slowdown * side) * math.exp(rng.gauss(0, jitter)) * (1 + 3e-6 * next(clock))
            ms *= (1 + offset * side) * (1 + 0.01 * place)
            return ms * (1 + rng.random()) if rng.random() < outliers else ms

        a0, b1, b0, a1 = (take(*where) for where in ((0, 0), (1, 1), (1, 0), (0, 1)))
        return math.log(a0 / b1), math.log(a1 / b0)

    rule = Rule(maximum=2048)  # half of what is usual, for a quick test
    decided = design([block(0) for _ in range(16)], 1e-3, 0.03, 10.0, rule)
    rounds = []
    for _ in range(decided.rounds):
        offset = rng.gauss(0, between)
        rounds.append([block(offset) for _ in range(decided.blocks)])
    return estimate(rounds, rule)


NOISE = [(0.005, 0.002, 0.02), (0.01, 0.002, 0.05), (0.05, 0.001, 0.0)]


@pytest.mark.parametrize(("jitter", "between", "outliers"), NOISE)
def test_a_kernel_against_itself_differs_in_none_of_twenty_runs(jitter, between, outliers):
    found = [simulated(seed, 0.0, jitter, between, outliers) for seed in range(20)]
    assert sum(one.differs for one in found) == 0


@pytest.mark.parametrize(("jitter", "between", "outliers"), NOISE)
def test_a_slowdown_of_two_percent_is_found_in_twenty_of_twenty(jitter, between, outliers):
    found = [simulated(seed, 0.02, jitter, between, outliers) for seed in range(20)]
    assert sum(one.differs and one.ratio < 1 for one in found) == 20


def test_the_interval_holds_at_a_low_confidence_where_rounds_differ():
    """Pairs of all rounds in one pot would cover far less: what differs between rounds would count as known."""
    rng, rule, covered = random.Random(3), Rule(confidence=0.9), 0
    for _ in range(150):
        offsets = [rng.gauss(0, 0.01) for _ in range(10)]
        rounds = [
            [(offset + rng.gauss(0, 0.001), offset + rng.gauss(0, 0.001)) for _ in range(4)] for offset in offsets
        ]
        found = estimate(rounds, rule)
        covered += found.low <= 1 <= found.high
    assert 0.86 <= covered / 150 <= 0.97


def test_the_smallest_visible_difference_is_seen_about_as_often_as_promised():
    noise = simulated(0, 0.0, 0.01, 0.001, 0.0).visible
    found = [simulated(seed, noise, 0.01, 0.001, 0.0).differs for seed in range(40)]
    assert sum(found) >= 34


def test_blocks_are_as_many_as_bring_half_the_interval_to_the_resolution() -> None:
    noise = [0.02 * NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)]
    planned = design([(ratio, ratio) for ratio in noise], 1e-4, 0.0, 10.0, Rule())
    # Of a block two pairs; Student's 99.95% point of 15 degrees is 4.07; a third on top for the pilot's own error.
    half = 1.3 * 4.07 * 0.02 / math.sqrt(2 * planned.blocks * planned.rounds)
    assert planned.rounds == 16 and half == pytest.approx(Rule().resolution, rel=0.1)
