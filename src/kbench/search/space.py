"""What a search looks through: the rows of one version at one problem, by block size and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kbench.jobs import Job

# The name of the block size among the axes. Parameters are upper case, so it is none of theirs.
BLOCK = "block"

# Rows of a search where the user gives no number. Populations of the strategies have up to 26 members: with fewer rows
# than that many and some more, a search is a random sample. And whoever has a quarter of the rows measured has the time
# to measure all of them.
LEAST_ROWS = 32
SHARE = 0.25

Place = tuple[int, ...]  # a value for each axis


@dataclass(frozen=True)
class Space:
    """All rows of one version at one problem. jobs: at least one, each combination of the axes' values once."""

    jobs: Sequence[Job]

    @property
    def name(self) -> str:
        first = self.jobs[0]
        sizes = " ".join(f"{name}={size}" for name, size in first.sizes.items())
        return f"{first.family}:{first.version} {sizes} {first.dtype}"

    @cached_property
    def axes(self) -> dict[str, list[int]]:
        """By name the values that a row may have, in the order in which they would be swept; those with one value are
        no axes."""
        names = [BLOCK, *self.jobs[0].params]
        values = {name: list(dict.fromkeys(_value(job, name) for job in self.jobs)) for name in names}
        return {name: found for name, found in values.items() if len(found) > 1}

    @cached_property
    def by_place(self) -> dict[Place, Job]:
        """Each job by its values on the axes."""
        return {tuple(_value(job, name) for name in self.axes): job for job in self.jobs}

    def budget(self, most: int | None) -> int:
        """How many rows a search may measure. most: what the user allows, None for the usual number."""
        usual = max(LEAST_ROWS, math.ceil(SHARE * len(self.jobs)))
        return min(len(self.jobs), usual if most is None else most)


def spaces(jobs: Iterable[Job]) -> list[Space]:
    """The spaces that jobs are rows of, in the order in which they come."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.family, job.version, tuple(job.sizes.items()), job.dtype), []).append(job)
    return [Space(group) for group in groups.values()]


def _value(job: Job, name: str) -> int:
    return job.block if name == BLOCK else job.params[name]
