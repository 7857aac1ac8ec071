"""What a training step has to know of its kernels before it runs them: their times, and that they are right.

Versions are swept at the very problems of the step. Large batches are swept in two rounds: all versions and block
sizes with a batch of 1, then those that came near the fastest at the real size. What was swept and proven is remembered
by the hash of the sources, so that a changed kernel is tried again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kbench.catalog import Catalog
from kbench.device.base import Device
from kbench.device.cuda import cache
from kbench.errors import Exit, KbenchError
from kbench.family import Version
from kbench.jobs import Job
from kbench.measure.statistics import plural
from kbench.results.best import median
from kbench.results.schema import Row
from kbench.sweep import Bench
from kbench.train.chooser import Chooser, Times
from kbench.train.program import Use
from kbench.train.slots import Need, Shape, Slot, slots

# Of the first round's fastest: what is slower than this is not tried at the real size. Launches of a small problem end
# in microseconds, where versions lie closer together than at large ones, so the limit errs on the safe side.
_NEAR = 2.0
# Tokens of a micro-step up to which one round is enough: naive versions then take seconds, not minutes.
_ONE_ROUND = 8192
# Block sizes per version that go into the second round: times are flat around the best.
_BLOCKS = 3
# Seconds that a row takes, reference and proof included, as seen on an H200; only to say what to expect.
_ROW_SECONDS = 0.3

# What of a device's description decides what a kernel does and how fast: libraries run GEMMs and attention.
_DECIDING = ("name", "driver", "compiler", "options", "cublaslt", "cudnn")


@dataclass
class Trials:
    """Sweeps and proofs. open_bench: opens what rows run on; only when there are any, since it takes a second.

    device: of the same kind. keep: called with the rows of every sweep, to store them. progress: makes a context whose
    value is called after every row, from names of the rows.
    """

    open_bench: Callable[[], AbstractContextManager[Bench]]
    device: Device
    catalog: Catalog
    note: Callable[[str], None]
    keep: Callable[[Sequence[Row]], None]
    progress: Callable[[Sequence[str]], AbstractContextManager[Callable[[], None]]]

    def __post_init__(self) -> None:
        self._opened = ExitStack()
        self._bench: Bench | None = None
        self._described = self.device.describe()

    def close(self) -> None:
        self._opened.close()
        self._bench = None

    # ------------------------------------------------------------------------------------------ sweeps

    def missing(self, shape: Shape, total: int, chooser: Chooser, times: Times) -> list[Need]:
        """Needs at whose problems not every eligible version has been swept, each problem once. Without any time the
        sweep was kept in another results folder."""
        found: dict[tuple[str, str, str], Need] = {}
        for need in _needs(slots(shape, total)):
            numbers = {version.number for version in chooser.eligible(need)}
            timed = set(times.of(need))
            if numbers and (not timed or not numbers <= (timed | self._swept(need, numbers))):
                found.setdefault((need.family, need.dtype, need.problem), need)
        return list(found.values())

    def sweep(self, shape: Shape, total: int, chooser: Chooser, wanted: Sequence[Need]) -> None:
        """Time what is missing, and remember it."""
        large = shape.batch > 1 and shape.batch * shape.seq > _ONE_ROUND
        chosen = self._first_round(shape, total, chooser, wanted) if large else {}
        jobs: list[Job] = []
        needs: list[Need] = []  # of each job
        for need in wanted:
            known = chosen.get(need.role)
            for version in chooser.eligible(need):
                blocks = version.blocks if known is None else known.get(version.number, ())
                jobs += [_job(need, version, block, "time") for block in blocks]
                needs += [need for _ in blocks]
        # Kept need by need, so that a sweep that is stopped goes on where it was.
        rows = zip(needs, self._run(jobs, "sweeping the step's kernels"), strict=True)
        for need, group in itertools.groupby(rows, key=lambda pair: pair[0]):
            self._swept_now(need, chooser, [row for _, row in group])
        for need in wanted:
            if need not in needs:  # the first round left no version to try
                self._swept_now(need, chooser, [])

    def _swept_now(self, need: Need, chooser: Chooser, rows: Sequence[Row]) -> None:
        self.keep(rows)
        for row in rows:
            if row.status == "pass":
                self._remember_proof(_use(row))
        for version in chooser.eligible(need):
            cache.store("swept", self._key(need, version.number), {})

    def _first_round(
        self, shape: Shape, total: int, chooser: Chooser, wanted: Sequence[Need]
    ) -> dict[str, dict[int, list[int]]]:
        """By role: versions that are near the fastest with a batch of 1, with their best block sizes. A need that does
        not grow with the batch is left out, and with it all versions with all block sizes are tried."""
        small = {need.role: need for need in _needs(slots(replace(shape, batch=1), total))}
        pairs = [(need, small[need.role]) for need in wanted if small[need.role].problem != need.problem]
        jobs = [
            _job(one, version, block, "time")
            for need, one in pairs
            for version in chooser.eligible(need)
            for block in version.blocks
        ]
        rows = self._run(jobs, "sweeping all versions with a batch of 1")
        by_problem: dict[tuple[str, str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if row.may_win:
                by_problem[row.family, row.dtype, row.problem][row.version].append(row)
        return {need.role: _near(by_problem[one.family, one.dtype, one.problem]) for need, one in pairs}

    # ------------------------------------------------------------------------------------------ proofs

    def prove(self, uses: Iterable[Use]) -> None:
        """Prove every use that was not proven at these sources before. Raises Unproven for one that is not right."""
        jobs = []
        for use in dict.fromkeys(uses):
            if cache.load("proof", self.proof_key(use)) is None:
                version = self.catalog.version(use.family, use.version)
                jobs.append(_prove(use, version.idea))
        for row in self._run(jobs, "proving the step's kernels"):
            if row.status != "pass":
                raise Unproven(row)
            self._remember_proof(_use(row))

    def _remember_proof(self, use: Use) -> None:
        cache.store("proof", self.proof_key(use), {})

    # ------------------------------------------------------------------------------------------ inside

    def _run(self, jobs: Sequence[Job], doing: str) -> Iterator[Row]:
        if not jobs:
            return
        self.note(f"{doing}: {plural(len(jobs), 'row')}{self._expected(len(jobs))}")
        if self._bench is None:
            self._bench = self._opened.enter_context(self.open_bench())
        with self.progress([f"{job.family}:{job.version} block {job.place}" for job in jobs]) as advance:
            for row in self._bench.rows(jobs):
                yield row
                advance()

    def _expected(self, count: int) -> str:
        seconds = count * _ROW_SECONDS
        return f", about {seconds:.0f} s" if self.device.kind == "cuda" and seconds > 10 else ""

    def _swept(self, need: Need, numbers: Iterable[int]) -> set[int]:
        return {number for number in numbers if cache.load("swept", self._key(need, number)) is not None}

    def _key(self, need: Need, number: int) -> dict[str, Any]:
        return self._identity(need.family, number) | {"problem": need.problem, "dtype": need.dtype}

    def proof_key(self, use: Use) -> dict[str, Any]:
        """All that a proof depends on: sources, device, compiler, libraries, problem, block size, parameters."""
        own = {"problem": str(use.problem), "dtype": use.dtype, "block": use.block, "params": dict(use.params)}
        return self._identity(use.family, use.version) | own

    def _identity(self, family: str, number: int) -> dict[str, Any]:
        """A version as it stands in its files, on this device with its compiler and libraries."""
        device = {name: self._described.get(name) for name in _DECIDING}
        source = self.catalog.fingerprint(family, number)
        return {"family": family, "version": number, "source": source, "device": device}


class Unproven(KbenchError):
    """A version that was to train and was not proven; it ends in the exit status of its row."""

    def __init__(self, row: Row):
        what = f"{row.family} version {row.version}, block size {row.place}, cannot train: {row.status}"
        super().__init__(f"{what}: {row.reason}", row.reproduce)
        # Refused and skipped rows are fine beside others; here nothing else takes their place.
        stands_for = {"refused": Exit.USAGE, "skipped": Exit.CANNOT}
        self.exit_status = stands_for.get(row.status, row.exit_status)


def _needs(all_slots: Sequence[Slot]) -> Iterator[Need]:
    for slot in all_slots:
        for way in slot.ways:
            yield from way.needs


def _near(rows: dict[int, list[Row]]) -> dict[int, list[int]]:
    """Versions within _NEAR of the fastest, each with its best block sizes."""
    fastest = {number: min(map(median, group)) for number, group in rows.items()}
    limit = _NEAR * min(fastest.values(), default=0.0)
    return {
        number: [row.block for row in sorted(group, key=median)[:_BLOCKS]]
        for number, group in rows.items()
        if fastest[number] <= limit
    }


def _job(need: Need, version: Version, block: int, purpose: str) -> Job:
    """With the version's default parameters: others are tried where a user sweeps them."""
    sizes = dict(need.sizes)
    return Job(need.family, version.number, version.idea, sizes, need.dtype, block, purpose, version.defaults)


def _prove(use: Use, idea: str) -> Job:
    return Job(use.family, use.version, idea, dict(use.sizes), use.dtype, use.block, "prove", dict(use.params))


def _use(row: Row) -> Use:
    return Use(
        row.family, row.version, row.block, tuple(row.sizes.items()), row.dtype, tuple(sorted(row.params.items()))
    )
