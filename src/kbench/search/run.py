"""Searches: of the rows of a sweep those that a strategy asks for, proved and timed like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kbench.errors import CannotRunError
from kbench.jobs import Job
from kbench.results.best import median
from kbench.results.schema import Row
from kbench.search.space import Place, Space, spaces
from kbench.search.strategies import require_strategy, search


class RowSource(Protocol):
    """Runs jobs: `kbench.sweep.Bench`."""

    seed: int

    def rows(self, jobs: Sequence[Job]) -> Iterator[Row]: ...


@dataclass
class Searched:
    """What came of one space: how many rows of it were measured, and how many it has."""

    space: str
    strategy: str
    rows: int
    size: int


@dataclass(frozen=True)
class Search:
    """A search in each space of a sweep. most: rows of each, None for the usual number.

    Raises UsageError for an unknown strategy, CannotRunError where its package is missing.
    """

    strategy: str
    most: int | None = None

    def __post_init__(self) -> None:
        require_strategy(self.strategy)

    def require_times(self, device_kind: str) -> None:
        """Raise CannotRunError for a device without times, which are what a search compares."""
        if device_kind != "cuda":
            what = f"--strategy {self.strategy} looks for the shortest time, and the emulator has none"
            raise CannotRunError(what, "leave --strategy out, or run it on a GPU")

    def planned(self, jobs: Sequence[Job]) -> list[Job]:
        """As many jobs as rows may be measured, of each space so many; which ones, nobody knows yet."""
        return [job for space in spaces(jobs) for job in space.jobs[: space.budget(self.most)]]

    def run(self, bench: RowSource, jobs: Sequence[Job], take: Callable[[Row], object]) -> Iterator[Searched]:
        """Search in one space after the other; `take` gets every row as soon as it is there."""
        for space in spaces(jobs):
            found = Searched(space.name, self.strategy, 0, len(space.jobs))
            yield found  # before it begins: what a Ctrl-C leaves is counted, too
            self._search(space, bench, take, found)

    def _search(self, space: Space, bench: RowSource, take: Callable[[Row], object], found: Searched) -> None:
        def measured(jobs: Sequence[Job]) -> list[float | None]:
            times: list[float | None] = []
            for row in bench.rows(jobs):
                take(row)
                found.rows += 1
                times.append(median(row) if row.may_win else None)
            return times

        def objective(places: Sequence[Place]) -> list[float | None]:
            return measured([space.by_place[place] for place in places])

        budget = space.budget(self.most)
        if budget == len(space.jobs):  # nothing to choose
            measured(space.jobs)
        else:
            search(self.strategy, space.axes, budget, bench.seed, objective)
