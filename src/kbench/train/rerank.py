"""Close choices, decided inside the step: what wins alone with a cold L2 can lose where its input was just written.

Each alternative that comes near the chosen one, in a slot that matters, takes its place in turn; the whole step is
timed, as graphs, and the faster one stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kbench.errors import CannotRunError
from kbench.family import Array
from kbench.train.chooser import Answer, Chooser
from kbench.train.model import WEIGHT_STD
from kbench.train.slots import Shape
from kbench.train.trainer import Settings, State, Trainer, fresh_state

if TYPE_CHECKING:
    from kbench.train.setup import Chosen, Workshop

# How much slower alone an alternative may be: about what a warm L2 was seen to change in a step.
_NEAR = 1.05
# Slots below this share of the step are left as they are: no choice there shows in the step's time.
_MATTERS = 0.003
# Alternatives per slot. Each costs a few seconds: a new step is prepared, bound and captured.
_PER_SLOT = 2
# Steps that are timed at once, and how often: the smallest of the means is the least disturbed one.
_STEPS, _ROUNDS = 5, 4
# A step has to be faster by more than such means of one and the same step differ.
_CLEARLY = 0.998


def alternatives(answers: Sequence[Answer], chooser: Chooser) -> Iterator[tuple[int, Answer]]:
    """Slots by number, with answers close to the one chosen."""
    total = sum(answer.cost for answer in answers)
    for number, answer in enumerate(answers):
        if not answer.cost >= _MATTERS * total:
            continue
        near = [
            other
            for other in chooser.alternatives(answer.slot)
            if other.cost <= _NEAR * answer.cost and _versions(other) != _versions(answer)
        ]
        for other in sorted(near, key=lambda one: one.cost)[:_PER_SLOT]:
            yield number, other


def rerank(
    chosen: Chosen,
    others: Iterable[tuple[int, Answer]],
    built: Callable[[Sequence[Answer]], Chosen],
    time_step: Callable[[Chosen], float],
) -> Chosen:
    """The fastest step that is found by changing one slot after the other. time_step: any unit; infinite for a step
    that cannot run."""
    best, best_time = chosen, None
    for number, other in others:
        if best_time is None:
            best_time = time_step(best)
        answers = [*best.answers[:number], other, *best.answers[number + 1 :]]
        candidate = built(answers)
        taken = time_step(candidate)
        if taken < _CLEARLY * best_time:
            best, best_time = candidate, taken
    return best


def _versions(answer: Answer) -> list[tuple[str, int]]:
    return [(c.need.role, c.version.number) for c in answer.candidates]


class StepTimer:
    """Times whole steps of one shape on random weights and tokens; the same for all that are compared."""

    def __init__(self, workshop: Workshop, shape: Shape):
        self._workshop = workshop
        rng = np.random.default_rng(0)
        model = shape.model
        # As spread as real ones, so that nothing overflows: a step of NaNs might take another time.
        weights: dict[str, Array] = {
            p.name: rng.standard_normal(p.shape, np.float32) * np.float32(WEIGHT_STD) + np.float32(p.constant)
            for p in model.parameters
        }
        self._state: State = fresh_state(weights, shape.storage)
        self._tokens: Array = rng.integers(0, model.vocab, (2, shape.batch, shape.seq)).astype(np.int32)

    def __call__(self, chosen: Chosen) -> float:
        """Milliseconds of a micro-step and an update; infinite where memory is too short for it."""
        engine = self._workshop.engine(chosen)
        try:
            try:
                engine.allocate()
            except CannotRunError:
                return float("inf")
            trainer = Trainer(engine, chosen.shape, Settings([0.0]))
            trainer.load(replace(self._state))
            trainer.feed.put(*self._tokens)
            return min(self._round(trainer) for _ in range(_ROUNDS))
        finally:
            engine.close()

    def _round(self, trainer: Trainer) -> float:
        return sum(trainer.measure(part, _STEPS, time.perf_counter) for part in ("first", "update")) * 1e3
