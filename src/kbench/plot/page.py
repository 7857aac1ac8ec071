"""The page of a run: one HTML file that needs no network, no script and no library to be read.

The pictures are SVG and HTML of our own rather than a plotting library's: four kinds are all that is drawn, a page has
up to a hundred of them, and these follow the reader's light or dark theme, stay text that can be searched and copied,
and fit a telephone. A library draws letters and colours that follow no reader, at the price of a dependency.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kbench.ceilings import Ceilings
from kbench.errors import UsageError
from kbench.plot import charts, tables
from kbench.plot.contest import Contest, contests, label, series_of
from kbench.plot.document import document
from kbench.results.best import median
from kbench.results.conditions import mode_text
from kbench.results.revisions import revisions_of
from kbench.results.store import Run, replace_text
from kbench.results.summary import Line, ceilings_text, summarise
from kbench.results.tables import interval, milliseconds


def write_page(path: Path, run: Run, option: str = "-o") -> int:
    """Write the page of a run in one move; returns how many problems it shows. option: that names another file.

    Raises UsageError for a run that holds nothing to plot or is damaged, CannotRunError for a file that cannot be
    written.
    """
    found = contests(run)
    # JSON may hold half a character, which no file of text can.
    text = page(run, found).encode("utf-8", errors="replace").decode("utf-8")
    replace_text(path, text, hint=f"choose another file with {option} FILE.html")
    return len(found)


def page(run: Run, found: Sequence[Contest]) -> str:
    """The HTML of a run. found: `contests(run)`."""
    ceilings = _ceilings(run)
    lines = summarise([row for contest in found for row in contest.rows], ceilings)
    timed = any(contest.timed for contest in found)
    links: dict[tuple[str, str, str], str] = {}
    for number, contest in enumerate(found, start=1):
        first = contest.rows[0]
        links.setdefault((first.family, first.problem, first.dtype), f"p{number}")
    parts = [_head(run, found, timed)]
    if timed:
        parts += ["<h2>Summary</h2>", tables.summary(lines, links), *_overview(lines, ceilings)]
    parts += [_section(contest, f"p{number}") for number, contest in enumerate(found, start=1)]
    return document(f"kbench {run.id}", parts)


def _ceilings(run: Run) -> Ceilings:
    """What the run measured of its card; nothing where it did not, as on the emulator. Raises UsageError."""
    try:
        return Ceilings.from_dict(_device(run).get("ceilings") or {})
    except ValueError:
        raise UsageError(f"{run.path}:1 is damaged: its ceilings are no ceilings", "sweep again") from None


def _device(run: Run) -> dict[str, Any]:
    device = run.header.get("device")
    return device if isinstance(device, dict) else {}


def _head(run: Run, found: Sequence[Contest], timed: bool) -> str:
    device, header = _device(run), run.header
    facts = [("", device.get("arch")), ("driver ", device.get("driver")), ("", device.get("compiler"))]
    known = [f"{name}{value}" for name, value in facts if value]
    machine = str(device.get("name", "unknown device")) + (f" ({', '.join(known)})" if known else "")
    rows = sum(len(contest.rows) for contest in found)
    parts = [f"<h1>{html.escape(machine)}</h1>"]
    command = header.get("command")
    if isinstance(command, list):
        parts.append(f"<p><code>{html.escape(shlex.join(map(str, command)))}</code></p>")
    facts_of_run = f"run {run.id}, {header.get('started', 'of an unknown time')}, kbench {header.get('kbench', '?')}"
    if commits := revisions_of(header):
        facts_of_run += f", kernels at {'; '.join(commits)}"
    parts.append(f'<p class="faint">{html.escape(facts_of_run)}; rows: {rows}</p>')
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in [*_warnings(run), *_no_times(run, timed)]]
    return "\n".join(parts)


def _warnings(run: Run) -> list[str]:
    if run.footer is None:
        return ["The run did not come to its end: it was killed, or it still runs.", *run.warnings]
    ended = str(run.footer.get("ended", "complete"))
    return [] if ended == "complete" else [f"The run did not come to its end: {ended}."]


def _no_times(run: Run, timed: bool) -> list[str]:
    if timed:
        return []
    if all(row.device == "emulator" for row in run.rows):
        return ["Verdicts only: the emulator is not a GPU, so there are no times, and nothing to compare."]
    return ["Verdicts only: no row of this run was both proven and timed."]


def _overview(lines: Sequence[Line], ceilings: Ceilings) -> list[str]:
    """Roofline, bandwidths, and what the card does at most."""
    parts = []
    arithmetic = [line for line in lines if line.tflops and line.gbs]
    others = [line for line in lines if line.gbs and not line.tflops]
    if arithmetic:
        text = "The best version of each problem whose operations are counted, below what the card was measured to do."
        parts.append(f'<div><h3>Roofline</h3><p class="faint">{text}</p>{charts.roofline(arithmetic, ceilings)}</div>')
    if others:
        text = "The best version of the problems whose operations are not counted: what memory has to move."
        text += " The red line is the card's copy." if ceilings.copy_gbs else ""
        bars = tables.bandwidths(others, ceilings)
        parts.append(f'<div><h3>Bandwidth</h3><p class="faint">{text}</p>{bars}</div>')
    notes = [f'<p class="faint">{html.escape(text)}</p>' for text in ceilings_text(ceilings)]
    return ['<div class="pair">', *parts, "</div>", *notes]


def _section(contest: Contest, place: str) -> str:
    first = contest.rows[0]
    mode = f", {mode_text(first)}" if contest.timed else ""
    parts = [f'<section id="{place}"><h2>{html.escape(first.family)}</h2>']
    parts.append(f'<p class="faint">{html.escape(f"{first.problem}, {first.dtype}{mode}")}</p>')
    if contest.winner is None:
        parts += ["<h3>Verdicts</h3>", tables.heat_map(contest)]
    else:
        parts.append(f"<p>{html.escape(_fastest(contest))}</p>")
        pictures = (
            ("Time over block size, 95% intervals; ringed: the fastest", charts.times(contest)),
            ("Median ms by version and block size", tables.heat_map(contest)),
        )
        pair = "".join(f"<div><h3>{title}</h3>{picture}</div>" for title, picture in pictures)
        parts.append(f'<div class="pair">{pair}</div>')
        parts.append(f"<h3>Speed-up over the first version, each at its best block size</h3>{tables.ladder(contest)}")
    parts.append(tables.untimed(contest))
    return "\n".join([*parts, "</section>"])


def _fastest(contest: Contest) -> str:
    winner = contest.winner
    assert winner is not None
    name = f"{label(series_of(winner))} at block size {winner.block}"
    tied = f"; not told apart from it: {contest.tied}" if contest.tied else ""
    return f"Fastest: {name}, {milliseconds(median(winner))} ms (95% interval {interval(winner)}){tied}"
