"""Runs of several machines in one file, and that file as its runs again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kbench import __version__
from kbench.errors import UsageError
from kbench.results.baselines import compressed
from kbench.results.schema import SCHEMA_VERSION, Row
from kbench.results.store import COMPRESSED, SUFFIX, Run, read_run, replace_bytes, row_key
from kbench.results.strict_json import dumps

SOURCES = "sources"
_SEVERAL = "several devices"


@dataclass(frozen=True)
class Merged:
    """What is to be written. headers: of the runs, in the order in which they came, with `ended` of each: how it did.
    remarks: a line each, on rows that stand in several files."""

    headers: Sequence[Mapping[str, Any]]
    rows: Sequence[Row]
    ended: str
    remarks: Sequence[str] = field(default=())

    @property
    def id(self) -> str:
        """Of the same runs always the same, so that merging again gives the same file."""
        names = "\n".join(str(header.get("id", "")) for header in self.headers).encode("utf-8", errors="replace")
        return f"merged-{hashlib.sha256(names).hexdigest()[:12]}"


def parts(run: Run) -> list[Run]:
    """The runs that a file holds: of a merged one those that it was made of, each with its own header; else itself.

    Rows that name none of them are of the first: somebody has edited the file.
    """
    headers = source_headers(run.header)
    if not headers:
        return [run]
    found = {name: Run(run.path, header, [], _footer(header)) for name, header in headers.items()}
    first = next(iter(found.values()))
    for row in run.rows:
        found.get(row.run, first).rows.append(row)
    first.warnings = run.warnings
    return list(found.values())


def source_headers(header: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By their ids the headers of the runs that a merged file was made of, from its own header; {} of another file."""
    headers = header.get(SOURCES)
    if not isinstance(headers, list) or not all(isinstance(each, dict) for each in headers):
        return {}
    return {str(each.get("id", number)): each for number, each in enumerate(headers)}


def merge(files: Sequence[Run]) -> Merged:
    """The rows of all files, in the order of the files and, in each, as they stand there.

    An experiment of one run may stand in several files, where one of them was merged before: equal rows are kept once,
    rows that differ all, and both is said. Raises UsageError for two runs of one id: their rows could not be told
    apart.
    """
    headers: dict[str, Mapping[str, Any]] = {}
    first: dict[str, Path] = {}
    rows: list[Row] = []
    kept: dict[object, tuple[Row, Path]] = {}
    repeated: Counter[Path] = Counter()
    remarks: list[str] = []
    for file in files:
        for run in parts(file):
            ended = str(run.footer.get("ended", "")) if run.footer is not None else ""
            # A baseline of exact numbers has no id in it; its rows have to find it again.
            header = {**run.header, "id": run.id, "ended": ended}
            if _differ(headers.setdefault(run.id, header), header):
                raise UsageError(
                    f"{first[run.id]} and {file.path} hold different runs of the id {run.id!r}",
                    "give one of the files another name" if "id" not in run.header else "one of them was edited",
                )
            first.setdefault(run.id, file.path)
            for row in run.rows:
                row = replace(row, run=run.id)
                key = (run.id, row_key(row), row.round)
                before = kept.setdefault(key, (row, file.path))
                if before[0] is row:
                    rows.append(row)
                elif before[0] == row:
                    repeated[file.path] += 1
                else:
                    rows.append(row)
                    if before[1] != file.path:  # within one run an experiment may have been repeated
                        remarks.append(_differs(row, run, before[1], file.path))
    found = [
        f"{path}: {count} rows stand in a file before it too, and are kept once" for path, count in repeated.items()
    ]
    unfinished = [header for header in headers.values() if header["ended"] != "complete"]
    ended = f"{len(unfinished)} of {len(headers)} runs did not come to their end" if unfinished else "complete"
    return Merged(list(headers.values()), rows, ended, [*found, *dict.fromkeys(remarks)])  # rounds differ one by one


def write_merged(path: Path, merged: Merged) -> None:
    """Write one run file in one step, compressed if its name ends in .gz. Raises as `require_target` does, and
    CannotRunError where it cannot be written."""
    require_target(path)
    starts = sorted(str(header["started"]) for header in merged.headers if header.get("started"))
    header = {
        "kind": "header",
        "schema": SCHEMA_VERSION,
        "kbench": __version__,
        "id": merged.id,
        "started": starts[0] if starts else "",
        "command": ["kbench", "results", "merge"],
        "device": _device(merged.headers),
        "options": {},
        SOURCES: list(merged.headers),
    }
    statuses = Counter(row.status for row in merged.rows)
    footer = {"kind": "footer", "rows": len(merged.rows), "statuses": dict(statuses), "ended": merged.ended}
    rows = ({"kind": "row", **row.to_dict()} for row in merged.rows)
    data = "".join(dumps(line) + "\n" for line in (header, *rows, footer)).encode("utf-8", errors="replace")
    hint = "choose another file with -o FILE"
    replace_bytes(path, compressed(data) if path.name.endswith(".gz") else data, hint)


def require_target(path: Path) -> None:
    """Raises UsageError for a file that must not be written over, and for a name that nothing would read again."""
    if not path.name.endswith((SUFFIX, COMPRESSED)):
        raise UsageError(f"-o {path} is not the name of a run file", f"it has to end in {SUFFIX} or {COMPRESSED}")
    if not path.exists():
        return
    # One run more or less is merged anew; the records of a run are nowhere else.
    try:
        old = read_run(path)
    except UsageError:
        old = None
    if old is None or SOURCES not in old.header:
        raise UsageError(f"-o {path} is there, and is no merged file", "name another file, or remove it first")


def _device(headers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The one device of all runs, or what they have in common."""
    devices = [header["device"] for header in headers if isinstance(header.get("device"), dict)]
    if devices and all(device == devices[0] for device in devices):
        return dict(devices[0])
    names = dict.fromkeys(str(device.get("name", "unnamed device")) for device in devices)
    kinds = {str(device.get("kind", "")) for device in devices}
    shared = (
        {key: value for key, value in devices[0].items() if all(d.get(key) == value for d in devices)}
        if devices
        else {}
    )
    return {**shared, "kind": kinds.pop() if len(kinds) == 1 else "", "name": ", ".join(names) or _SEVERAL}


def _footer(header: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a run ended, as its header in a merged file says: None where it was killed."""
    return {"ended": header["ended"]} if header.get("ended") else None


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two headers are of different runs: how a run ended may have changed since, for it may have gone on."""
    return {**one, "ended": ""} != {**other, "ended": ""}


def _differs(row: Row, run: Run, one: Path, other: Path) -> str:
    what = f"{row.family}:{row.version} {row.problem} {row.dtype} at block size {row.place}"
    return f"{what} of run {run.id} differs between {one} and {other}: both rows are kept"
