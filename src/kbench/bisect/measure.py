"""How a commit is measured against the good one: by a compiler's counts, or by timing both alternately."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.bisect.repository import WorkTrees
from kbench.bisect.search import Commit, Trial, Verdict
from kbench.catalog import Catalog, load_catalog
from kbench.errors import Exit, KbenchError, UsageError, worst
from kbench.git import GitError
from kbench.jobs import Job
from kbench.results.schema import STATIC, STATUSES, Row
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.compare import CompareBench, PlannedSide
    from kbench.measure.ab_statistics import Rule
    from kbench.report.model import Metric


@dataclass(frozen=True)
class Kernels:
    """Where a commit's kernels are. others: folders of families beside that of the repository, in the order in which
    they were given; position: at which of them the repository's stands."""

    trees: WorkTrees
    others: tuple[Path, ...] = ()
    position: int = 0

    def folders(self, tree: Path) -> list[Path]:
        """What --family-dir would be. A folder that the commit lacks has no families."""
        folders = [*self.others[: self.position], tree, *self.others[self.position :]]
        return [folder for folder in folders if folder.is_dir()]

    def catalog(self, tree: Path) -> Catalog:
        return load_catalog(self.folders(tree))


class CommitFault(KbenchError):
    """The good commit cannot be measured, so that there is nothing to hold others against."""

    def __init__(self, message: str, status: Exit):
        super().__init__(message, "choose another --good")
        self.exit_status = status


def compiled(catalog: Catalog, job: Job) -> Row:
    """A row of what a compiler makes of a version; whatever goes wrong is in it."""
    from kbench.compiled import compile_row
    from kbench.outcome import outcome_of

    row = Row(
        job.family, job.version, job.idea, job.sizes, job.dtype, job.block, job.arch, "pass", 0, cache_mode=STATIC,
        params=dict(job.params),
    )  # fmt: skip
    try:
        compile_row(catalog, job, row)
    except Exception as error:
        row.status, row.reason, row.details = outcome_of(error)
    return row


def job_of(catalog: Catalog, selection: Selection, block: int | None) -> Job:
    """The one row that a selection of one version stands for. Raises UsageError for several problems."""
    jobs = list(selection.jobs(catalog, "cuda"))
    if len({str(job.sizes) for job in jobs}) > 1:
        raise UsageError("one problem can be bisected at a time", "give each --size a single value")
    return replace(jobs[0], block=block) if block is not None else jobs[0]


@dataclass
class CountMeasurer:
    """Judges commits by a count that a compiler gives: the largest of all kernels, the smallest where less is worse.

    job: with its architecture. least: what counts as worse, as a share; 0 for any.
    """

    kernels: Kernels
    good: Commit
    job: Job
    metric: Metric
    least: float = 0.0
    _reference: float | None = None

    def begin(self) -> float:
        """The good commit's count. Raises CommitFault where it has none, UsageError for an unknown metric."""
        with self.kernels.trees.lent(self.good) as tree:
            row = self._row(tree)
        if row.status != "pass":
            raise CommitFault(
                f"{self.good.short}, the good commit, is {row.status}: {row.reason}", STATUSES[row.status]
            )
        known = sorted({name for counts in row.metrics.values() for name in counts})
        if self.metric.name not in known:
            raise UsageError(f"there is no metric {self.metric.name!r}", f"write time, or one of {', '.join(known)}")
        self._reference = self._count(row)
        return self._reference

    def __call__(self, commit: Commit) -> Trial:
        try:
            with self.kernels.trees.lent(commit) as tree:
                row = self._row(tree)
        except GitError as error:
            return Trial(commit, Verdict.SKIP, reason=str(error))
        if row.status != "pass":
            return Trial(commit, Verdict.SKIP, reason=f"{row.status}: {row.reason}")
        before, value = self._reference, self._count(row)
        assert before is not None
        change = (value - before) * self.metric.worse
        bad = change > 0 and change >= self.least * abs(before)
        ratio = value / before if before else math.inf if value else 1.0
        return Trial(commit, Verdict.BAD if bad else Verdict.GOOD, value, ratio)

    def _row(self, tree: Path) -> Row:
        try:
            row = compiled(self.kernels.catalog(tree), self.job)
        except KbenchError as error:
            row = Row("", 0, "", {}, "", 0, "", "invalid", 0, reason=str(error))
        row.reason = self.kernels.trees.plain(row.reason)
        return row

    def _count(self, row: Row) -> float:
        counts = [counts[self.metric.name] for counts in row.metrics.values() if self.metric.name in counts]
        return float(max(counts) if self.metric.worse > 0 else min(counts))


