"""Rows of a command that runs kernels on its way to something else: kept as a sweep keeps its own, as they come."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kbench import __version__
from kbench.results.best import update_best
from kbench.results.schema import Row
from kbench.results.store import RunWriter
from kbench.revision import revisions


class Journal:
    """A run file and best.json of a results folder; the file is made when there is a first row.

    Use it as a context manager. device: what Device.describe() says. family_dirs: of users' kernels. Raises
    CannotRunError when a write fails.
    """

    def __init__(self, folder: Path, device: Mapping[str, Any], family_dirs: Sequence[Path] = ()):
        self._folder, self._device, self._family_dirs = folder, device, family_dirs
        self._writer: RunWriter | None = None

    def keep(self, rows: Sequence[Row]) -> None:
        """Write rows, and put those that are timed and proven into best.json."""
        if not rows:
            return
        if self._writer is None:
            command = ["kbench", *sys.argv[1:]]
            self._writer = RunWriter(
                self._folder, device=self._device, command=command, options={}, kbench_version=__version__,
                revisions=revisions(self._family_dirs),
            )  # fmt: skip
        for row in rows:
            self._writer.append(row)
        update_best(self._folder, rows, self._writer.id)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, at)
