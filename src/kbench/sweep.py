"""Benches: which rows a command asks for, and running them in a worker that is replaced when it is lost."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kbench.device.open import choose_kind
from kbench.device.worker import Worker, WorkerError, WorkerLost
from kbench.errors import KbenchError, KernelFault
from kbench.jobs import Job
from kbench.results.schema import Row
from kbench.selection import Selection

# A version slower than this is timed at one block size only, unless asked for all: a sweep must stay a matter
# of seconds, and a kernel this slow is not chosen for its block size.
SLOW_MS = 100.0


@dataclass(frozen=True)
class Options:
    """What every command that runs kernels takes. device: auto, cuda or emulator. time_limit: seconds a launch.
    full: time slow versions at every block size. workers: CPU threads of the emulator. mode: how times are taken, see
    `kbench.measure.timer`; or of `kbench.results.schema.UNPROVEN`. archs: what is compiled for where nothing is run."""

    device: str = "auto"
    family_dirs: tuple[Path, ...] = ()
    seed: int | None = None
    rtol: float | None = None
    atol: float | None = None
    time_limit: float = 30.0
    debug: bool = False
    full: bool = False
    workers: int | None = None
    mode: str = "cold"
    archs: tuple[str, ...] = ()


class Bench:
    """An open worker with a device. `device_kind` is "cuda" or "emulator", `device` describes it for records."""

    # What answers in the worker process.
    handler = "kbench.evaluate:serve"

    device_kind: str
    device: dict[str, Any]

    def __init__(self, options: Options, note: Callable[[str], None]):
        self.options = options
        self.seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
        self.fallback = ""  # why there is no GPU, although one was asked for if there is one
        self._note = note
        self._worker: Worker | None = None

    def __enter__(self) -> Bench:
        self.device_kind, self.fallback = choose_kind(self.options.device)
        described = self._call({"do": "describe"})
        self.device = described["device"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None and self._worker is not None:
            self._worker.close()
            self._worker = None
        self._drop_worker()

    @property
    def device_name(self) -> str:
        """What rows call the device."""
        return str(self.device["name"]) if self.device_kind == "cuda" else self.device_kind

    def jobs(self, selection: Selection) -> list[Job]:
        """The rows of a command, in the order in which they run.

        Raises UsageError for an unknown family, version, size, preset or dtype, and for sizes that break a
        rule of the family.
        """
        return [Job(**job) for job in self._call({"do": "jobs", "select": asdict(selection)})]

    def ceilings(self) -> dict[str, Any] | None:
        """What the card can do at most (`kbench.ceilings.Ceilings` as a dict), kept once it was measured well.

        None without a GPU; also, with a note, where measuring fails: rows need none of it.
        """
        return self._about_gpu("ceilings", "the card's ceilings could not be measured")

    def timer(self) -> dict[str, Any] | None:
        """How times are taken on this card (`kbench.measure.timer.Timer.facts`); None as for `ceilings`."""
        return self._about_gpu("timer", "the timer could not be set up")

    def _about_gpu(self, what: str, failed: str) -> dict[str, Any] | None:
        if self.device_kind != "cuda":
            return None
        try:
            found: dict[str, Any] = self._call({"do": what})
            return found
        except (WorkerLost, KernelFault) as error:
            self._drop_worker()
            why = str(error)
        except WorkerError as error:  # in whatever state it left the device
            self._drop_worker()
            why = f"internal error: {error.trace if self.options.debug else error}"
        except KbenchError as error:
            why = str(error)
        self._note(f"{failed}: {why}")
        return None

    def rows(self, jobs: Sequence[Job], earlier: Sequence[Row] = (), again: bool = False) -> Iterator[Row]:
        """Run the jobs, one row each. A version's failure is its row, never an exception.

        earlier: rows of the same run that an earlier process measured. again: all of these were timed before, and are
        to be timed again, however slow they are.
        """
        full = self.options.full or again
        self._announce(jobs)
        slow = {_slowness(row) for row in earlier if _is_slow(row)}
        for position, job in enumerate(jobs):
            key = _slowness(job)
            if key in slow and not full:
                job = replace(job, purpose="prove")
            row = self._row(job)
            if self._worker is None:
                self._announce(jobs[position + 1 :])
            if key in slow and row.status == "pass" and not full:
                row.reason = "slow: timed at one block size only (--full times all)"
            if _is_slow(row):
                slow.add(key)
            yield row

    # ------------------------------------------------------------------------------------------ worker

    def _announce(self, jobs: Sequence[Job]) -> None:
        if jobs:
            try:
                self._call({"do": "announce", "jobs": [asdict(job) for job in jobs]})
            except WorkerLost:
                self._worker = None  # the row that caused it will say so

    def _row(self, job: Job) -> Row:
        try:
            answer = self._call({"do": "row", "job": asdict(job)})
        except WorkerLost as lost:
            self._worker = None
            return self._lost_row(job, lost.fault)
        if answer["lost"]:
            self._drop_worker()
        return Row.from_dict(answer["row"])

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _lost_row(self, job: Job, fault: KernelFault) -> Row:
        return Row(
            job.family, job.version, job.idea, job.sizes, job.dtype, job.block, self.device_name, fault.row_status,
            self.seed, reason=str(fault), details=["the worker process was replaced"], source=job.source,
            reproduce=job.command(self.seed, self.device_kind, *self._repeat_options()), params=job.params,
            cache_mode=self.options.mode,
        )  # fmt: skip

    def _repeat_options(self) -> tuple[list[str], list[str]]:
        """What a command that repeats a row takes besides the job: family folders, and options that change verdicts."""
        options = self.options
        words = []
        for name, value, usual in (
            ("rtol", options.rtol, None),
            ("atol", options.atol, None),
            ("time-limit", options.time_limit, Options.time_limit),
        ):
            if value != usual:
                words += [f"--{name}", f"{value:g}"]
        if options.mode != Options.mode:
            words.append(f"--{options.mode}")
        return [str(folder) for folder in options.family_dirs], words

    def _call(self, request: dict[str, Any]) -> Any:
        if self._worker is None:
            self._worker = Worker(self.handler, self._worker_options(), self._note)
        return self._worker.call(request)

    def _worker_options(self) -> dict[str, Any]:
        options = self.options
        return {
            "device": self.device_kind, "family_dirs": [str(folder) for folder in options.family_dirs],
            "seed": self.seed, "rtol": options.rtol, "atol": options.atol, "time_limit": options.time_limit,
            "workers": options.workers, "mode": options.mode, "repeat_options": self._repeat_options()[1],
        }  # fmt: skip


def _slowness(what: Row | Job) -> tuple[str, int, str, str, str]:
    """The rows of which only one is timed where that one is slow: they differ in block size alone."""
    return what.family, what.version, str(what.sizes), what.dtype, str(what.params)


def _is_slow(row: Row) -> bool:
    return row.measurement is not None and bool(row.measurement["median_ms"] > SLOW_MS)
