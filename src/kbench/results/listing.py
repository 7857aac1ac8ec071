"""The runs of a results folder: what can be said of each without reading all of its rows."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench.errors import UsageError
from kbench.results.revisions import revisions_of
from kbench.results.schema import UNPROVEN
from kbench.results.store import header_of, is_running, latest_run, open_run, run_files, unreadable

_TAIL = 1 << 16  # bytes at the end of a file in which its footer stands


@dataclass(frozen=True)
class Entry:
    """One run file. started: UTC, None where it does not say. statuses: rows by what became of them. ended: as its
    footer says; "" without one. fault: why it cannot be read. running: whether somebody writes it. revisions: which
    commits the kernels were of, as text: of a merged file those of its runs. passed: what rows of the status "pass" are
    called: nothing was proven in a run that only compiled or counted."""

    id: str
    path: Path
    size: int = 0
    started: datetime | None = None
    device: str = ""
    command: str = ""
    schema: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    ended: str = ""
    latest: bool = False
    running: bool = False
    fault: str = ""
    revisions: tuple[str, ...] = ()
    passed: str = "pass"

    @property
    def rows(self) -> int:
        return sum(self.statuses.values())

    def to_dict(self) -> dict[str, Any]:
        """As `--json` gives it."""
        known = {
            name: getattr(self, name) for name in ("id", "size", "device", "command", "schema", "rows", "statuses")
        }
        known |= {"path": str(self.path), "started": self.started.isoformat() if self.started else None}
        known |= {name: getattr(self, name) for name in ("ended", "latest", "running", "fault")}
        return known | {"revision": "; ".join(self.revisions)}


def entries(folder: Path) -> list[Entry]:
    """The runs of a results folder, newest first; those that do not say when they began, or cannot be read, last."""
    try:
        latest = latest_run(folder).resolve()
    except UsageError:
        latest = None
    found = [_entry(name, path, latest) for name, path in run_files(folder).items()]
    never = datetime.min.replace(tzinfo=UTC)
    return sorted(found, key=lambda entry: (entry.started or never, entry.id), reverse=True)


def moment(text: Any) -> datetime | None:
    """The time of a stamp in a record; None for what is none."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _entry(name: str, path: Path, latest: Path | None) -> Entry:
    here = path.resolve() == latest
    try:
        size = path.stat().st_size
        header, statuses, ended = _read(path)
    except (OSError, EOFError, zlib.error) as error:
        return Entry(name, path, fault=str(unreadable(path, error)), latest=here)
    except UsageError as error:
        return Entry(name, path, size, fault=str(error), latest=here)
    device = header.get("device")
    named = str(device.get("name", "")) if isinstance(device, dict) else ""
    command, options = header.get("command"), header.get("options")
    mode = options.get("mode") if isinstance(options, dict) else None
    return Entry(
        name, path, size, moment(header.get("started")), named,
        " ".join(map(str, command)) if isinstance(command, list) else "",
        header["schema"], statuses, ended, here, not ended and is_running(path), "", tuple(revisions_of(header)),
        UNPROVEN.get(str(mode), "pass"),
    )  # fmt: skip


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int], str]:
    """Header, rows by status, and how the run ended."""
    with open_run(path) as file:
        header = header_of(path, file.readline().decode("utf-8", errors="replace").removesuffix("\n"))
        if not path.name.endswith(".gz"):
            footer = _footer(_tail(path))
            if footer is not None:
                return header, footer["statuses"], str(footer.get("ended", ""))
        statuses, last = Counter[str](), b""
        for line in file:
            last = line
            if (status := _status(line)) is not None:
                statuses[status] += 1
        footer = _footer(last)
        return header, dict(statuses), str(footer.get("ended", "")) if footer is not None else ""


def _tail(path: Path) -> bytes:
    """The last line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read().rstrip(b"\n").rsplit(b"\n", 1)[-1]


def _footer(line: bytes) -> dict[str, Any] | None:
    data = _object(line)
    statuses = data.get("statuses")
    counts = statuses.values() if isinstance(statuses, dict) else [None]
    sound = data.get("kind") == "footer" and all(isinstance(count, int) for count in counts)
    return data if sound else None


def _status(line: bytes) -> str | None:
    data = _object(line)
    return str(data.get("status")) if data.get("kind") == "row" else None


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def counts_text(statuses: dict[str, int], passed: str = "pass") -> str:
    """Such as "118 pass, 2 fail": the most frequent first. passed: the word for "pass"."""
    pairs: Iterator[tuple[str, int]] = iter(sorted(statuses.items(), key=lambda pair: (-pair[1], pair[0])))
    return ", ".join(f"{count:,} {passed if status == 'pass' else status}" for status, count in pairs) or "no rows"
