"""The order in which two sides are timed, what cancels in it, and what is thrown away."""

import math
import random
from collections import Counter
from contextlib import contextmanager

import pytest

from kbench.errors import CannotRunError
from kbench.measure import ab
from kbench.measure.ab_statistics import Rule, estimate
from kbench.measure.collect import Sample

QUICK = Rule(minimum=64, maximum=64)


class Kernels:
    """Two kernels whose launches take what `ms(side, place, number of launch)` says."""

    def __init__(self, ms=lambda side, place, number: 0.1, places=2, fault=lambda number: ""):
        self.ms, self.places, self.fault = ms, places, fault
        self.rounds, self.open, self.taken = [], 0, []

    @contextmanager
    def new_round(self, number):
        self.rounds.append(number)
        assert self.open == 0
        self.open += 1
        yield self.take, self.places
        self.open -= 1

    def take(self, side, place, *, hold=True):
        number = len(self.taken)
        self.taken.append((side, place, hold))
        time = self.ms(side, place, number)
        return Sample(time, time, self.fault(number))

    def compare(self, rule=QUICK, seed=1, **more):
        return ab.compare(self.new_round, rule, random.Random(seed), **more)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(ab, "WARMUP_S", 0.0)
    monkeypatch.setattr(ab.time, "sleep", lambda seconds: None)


def ratio(comparison):
    return estimate([one.log_ratios() for one in comparison.rounds], QUICK).ratio


def test_each_block_has_each_side_in_each_place_and_in_both_positions():
    comparison = Kernels().compare()
    assert len(comparison.rounds) == 16
    blocks = [block for one in comparison.rounds for block in one.blocks]
    assert len(blocks) == 32
    for block in blocks:
        sides = [timed.side for timed in block]
        assert sides in ([0, 1, 1, 0], [1, 0, 0, 1])
        assert Counter((timed.side, timed.place) for timed in block) == {(s, p): 1 for s in (0, 1) for p in (0, 1)}
    assert len({(block[0].side, block[0].place) for block in blocks}) == 4  # all by a coin


def test_the_ratio_is_time_of_a_over_time_of_b():
    assert ratio(Kernels(lambda side, place, number: (0.3, 0.2)[side]).compare()) == pytest.approx(1.5)


def test_drift_and_places_cancel():
    drifting = Kernels(lambda side, place, number: (1 + 0.1 * place) * math.exp(1e-3 * number))
    assert ratio(drifting.compare()) == pytest.approx(1.0, abs=1e-9)


def test_log_ratios_are_told_apart_by_the_place_of_a():
    comparison = Kernels(lambda side, place, number: 1 + place).compare()
    pairs = [pair for one in comparison.rounds for pair in one.log_ratios()]
    assert pairs == [pytest.approx((-math.log(2), math.log(2)))] * len(pairs)


def test_one_place_serves_where_there_is_no_second():
    comparison = Kernels(lambda side, place, number: (0.3, 0.2)[side], places=1).compare()
    assert {timed.place for one in comparison.rounds for block in one.blocks for timed in block} == {0}
    assert ratio(comparison) == pytest.approx(1.5)


def test_a_block_with_a_faulty_sample_is_thrown_away_whole():
    kernels = Kernels(fault=lambda number: "throttled" if number % 11 == 0 else "")
    comparison = kernels.compare()
    assert all(len(block) == 4 for one in comparison.rounds for block in one.blocks)
    assert sum(len(one.blocks) for one in comparison.rounds) == 32
    assert set(comparison.thrown_away) == {"throttled"}
    faulty = {number for number in range(len(kernels.taken)) if number % 11 == 0}
    assert len(faulty) >= len(comparison.thrown_away) > 0


@pytest.mark.parametrize("ms", [0.0, math.nan, math.inf, -1.0])
def test_times_that_are_none_are_faulty(ms):
    with pytest.raises(CannotRunError, match="thrown away, 0 kept: an event time of"):
        Kernels(lambda side, place, number: ms).compare()


def test_the_pilot_counts_for_nothing():
    kernels = Kernels()
    kernels.ms = lambda side, place, number: (9.0, 1.0)[side] if kernels.rounds == [0] else 0.1
    comparison = kernels.compare()
    assert ratio(comparison) == pytest.approx(1.0)
    assert kernels.rounds == list(range(17))


def test_only_the_very_first_launches_are_not_held():
    kernels = Kernels()
    kernels.compare()
    assert [hold for _, _, hold in kernels.taken[:5]] == [False, False, False, False, True]
    assert all(hold for _, _, hold in kernels.taken[4:])


def test_what_was_decided_is_said_before_it_is_done():
    said = []
    kernels = Kernels()
    comparison = kernels.compare(planned=lambda design, seconds: said.append((design, seconds, len(kernels.rounds))))
    ((decided, seconds, rounds),) = said
    assert decided == comparison.design and seconds > 0 and rounds == 1


def test_records_hold_order_place_and_times():
    comparison = Kernels(lambda side, place, number: 0.1234567891).compare()
    first = comparison.raw()[0][0]
    assert first[0] in ("ABBA", "BAAB") and first[1] in (0, 1)
    assert first[2:] == [0.123457] * 4