@dataclass
class TimeMeasurer:
    """Judges commits by timing their kernels and the good one's alternately, in one process on one GPU: what the
    machine does in the meantime happens to both.

    bench: open, with the folders of the good commit. planned: the version at the problem and block size. least: how
    much slower is slower. code: the hash of a commit's machine code where it can be compiled for this GPU here, else
    "": what is the same machine code as a commit that was timed is not timed again.
    """

    kernels: Kernels
    good: Commit
    bench: CompareBench
    planned: PlannedSide
    rule: Rule
    least: float
    code: Callable[[Path], str]
    _known: dict[str, Trial] | None = None

    def begin(self) -> None:
        """Remember the good commit's machine code."""
        self._known = {}
        if code := self.code(self.kernels.trees.folder(self.good)):
            self._known[code] = Trial(self.good, Verdict.GOOD, ratio=1.0)

    def __call__(self, commit: Commit) -> Trial:
        known = self._known if self._known is not None else {}
        try:
            with self.kernels.trees.lent(commit) as tree:
                code = self.code(tree)
                if code and code in known:
                    same = known[code]
                    return replace(same, commit=commit, reason=f"the same machine code as {same.commit.short}")
                trial = self._timed(commit, tree)
        except GitError as error:
            return Trial(commit, Verdict.SKIP, reason=str(error))
        if code and trial.verdict is not Verdict.SKIP:
            known[code] = trial
        return trial

    def _timed(self, commit: Commit, tree: Path) -> Trial:
        folders = [str(folder) for folder in self.kernels.folders(tree)]
        try:
            answer = self.bench.compare((self.planned, self.planned), self.rule, "", folders)
        except KbenchError as error:  # the version is not there, a family file is at fault, or the worker was lost
            return Trial(commit, Verdict.SKIP, reason=self.kernels.trees.plain(str(error)))
        first, second = answer.rows
        if first.status != "pass":
            what = f"{self.good.short}, the good commit, is {first.status}: {first.reason}"
            raise CommitFault(what, worst([STATUSES[first.status], STATUSES[second.status]]))
        if second.status != "pass" or answer.comparison is None:
            reason = self.kernels.trees.plain(second.reason)
            return Trial(commit, Verdict.SKIP, reason=f"{second.status}: {reason}")
        return self._judged(commit, answer.comparison)

    def _judged(self, commit: Commit, comparison: dict[str, Any]) -> Trial:
        estimate = comparison["estimate"]
        # The comparison's ratio is the good one's time over this one's.
        ratio, low, high = 1 / estimate["ratio"], 1 / estimate["high"], 1 / estimate["low"]
        slower = ratio >= 1 + self.least and low > 1
        note = "" if not low <= 1 + self.least <= high else ", near the threshold"
        reason = f"interval {low:.3f}..{high:.3f}{note}"
        verdict = Verdict.BAD if slower and not comparison["same_code"] else Verdict.GOOD
        return Trial(commit, verdict, float(comparison["sides"][1]["median_ms"]), ratio, reason)


def code_of(kernels: Kernels, job: Job, arch: str) -> Callable[[Path], str]:
    """What hashes a commit's machine code for an architecture; "" where it cannot be compiled here."""

    def hashed(tree: Path) -> str:
        with contextlib.suppress(KbenchError):
            return compiled(kernels.catalog(tree), replace(job, arch=arch)).code
        return ""

    return hashed
