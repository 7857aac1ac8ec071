"""Winners: the fastest proven row of each problem, and `best.json`, where every proven version keeps its best row."""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kbench.errors import CannotRunError, UsageError
from kbench.results.schema import Row
from kbench.results.store import replace_text
from kbench.results.strict_json import dumps

BEST = "best.json"
BEST_SCHEMA = 1

_MOVE_AWAY = "move it away; the next sweep writes a new one"

# GPU, family, dtype, cache mode and problem: only rows that share all of these compete.
Contest = tuple[str, str, str, str, str]

_DEPTH = 5  # the length of a Contest: as many dictionaries lie above the entries

# An entry is dropped only by proof of a fault in that very version, block size and parameters; a refusal is none.
_DISPROVED = ("fail", "crashed", "hung")


def contest(row: Row) -> Contest:
    """What a row competes for."""
    return (row.device, row.family, row.dtype, row.cache_mode, row.problem)


def median(row: Row) -> float:
    """The median time of a row in milliseconds; infinite where none was taken."""
    return float(row.measurement["median_ms"]) if row.measurement is not None else float("inf")


def winners(rows: Iterable[Row]) -> dict[Contest, Row]:
    """The fastest row of each contest, of those that were proven, timed and judged by the family's own bound."""
    best: dict[Contest, Row] = {}
    for row in rows:
        if row.may_win and median(row) < median(best.get(contest(row), _UNTIMED)):
            best[contest(row)] = row
    return best


def ties(row: Row, winner: Row) -> bool:
    """Whether a row that may win is not told apart from the winner: the intervals of their medians overlap."""
    if not row.may_win or row is winner:
        return False
    mine, best = row.measurement, winner.measurement
    return bool(mine and best and contest(row) == contest(winner) and mine["low_ms"] <= best["high_ms"])


def merge(document: dict[str, Any], rows: Iterable[Row], run_id: str) -> int:
    """Put rows into a best.json document; returns how many entries changed.

    A newer row replaces an older one of the same version if it is faster or of the same block size and parameters: the
    same experiment repeated, and the newer answer is the truer. It also replaces a row of other source files, whose
    version is no more. A row that proves a kept one wrong removes it.
    """
    changed = 0
    for group in _by_version(rows).values():
        entries = _entries(document, group[0])
        for row in group:
            changed += _merge_row(entries, row, run_id)
    _prune(document["gpus"])
    return changed


def load_best(folder: Path) -> dict[str, Any]:
    """The best.json of a results folder, or an empty document. Raises UsageError if it cannot be understood."""
    path = folder / BEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"schema": BEST_SCHEMA, "gpus": {}}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}", _MOVE_AWAY) from error
    if not isinstance(document, dict) or not isinstance(document.get("gpus"), dict):
        raise UsageError(f"{path} is not a best.json of kbench", _MOVE_AWAY)
    if document.get("schema") != BEST_SCHEMA:
        raise UsageError(
            f"{path} has schema {document.get('schema')}, and this kbench reads {BEST_SCHEMA}", "update kbench"
        )
    return document


def kept_row(document: dict[str, Any], row: Row) -> Row | None:
    """The row that best.json keeps of a version for what `row` competes for; None without one that can be read."""
    level: Any = document.get("gpus", {})
    try:
        for name in contest(row):
            level = level[name]
        return Row.from_dict(level[str(row.version)]["row"])
    except (KeyError, TypeError, AttributeError):
        return None


def update_best(folder: Path, rows: Iterable[Row], run_id: str) -> int:
    """Merge rows into `results/best.json`; returns how many entries changed. Safe with two processes at once."""
    with _locked(folder / f".{BEST}.lock"):
        document = load_best(folder)
        try:
            changed = merge(document, rows, run_id)
        except (KeyError, TypeError, AttributeError) as error:  # edited by hand, or by another program
            raise UsageError(f"{folder / BEST} holds an entry that is no row of results", _MOVE_AWAY) from error
        if changed:
            replace_text(folder / BEST, dumps(document, indent=1) + "\n")
    return changed


def unsettled(document: Mapping[str, Any], rows: Iterable[Row], run_id: str) -> list[Row]:
    """Of rows that a run had before it was stopped: those that no newer run has measured or replaced since."""
    found = []
    for row in rows:
        level: Any = document["gpus"]
        for name in (*contest(row), str(row.version)):
            level = level.get(name, {}) if isinstance(level, Mapping) else {}
        # Ids begin with the time at which their run started.
        if not isinstance(level, Mapping) or str(level.get("run", "")) <= run_id:
            found.append(row)
    return found


_UNTIMED = Row("", 0, "", {}, "", 0, "", "refused", 0)


def _by_version(rows: Iterable[Row]) -> dict[tuple[Contest, int], list[Row]]:
    groups: dict[tuple[Contest, int], list[Row]] = defaultdict(list)
    for row in rows:
        # An overridden tolerance proves nothing either way.
        if row.may_win or (row.status in _DISPROVED and not row.overridden):
            groups[contest(row), row.version].append(row)
    for group in groups.values():
        # Fastest last: of two block sizes of one run the faster has to stay, whatever the order they ran in.
        group.sort(key=median, reverse=True)
    return groups


def _entries(document: dict[str, Any], row: Row) -> dict[str, Any]:
    """The versions kept for a row's contest: {"7": {"run": ..., "row": {...}}}."""
    level: dict[str, Any] = document["gpus"]
    for name in contest(row):
        level = level.setdefault(name, {})
    return level


def _merge_row(entries: dict[str, Any], row: Row, run_id: str) -> bool:
    key = str(row.version)
    kept = entries.get(key)
    same = kept is not None and kept["row"]["block"] == row.block and kept["row"].get("params", {}) == row.params
    if not row.may_win:
        return same and entries.pop(key, None) is not None
    # Entries of this very run compete by time alone; an older entry of the same block size and parameters is out of
    # date, and so is one that was measured of other files.
    other_files = kept is not None and kept["row"].get("source", "") != row.source
    stale = (same or other_files) and kept is not None and kept["run"] != run_id
    if kept is None or stale or median(row) < kept["row"]["measurement"]["median_ms"]:
        entries[key] = {"run": run_id, "row": row.to_dict()}
        return True
    return False


def _prune(level: dict[str, Any], depth: int = _DEPTH) -> None:
    """Drop the dictionaries that removing entries left empty."""
    for name, value in list(level.items()):
        if depth > 1:
            _prune(value, depth - 1)
        if not value:
            del level[name]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise CannotRunError(
            f"cannot write {path}: {error.strerror}", "choose another folder with --results"
        ) from error
    with file:
        # Released by the kernel when the file closes, also when this process is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
