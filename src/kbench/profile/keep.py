"""Keeping a profile: ncu's report, its counters as CSV and our summary as JSON, side by side under one name."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench.profile.ncu import REPORT
from kbench.results.store import replace_text, unwritable
from kbench.results.strict_json import dumps

PROFILES = "profiles"


@dataclass(frozen=True)
class Files:
    """Where a profile is kept. report: for ncu's viewer. csv: all that ncu counted. summary: what kbench made of it."""

    report: Path
    csv: Path
    summary: Path

    def to_dict(self) -> dict[str, str]:
        return {"report": str(self.report), "csv": str(self.csv), "summary": str(self.summary)}


def new_files(results: Path, family: str, version: int) -> Files:
    """Names that no other profile has."""
    # The random part keeps two profiles of one second apart.
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{family}-{version}-{secrets.token_hex(3)}"
    folder = results / PROFILES
    return Files(folder / f"{stem}{REPORT}", folder / f"{stem}.csv", folder / f"{stem}.json")


def keep_report(files: Files, report: Path, raw: str) -> None:
    """Take over ncu's report and its counters. Raises CannotRunError where they cannot be written; half a file never
    stands under its name."""
    try:
        files.report.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=files.report.parent, prefix=f".{files.report.name}-")
        os.close(handle)
        try:
            shutil.copyfile(report, temporary)
            os.chmod(temporary, 0o644)  # mkstemp makes it private
            os.replace(temporary, files.report)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise unwritable(files.report, error) from error
    replace_text(files.csv, raw)


def keep_summary(files: Files, document: Mapping[str, Any]) -> None:
    """Raises CannotRunError where it cannot be written."""
    replace_text(files.summary, dumps(document, indent=1) + "\n")
