"""A report as one page that needs no network and no script: pictures of what changed, then every row.

Rows are filtered by anchors: the style sheet hides those that the address at the end of the page's name leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from kbench.plot.document import document
from kbench.report.model import Change, Report
from kbench.report.surfaces import picture, words

CARDS = 200  # of a verdict: the others stand in the table, which has all of them
PICTURES = 200  # of a page: each takes some ten thousand bytes
FAMILIES = 60  # that the rows can be filtered by
_PLACE = {verdict: re.sub(r"\W+", "-", verdict) for verdict in words.TITLES}  # the anchor of a verdict
_CARDS = ("wrong", "slower", "over budget", "unclear", "faster")  # their rows are told in full
# Facts that are to differ.
_EXPECTED = ("records", "revision", "committed", "started", "run", "runs", "file", "files", "rows")
_BAD = ("wrong", "slower", "over budget")

_STYLE = """
.jump { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 10px 0 } .jump span { color: var(--faint) }
.facts td, .facts th { text-align: left; vertical-align: top } .facts td { overflow-wrap: anywhere }
.facts .differs { font-weight: 600 }
.card { border-left: 3px solid var(--grid); padding: 2px 0 2px 14px; margin: 16px 0 }
.card.bad-card { border-color: var(--bad) } .card h3 { margin: 0 0 4px; overflow-wrap: anywhere }
.card code, .rows code { overflow-wrap: anywhere }
.all td { vertical-align: top; border-top: 1px solid var(--grid); white-space: nowrap }
.all td:first-child, .all td.words { white-space: normal; min-width: 210px; text-align: left; overflow-wrap: anywhere }
.all th.words, .all td.verdict, .all th.verdict { text-align: left }
.target { display: block; scroll-margin-top: 70px }
"""


def render(report: Report) -> str:
    """The page. Its text may hold any character: what is no HTML is escaped."""
    found = words.sections(report)
    parts = [_head(report)]
    left = PICTURES
    for verdict, changes in found:
        if verdict in _CARDS:
            cards, left = _cards(verdict, changes, left)
            parts.append(cards)
    if left < PICTURES:
        parts.insert(1, f'<p class="faint">In the pictures: {picture.EXPLAINED}</p>')
    changed = [change for verdict, changes in found if verdict != "same" for change in changes]
    families = list(dict.fromkeys(change.subject.family for change in changed))[:FAMILIES]
    if found:
        parts.append(_rows(found, families))
    style = _STYLE + picture.STYLE + _filters([verdict for verdict, _ in found], len(families))
    return document(f"kbench report: {words.headline(report)}", parts, style)


def _head(report: Report) -> str:
    bad = ' class="bad"' if any(report.counts[verdict] for verdict in words.failing(report)) else ""
    names = [escape(words.plain(side.name)) for side in (report.before, report.after)]
    parts = [f"<h1{bad}>{escape(words.headline(report))}</h1>"]
    parts.append(f'<p class="faint">kbench report: {names[0]} &rarr; {names[1]}</p>')
    parts += [f'<p class="note">{escape(words.plain(finding))}</p>' for finding in report.findings]
    cells = []
    for fact, before, after in words.sides(report):
        style = ' class="differs"' if before != after and fact not in _EXPECTED else ""
        cells.append(f"<tr><th>{escape(fact)}</th><td{style}>{escape(before)}</td><td{style}>{escape(after)}</td></tr>")
    head = "<tr><th></th><th>before</th><th>after</th></tr>"
    parts.append(f'<h3>Compared</h3><table class="facts">{head}{"".join(cells)}</table>')
    parts.append(f"<h3>Limits</h3><p>{escape(words.limits(report))}</p>")
    links = [_link(verdict, len(changes)) for verdict, changes in words.sections(report)]
    if links:
        parts.append(f'<p class="jump">{" ".join(links)}</p>')
    return "\n".join(parts)


def _title(verdict: str) -> str:
    return escape(words.TITLES.get(verdict, words.plain(verdict)))


def _anchor(verdict: str) -> str:
    return _PLACE.get(verdict, "others")


def _link(verdict: str, number: int) -> str:
    """To the section of a verdict, or, where it has none, to its rows in the table."""
    place = _anchor(verdict) if verdict in (*_CARDS, "same") else f"only-{_anchor(verdict)}"
    return f'<a href="#{place}">{_title(verdict)} ({number})</a>'


def _cards(verdict: str, changes: Sequence[Change], left: int) -> tuple[str, int]:
    """The section of a verdict, and how many more pictures the page may have."""
    parts = [f'<section id="{_anchor(verdict)}"><h2>{_title(verdict)} ({len(changes)})</h2>']
    for change in changes[:CARDS]:
        drawn = picture.picture(change) if left > 0 else ""
        left -= bool(drawn)
        parts.append(_card(change, drawn))
    if rest := len(changes) - CARDS:
        parts += [f'<p class="faint">{rest} more stand in <a href="#rows">the table</a>.</p>'] if rest > 0 else []
    return "\n".join([*parts, "</section>"]), left


def _card(change: Change, drawn: str) -> str:
    bad = " bad-card" if change.verdict in _BAD else ""
    parts = [f'<div class="card{bad}"><h3>{escape(words.name(change))}</h3>']
    metric = words.plain(change.metric.name)
    if told := words.told(change):
        parts.append(f"<p>{escape(metric)}: {escape(told)}</p>")
    if reason := words.beyond(change):
        parts.append(f"<p>{escape(reason)}</p>")
    if change.reproduce:
        parts.append(f"<p>again: <code>{escape(words.plain(change.reproduce))}</code></p>")
    if change.subject.file:
        parts.append(f'<p class="faint">{escape(words.place(change.subject))}</p>')
    return "\n".join([*parts, drawn, "</div>"])


def _rows(found: Sequence[tuple[str, Sequence[Change]]], families: Sequence[str]) -> str:
    """All rows: those that changed, and the unchanged ones behind a click."""
    verdicts = [(verdict, len(changes)) for verdict, changes in found if verdict != "same"]
    links = [f'<a href="#only-{_anchor(verdict)}">{_title(verdict)} ({number})</a>' for verdict, number in verdicts]
    parts = ['<section id="rows"><h2>All rows</h2>']
    parts.append(f'<p class="jump"><span>only</span> {" ".join(links)} <a href="#rows">all</a></p>')
    if len(families) > 1:
        links = [f'<a href="#family-{i}">{escape(words.plain(name, 60))}</a>' for i, name in enumerate(families)]
        parts.append(f'<p class="jump"><span>only</span> {" ".join(links)}</p>')
    places = [f"only-{_anchor(verdict)}" for verdict, _ in verdicts] + [f"family-{i}" for i in range(len(families))]
    parts += [f'<span class="target" id="{place}"></span>' for place in places]
    changed = [change for verdict, changes in found if verdict != "same" for change in changes]
    same = [change for verdict, changes in found if verdict == "same" for change in changes]
    number = {name: i for i, name in enumerate(families)}
    if changed:
        parts.append(_table(changed, number))
    if same:
        inside = f'<div id="same">{_table(same, number)}</div>'
        parts.append(f"<details><summary>{_title('same')} ({len(same)})</summary>{inside}</details>")
    return "\n".join([*parts, "</section>"])


def _table(changes: Sequence[Change], families: dict[str, int]) -> str:
    head = '<tr><th>row</th><th class="words">metric</th><th>before</th><th>after</th><th>ratio</th><th>interval</th>'
    head += '<th class="verdict">verdict</th><th class="words">reason</th></tr>'
    lines = [_line(change, families.get(change.subject.family)) for change in changes]
    return f'<div class="scroll"><table class="all">{head}{"".join(lines)}</table></div>'


def _line(change: Change, family: int | None) -> str:
    style = f"row {_anchor(change.verdict)}" + (f" f{family}" if family is not None else "")
    bad = " bad" if change.verdict in _BAD else ""
    numbers = [words.value(number, change.metric) for number in (change.before, change.after)]
    cells = [*numbers, words.ratio(change), words.interval(change)]
    middle = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return (
        f'<tr class="{style}"><td>{escape(words.name(change))}</td>'
        f'<td class="verdict">{escape(words.metric_name(change))}</td>{middle}'
        f'<td class="verdict{bad}">{escape(words.verdict(change))}</td>'
        f'<td class="words">{escape(words.plain(change.reason))}</td></tr>\n'
    )


def _filters(verdicts: Sequence[str], families: int) -> str:
    """For each anchor the rule that hides all other rows."""
    pairs = [(f"only-{_anchor(verdict)}", _anchor(verdict)) for verdict in verdicts if verdict != "same"]
    pairs += [(f"family-{i}", f"f{i}") for i in range(families)]
    return "".join(f"#{place}:target ~ * tr.row:not(.{style}) {{ display: none }}\n" for place, style in pairs)
