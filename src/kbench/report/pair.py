"""Which rows are held against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kbench.report.records import Experiment, Loaded


@dataclass(frozen=True, slots=True)
class Pair:
    """An experiment on both sides, or on one."""

    before: Experiment | None
    after: Experiment | None

    @property
    def other_device(self) -> bool:
        return self.before is not None and self.after is not None and self.before.device != self.after.device


def pairs(before: Loaded, after: Loaded) -> Iterator[Pair]:
    """Every experiment of both sides once.

    Those of the same device are pairs. What is then left of both sides is a pair too: that it ran on another device
    is why it cannot be compared, and not that it is gone and something else new.
    """
    for key, mine in before.experiments.items():
        others = dict(after.experiments.get(key, {}))
        left = [experiment for device, experiment in mine.items() if device not in others]
        for device, experiment in mine.items():
            if device in others:
                yield Pair(experiment, others.pop(device))
        for experiment in left:
            yield Pair(experiment, others.pop(next(iter(others))) if others else None)
        for experiment in others.values():
            yield Pair(None, experiment)
    for key, mine in after.experiments.items():
        if key not in before.experiments:
            for experiment in mine.values():
                yield Pair(None, experiment)
