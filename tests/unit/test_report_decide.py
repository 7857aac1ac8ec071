"""The decision of a report, on samples made by hand, and a small simulation of whole reports."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.report.decide import Comparison, decide, decide_all
from kbench.report.decision import Decision, Rule, Verdict
from kbench.report.estimate import estimate, midmeans
from kbench.report.exact import decide_exact
from kbench.report.family_wise import tail_of
from kbench.report.metrics import metric_of
from kbench.report.model import Metric
from kbench.report.needed import NEVER, needed_rounds
from kbench.report.noise import Noise, fit_prior, noise_of, session_variance
from kbench.report.quantiles import f_quantile, f_tail, incomplete_beta, t_quantile, t_tail
from kbench.report.side import Side, fault_of

NAN, INF = math.nan, math.inf


def side(
    level: float = 1.0,
    *,
    rounds: int = 3,
    samples: int = 10,
    noise: float = 0.004,
    between: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Side:
    """Samples about a level; without a generator evenly spread, so that the midmean of each round is the level."""
    if rng is None:
        steps = np.linspace(-1.0, 1.0, samples)
        return Side(tuple(tuple((level * np.exp(noise * steps)).tolist()) for _ in range(rounds)))
    logs = math.log(level) + between * rng.standard_normal((rounds, 1)) + noise * rng.standard_normal((rounds, samples))
    return Side(tuple(map(tuple, np.exp(logs).tolist())))


def noisy_rows(
    count: int, ratio: float = 1.0, seed: int = 0, between: float = 0.005, **options: Any
) -> list[Comparison]:
    rng = np.random.default_rng(seed)
    return [
        Comparison(
            side(noise=0.01, between=between, rng=rng), side(ratio, noise=0.01, between=between, rng=rng), **options
        )
        for _ in range(count)
    ]


def verdicts(rows: list[Comparison], **options: Any) -> list[Verdict]:
    return [decision.verdict for decision in decide_all(rows, **options).decisions]


# ---------------------------------------------------------------------------------------------- quantiles


@pytest.mark.parametrize(
    "df, tail, value",
    [
        (1, 0.05, 6.3138),
        (1, 0.005, 63.6567),
        (2, 0.025, 4.3027),
        (4, 0.0005, 8.6103),
        (5, 0.01, 3.3649),
        (10, 0.0005, 4.5869),
        (30, 0.005, 2.7500),
        (120, 0.001, 3.1595),
        (INF, 0.025, 1.9600),
        (INF, 0.0005, 3.2905),
    ],
)
def test_t_quantiles_are_those_of_the_tables(df, tail, value):
    assert t_quantile(tail, df) == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize("df", [1, 2])
@pytest.mark.parametrize("tail", [1e-3, 1e-6, 1e-9])
def test_t_quantiles_far_out_are_those_of_the_closed_forms(df, tail):
    exact = 1.0 / math.tan(math.pi * tail) if df == 1 else (1 - 2 * tail) / math.sqrt(2 * tail * (1 - tail))
    assert t_quantile(tail, df) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("df", [0.5, 3, 7.3, 60, 1000])
@pytest.mark.parametrize("tail", [0.4, 0.01, 5e-8])
def test_the_tail_beyond_a_quantile_is_what_was_asked_for(df, tail):
    assert t_tail(t_quantile(tail, df), df) == pytest.approx(tail, rel=1e-6)
    assert f_tail(f_quantile(tail, df, 12), df, 12) == pytest.approx(tail, rel=1e-6)


@pytest.mark.parametrize("tail, df, below, value", [(0.05, 4, 10, 3.4780), (0.01, 10, 3, 27.229), (0.05, 1, 1, 161.45)])
def test_f_quantiles_are_those_of_the_tables(tail, df, below, value):
    assert f_quantile(tail, df, below) == pytest.approx(value, rel=2e-5)


def test_incomplete_beta_at_its_ends_and_where_it_is_a_polynomial():
    assert incomplete_beta(0.0, 2.0, 3.0) == 0.0 and incomplete_beta(1.0, 2.0, 3.0) == 1.0
    for x in (0.1, 0.5, 0.9):
        assert incomplete_beta(x, 2.0, 2.0) == pytest.approx(3 * x**2 - 2 * x**3)


@pytest.mark.parametrize("tail, df", [(0.0, 3), (0.5, 3), (-1, 3), (0.1, 0), (0.1, -1), (NAN, 3), (0.1, NAN)])
def test_a_quantile_that_does_not_exist_is_an_error(tail, df):
    with pytest.raises(ValueError, match="needs"):
        t_quantile(tail, df)


# ---------------------------------------------------------------------------------------------- bad samples

BAD = [
    (0.0, "sample 2 of round 1 is not above zero: 0"),
    (-1.5, "not above zero: -1.5"),
    (NAN, "not finite: nan"),
    (INF, "not finite: inf"),
    (10**400, "too large"),
    (None, "not a number: null"),
    ("1.2", "not a number: '1.2'"),
    (True, "not a number: True"),
    ([1.0], "not a number"),
]


@pytest.mark.parametrize("sample, message", BAD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_bad_sample_makes_its_row_not_comparable_and_no_other(sample, message, where):
    bad = Side(((1.0, sample, 1.0),) * 3)
    row = Comparison(bad, side()) if where == "before" else Comparison(side(), bad)
    spoilt = decide_all([Comparison(side(), side(2.0)), row, Comparison(side(), side())])
    first, second, third = spoilt.decisions
    assert second.verdict is Verdict.NOT_COMPARABLE and message in second.reason and second.ratio is None
    assert second.reason.startswith(f"{where}: ")
    assert (first.verdict, third.verdict) == (Verdict.SLOWER, Verdict.SAME)
    assert spoilt.decided == 2


@pytest.mark.parametrize(
    "rounds, message",
    [
        ((), "no samples"),
        (((), ()), "no samples"),
        (None, "not a list of rounds, but null"),
        ("12", "not a list of rounds, but '12'"),
        (3.0, "not a list of rounds"),
        ((1.0, 2.0), "round 1 is not a list of samples, but 1.0"),
        (((1.0,), "12"), "round 2 is not a list of samples, but '12'"),
        (({1.0: 2.0},), "round 1 is not a list"),
        ((None,), "round 1 is not a list of samples, but null"),
    ],
)
def test_samples_of_a_wrong_shape_are_named(rounds, message):
    decision = decide(side(), Side(rounds))
    assert decision.verdict is Verdict.NOT_COMPARABLE
    assert decision.reason.startswith("after: ") and message in decision.reason
    assert decide(Side(rounds), side()).reason.startswith("before: ")


def test_a_report_of_bad_rows_only_and_one_of_none():
    assert verdicts([Comparison(Side(()), Side(()))] * 3) == [Verdict.NOT_COMPARABLE] * 3
    assert decide_all([]).decisions == []


def test_integers_and_arrays_are_samples_and_an_empty_round_is_none():
    whole = Side(([500, 501] * 6, np.array([500.0, 501.0] * 6), (), [np.float64(501.0), 500] * 6))
    decision = decide(whole, whole)
    assert fault_of(whole) == "" and decision.verdict is Verdict.SAME
    assert decision.rounds == (3, 3) and decision.samples == (36, 36)


# ---------------------------------------------------------------------------------------------- one row


def test_the_estimate_is_the_midmean_of_logarithms():
    values = np.array([8.0, 1.0, 2.0, 1000.0, 4.0, 3.0])  # a quarter of 6 is one at each end
    middle, squares, kept = midmeans(np.log(values), np.array([6]))
    logs = np.log([2.0, 3.0, 4.0, 8.0])
    clipped = np.log([2.0, 2.0, 3.0, 4.0, 8.0, 8.0])
    assert middle == pytest.approx(logs.mean()) and kept == [4]
    assert squares == pytest.approx(((clipped - clipped.mean()) ** 2).sum())


def test_rounds_of_different_sizes_keep_their_places():
    sizes = [1, 5, 2, 5, 1, 1]
    values = np.concatenate([np.full(size, float(number + 1)) for number, size in enumerate(sizes)])
    rows = estimate(values, sizes, [2, 1, 2, 1])
    assert np.exp(rows.location) == pytest.approx(np.array([[math.sqrt(2.0), 3.0], [math.sqrt(20.0), 6.0]]))
    assert rows.rounds.tolist() == [[2, 1], [2, 1]] and rows.samples.tolist() == [[6, 2], [6, 1]]
    assert rows.scatter[0, 0] == pytest.approx(2 * (math.log(2.0) / 2) ** 2)


def test_a_few_wild_samples_move_nothing():
    wild = Side(tuple((*samples[:-2], 50.0, 80.0) for samples in side().rounds))
    decision = decide(side(), wild)
    assert decision.verdict is Verdict.SAME and decision.ratio == pytest.approx(1.0, abs=0.002)


@pytest.mark.parametrize(
    "ratio, verdict", [(2.0, Verdict.SLOWER), (1.06, Verdict.SLOWER), (1.0, Verdict.SAME), (0.94, Verdict.FASTER)]
)
def test_a_clear_row(ratio, verdict):
    decision = decide(side(), side(ratio))
    assert decision.verdict is verdict and decision.needed_rounds is None and decision.needed_samples is None
    assert decision.regression == (verdict is Verdict.SLOWER) and decision.improvement == (verdict is Verdict.FASTER)
    assert decision.ratio == pytest.approx(ratio) and decision.low < ratio < decision.high
    assert decision.before == pytest.approx(1.0) and decision.after == pytest.approx(ratio)


def test_an_interval_above_one_is_no_regression_below_the_threshold():
    decision = decide(side(), side(1.02))
    assert decision.low > 1.0 and decision.verdict is Verdict.SAME
    strict = decide(side(), side(1.02), Rule(threshold=0.01))
    assert strict.verdict is Verdict.SLOWER
    assert "+2.0%" in strict.reason and "limit 1%" in strict.reason


def test_an_estimate_above_the_threshold_is_no_regression_where_the_interval_holds_one():
    decision = decide(*_pair(0.03, 1.08))
    assert decision.ratio > 1.03 and decision.low < 1.0
    assert decision.verdict is Verdict.UNCLEAR and "would settle it" in decision.reason
    assert decision.needed_rounds >= 1


def test_an_estimate_of_one_is_not_the_same_where_the_interval_is_wide():
    decision = decide(*_pair(0.05, 1.0))
    assert decision.ratio == pytest.approx(1.0) and decision.verdict is Verdict.UNCLEAR


def test_a_row_and_the_same_row_turned_round():
    there, back = decide(side(), side(1.5)), decide(side(1.5), side())
    assert (there.verdict, back.verdict) == (Verdict.SLOWER, Verdict.FASTER)
    assert there.ratio * back.ratio == pytest.approx(1.0) and there.low * back.high == pytest.approx(1.0)


def test_less_bandwidth_is_slower():
    bandwidth = Metric("bandwidth", "GB/s", worse=-1)
    down = decide(side(1000.0), side(500.0), metric=bandwidth)
    assert down.verdict is Verdict.SLOWER and down.ratio == pytest.approx(0.5) and "-50.0%" in down.reason
    assert down.low < 0.5 < down.high
    assert decide(side(1000.0), side(2000.0), metric=bandwidth).verdict is Verdict.FASTER


def test_a_quarter_more_of_two_microseconds_is_not_seen_and_of_two_milliseconds_is():
    tiny = decide(side(0.002, noise=1e-4), side(0.0025, noise=1e-4))
    assert not tiny.regression and "limit 0.5 us" in tiny.reason
    assert decide(side(0.002, noise=1e-4), side(0.00249, noise=1e-4)).verdict is Verdict.SAME
    large = decide(side(2.0, noise=1e-4), side(2.5, noise=1e-4))
    assert large.regression and "limit 3%" in large.reason


def test_the_floor_holds_both_ways_and_can_be_set():
    small, large = side(0.002), side(0.0026)
    assert decide(small, large).verdict is Verdict.SLOWER and decide(large, small).verdict is Verdict.FASTER
    assert not decide(large, small, Rule(floor=0.001)).improvement
    assert decide(side(0.002), side(0.0022), Rule(floor=0.0)).verdict is Verdict.SLOWER


@pytest.mark.parametrize(
    "before, after, missing, rounds, samples",
    [
        (side(rounds=1, samples=64), side(rounds=1, samples=64), "1 round after; a side needs 3 rounds and 30", 2, 0),
        (side(), side(2.0, rounds=2, samples=20), "too few: 2 rounds after; ", 1, 0),
        (side(samples=9), side(2.0, samples=20), "too few: 27 samples before; ", 0, 3),
        (side(rounds=1, samples=1), side(9.0), "too few: 1 round and 1 sample before; ", 2, 29),
    ],
)
def test_too_few_rounds_or_samples_are_unclear_whatever_they_show(before, after, missing, rounds, samples):
    decision = decide(before, after)
    assert decision.verdict is Verdict.UNCLEAR and missing in decision.reason
    assert (decision.needed_rounds, decision.needed_samples) == (rounds, samples)


def test_samples_that_are_all_equal_are_decided():
    assert decide(side(noise=0.0), side(noise=0.0)).verdict is Verdict.SAME
    assert decide(side(noise=0.0), side(1.05, noise=0.0)).verdict is Verdict.SLOWER


def test_a_gain_too_large_to_believe_is_marked():
    decision = decide(side(), side(0.01))
    assert decision.verdict is Verdict.FASTER and decision.suspicious and "suspiciously large" in decision.reason
    assert not decide(side(), side(0.5)).suspicious and not decide(side(), side(100.0)).suspicious


def test_one_disturbed_round_of_three_is_no_regression():
    calm = side().rounds
    disturbed = Side((*calm[:2], tuple(sample * 3.0 for sample in calm[2])))
    assert decide(side(), disturbed).verdict is Verdict.UNCLEAR
    # Nor does it make others noisy, nor do they lend it their calm.
    rows = [*noisy_rows(200), Comparison(side(), disturbed)]
    noise = noise_of(_estimates(rows))
    assert noise.prior_df[-1] == 0.0 and noise.df[-1] == 4.0 and np.median(noise.prior_df) > 20
    outcome = decide_all(rows)
    assert outcome.decisions[-1].verdict is Verdict.UNCLEAR
    assert outcome.between == pytest.approx(0.005, rel=0.1)


# ---------------------------------------------------------------------------------------------- many rows


def test_more_rows_have_to_be_surer():
    assert tail_of(1) == 0.005 and tail_of(200) == pytest.approx(0.005 / 200) and tail_of(0) == 0.005
    row = Comparison(*_pair(0.012, 1.045), kernel="one")
    few, many = decide_all([row] * 4), decide_all([row] * 400)
    assert few.decided == 4 and many.decided == 400
    assert many.decisions[0].high > few.decisions[0].high


def test_rows_of_unchanged_code_do_not_make_others_wider():
    changed = noisy_rows(4)
    alone = decide_all([*changed, *noisy_rows(100, seed=1)]).decisions[0]
    among = decide_all([*changed, *noisy_rows(100, seed=1, identical=True)]).decisions[0]
    assert among.high - among.low < alone.high - alone.low


def test_the_order_of_rows_does_not_matter():
    rows = [*noisy_rows(20), *noisy_rows(5, 1.2, seed=4)]
    forward, backward = decide_all(rows).decisions, decide_all(rows[::-1]).decisions[::-1]
    for one, other in zip(forward, backward, strict=True):
        assert one.verdict is other.verdict and one.low == pytest.approx(other.low)


def test_rows_lend_each_other_what_they_know_of_the_noise():
    pair = _pair(0.01, 1.06)
    alone = decide(*pair)
    among = decide_all([Comparison(*pair), *noisy_rows(100, between=0.01)]).decisions[0]
    # Alone t has 4 degrees of freedom; among others many, which outweighs having to be surer.
    assert among.high - among.low < alone.high - alone.low


def test_two_hundred_fifty_six_regressions_are_all_of_them_found():
    rows = [*noisy_rows(256, 1.5, kernel="slow"), *noisy_rows(300, seed=2)]
    found = Counter(verdicts(rows))
    assert found[Verdict.SLOWER] == 256


def test_per_row_rules_are_kept():
    rows = noisy_rows(4, 1.10)
    rows[1] = Comparison(rows[1].before, rows[1].after, Rule(threshold=0.5))
    assert verdicts(rows) == [Verdict.SLOWER, Verdict.SAME, Verdict.SLOWER, Verdict.SLOWER]


def test_a_single_round_gets_an_interval_from_what_other_rows_show():
    short = Comparison(side(rounds=1, samples=30), side(1.5, rounds=1, samples=30))
    alone, among = decide_all([short]).decisions[0], decide_all([short, *noisy_rows(30)]).decisions[0]
    assert alone.low is None and alone.ratio == pytest.approx(1.5)
    assert among.low is not None and 1.4 < among.low < 1.5 and among.verdict is Verdict.UNCLEAR
    loose = Rule(min_rounds=1)
    assert "not known" in decide(short.before, short.after, loose).reason


# ---------------------------------------------------------------------------------------------- the machine


def test_the_same_machine_code_is_never_a_regression_and_gives_the_noise_floor():
    outcome = decide_all([*noisy_rows(5), Comparison(side(), side(1.3), identical=True)])
    assert outcome.decisions[-1].verdict is Verdict.SAME and "same machine code; +30.0%" in outcome.decisions[-1].reason
    assert outcome.noise_floor == pytest.approx(0.3) and decide_all(noisy_rows(3)).noise_floor is None
    few = decide(side(rounds=1), side(2.0, rounds=1), identical=True)
    assert few.verdict is Verdict.SAME


def test_unchanged_code_that_wanders_between_sessions_makes_other_rows_less_sure():
    rng = np.random.default_rng(8)
    still = noisy_rows(40, identical=True)
    wandering = [
        Comparison(row.before, side(math.exp(0.03 * rng.standard_normal()), noise=0.01, rng=rng), identical=True)
        for row in still
    ]
    slow = noisy_rows(1, 1.06, seed=9)
    calm, moved = decide_all([*slow, *still]), decide_all([*slow, *wandering])
    assert calm.decisions[0].verdict is Verdict.SLOWER and moved.decisions[0].verdict is Verdict.UNCLEAR
    assert calm.session < 0.005 and moved.session == pytest.approx(0.03, rel=0.4)
    # More rounds would not help: what wanders is the session.
    assert moved.decisions[0].needed_rounds is None


@pytest.mark.parametrize("factor", [2.0, 1.05, 0.5])
def test_all_rows_moving_alike_is_the_machine(factor):
    outcome = decide_all(noisy_rows(40, factor))
    assert outcome.shift.machine_differs and math.exp(outcome.shift.log) == pytest.approx(factor, rel=0.01)
    assert {decision.verdict for decision in outcome.decisions} == {Verdict.NOT_COMPARABLE}
    assert "machine differs" in outcome.decisions[0].reason and "most of 40 rows" in outcome.decisions[0].reason


def test_a_row_that_leaves_the_machines_shift_is_still_named():
    rows = [*noisy_rows(40, 2.0), *noisy_rows(1, 2.4, seed=3), *noisy_rows(1, 1.7, seed=4)]
    decisions = decide_all(rows).decisions
    assert [decision.verdict for decision in decisions[-2:]] == [Verdict.SLOWER, Verdict.FASTER]
    assert "beside the machine's +100" in decisions[-2].reason
    assert {decision.verdict for decision in decisions[:-2]} == {Verdict.NOT_COMPARABLE}


def test_seven_rows_or_one_kernels_rows_are_no_machine():
    assert set(verdicts(noisy_rows(7, 1.5))) == {Verdict.SLOWER}
    assert set(verdicts(noisy_rows(12, 1.5, kernel="layernorm_forward:6"))) == {Verdict.SLOWER}
    kernels = [row for name in "abcd" for row in noisy_rows(3, 1.5, kernel=name)]
    assert set(verdicts(kernels)) == {Verdict.NOT_COMPARABLE}


def test_unchanged_rows_say_whether_the_machine_moved():
    changed, still = noisy_rows(40, 1.2), noisy_rows(10, seed=1, identical=True)
    assert verdicts([*changed, *still])[:40] == [Verdict.SLOWER] * 40
    moved = decide_all([*noisy_rows(3, 1.2), *noisy_rows(10, 1.2, seed=1, identical=True)])
    assert moved.shift.unchanged and "unchanged machine code" in str(moved.shift)
    assert {decision.verdict for decision in moved.decisions} == {Verdict.NOT_COMPARABLE}


def test_half_of_the_rows_slower_is_not_the_machine():
    outcome = decide_all([*noisy_rows(30, 1.10), *noisy_rows(30, seed=1)])
    assert not outcome.shift.machine_differs
    assert [decision.verdict for decision in outcome.decisions[:30]].count(Verdict.SLOWER) == 30


def test_rows_that_all_get_slower_but_each_by_its_own_amount_are_not_the_machine():
    ratios = np.linspace(1.0, 1.4, 40)
    rows = [row for number, ratio in enumerate(ratios) for row in noisy_rows(1, float(ratio), seed=number)]
    outcome = decide_all(rows)
    assert not outcome.shift.machine_differs and str(outcome.shift) == "rows do not move alike"
    assert outcome.decisions[-1].verdict is Verdict.SLOWER


def test_a_few_noisy_rows_are_no_machine():
    outcomes = [decide_all(noisy_rows(8, seed=seed, between=0.03)) for seed in range(20)]
    assert not any(outcome.shift.machine_differs for outcome in outcomes)


def test_a_small_shift_widens_intervals_and_decides_nothing():
    rows = noisy_rows(60, 1.008, between=0.002)
    outcome = decide_all(rows)
    assert 0.006 < outcome.shift.log < 0.0099 and not outcome.shift.machine_differs
    strict = [Comparison(row.before, row.after, Rule(threshold=0.0)) for row in rows]
    assert Verdict.SLOWER not in verdicts(strict)


# ---------------------------------------------------------------------------------------------- noise


def test_alike_variances_share_and_unlike_ones_do_not():
    rng = np.random.default_rng(2)
    alike = rng.chisquare(4, 300) / 4
    unlike = alike * np.exp(3.0 * rng.standard_normal(300))
    df = np.full(300, 4.0)
    assert fit_prior(alike, df).df > 20 and fit_prior(alike, df).value == pytest.approx(1.0, rel=0.2)
    assert fit_prior(unlike, df).df < 1.0
    known = alike * 5.0 / rng.chisquare(5, 300)
    assert 2.5 < fit_prior(known, df).df < 8.0
    assert fit_prior(np.zeros(5), df[:5]).value == 0.0


@pytest.mark.parametrize("between", [0.0, 0.01, 0.05])
def test_the_variance_between_rounds_is_found(between):
    noise = noise_of(_estimates(noisy_rows(200, between=between)))
    assert noise.between == pytest.approx(between, rel=0.1, abs=0.0015)


def test_the_error_has_a_part_within_rounds_and_one_between():
    rows = noisy_rows(300, between=0.005)
    estimates = _estimates(rows)
    errors = np.sqrt(noise_of(estimates).variance(estimates.rounds))
    real = np.std(estimates.location[:, 1] - estimates.location[:, 0])
    assert np.median(errors) == pytest.approx(real, rel=0.1)
    sampling = noise_of(estimates).sampling
    assert 0.2 < np.median(sampling / noise_of(estimates).round_variance) < 0.4  # 0.0031^2 of 0.0031^2 + 0.005^2


def test_what_a_session_adds_is_found_whatever_one_row_does():
    rng = np.random.default_rng(3)
    deviations = 0.02 * rng.standard_normal(100)
    variances = np.full(100, 0.01**2)
    assert math.sqrt(session_variance(deviations, variances)) == pytest.approx(math.sqrt(3) * 0.01, rel=0.2)
    deviations[0] = 5.0
    assert math.sqrt(session_variance(deviations, variances)) < 0.025
    assert session_variance(deviations[:7], variances[:7]) == 0.0


# ---------------------------------------------------------------------------------------------- what is needed


def test_the_rounds_that_are_asked_for_are_as_many_as_it_takes():
    noise = Noise(np.full((1, 2), 1e-4), np.full((1, 2), 1e-5), np.array([4.0]), np.array([0.0]), 0.01)
    rounds = np.array([[3, 3]])
    more = int(needed_rounds(noise, rounds, np.array([0.02]), 0.0, 0.005)[0])

    def half(count: int) -> float:
        return t_quantile(0.005, 2 * count - 2) * math.sqrt(2e-4 / count)

    assert half(3 + more) <= 0.0201 and half(3 + more - 1) > 0.0199
    after = int(needed_rounds(noise, rounds, np.array([0.02]), 0.0, 0.005, rerun_before=False)[0])
    assert after == NEVER or after > more


@pytest.mark.parametrize("width, fixed", [(0.0, 0.0), (-0.01, 0.0), (0.01, 1.0), (1e-9, 0.0)])
def test_what_no_number_of_rounds_settles_is_said(width, fixed):
    noise = Noise(np.full((1, 2), 1e-4), np.full((1, 2), 1e-5), np.array([4.0]), np.array([0.0]), 0.01)
    assert needed_rounds(noise, np.array([[3, 3]]), np.array([width]), fixed, 0.005).tolist() == [NEVER]


def test_samples_settle_what_is_noisy_within_rounds_and_not_what_is_between():
    rng = np.random.default_rng(6)

    def row(noise: float, between: float) -> Comparison:
        return Comparison(*(side(noise=noise, between=between, samples=20, rng=rng) for _ in range(2)))

    within = [d for d in decide_all([row(0.10, 0.0001) for _ in range(40)]).decisions if d.verdict is Verdict.UNCLEAR]
    assert within and any(d.needed_samples is not None for d in within)
    settled = [d for d in within if d.needed_samples is not None and "more samples" in d.reason]
    assert settled and all(d.needed_samples > 0 for d in settled)
    between = [d for d in decide_all([row(0.001, 0.03) for _ in range(40)]).decisions if d.verdict is Verdict.UNCLEAR]
    assert between and all(d.needed_samples is None for d in between)
    assert any(d.needed_rounds for d in between)


# ---------------------------------------------------------------------------------------------- rules and counts


@pytest.mark.parametrize("options", [{"threshold": -0.05}, {"threshold": NAN}, {"threshold": INF}, {"floor": -1.0}])
@pytest.mark.parametrize("limits", [{}, {"min_rounds": 0}, {"min_samples": 0}])
def test_limits_that_make_no_sense_are_named(options, limits):
    with pytest.raises(UsageError, match="a report"):
        Rule(**options)
    if limits:
        with pytest.raises(UsageError, match="at least 1 round and 1 sample"):
            Rule(**limits)


@pytest.mark.parametrize("error", [0.0, 1.0, -1.0, NAN])
def test_an_error_rate_that_is_none(error):
    with pytest.raises(ValueError, match="report_error"):
        decide_all([], report_error=error)


def test_thresholds_above_one_hundred_percent_work():
    assert decide(side(), side(2.4), Rule(threshold=1.5)).verdict is Verdict.SAME
    assert decide(side(), side(2.6), Rule(threshold=1.5)).verdict is Verdict.SLOWER


@pytest.mark.parametrize(
    "name, before, after, verdict",
    [
        ("registers", 40, 41, Verdict.WORSE),
        ("registers", 41, 40, Verdict.BETTER),
        ("registers", 40, 40, Verdict.SAME),
        ("spill_bytes", 0, 8, Verdict.WORSE),
        ("spill_bytes", 8, 0, Verdict.BETTER),
        ("spill_bytes", 0, 0, Verdict.SAME),
        ("occupancy", 32, 48, Verdict.BETTER),
        ("occupancy", 48, 32, Verdict.WORSE),
    ],
)
def test_counts_need_no_statistics(name, before, after, verdict):
    decision = decide_exact(before, after, metric_of(name))
    assert decision.verdict is verdict
    assert decision.regression == (verdict is Verdict.WORSE)
    assert decision.ratio == (after / before if before else None)


def test_a_count_may_have_a_threshold():
    instructions = metric_of("instructions")
    assert decide_exact(1000, 1020, instructions, threshold=0.02).verdict is Verdict.SAME
    assert decide_exact(1000, 1021, instructions, threshold=0.02).verdict is Verdict.WORSE
    assert decide_exact(0, 1, instructions, threshold=0.5).verdict is Verdict.WORSE
    assert "1234567 to 1234568" in decide_exact(1234567, 1234568, instructions).reason, "with all of its digits"


@pytest.mark.parametrize("value", [None, "40", NAN, INF, -1, True])
def test_what_is_no_count_is_not_comparable(value):
    for pair, name in (((value, 40), "before"), ((40, value), "after")):
        decision = decide_exact(*pair, metric_of("registers"))
        assert decision.verdict is Verdict.NOT_COMPARABLE and decision.reason.startswith(f"{name}: registers is")


# ---------------------------------------------------------------------------------------------- simulation


def simulation() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "report_simulation.py"
    spec = importlib.util.spec_from_file_location("benchmark_report_simulation", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("noise, between", [(0.01, 0.02), (0.20, 0.005)])
def test_reports_without_a_change_are_quiet_and_slowdowns_are_found(noise, between):
    script = simulation()
    result = script.simulate(script.Case("", (noise, noise), (between, between), power=True), 12, 200, seed=1)
    assert result.false_at_zero <= 1 / 12 and result.false == 0.0
    assert result.found > 0.96  # of 120: the whole simulation asks for 99%


def test_rows_of_different_noise_are_quiet_too():
    script = simulation()
    result = script.simulate(script.Case("", (0.01, 0.2), (0.005, 0.02), disturbed=0.02), 12, 200, seed=2)
    assert result.false_at_zero <= 1 / 12


# ---------------------------------------------------------------------------------------------- what tests stand on


def _pair(between: float, ratio: float) -> tuple[Side, Side]:
    """A row whose rounds lie `between` apart on either side."""
    factors = (math.exp(-between), 1.0, math.exp(between))
    samples = side().rounds[0]
    before = tuple(tuple(sample * factor for sample in samples) for factor in factors)
    return Side(before), Side(tuple(tuple(ratio * sample for sample in samples) for samples in before))


def _estimates(rows: list[Comparison]) -> Any:
    sides = [one for row in rows for one in (row.before, row.after)]
    rounds = [samples for one in sides for samples in one.rounds]
    return estimate(
        np.concatenate([np.array(r) for r in rounds]), list(map(len, rounds)), [len(s.rounds) for s in sides]
    )


def test_decisions_hold_plain_values():
    decision = decide(side(), side(1.5))
    assert isinstance(decision, Decision)
    kinds = {type(value) for name in Decision.__slots__ for value in [getattr(decision, name)]}
    assert kinds <= {Verdict, str, float, tuple, bool, type(None), int}
    assert all(type(count) is int for count in (*decision.rounds, *decision.samples))
