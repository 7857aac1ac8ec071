"""Series: one number of one experiment over the runs of a folder, oldest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kbench.errors import UsageError
from kbench.history.segments import Change, changes_of, scatter
from kbench.params import place_text
from kbench.report.metrics import TIME, Reader, metric_of
from kbench.report.model import Metric
from kbench.report.surroundings import Surroundings
from kbench.results.facts import Card
from kbench.results.listing import moment
from kbench.results.merge import parts
from kbench.results.revisions import revision_text
from kbench.results.rounds import merged
from kbench.results.schema import Row
from kbench.results.sound import is_sound
from kbench.results.store import Run, read_run

# Of a median whose interval is (low, high) with 95%: two standard errors either way, nearly.
_INTERVAL_ERRORS = 2 * 1.959964


@dataclass(frozen=True, order=True)
class Key:
    """What makes one series. kernel: "" but for counts, which are a kernel's own."""

    version: int
    problem: str
    dtype: str
    block: int
    params: tuple[tuple[str, int], ...]
    cache_mode: str
    device: str
    kernel: str = ""

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, dict(self.params))


@dataclass(frozen=True)
class Point:
    """One run's number. low, high: its 95% interval, equal to it for a count. source: the fingerprint of the version's
    files. around, uses: what it depends on beside the kernel, and which libraries it uses. revision: the commit that
    the kernels were of (`kbench.results.revisions.revision_text`), "" where that is not known."""

    run: str
    started: datetime | None
    value: float
    low: float
    high: float
    source: str
    around: Surroundings
    uses: frozenset[str]
    revision: str = ""

    @property
    def error(self) -> float:
        """Its standard error, of 1."""
        return (self.high - self.low) / _INTERVAL_ERRORS / self.value if self.value > 0 else 0.0


@dataclass
class Series:
    """Points, oldest first. failed: runs in which it was no number, and what it was. metric: what the numbers are.
    least: changes that count, as a share; of counts any does."""

    family: str
    key: Key
    metric: Metric
    least: float
    points: list[Point] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    @cached_property
    def breaks(self) -> dict[int, str]:
        """By the position of a run, why it cannot be compared with the one before it."""
        found = {}
        for position, (before, after) in enumerate(zip(self.points, self.points[1:], strict=False), start=1):
            difference = before.around.against(after.around, before.uses | after.uses)
            if why := difference.counts if self.metric.exact else difference.times:
                found[position] = f"{why.name} {why.one}, then {why.other}"
        return found

    @property
    def stretches(self) -> list[range]:
        """Positions of runs that can be compared with each other."""
        ends = [0, *sorted(self.breaks), len(self.points)]
        return [range(start, end) for start, end in zip(ends, ends[1:], strict=False)]

    @cached_property
    def changes(self) -> list[Change]:
        """The changes within each stretch; `at` and `since` are positions in `points`."""
        if self.metric.exact:
            return self._steps()
        logs = [[math.log(self.points[i].value) for i in stretch] for stretch in self.stretches]
        errors = [[self.points[i].error for i in stretch] for stretch in self.stretches]
        c = scatter(logs, errors)
        found = []
        for stretch, y, e in zip(self.stretches, logs, errors, strict=True):
            for change in changes_of(y, e, c, self.least):
                since = stretch[change.since] if change.since is not None else None
                found.append(Change(change.kind, stretch[change.at], change.ratio, change.low, change.high, since))
        return found

    @property
    def ratio(self) -> float | None:
        """The last number over the first that it can be compared with; None for one alone, or a first of zero."""
        last = self.stretches[-1] if self.points else range(0)
        if len(last) < 2 or self.points[last[0]].value <= 0:
            return None
        return self.points[last[-1]].value / self.points[last[0]].value

    def is_worse(self, change: Change) -> bool:
        return (change.ratio - 1) * self.metric.worse > 0

    def _steps(self) -> list[Change]:
        """Of counts: a compiler does not vary, so that any difference is a change."""
        found = []
        for position in range(1, len(self.points)):
            before, after = self.points[position - 1].value, self.points[position].value
            if position not in self.breaks and before != after:
                ratio = after / before if before else math.inf
                found.append(Change("step", position, ratio, ratio, ratio))
        return found

    def to_dict(self) -> dict[str, Any]:
        """As `--json` gives it."""
        key = {
            name: getattr(self.key, name) for name in ("version", "problem", "dtype", "block", "cache_mode", "device")
        }
        key |= {"params": dict(self.key.params), "kernel": self.key.kernel}
        points = [
            {
                "run": p.run, "started": p.started.isoformat() if p.started else None, "value": p.value, "low": p.low,
                "high": p.high, "source": p.source, "revision": p.revision, "incomparable": self.breaks.get(i),
            }
            for i, p in enumerate(self.points)
        ]  # fmt: skip
        changes = [
            {
                "kind": c.kind, "run": self.points[c.at].run, "revision": self.points[c.at].revision, "at": c.at,
                "ratio": c.ratio, "low": c.low, "high": c.high,
                "since": self.points[c.since].run if c.since is not None else None,
                "worse": self.is_worse(c), "source_changed": self.source_changed(c),
            }
            for c in self.changes
        ]  # fmt: skip
        failed = [{"run": run, "status": what} for run, what in self.failed]
        head = {"family": self.family, **key, "metric": self.metric.name, "unit": self.metric.unit, "ratio": self.ratio}
        return {**head, "points": points, "changes": changes, "failed": failed}

    def source_changed(self, change: Change) -> bool | None:
        """Whether the version's files changed with it; None where a record does not say."""
        before = self.points[change.since if change.since is not None else change.at - 1].source
        after = self.points[change.at].source
        return before != after if before and after else None


