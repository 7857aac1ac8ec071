"""The rounds of a comparison on a GPU: in each, memory anew, and both plans bound wherever the other one runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kbench.check.buffers import Buffers
from kbench.check.case import Case
from kbench.check.place import place_bytes, shared_place
from kbench.check.prove import POISONS
from kbench.device.base import Bound, Prepared
from kbench.family import Tensor
from kbench.measure import ab
from kbench.measure.ab_statistics import Design, Rule, estimate
from kbench.measure.collect import Sample
from kbench.measure.statistics import confidence_interval, median
from kbench.measure.timer import Timer, remarks

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# GPU memory beside two places and the inputs as they were drawn, which are at most as large as one: what judging an
# output takes, and the workspaces of libraries.
_MARGIN_BYTES = 1 << 30
# At most, of a block in front of a round's places: without it they would lie where the last round's lay.
_SHIFT_MIB = 32
_DIGITS = 6  # of a millisecond


@dataclass(frozen=True)
class Plan:
    """One side: what was proven, the inputs that it runs on, and how to get buffers for it (without memory yet)."""

    prepared: Prepared
    case: Case
    buffers: Callable[[], Buffers]


class PairRounds:
    """Times two plans alternately.

    on_launch: called before each launch, to tell a watchdog that the last one ended. at_end: called with the buffers of
    both sides, as they were timed, after the last round. side: whose launch came last. places: how many there are, 2
    or, where memory is short, 1.
    """

    def __init__(
        self,
        device: CudaDevice,
        timer: Timer,
        plans: Sequence[Plan],
        rng: random.Random,
        on_launch: Callable[[], None],
        at_end: Callable[[Sequence[Buffers]], None],
    ):
        self._device, self._timer, self._plans, self._rng = device, timer, plans, rng
        self._on_launch, self._at_end = on_launch, at_end
        self._last = -1
        self.side = ab.A
        needed = place_bytes([plan.buffers() for plan in plans])
        self.places = 2 if 3 * needed + _MARGIN_BYTES <= device.free_memory() else 1

    def compare(self, rule: Rule, planned: Callable[[Design, float], None]) -> ab.Comparison:
        """See `ab.compare`. Raises KernelFault if a launch fails, CannotRunError without memory or valid samples."""

        def decided(design: Design, seconds: float) -> None:
            self._last = design.rounds
            planned(design, seconds)

        return ab.compare(self._round, rule, self._rng, decided)

    @contextmanager
    def _round(self, number: int) -> Iterator[tuple[ab.Take, int]]:
        device = self._device
        with self._memory() as places, device.activate():
            bounds = [
                [self._bind(plan, view) for plan, view in zip(self._plans, views, strict=True)] for views in places
            ]

            def take(side: int, place: int, *, hold: bool = True) -> Sample:
                self.side = side
                self._on_launch()
                return self._timer.sample(bounds[place][side], places[place][side].restore, hold=hold)

            yield take, self.places
            if number == self._last:
                # In the places of the other side in which each ran last, or in the only one.
                self._at_end([places[side % self.places][side] for side in ab.SIDES])

    def _bind(self, plan: Plan, view: Buffers) -> Bound:
        view.reset(plan.case, POISONS[0])
        bound = view.bind(plan.prepared)
        self._device.distribute(bound)
        return bound

    @contextmanager
    def _memory(self) -> Iterator[list[list[Buffers]]]:
        """Of each place, both sides' buffers in it."""
        device = self._device
        places = [[plan.buffers() for plan in self._plans] for _ in range(self.places)]
        try:
            with ExitStack() as stack:
                if self.places > 1:
                    stack.enter_context(self._shifted())
                for views in places:
                    stack.enter_context(shared_place(device, views))
                yield places
        finally:
            # Kept in the pool, the next round would get the very same memory.
            device.xp.get_default_memory_pool().free_all_blocks()

    @contextmanager
    def _shifted(self) -> Iterator[None]:
        nbytes = self._rng.randint(1, _SHIFT_MIB) << 20
        block = self._device.alloc(Tensor("shift", (nbytes,), "uint8", "scratch"))
        try:
            yield
        finally:
            self._device.free(block)


def describe(comparison: ab.Comparison, rounds: PairRounds, timer: Timer, rule: Rule) -> dict[str, Any]:
    """What a comparison showed, as records keep it; every number is finite or, where there is none, infinite."""
    return {
        "mode": "cold",
        "rule": asdict(rule),
        "estimate": asdict(estimate([one.log_ratios() for one in comparison.rounds], rule)),
        "sides": [_side(comparison.samples(side), timer) for side in ab.SIDES],
        "places": rounds.places,
        "overhead_ms": round(timer.overhead_ms, _DIGITS),
        "thrown_away": comparison.thrown_away,
        "rounds": comparison.raw(),
    }


def _side(samples: list[Sample], timer: Timer) -> dict[str, Any]:
    times = [sample.event_ms for sample in samples]
    interval = confidence_interval(times)
    return {
        "median_ms": round(median(times), _DIGITS),
        "low_ms": round(interval.low, _DIGITS),
        "high_ms": round(interval.high, _DIGITS),
        "samples": len(times),
        "notes": remarks(timer, samples),
    }
