"""Statistics and the stop rule, on samples made by hand."""

import json
import math
import random

import pytest

from kbench.measure.measurement import summarise
from kbench.measure.statistics import (
    MAX_SAMPLES,
    NO_SAMPLES,
    StopRule,
    confidence_interval,
    coverage,
    median,
    quartiles,
    relative_half_width,
    settled,
    valid_samples,
)

NAN, INF = math.nan, math.inf
USELESS = [0.0, -1.0, NAN, INF, -INF]


def test_valid_samples_keeps_order_and_drops_what_no_work_can_take():
    assert valid_samples([3.0, *USELESS, 1.0]) == [3.0, 1.0]


def test_median_of_odd_even_and_single():
    assert median([5.0, 1.0, 3.0]) == 3.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert median([7.0]) == 7.0
    assert median([7.0, NAN, 0.0]) == 7.0


def test_quartiles_interpolate_and_a_single_sample_is_both():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.75)
    assert quartiles([7.0]) == (7.0, 7.0)


@pytest.mark.parametrize("function", [median, quartiles, confidence_interval])
@pytest.mark.parametrize("samples", [[], USELESS])
def test_no_valid_sample_is_said(function, samples):
    with pytest.raises(ValueError, match=NO_SAMPLES):
        function(samples)


# Ranks of the sign test, and coverages computed apart from the code, from log-gamma.
@pytest.mark.parametrize(
    ("count", "rank", "covers"),
    [(1, 1, 0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (10, 2, 0.978516), (20, 6, 0.958611), (64, 24, 0.967234)],
)
def test_confidence_interval_ranks(count, rank, covers):
    samples = [float(i + 1) for i in range(count)]
    random.Random(count).shuffle(samples)
    interval = confidence_interval(samples, 0.95)
    assert (interval.low, interval.high) == (float(rank), float(count + 1 - rank))
    assert interval.confidence == pytest.approx(covers, abs=1e-6)
    # The next narrower pair must not be enough, or the interval is wider than it need be.
    if 2 * (rank + 1) <= count:
        assert coverage(count, rank + 1) < 0.95


def test_interval_of_many_samples_is_that_of_the_binomial():
    for count in (65, 333, 1000):
        rank = 1
        while coverage(count, rank + 1) >= 0.99:
            rank += 1
        interval = confidence_interval([float(i) for i in range(1, count + 1)], 0.99)
        assert (interval.low, interval.high) == (rank, count + 1 - rank)
        assert interval.confidence == coverage(count, rank)


def test_interval_covers_the_true_median_as_often_as_it_says():
    draw = random.Random(1)
    interval_of = [confidence_interval([draw.expovariate(1.0) for _ in range(15)]) for _ in range(4000)]
    hits = sum(i.low <= math.log(2) <= i.high for i in interval_of) / len(interval_of)
    assert hits == pytest.approx(interval_of[0].confidence, abs=0.015)


def test_interval_ignores_one_outlier():
    assert confidence_interval([1.0] * 9 + [100.0]).high == 1.0


def test_relative_half_width():
    assert relative_half_width([1.0, *[2.0] * 8, 3.0]) == 0.0
    # Ten samples: the second smallest and the second largest, (3 - 1) / 2 of the median 2.
    assert relative_half_width([1.0, 1.0, *[2.0] * 6, 3.0, 3.0]) == pytest.approx(0.5)
    assert relative_half_width([1.0] * 5) == INF  # five samples cannot reach 95%
    assert relative_half_width([]) == INF


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], False),
        ([5.0], False),
        ([10.0, 5.0], False),
        ([10.0, 5.0, 5.05], True),
        ([10.0, 9.9], True),  # within the jitter
        ([5.0, 9.0], True),
        ([5.0, 9.0, 7.0], True),  # still not shorter than the shortest
        ([10.0, 9.0, 8.0, 7.0], False),
        ([NAN, 0.0, 5.0], False),
        ([5.0, NAN, 5.0], True),
    ],
)
def test_settled(times, expected):
    assert settled(times) is expected


def test_rule_stops_when_the_interval_is_narrow_but_not_before_the_minimum():
    rule = StopRule()
    assert rule.done([1.0] * 9, 0.0) == ""
    assert rule.done([1.0] * 10, 0.0) == "interval within 0.50%"


def test_rule_spends_the_budget_only_once_the_minimum_is_there():
    rule = StopRule()
    noisy = [1.0, 2.0] * 10
    assert rule.done(noisy, 0.4) == ""
    assert rule.done(noisy, 0.5) == "0.5 s spent"
    assert rule.done(noisy[:9], 9.0) == ""


def test_rule_stops_at_the_maximum_and_counts_valid_samples_only():
    rule = StopRule(relative=0.0)
    noisy = [1.0, 2.0] * 32
    assert rule.done(noisy, 0.0) == "64 samples"
    assert rule.done([*noisy[:63], NAN], 0.0) == ""
    assert StopRule(minimum=1, maximum=1).done([1.0], 0.0) == "1 sample"


@pytest.mark.parametrize(
    "wrong",
    [
        {"minimum": 0},
        {"minimum": -1},
        {"minimum": 11, "maximum": 10},
        {"maximum": MAX_SAMPLES + 1},
        {"confidence": 1.0},
        {"confidence": NAN},
        {"relative": -0.1},
        {"relative": NAN},
        {"budget_s": -1.0},
    ],
)
def test_rule_refuses_nonsense(wrong):
    with pytest.raises(ValueError):
        StopRule(**wrong)


def summary(samples, **more):
    options = {"confidence": 0.95, "warmups": 2, "overhead_ms": 0.0015, "mode": "cold", "stopped": "10 samples"}
    return summarise(samples, **(options | more))


def test_measurement_keeps_one_unit_and_is_strict_json():
    samples = [6.0, 1.0, 3.0, 2.0, 5.0, 4.0]
    data = summary(samples, notes=("a", "", "b")).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    spread = [data[key] for key in ("low_ms", "q1_ms", "median_ms", "q3_ms", "high_ms")]
    assert spread == [1.0, 2.25, 3.5, 4.75, 6.0]
    assert data["samples_ms"] == samples
    assert (data["note"], data["mode"], data["warmups"], data["overhead_ms"]) == ("a; b", "cold", 2, 0.0015)


def test_measurement_has_the_keys_that_a_row_documents():
    documented = {"median_ms", "low_ms", "high_ms", "q1_ms", "q3_ms", "samples_ms", "warmups", "overhead_ms", "note"}
    assert documented <= set(summary([1.0]).to_dict())


def test_measurement_of_one_sample_says_that_its_interval_is_worth_nothing():
    data = summary([3.0]).to_dict()
    assert (data["low_ms"], data["high_ms"], data["confidence"]) == (3.0, 3.0, 0.0)
    json.dumps(data, allow_nan=False)


def test_measurement_drops_invalid_samples_and_refuses_none():
    assert summary([NAN, 0.0, 2.0]).samples_ms == (2.0,)
    with pytest.raises(ValueError, match=NO_SAMPLES):
        summary(USELESS)
