"""What a change is about, in the words of the report, and where its kernel stands in the source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kbench.catalog import load_catalog, shown
from kbench.errors import KbenchError
from kbench.params import params_text
from kbench.report.model import Subject
from kbench.report.records import Experiment
from kbench.source import kernel_line


def subject_of(experiment: Experiment, kernel: str = "", places: Places | None = None) -> Subject:
    """The subject of an experiment, or of one kernel of it. places: finds the file, where it is wanted."""
    family, version, _, dtype, block, params, mode = experiment.key
    file, line = places.of(family, version, kernel or experiment.kernel) if places is not None else ("", 0)
    return Subject(
        family, version, experiment.problem, dtype, block, params_text(dict(params)), mode, experiment.device, kernel,
        file, line,
    )  # fmt: skip


class Places:
    """Files and lines of kernels, in the folders of families as they are now; what is not there has no place."""

    def __init__(self, folders: Sequence[Path]):
        self._catalog = load_catalog(folders)
        self._known: dict[tuple[str, int, str], tuple[str, int]] = {}
        self._texts: dict[str, str] = {}

    @property
    def families(self) -> tuple[str, ...]:
        return self._catalog.names

    def of(self, family: str, version: int, kernel: str) -> tuple[str, int]:
        """File, relative to this folder where it lies below it, and line from 1; "" and 0 where it is not known."""
        key = (family, version, kernel)
        if key not in self._known:
            try:
                self._known[key] = self._find(*key)
            except (KbenchError, OSError, UnicodeDecodeError, KeyError):
                self._known[key] = ("", 0)
        return self._known[key]

    def _find(self, family: str, version: int, kernel: str) -> tuple[str, int]:
        path = self._catalog[family].sources[version]
        if path not in self._texts:
            self._texts[path] = Path(path).read_text(encoding="utf-8-sig")
        # Of a version that only calls libraries, or a kernel that a macro defines, the file is all that is known.
        return shown(Path(path)), (kernel_line(self._texts[path], kernel) if kernel else 0) or 1
