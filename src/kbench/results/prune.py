"""Removing old runs: which may go, and which stay whatever is asked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kbench.errors import UsageError
from kbench.results.best import load_best
from kbench.results.listing import Entry, entries
from kbench.results.store import TABLES, is_running, unwritable

_AGE = re.compile(r"([0-9]{1,6})(h|d|w)")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
AGE_FORM = "write hours, days or weeks, such as 12h, 30d or 8w"


@dataclass(frozen=True)
class Plan:
    """What becomes of the runs of a folder. kept: of those that would go, with why they stay."""

    removed: Sequence[Entry]
    kept: Sequence[tuple[Entry, str]]


def parse_age(text: str) -> timedelta:
    """The age of "30d", "12h" or "8w". Raises UsageError."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--older-than {text!r} is not an age", AGE_FORM)
    return int(match[1]) * _UNITS[match[2]]


def plan(folder: Path, keep: int | None, age: timedelta | None, now: datetime | None = None) -> Plan:
    """Which runs are past the newest `keep` and older than `age`; a limit that is None lets all go.

    What best.json took its rows from stays, and so do the latest run, one that is being written, and what cannot be
    read: it may be somebody's only copy. Raises UsageError where best.json cannot be read.
    """
    referred = set(_runs_of(load_best(folder)))
    limit = _ago(age, now or datetime.now(UTC)) if age is not None else None
    removed, kept = [], []
    for position, entry in enumerate(entries(folder)):
        if keep is not None and position < keep:
            continue
        if limit is not None and entry.started is not None and entry.started > limit:
            continue
        if why := _reason(entry, referred, limit is not None):
            kept.append((entry, why))
        else:
            removed.append(entry)
    return Plan(removed, kept)


def _ago(age: timedelta, now: datetime) -> datetime:
    try:
        return now - age
    except OverflowError:  # before the calendar begins
        return datetime.min.replace(tzinfo=UTC)


def remove(folder: Path, entry: Entry) -> bool:
    """Remove a run file and its tables; whether they are gone: a run that goes on just now stays.

    Raises CannotRunError where they cannot be removed.
    """
    if is_running(entry.path):
        return False
    try:
        entry.path.unlink(missing_ok=True)
        tables = folder / TABLES / entry.id
        if tables.is_dir() and not tables.is_symlink():
            shutil.rmtree(tables)
    except OSError as error:
        raise unwritable(Path(error.filename or entry.path), error, "remove it by hand, or change its owner") from error
    return True


def _reason(entry: Entry, referred: set[str], by_age: bool) -> str:
    """Why a run stays."""
    if entry.latest:
        return "it is the latest"
    if entry.id in referred:
        return "best.json has rows of it"
    if entry.running:
        return "it is being written"
    if entry.fault:
        return "it cannot be read"
    return "it does not say when it began" if by_age and entry.started is None else ""


def _runs_of(level: Any) -> Iterator[str]:
    """The runs that best.json names, wherever they stand in it."""
    if isinstance(level, Mapping):
        if isinstance(level.get("run"), str):
            yield level["run"]
        for value in level.values():
            yield from _runs_of(value)
