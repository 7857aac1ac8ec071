"""A run that was read back, and a folder's runs, on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kbench.cli.screen import Screen
from kbench.cli.session import NO_TIMES, Session
from kbench.cli.summary import show_summary
from kbench.cli.sweep_shown import Layout, Shown
from kbench.cli.table import Column
from kbench.results.columns import bytes_text
from kbench.results.facts import Card, facts_of
from kbench.results.listing import Entry, counts_text, moment
from kbench.results.revisions import revision_text
from kbench.results.rounds import merged
from kbench.results.store import Run
from kbench.results.summary import summarise
from kbench.results.tables import by_family, by_problem

LIST_COLUMNS = (Column("run"), Column("rows", flexible=True, drop=2), Column("size", "right", drop=1))
_DEVICE = 36  # letters of a device's name, as many as an id has: a merged file names several
_BESIDE = 14  # letters of a device's name that have room behind the time


def session_of(run: Run) -> Session:
    """A run as the session that a sweep had: rounds of an experiment together."""
    device, options = _mapping(run.header.get("device")), _mapping(run.header.get("options"))
    given = [(f"--{name}", options.get(name)) for name in ("rtol", "atol")]
    replaced = " ".join(f"{name} {value:g}" for name, value in given if isinstance(value, int | float))
    rows = merged(run.rows)
    seed = options.get("seed")
    if not isinstance(seed, int):
        seed = rows[0].seed if rows else 0
    return Session(rows, dict(device), str(device.get("kind", "")), seed, replaced=replaced)


def document(run: Run) -> dict[str, Any]:
    """The JSON of one run: its header and footer as they stand in the file, and rows with what follows from them."""
    card = Card.of(_mapping(run.header.get("device")))
    rows = [{**row.to_dict(), "facts": asdict(facts_of(row, card))} for row in merged(run.rows)]
    return {"id": run.id, "header": run.header, "footer": run.footer, "warnings": run.warnings, "rows": rows}


def show_run(run: Run, layout: Layout, screen: Screen) -> None:
    """The tables of a run, as its sweep showed them."""
    _head(run, screen)
    if not run.rows:
        return
    session = session_of(run)
    for rows in by_family(session.rows).values():
        for group in by_problem(rows):
            Shown(session, group, layout).show(screen)
    if all(row.device == "emulator" for row in session.rows):
        screen.say(f"{NO_TIMES}, so there is no winner")
    card = Card.of(session.device)
    if session.timed and len(by_family(session.rows)) > 1:
        show_summary(summarise(session.rows, card.ceilings), card.ceilings, screen)


def show_list(folder: Path, entries: Sequence[Entry], screen: Screen) -> None:
    """The runs of a folder as a table of 80 columns: the id alone in a line, to be copied."""
    if not entries:
        screen.note(f"{folder} holds no runs; `kbench sweep` writes one")
        return
    screen.table(LIST_COLUMNS, [[_what(entry), _rows(entry), bytes_text(entry.size)] for entry in entries])
    screen.say()
    total = sum(entry.size for entry in entries)
    latest = " (*: the latest)" if any(entry.latest for entry in entries) else ""
    screen.say(f"{len(entries)} run{'s' if len(entries) != 1 else ''} in {folder}, {bytes_text(total)}{latest}")


def _head(run: Run, screen: Screen) -> None:
    started = moment(run.header.get("started"))
    when = f", {started:%Y-%m-%d %H:%M} UTC" if started else ""
    revision = revision_text(run.header)
    at = f", kernels at {revision}" if revision else ""
    screen.prose(f"run {run.id}{when}, kbench {run.header.get('kbench', '?')}{at}", rest="  ")
    command = run.header.get("command")
    if isinstance(command, list):
        screen.prose(shlex.join(map(str, command)), "  ")
    if run.footer is None:
        screen.prose("it did not come to its end: it was killed, or it still runs", "  ")
    elif (ended := str(run.footer.get("ended", "complete"))) != "complete":
        screen.prose(f"it did not come to its end: {ended}", "  ")
    screen.say()


def _what(entry: Entry) -> str:
    name = f"{entry.id}{' *' if entry.latest else ''}"
    when = f"{entry.started:%Y-%m-%d %H:%M} UTC" if entry.started else "of an unknown time"
    device = entry.device or "unknown device"
    if len(device) > _DEVICE:
        device = device[: _DEVICE - 3] + "..."
    between = ", " if len(device) <= _BESIDE else "\n  "
    return f"{name}\n  {when}{between}{device}" if not entry.fault else name


def _rows(entry: Entry) -> str:
    if entry.fault:
        return f"unreadable: {entry.fault.removeprefix(str(entry.path)).lstrip(': ')}"
    end = ""
    if entry.running:
        end = "; is being written"
    elif entry.ended != "complete":
        end = f"; {entry.ended or 'killed'}"
    at = f"\nat {'; '.join(entry.revisions)}" if entry.revisions else ""
    return counts_text(entry.statuses, entry.passed) + end + at


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