@dataclass(frozen=True)
class Wanted:
    """Which series. versions, blocks: None for all; sizes: by name, those that are wanted; dtypes: None for all."""

    family: str
    versions: Sequence[int] | None = None
    dtypes: Sequence[str] | None = None
    blocks: Sequence[int] | None = None
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def takes(self, row: Row) -> bool:
        return (
            row.family == self.family
            and (self.versions is None or row.version in self.versions)
            and (self.dtypes is None or row.dtype in self.dtypes)
            and (self.blocks is None or row.block in self.blocks)
            and all(row.sizes.get(name) in values for name, values in self.sizes.items())
        )


def read_runs(files: Iterable[Path], family: str, note: Callable[[str], None]) -> list[Run]:
    """The runs of these files, oldest first, each once: a baseline is a copy of a run. Files that cannot be read, and
    rows that hold no sound numbers, are left out and named."""
    found: dict[str, Run] = {}
    for path in files:
        try:
            run = read_run(path, family, times=False)
        except UsageError as error:
            note(f"left out: {error}")
            continue
        for warning in run.warnings:
            note(warning)
        damaged = sum(not is_sound(row) for row in run.rows)
        if damaged:
            note(f"{path}: left out {damaged} damaged rows")
            run.rows = [row for row in run.rows if is_sound(row)]
        for part in parts(run):
            found.setdefault(part.id, part)
    never = datetime.min.replace(tzinfo=UTC)
    return sorted(found.values(), key=lambda run: (moment(run.header.get("started")) or never, run.id))


def series_of(runs: Iterable[Run], wanted: Wanted, metric: str, least: float) -> list[Series]:
    """The series of a metric, in the order of versions, problems and block sizes."""
    known, found = metric_of(metric), dict[Key, Series]()
    for run in runs:
        device = run.header.get("device")
        reader = Reader(Card.of(device if isinstance(device, dict) else {}))
        around, started = Surroundings.of(run.header), moment(run.header.get("started"))
        revision = revision_text(run.header)
        for row in merged(row for row in run.rows if wanted.takes(row)):
            numbers = _time(row) if metric == TIME.name else _counts(row, reader, metric)
            for kernel, (value, low, high) in numbers.items():
                key = _key(row, kernel)
                series = found.setdefault(key, Series(row.family, key, known, least))
                uses = frozenset(row.steps)
                series.points.append(Point(run.id, started, value, low, high, row.source, around, uses, revision))
            if not numbers and row.exit_status:
                key = _key(row)
                series = found.setdefault(key, Series(row.family, key, known, least))
                series.failed.append((run.id, row.status))
    some = [series for series in found.values() if series.points]
    return sorted(some, key=lambda s: (s.key.device, s.key.problem, s.key.dtype, s.key.cache_mode, s.key.kernel, s.key))


def metrics_in(runs: Iterable[Run], wanted: Wanted) -> list[str]:
    """The metrics that the rows have, for a message."""
    found = set()
    for run in runs:
        device = run.header.get("device")
        reader = Reader(Card.of(device if isinstance(device, dict) else {}))
        for row in run.rows:
            if wanted.takes(row):
                found |= {name for _, name in reader.read(row)} | ({TIME.name} if row.may_win else set())
    return sorted(found)


def _time(row: Row) -> dict[str, tuple[float, float, float]]:
    taken = row.measurement
    if not row.may_win or taken is None:
        return {}
    return {"": (float(taken["median_ms"]), float(taken["low_ms"]), float(taken["high_ms"]))}


def _counts(row: Row, reader: Reader, metric: str) -> dict[str, tuple[float, float, float]]:
    values = {kernel: value for (kernel, name), value in reader.read(row).items() if name == metric}
    return {kernel: (value, value, value) for kernel, value in values.items()}


def _key(row: Row, kernel: str = "") -> Key:
    params = tuple(sorted(row.params.items()))
    return Key(row.version, row.problem, row.dtype, row.block, params, row.cache_mode, row.device, kernel)
