"""The files that `kbench report` writes: proven writable before any work, written in one step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from kbench.cli.output import write
from kbench.errors import UsageError
from kbench.report.model import Report
from kbench.results.store import replace_text, require_writable, unwritable

STDOUT = "-"
SUMMARY = "GITHUB_STEP_SUMMARY"
_CHOOSE = "choose another file"
# What nobody wants replaced by a report: records, and sources.
_PRECIOUS = (".jsonl", ".gz", ".cu", ".py", ".toml")


@dataclass(frozen=True)
class Output:
    """One format. option: that asked for it. file: as it was given. render: makes its text."""

    option: str
    file: str
    render: Callable[[Report], str]

    @property
    def to_stdout(self) -> bool:
        return self.file == STDOUT

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def appends(self) -> bool:
        """What GitHub shows as a job's summary is what its steps append to a file, others' words among it."""
        summary = os.environ.get(SUMMARY)
        return bool(summary) and not self.to_stdout and _same(self.path, Path(summary or ""))

    def require_writable(self, sources: Collection[Path]) -> None:
        """Prove that it can be written. sources: files that the report reads. Raises UsageError, CannotRunError."""
        path = self.path
        if path.is_dir():
            raise UsageError(f"{self.option} {path} is a folder", "name a file in it")
        if path.name.endswith(_PRECIOUS) or any(_same(path, source) for source in sources):
            raise UsageError(f"{self.option} {path} would replace what is no report", _CHOOSE)
        if self.appends or _is_special(path):
            try:
                path.open("a", encoding="utf-8").close()
            except OSError as error:
                raise unwritable(path, error, _CHOOSE) from error
            return
        require_writable(path.parent, below=(), hint=_CHOOSE)

    def write(self, report: Report) -> None:
        """Raises CannotRunError where it cannot be written."""
        # JSON may hold half a character, which no file of text can.
        text = self.render(report).encode("utf-8", errors="replace").decode("utf-8")
        if self.to_stdout:
            write(sys.stdout, text if text.endswith("\n") else text + "\n")
        elif self.appends or _is_special(self.path):
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(text if text.endswith("\n") else text + "\n")
            except OSError as error:
                raise unwritable(self.path, error, _CHOOSE) from error
        else:
            replace_text(self.path, text, _CHOOSE)


def require_apart(outputs: Collection[Output], json: bool, github: bool) -> None:
    """Raises UsageError where two texts would go to one place."""
    to_stdout = [output.option for output in outputs if output.to_stdout]
    to_stdout += ["--json"] if json else []
    to_stdout += ["--github"] if github and to_stdout else []
    if len(to_stdout) > 1:
        raise UsageError(f"{' and '.join(to_stdout)} both write to standard output", "give one of them a file")
    seen: dict[str, str] = {}
    for output in outputs:
        place = os.path.realpath(output.file)
        if not output.to_stdout and place in seen:
            raise UsageError(f"{seen[place]} and {output.option} name one file, {output.file}", "give each its own")
        seen[place] = output.option


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _is_special(path: Path) -> bool:
    """Whether it is something like /dev/stdout, which a file must not replace."""
    return path.exists() and not path.is_file()
