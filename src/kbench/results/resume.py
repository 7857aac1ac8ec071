"""Going on with a run that was stopped: which of its rows stay, and appending to its file."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kbench.errors import CannotRunError, UsageError
from kbench.jobs import Job
from kbench.results.schema import UNPROVEN, Row
from kbench.results.store import LATEST, RUNS, Run, RunWriter, lock, newest, read_run, replace_text, unwritable

# What a time depends on beside the source. Ceilings, the number of the emulator's threads and the like are left out.
SAME = ("kind", "name", "arch", "driver", "compiler", "options", "cublaslt", "cudnn", "nccl")

# The machine's state decides on these as much as the kernel does: a context that was lost, memory that was short.
AGAIN = {"crashed": "crashed", "unable": "could not run", "internal": "ended in an internal error"}


@dataclass(frozen=True)
class Remainder:
    """What of a run's jobs is there already.

    kept: rows by their places, which are the positions of their jobs, those of each further round behind those of the
    round before. again: why others of its rows are run once more, and how many. left: how many rows are to be run, at
    most: of a row that is not there, nobody knows whether it will be timed.
    """

    kept: Mapping[int, Row]
    again: Mapping[str, int]
    left: int = 0


def remainder(run: Run, jobs: Sequence[Job], rounds: int = 1) -> Remainder:
    """Rows that are there stay, if the version's files are what they were and the machine had no part in the end."""
    rows = {(_key(row), row.round): row for row in newest(run.rows)}
    kept: dict[int, Row] = {}
    again: Counter[str] = Counter()
    left = 0
    for number, (position, job) in itertools.product(range(rounds), enumerate(jobs)):
        row = rows.get((_key(job), number))
        if row is None:
            left += not number or position not in kept or kept[position].measurement is not None
        elif not row.source or row.source != job.source:
            again["whose source changed"] += 1
            left += 1
        elif row.status in AGAIN:
            again[f"that {AGAIN[row.status]}"] += 1
            left += 1
        else:
            kept[number * len(jobs) + position] = row
    return Remainder(kept, again, left)


def rounds_of(run: Run) -> int:
    """How often a run was to time its rows."""
    options = run.header.get("options")
    rounds = options.get("rounds", 1) if isinstance(options, dict) else 1
    return rounds if isinstance(rounds, int) and rounds > 0 else 1


def _key(what: Row | Job) -> tuple[object, ...]:
    """What is the same experiment within one run: its device and cache mode are one throughout."""
    sizes = tuple(sorted(what.sizes.items()))
    return what.family, what.version, sizes, what.dtype, what.block, tuple(sorted(what.params.items()))


def selection_of(run: Run) -> dict[str, Any]:
    """What a run was to sweep, as `dataclasses.asdict` of a Selection. Raises UsageError if its file does not say."""
    options = run.header.get("options")
    if isinstance(options, dict) and options.get("strategy"):
        raise UsageError(
            f"{run.path} is a search by {options['strategy']}, which cannot go on: it chose by the times before",
            "search again, or sweep all rows without --strategy",
        )
    if isinstance(options, dict) and options.get("mode") in UNPROVEN:
        what = f"{run.path} is a sweep that was {UNPROVEN[options['mode']]} alone, which does not go on"
        raise UsageError(what, "sweep again: what was compiled is kept")
    selection = run.header.get("selection")
    if isinstance(selection, dict) and selection.get("mode") == "sweep":
        return selection
    command = run.header.get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else "another command"
    if not words.startswith("kbench sweep"):
        raise UsageError(f"{run.path} is a run of `{words}`", "only a sweep can go on")
    raise UsageError(f"{run.path} does not say what was to be swept: an older kbench wrote it", f"repeat `{words}`")


def require_same_device(run: Run, device: Mapping[str, Any]) -> None:
    """Raises CannotRunError if a run's rows would not be comparable with those of this device."""
    before = run.header.get("device")
    before = before if isinstance(before, dict) else {}
    for name in SAME:
        if before.get(name) != device.get(name):
            what = "device" if name in ("kind", "name") else name
            raise CannotRunError(
                f"{run.path} cannot go on here: its {what} was {_text(before.get(name))}, "
                f"this one is {_text(device.get(name))}",
                "go on there, or sweep again here",
            )


def _text(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


class ResumedRun(RunWriter):
    """The file of a run that goes on: locked from the start, changed only when the first row comes.

    folder: the results folder, for what is derived from the run. run: what the file held when it was locked. Raises
    UsageError for a file that cannot be read or is being written, CannotRunError for one that cannot be written.
    """

    def __init__(self, folder: Path, path: Path):
        self.path = path
        self.folder = path.parent.parent if path.parent.name == RUNS else folder
        read_run(path)  # what is wrong with the file comes before what is wrong with writing it
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error, "make it writable, or copy it to where it can be written") from error
        if not lock(self._file):
            raise UsageError(f"{path} is being written by another process", "wait for its end, or stop it")
        self.run = read_run(path)  # again, now that nobody else writes
        self.id = self.run.id
        self._statuses: Counter[str] = Counter()
        self._begun = False

    def keep(self, rows: Sequence[Row]) -> None:
        """Count rows that the file holds already, for the footer."""
        self._statuses.update(row.status for row in rows)

    def append(self, row: Row) -> None:
        self._begin()
        super().append(row)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ended = (self.run.footer or {}).get("ended")
        if not self._begun and ended is not None and (error is not None or ended == "complete"):
            self.close()  # nothing was done, and the file says how it ended
            return
        try:
            self._begin()
        except CannotRunError:
            self.close()
            raise
        super().__exit__(kind, error, at)

    def close(self) -> None:
        """Give the file back as it is."""
        self._file.close()

    def _begin(self) -> None:
        """Before the first write: take off the last line where it was cut, and be the latest run."""
        if self._begun:
            return
        self._begun = True
        try:
            mend(self.path, self._file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error
        if self.path.parent == self.folder / RUNS:
            replace_text(self.folder / LATEST, f"{RUNS}/{self.path.name}\n")


def mend(path: Path, descriptor: int) -> None:
    """Make a file of lines end with a whole one: a cut one is taken off, a whole one gets its end.

    One system call changes the file, so that a kill leaves it as it was or mended. Raises OSError.
    """
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    try:
        json.loads(data[start:])
    except (ValueError, RecursionError):
        os.ftruncate(descriptor, start)
    else:
        os.write(descriptor, b"\n")
