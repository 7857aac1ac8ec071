"""Two versions compared: both proven, timed alternately, and proven again. Runs in the worker process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kbench.catalog import Catalog, kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.prove import prove, recheck
from kbench.device.worker import Channel, Message
from kbench.errors import UsageError
from kbench.evaluate import Evaluator, Ready
from kbench.family import Family, Version
from kbench.grammar import Target
from kbench.jobs import Job
from kbench.params import require_taken
from kbench.results.best import kept_row, load_best
from kbench.results.schema import Row
from kbench.selection import Selection
from kbench.sides import Side
from kbench.source import Source, load_source

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice
    from kbench.measure.ab_statistics import Design, Rule
    from kbench.pair_rounds import Plan

# Loading families, reading best.json.
_LOOKUP_SECONDS = 60.0
# Comparisons that take longer than this say so before they begin.
_LONG_S = 20.0


@dataclass
class _Subject:
    """One side while it is compared."""

    job: Job
    family: Family
    version: Version
    row: Row
    catalog: Catalog
    file: str = ""
    ready: Ready | None = None

    @property
    def passed(self) -> bool:
        return self.row.status == "pass"


class PairEvaluator(Evaluator):
    """Answers the requests of `kbench.compare.CompareBench` in the worker process."""

    _file = ""  # whose kernels stand in place of the family's, while a side is compiled
    _compared = 0  # how many comparisons there were: each has an order of its own

    def handle(self, request: Message) -> Any:
        match request["do"]:
            case "sides":
                with self.channel.limit(_LOOKUP_SECONDS, "loading the family files"):
                    select, results = Selection.from_dict(request["select"]), Path(request["results"])
                    return self.sides([Side(**side) for side in request["sides"]], select, results)
            case "compare":
                from kbench.measure.ab_statistics import Rule

                jobs, files = [Job(**job) for job in request["jobs"]], request["files"]
                rule, again = Rule(**request["rule"]), request["again"]
                with self.channel.limit(_LOOKUP_SECONDS, "loading the family files"):
                    catalogs = [self.catalog, self._catalog_of(request.get("second_folders", ()))]
                return self.compare(jobs, files, rule, again, catalogs)
        return super().handle(request)

    # ------------------------------------------------------------------------------------------ what is asked

    def sides(self, sides: Sequence[Side], select: Selection, results: Path) -> list[dict[str, Any]]:
        """A job for each side, and where its block size and parameters come from. Raises UsageError, also for several
        problems."""
        target = Target(sides[0].family, tuple(sorted({side.version for side in sides})))
        jobs = list(replace(select, targets=[target]).jobs(self.catalog, self.device.kind))
        if len({str(job.sizes) for job in jobs}) > 1:
            raise UsageError("one problem can be compared at a time", "give each --size a single value")
        by_version = {job.version: job for job in jobs}
        best = load_best(results) if self.device.kind == "cuda" else {}
        planned = []
        for side in sides:
            job = by_version[side.version]
            require_taken(
                side.params, self.catalog.version(job.family, job.version).params, f"{job.family}:{job.version}"
            )
            job = replace(job, params={**job.params, **side.params})
            block, why = self._block(side, job, best, results)
            given = side.params.keys() | select.params.keys()
            origins = {name: "as given" if name in given else "the default" for name in job.params}
            planned.append({"job": asdict(replace(job, block=block)), "why": why, "params_from": origins})
        return planned

    def _block(self, side: Side, job: Job, best: dict[str, Any], results: Path) -> tuple[int, str]:
        """A side's block size, and where it comes from. job: with the side's parameters."""
        if side.block is not None:
            return side.block, "as given"
        row = kept_row(best, self._new_row(job))
        # Of other parameters, the best block size may be another one.
        source = self.catalog.fingerprint(job.family, job.version)
        if row is not None and (row.params, row.source) == (job.params, source):
            return row.block, f"the best in {results / 'best.json'}"
        only = self.catalog.version(job.family, job.version).fixed is not None
        return job.block, "the only one" if only else "the usual one"

    # ------------------------------------------------------------------------------------------ both sides

    def compare(
        self, jobs: Sequence[Job], files: Sequence[str], rule: Rule, again: str, catalogs: Sequence[Catalog] = ()
    ) -> dict[str, Any]:
        """Rows of both sides, and what timing them showed: None on a device without times, and where a side failed.

        files: a `.cu` for each side, "" for the family's own. again: the command that repeats the comparison. catalogs:
        where each side's family comes from; both from the evaluator's own if left out.
        """
        catalogs = catalogs or [self.catalog] * len(jobs)
        sides = [self._subject_of(*side, again) for side in zip(jobs, files, catalogs, strict=True)]
        for side in sides:
            with self._blamed(side):
                side.ready = self._compiled(side)
        found = None
        if all(side.ready is not None and side.passed for side in sides):
            self._prove(sides)
            if all(side.passed for side in sides) and self.device.kind == "cuda":
                found = self._timed(sides, rule)
        passed = all(side.passed for side in sides)
        rows = [side.row.to_dict() for side in sides]
        return {"rows": rows, "comparison": found if passed else None, "lost": self.lost}

    def _subject_of(self, job: Job, file: str, catalog: Catalog, again: str) -> _Subject:
        with self._from(catalog):
            row = self._new_row(job)
            if file:
                row.reproduce = again  # no command runs a file by itself
            return _Subject(job, catalog[job.family], catalog.version(job.family, job.version), row, catalog, file)

    def _catalog_of(self, folders: Sequence[str]) -> Catalog:
        return load_catalog([Path(folder) for folder in folders]) if folders else self.catalog

    @contextmanager
    def _from(self, catalog: Catalog) -> Iterator[None]:
        """Families come from this catalogue for a while."""
        own, self.catalog = self.catalog, catalog
        try:
            yield
        finally:
            self.catalog = own

    @contextmanager
    def _blamed(self, side: _Subject) -> Iterator[None]:
        """Whatever goes wrong inside is the side's."""
        try:
            yield
        except Exception as error:
            self._record(error, side.row, side.job.purpose)

    def _compiled(self, side: _Subject) -> Ready | None:
        self._file = side.file
        try:
            with self._from(side.catalog):
                ready = self._ready(side.family, side.version, side.job, side.row)
            if side.file:
                source = self._source(side.family, side.version.number)
                side.row.source = f"{source.digest}+{side.row.source}"
            return ready
        finally:
            self._file = ""

    def _source(self, family: Family, number: int) -> Source:
        if self._file:
            return load_source(Path(self._file).resolve(), (kernel_folder(),))
        return super()._source(family, number)

    def _prove(self, sides: Sequence[_Subject]) -> None:
        """Each side on memory of its own; on a device without times the second proof follows at once."""
        for side in sides:
            ready = _ready(side)
            with self._blamed(side), self._view(side) as buffers:
                self._verdict(side, prove, buffers, ready.cases[0])
                if side.passed and self.device.kind != "cuda":
                    self._verdict(side, recheck, buffers, ready.cases[1], "on other inputs: ")

    def _verdict(self, side: _Subject, proof: Any, buffers: Buffers, case: Any, when: str = "") -> None:
        def guard() -> Any:
            return self.channel.limit(self.time_limit, f"a launch of {_named(side)}")

        ready = _ready(side)
        verdict = proof(
            self.device, side.family, side.version, ready.prepared, buffers, case, tolerance=self.tolerance, guard=guard
        )
        if proof is prove or not verdict.passed:
            self._judge(side.row, verdict)
            side.row.reason = f"{when}{side.row.reason}" if side.row.reason else ""

    def _view(self, side: _Subject) -> Buffers:
        subject = _ready(side).subject
        return Buffers(
            self.device, side.family, side.version, subject.problem, side.job.block, subject.plan, side.row.params
        )

    # ------------------------------------------------------------------------------------------ times

    def _timed(self, sides: Sequence[_Subject], rule: Rule) -> dict[str, Any] | None:
        from kbench.device.cuda.same_code import same_code
        from kbench.measure.timer import timer_of
        from kbench.pair_rounds import PairRounds, describe

        def at_end(views: Sequence[Buffers]) -> None:
            restart()
            assert rounds is not None
            for number, (side, view) in enumerate(zip(sides, views, strict=True)):
                rounds.side = number
                self._verdict(side, recheck, view, _ready(side).cases[1], "after the timed launches: ")

        def planned(design: Design, seconds: float) -> None:
            if seconds > _LONG_S:
                self.channel.note(f"comparing them takes about {seconds:.0f} s, {design.rounds} rounds")

        first, second = map(_ready, sides)
        self._compared += 1
        rng = random.Random(f"{self.seed} {self._compared}")
        rounds: PairRounds | None = None
        try:
            with self.channel.limit(self.time_limit, f"a launch of {' or '.join(map(_named, sides))}") as restart:
                device = cast("CudaDevice", self.device)
                timer = timer_of(device)
                rounds = PairRounds(device, timer, [self._plan(s) for s in sides], rng, restart, at_end)
                found = describe(rounds.compare(rule, planned), rounds, timer, rule)
        except Exception as error:
            self._record(error, sides[rounds.side if rounds is not None else 0].row, "time")
            return None
        cubins = [ready.module.cubin if ready.module is not None else None for ready in (first, second)]
        same = same_code(first.subject.plan, cubins[0], second.subject.plan, cubins[1])
        return {"same_code": same, **found}

    def _plan(self, side: _Subject) -> Plan:
        from kbench.pair_rounds import Plan

        ready = _ready(side)
        return Plan(ready.prepared, ready.cases[0], lambda: self._view(side))


def _ready(side: _Subject) -> Ready:
    assert side.ready is not None  # or the comparison would have ended
    return side.ready


def _named(side: _Subject) -> str:
    return f"{side.job.family} version {side.job.version}{f' of {side.file}' if side.file else ''}"


def serve(channel: Channel, **options: Any) -> PairEvaluator:
    """The worker's entry: see `kbench.device.worker`."""
    return PairEvaluator(channel, **options)
