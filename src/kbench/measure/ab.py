"""Two sides timed alternately: in what order, where in memory, and what is thrown away.

A block is four samples in the order A B B A or B A A B, by a coin: two neighbouring pairs, in which each side comes
first once and second once, so that whatever drifts cancels. The samples take turns in two places in memory, so each
side runs once in each: what one place has over the other cancels as well. Several rounds, each in places of its own,
let what stays of both show as what it is: a difference between rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kbench.errors import CannotRunError
from kbench.measure.ab_statistics import Block, Design, Rule, design
from kbench.measure.collect import Sample
from kbench.measure.statistics import plural

A, B = 0, 1
SIDES = (A, B)

# After other buffers were bound and the GPU waited for them: clocks and address translation settle.
WARMUP_S = 0.02
# Launches of this length (all four of a block together) warm up by themselves, and are not waited for twice.
LONG_BLOCK_S = 0.2
# Blocks of the pilot: enough for the quartiles of its pairs.
PILOT_BLOCKS = 16
PILOT_SHARE = 0.1  # of the budget, beyond which the pilot of a slow plan ends early
PILOT_LEAST = 1
# Blocks thrown away in one round, beside as many as were kept: more have a cause that goes on.
MAX_THROWN_AWAY = 20
# Of a millisecond, in records: 1 ns, far below the resolution of an event.
_DIGITS = 6
# Seconds of rest before a round, drawn anew each time, so that rounds do not march in step with anything periodic.
REST_S = (0.001, 0.01)


class Take(Protocol):
    """Times one launch of side A (0) or B (1) in one of the places of this round (0, 1)."""

    def __call__(self, side: int, place: int, *, hold: bool = True) -> Sample: ...


@dataclass(frozen=True)
class Timed:
    """One sample that counts: whose it is, and in which place it ran."""

    side: int
    place: int
    sample: Sample

    @property
    def ms(self) -> float:
        return self.sample.event_ms


@dataclass
class Round:
    """The blocks of one round, four samples each in the order in which they were taken, and why others do not count."""

    blocks: list[tuple[Timed, ...]] = field(default_factory=list)
    thrown_away: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def samples(self, side: int) -> list[Sample]:
        return [timed.sample for block in self.blocks for timed in block if timed.side == side]

    def log_ratios(self) -> list[Block]:
        """What the statistics take."""
        return [_log_ratios(block) for block in self.blocks]


@dataclass
class Comparison:
    """All rounds. The pilot's are not among them."""

    design: Design
    rounds: list[Round]

    @property
    def thrown_away(self) -> list[str]:
        return [fault for one in self.rounds for fault in one.thrown_away]

    def samples(self, side: int) -> list[Sample]:
        """All samples of a side that count."""
        return [sample for one in self.rounds for sample in one.samples(side)]

    def raw(self) -> list[list[list[Any]]]:
        """As records keep it: each round's blocks, each with the order of its sides ("ABBA"), the place of its first
        sample (they take turns), and its four times in milliseconds."""
        return [[_raw(block) for block in one.blocks] for one in self.rounds]


def compare(
    new_round: Callable[[int], AbstractContextManager[tuple[Take, int]]],
    rule: Rule,
    rng: random.Random,
    planned: Callable[[Design, float], None] = lambda design, seconds: None,
) -> Comparison:
    """Take a pilot, decide how much to take, and take it.

    new_round: allocates and binds anew; what it yields is how to take a sample, and whether there are two places or
    one. Called with 0 for the pilot, then from 1 on. planned: called with what was decided, and the seconds that it
    will take.
    Raises CannotRunError if too many samples are faulty.
    """
    started = time.perf_counter()
    pilot, setup_s = _pilot(new_round, rule, rng)
    block_s = pilot.seconds / len(pilot.blocks)
    left = max(rule.budget_s - (time.perf_counter() - started), block_s)
    decided = design(pilot.log_ratios(), block_s, setup_s, left, rule)
    planned(decided, decided.rounds * (setup_s + decided.blocks * block_s))
    rounds = []
    for number in range(1, decided.rounds + 1):
        time.sleep(rng.uniform(*REST_S))
        with new_round(number) as (take, places):
            if block_s < LONG_BLOCK_S:
                _warm_up(take, places, hold=True)
            rounds.append(_round(take, places, rng, lambda taken: len(taken.blocks) >= decided.blocks))
    return Comparison(decided, rounds)


def _pilot(
    new_round: Callable[[int], AbstractContextManager[tuple[Take, int]]], rule: Rule, rng: random.Random
) -> tuple[Round, float]:
    """The round that decides how much to take, and the seconds that preparing it took."""

    def enough(taken: Round) -> bool:
        if len(taken.blocks) >= PILOT_BLOCKS:
            return True
        spent = time.perf_counter() - began
        return len(taken.blocks) >= PILOT_LEAST and spent >= PILOT_SHARE * rule.budget_s

    started = time.perf_counter()
    with new_round(0) as (take, places):
        # The first launches are not held: what the driver loads lazily would wait for the hold to end.
        _warm_up(take, places, hold=False)
        began = time.perf_counter()
        return _round(take, places, rng, enough), began - started


def _warm_up(take: Take, places: int, hold: bool) -> None:
    """Each side in each place at least once, all again until the GPU has been busy for a while."""
    started = time.perf_counter()
    while True:
        for place in range(places):
            for side in SIDES:
                take(side, place, hold=hold)
        if time.perf_counter() - started >= WARMUP_S:
            return
        hold = True


def _round(take: Take, places: int, rng: random.Random, enough: Callable[[Round], bool]) -> Round:
    started = time.perf_counter()
    taken = Round()
    while not enough(taken):
        block, fault = _take_block(take, places, rng)
        if not fault:
            taken.blocks.append(block)
            continue
        taken.thrown_away.append(fault)
        if len(taken.thrown_away) >= MAX_THROWN_AWAY + len(taken.blocks):
            counts = f"{plural(len(taken.thrown_away), 'block')} of samples thrown away, {len(taken.blocks)} kept"
            raise CannotRunError(f"{counts}: {fault}", "see that nothing else uses the GPU, and try again")
    taken.seconds = time.perf_counter() - started
    return taken


def _take_block(take: Take, places: int, rng: random.Random) -> tuple[tuple[Timed, ...], str]:
    """Four samples, or as many as were taken until one was faulty, and its fault. A pair with a faulty half is thrown
    away whole, and with it its neighbour, without which it would not be in balance."""
    first, place = rng.choice(SIDES), rng.randrange(2)
    samples: list[Timed] = []
    for side in (first, 1 - first, 1 - first, first):
        where = place if places > 1 else 0
        sample = take(side, where)
        if fault := sample.fault or _unusable(sample.event_ms):
            return tuple(samples), fault
        samples.append(Timed(side, where, sample))
        place = 1 - place
    return tuple(samples), ""


def _unusable(ms: float) -> str:
    return "" if math.isfinite(ms) and ms > 0 else f"an event time of {ms} ms"


def _log_ratios(block: tuple[Timed, ...]) -> Block:
    """Of the pair with A in the first place, and of that with A in the second; with a single place, in any order."""
    pairs = []
    for pair in (block[:2], block[2:]):
        a, b = sorted(pair, key=lambda timed: timed.side)
        pairs.append((a.place, math.log(a.ms / b.ms)))
    (_, first), (_, second) = sorted(pairs, key=lambda pair: pair[0])
    return first, second


def _raw(block: tuple[Timed, ...]) -> list[Any]:
    return ["".join("AB"[t.side] for t in block), block[0].place, *(round(t.ms, _DIGITS) for t in block)]
