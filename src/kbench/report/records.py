"""The rows of one side of a report, with no more of each than the report needs: there may be a hundred thousand."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbench.errors import UsageError
from kbench.report.metrics import Reader, Values
from kbench.report.model import Side
from kbench.report.side import NUMBERS
from kbench.report.sources import Source
from kbench.report.surroundings import Surroundings
from kbench.results.facts import Card, main_kernel
from kbench.results.merge import source_headers
from kbench.results.resume import AGAIN
from kbench.results.revisions import revision_text
from kbench.results.scan import Scan
from kbench.results.schema import Row

Key = tuple[str, int, tuple[tuple[str, int], ...], str, int, tuple[tuple[str, int], ...], str]
"""Family, version, sizes, dtype, block, params, cache mode: what two rows share that are held against each other."""
Samples = Sequence[float]
"""Milliseconds as an array, or whatever a file has in their place."""

# Which of several rounds stands for the experiment: the one that went wrong most.
_GRAVITY = ("fail", "crashed", "hung", "unlaunchable", "invalid", "internal", "unable", "skipped", "refused", "pass")
_RANK = {status: rank for rank, status in enumerate(_GRAVITY)}


@dataclass(slots=True)
class Record:
    """One row. uses: kinds of its steps. samples: None where nothing was timed. runs: of the plan in one sample."""

    status: str
    reason: str
    reproduce: str
    overridden: bool
    source: str
    code: str
    around: Surroundings
    uses: frozenset[str]
    samples: Samples | None
    runs: int


@dataclass(slots=True)
class Experiment:
    """All rounds of what was measured on one device, at least one.

    rounds: records by run and round. problem: its sizes as text. kernel: the name of its largest kernel. counts: of all
    its kernels.
    """

    key: Key
    device: str
    rounds: dict[tuple[int, int], Record] = field(default_factory=dict)
    problem: str = ""
    kernel: str = ""
    counts: Values = field(default_factory=dict)

    @property
    def worst(self) -> Record:
        """The record that stands for all: one that went wrong, if any did; else the first."""
        if len(self.rounds) == 1:
            return next(iter(self.rounds.values()))
        return min(self.rounds.values(), key=lambda record: _RANK[record.status])

    @property
    def timed(self) -> bool:
        return any(record.samples is not None for record in self.rounds.values())

    @property
    def samples(self) -> list[Samples]:
        """Of each round that was timed, in the order of their runs and rounds."""
        rounds = self.rounds if len(self.rounds) == 1 else sorted(self.rounds)
        return [samples for at in rounds if (samples := self.rounds[at].samples) is not None]

    @property
    def mixed(self) -> str:
        """Why its rounds are not of one kind; "" where they are."""
        if len(self.rounds) == 1:
            return ""
        first, *others = self.rounds.values()
        for record in others:
            if record.around is not first.around and (why := first.around.against(record.around, record.uses).times):
                return f"runs of one side differ: {why.name} {why.one} and {why.other}"
            if record.source != first.source:
                return "the version's files changed between the rounds of one side"
        return ""

    @property
    def code(self) -> str:
        """The hash of its machine code; "" where rounds differ in it."""
        codes = {record.code for record in self.rounds.values()}
        return codes.pop() if len(codes) == 1 else ""


@dataclass
class Loaded:
    """One side. experiments: by key, by device. warnings: lines for people. findings: sentences of the report."""

    side: Side
    experiments: dict[Key, dict[str, Experiment]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def load(name: str, sources: Sequence[Source]) -> Loaded:
    """Read one side. name: as the user gave it. Raises UsageError for a file that cannot be read or is named twice."""
    loaded = Loaded(Side(name))
    around: dict[str, str] = {}
    runs: dict[str, Source] = {}
    rows = 0
    for source in sources:
        scan = Scan(source.path, source.data)
        headers = source_headers(scan.header) or {scan.id: scan.header}
        for run in headers:
            if run in runs:
                raise UsageError(f"{name}: run {run} is named twice", f"{runs[run].path} and {source.path} hold it")
        rows += _read(loaded, len(runs), scan, headers)
        runs |= dict.fromkeys(headers, source)
        loaded.warnings += scan.warnings
        ended = (scan.footer or {}).get("ended", "the run was killed")
        if ended != "complete":
            loaded.findings.append(f'{source.path} may lack rows: it ended with "{ended}"')
        for header in headers.values():
            for fact, text in _facts(header, source).items():
                known = around.get(fact)
                around[fact] = text if known is None else known if text in known.split("; ") else f"{known}; {text}"
    if not rows:
        paths = " and ".join(str(source.path) for source in sources)
        whose = "" if paths == name else f"{name}: "
        raise UsageError(f"{whose}{paths} holds no rows", "; ".join(loaded.warnings) or _EMPTY)
    files = tuple(str(source.path) for source in sources)
    loaded.side = Side(name, files, tuple(runs), around, rows)
    return loaded


@dataclass(frozen=True, slots=True)
class _Origin:
    """The run that rows are of: its number on this side, what it was measured in, and how its counts are read."""

    number: int
    around: Surroundings
    reader: Reader

    @classmethod
    def of(cls, number: int, header: Mapping[str, Any]) -> _Origin:
        device = header.get("device")
        return cls(number, Surroundings.of(header), Reader(Card.of(device if isinstance(device, dict) else {})))


_EMPTY = "`kbench sweep` writes some"


def _read(loaded: Loaded, first: int, scan: Scan, headers: Mapping[str, Mapping[str, Any]]) -> int:
    """Take the rows of a file; returns how many there were, each round of an experiment once: of those that stand there
    again the last. headers: of its runs, which get numbers from `first` on."""
    known = {run: _Origin.of(number, header) for number, (run, header) in enumerate(headers.items(), first)}
    whole = next(iter(known.values()))  # what names no run of the file is of its first, as `results.merge.parts` says
    uses: dict[tuple[str, ...], frozenset[str]] = {}
    count = 0
    again: list[int] = []  # lines of rows that no run has written a second time
    for line, row in scan:
        try:
            key = (
                row.family, row.version, _pairs(row.sizes), row.dtype, row.block, _pairs(row.params), row.cache_mode,
            )  # fmt: skip
            by_device = loaded.experiments.setdefault(key, {})
            experiment = by_device.get(row.device)
            if experiment is None:
                experiment = by_device[row.device] = Experiment(key, row.device)
            origin = known.get(row.run, whole) if row.run else whole
            if not row.round or not experiment.rounds:  # rounds of a row are of the same kernels
                main = main_kernel(row)
                experiment.problem, experiment.counts = row.problem, origin.reader.read(row)
                experiment.kernel = str(main.get("name", "")) if main else ""
            kinds = tuple(row.steps)
            record = _record(row, origin.around, uses.setdefault(kinds, frozenset(kinds)))
            before = experiment.rounds.get((origin.number, row.round))
            if before is None:
                count += 1
            elif not _went_on(before, record):
                again.append(line)
            experiment.rounds[origin.number, row.round] = record
        except (TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"{scan.path}:{line} is damaged: {error}", "sweep again") from error
    if again:
        loaded.warnings.append(_repeated(scan.path, again))
    return count


def _went_on(before: Record, after: Record) -> bool:
    """Whether a run may have measured a row again: one that went wrong by the machine's fault, or of other files. No
    two that were measured are equal in every sample."""
    if before.samples is not None and before == after:
        return False
    return before.status in AGAIN or not before.source or before.source != after.source


def _repeated(path: Path | str, lines: Sequence[int]) -> str:
    """The warning for rows whose experiment and round stand in the file before them."""
    count = "1 row repeats" if len(lines) == 1 else f"{len(lines)} rows repeat"
    what = f"{path}: {count} the experiment and round of another (the first in line {lines[0]})"
    return f"{what}; each counts once: the file was put together from overlapping parts"


def _pairs(values: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(values.items()))


def _record(row: Row, around: Surroundings, uses: frozenset[str]) -> Record:
    taken = row.measurement
    samples = None if taken is None else _samples(taken.get("samples_ms"))
    return Record(
        row.status, row.reason, row.reproduce, row.overridden, row.source, row.code, around, uses, samples, _runs(taken)
    )


def _runs(taken: Mapping[str, Any] | None) -> int:
    runs = taken.get("runs", 1) if taken is not None else 1
    return runs if isinstance(runs, int) and runs > 0 else 1


def _samples(samples: Any) -> Any:
    """As an array, a quarter of a list's size, if all of them are numbers; else as they are, for the decision to say
    what is wrong with them."""
    if isinstance(samples, list) and set(map(type, samples)) <= NUMBERS:
        try:
            return array("d", samples)
        except OverflowError:
            return samples
    return () if samples is None else samples


def _facts(header: Mapping[str, Any], source: Source) -> dict[str, str]:
    """What a reader wants to know of a run, as text by name."""
    device = header.get("device")
    device = device if isinstance(device, dict) else {}
    known = {
        "device": device.get("name"), "arch": device.get("arch"), "driver": device.get("driver"),
        "compiler": device.get("compiler"), "kbench": header.get("kbench"), "started": header.get("started"),
        "revision": revision_text(header), "committed": source.revision,
    }  # fmt: skip
    return {name: str(value) for name, value in known.items() if value}
