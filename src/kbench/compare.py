"""The bench of a comparison: two versions side by side in one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kbench.device.worker import WorkerLost
from kbench.jobs import Job
from kbench.measure.ab_statistics import Rule
from kbench.results.schema import Row
from kbench.selection import Selection
from kbench.sides import Side
from kbench.sweep import Bench


@dataclass(frozen=True)
class PlannedSide:
    """A side with its problem, block size and parameters. why: where the block size comes from; params_from: by name,
    where each parameter does."""

    side: Side
    job: Job
    why: str
    params_from: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Rows of both sides, proven or not, and `kbench.pair_rounds.describe` with `same_code`: None on a device without
    times, and where a side failed."""

    rows: tuple[Row, Row]
    comparison: dict[str, Any] | None


class CompareBench(Bench):
    """A bench that can also compare."""

    handler = "kbench.evaluate_pair:serve"

    def __enter__(self) -> CompareBench:
        super().__enter__()
        return self

    def sides(self, sides: Sequence[Side], select: Selection, results: Path) -> tuple[PlannedSide, PlannedSide]:
        """What to run for each side. select: sizes, preset and dtype; the targets are those of the sides. results: the
        folder with best.json. Raises UsageError for names and values that do not exist, and for several problems."""
        request = {"do": "sides", "sides": [asdict(side) for side in sides], "select": asdict(select)}
        first, second = self._call({**request, "results": str(results)})
        return self._planned(sides[0], first), self._planned(sides[1], second)

    def compare(
        self, sides: Sequence[PlannedSide], rule: Rule, again: str, second_folders: Sequence[str] = ()
    ) -> Answer:
        """Prove both, time them alternately, prove them again. again: the command that repeats it. second_folders: the
        family folders of the second side, where they are not those of the bench.

        Raises KernelFault if the worker is lost: it cannot say which side was at fault.
        """
        jobs, files = [asdict(side.job) for side in sides], [side.side.file for side in sides]
        request = {"do": "compare", "jobs": jobs, "files": files, "rule": asdict(rule), "again": again}
        request["second_folders"] = list(second_folders)
        try:
            answer = self._call(request)
        except WorkerLost as lost:
            self._worker = None
            raise lost.fault from None
        if answer["lost"]:
            self._drop_worker()
        first, second = map(Row.from_dict, answer["rows"])
        return Answer((first, second), answer["comparison"])

    def _planned(self, side: Side, answer: dict[str, Any]) -> PlannedSide:
        return PlannedSide(side, Job(**answer["job"]), answer["why"], answer["params_from"])
