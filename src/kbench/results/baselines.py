"""Baselines: a run under a name, compressed and small enough to commit, for later runs to be held against."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
from pathlib import Path

from kbench.errors import UsageError
from kbench.results.steady import says_the_same, steady
from kbench.results.store import BASELINES, COMPRESSED, LATEST, read_bytes, replace_bytes

PREVIOUS = "previous"
USUAL = "baseline"  # the name that `git:REV` means
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def require_name(name: str) -> None:
    """Raises UsageError for a name that a baseline cannot have."""
    # "latest" and "previous" name runs, and what looks like a file is taken for one.
    if not _NAME.fullmatch(name) or name in (LATEST, PREVIOUS) or name.endswith((".jsonl", ".gz")):
        raise UsageError(
            f"{name!r} cannot be the name of a baseline",
            f"use letters, digits, - and _, such as {USUAL}; {LATEST} and {PREVIOUS} stand for runs",
        )


def baseline_path(folder: Path, name: str) -> Path:
    """Where a results folder keeps a baseline."""
    return folder / BASELINES / (name + COMPRESSED)


def baseline_names(folder: Path) -> list[str]:
    """The baselines of a results folder."""
    return sorted(path.name.removesuffix(COMPRESSED) for path in (folder / BASELINES).glob("*" + COMPRESSED))


def save_baseline(folder: Path, name: str, run: Path) -> Path:
    """Keep a whole run file as a baseline, in place of an older one; returns its path. Equal runs give equal bytes; one
    of exact numbers that says what the older one says leaves it as it is (`kbench.results.steady`).

    Raises UsageError for a run that cannot be read, CannotRunError where the baseline cannot be written.
    """
    path = baseline_path(folder, name)
    data = steady(read_bytes(run))
    with contextlib.suppress(UsageError):  # none, or one that is damaged
        if says_the_same(read_bytes(path), data):
            return path
    replace_bytes(path, compressed(data))
    return path


def compressed(data: bytes) -> bytes:
    """Data as gzip has it, without the name and time that would make equal data differ."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as file:
        file.write(data)
    return packed.getvalue()
