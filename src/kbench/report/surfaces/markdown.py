"""A report as Markdown: a comment on a pull request, or the summary of a job.

GitHub's dialect. Names stand in code spans, where nothing is markup, a mention or a link: "@256" would otherwise call
the user of that name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kbench.report.model import Change, Report
from kbench.report.surfaces import words

# What GitHub takes in one comment, in characters. Bytes are counted here: no way of counting characters gives more.
COMMENT = 65_536
MARKER = "<!-- kbench report -->"  # by which a program finds its earlier comment, to replace it
# A name or reason as long as this has no reader; its whole text is in the other formats.
_NAME, _SENTENCE, _COMMAND, _FACT = 240, 400, 600, 80
# What stands above the rows is bounded too: markup of the worst kind makes 8 bytes of a character.
_FINDINGS, _FACTS, _COMMANDS = 8, 12, 10
_OPEN = ("wrong", "slower", "over budget", "unclear", "faster")  # seen without a click
_REPRODUCED = ("wrong", "slower", "over budget")  # their commands are worth the room


def render(report: Report, limit: int = COMMENT) -> str:
    """The report in at most `limit` bytes of UTF-8, 48 KiB or more: rows that do not fit are counted.

    The first line is `MARKER`.
    """
    lists = [part for verdict, changes in words.sections(report) for part in _section(verdict, changes)]
    text = _head(report)
    left = limit - _size(text) - sum(part.least for part in lists)
    for part in lists:
        written, left = part.write(left)
        text += written
    return text


@dataclass(frozen=True)
class _List:
    """Lines of which as many are written as there is room for, with what stands before and behind them.

    noun: what a line is. close: what comes behind the sentence about lines that were left out.
    """

    before: str
    lines: Sequence[str]
    behind: str
    noun: str
    close: str = ""

    @property
    def least(self) -> int:
        """Bytes that it takes without any of its lines."""
        return _size(self.before + self.behind + self._omitted(len(self.lines)) + self.close)

    def write(self, room: int) -> tuple[str, int]:
        """Its text, and what is left of the room for lines."""
        kept = 0
        for line in self.lines:
            if _size(line) > room:
                room = 0  # nothing of a later list either: a stray short row of it would mislead
                break
            room -= _size(line)
            kept += 1
        rest = self._omitted(len(self.lines) - kept) if kept < len(self.lines) else ""
        return self.before + "".join(self.lines[:kept]) + self.behind + rest + self.close, room

    def _omitted(self, number: int) -> str:
        more = "more " if number < len(self.lines) else ""
        return f"\n*{number} {more}{self.noun if number == 1 else self.noun + 's'}, for which there is no room here*\n"


def _size(text: str) -> int:
    return len(text.encode())


def _head(report: Report) -> str:
    parts = [f"{MARKER}\n### kbench: {words.headline(report)}\n"]
    parts += [f"> {_prose(finding, _SENTENCE)}\n" for finding in report.findings[:_FINDINGS]]
    if rest := len(report.findings) - _FINDINGS:
        parts += [f"> {rest} more findings\n"] if rest > 0 else []
    rows = [tuple(words.shortened(cell, _FACT) for cell in row) for row in words.sides(report)]
    lines = [f"| {_prose(fact)} | {_code(before)} | {_code(after)} |\n" for fact, before, after in _chosen(rows)]
    parts.append("<details><summary>What was compared, and the limits</summary>\n")
    parts.append("| | before | after |\n|---|---|---|\n" + "".join(lines))
    parts.append(f"Limits: {_prose(words.limits(report), _SENTENCE)}\n\n</details>\n")
    return "\n".join(parts)


def _chosen(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first facts and the last, which is the number of rows."""
    return rows if len(rows) <= _FACTS else [*rows[: _FACTS - 1], rows[-1]]


def _section(verdict: str, changes: Sequence[Change]) -> list[_List]:
    """The table of the rows of one verdict, and the commands that show them again."""
    title = f"{words.TITLES.get(verdict, _prose(verdict))} ({len(changes)})"
    shown = verdict in _OPEN
    before = f"\n#### {title}\n\n" if shown else f"\n<details><summary>{title}</summary>\n\n"
    head, rows = _table(changes)
    table = _List(before + head, rows, "", "row", "" if shown else "\n</details>\n")
    commands = dict.fromkeys(words.plain(change.reproduce) for change in changes)
    lines = [f"{command}\n" for command in commands if 0 < len(command) <= _COMMAND][:_COMMANDS]
    if verdict not in _REPRODUCED or not lines:
        return [table]
    fence = _fence("".join(lines), 3)
    return [table, _List(f"\nTo see it again:\n\n{fence}sh\n", lines, f"{fence}\n", "command")]


def _table(changes: Sequence[Change]) -> tuple[str, list[str]]:
    """The two lines of its head, and its rows."""
    columns = ["row", "metric", "before", "after", "change", "reason"]
    aligned = ["---", "---", "---:", "---:", "---:", "---"]
    rows = [_cells(change) for change in changes]
    # A column without a word, such as the reasons of unchanged rows, says nothing but takes room.
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    head = _line([columns[i] for i in kept]) + _line([aligned[i] for i in kept])
    return head, [_line([row[i] for i in kept]) for row in rows]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cells(change: Change) -> list[str]:
    known = [words.value(number, change.metric) for number in (change.before, change.after)]
    reach = words.interval(change)
    return [
        _code(words.plain(change.subject.name, _NAME)),
        _prose(words.metric_name(change), _FACT),
        *(_prose(number, _FACT).replace(" ", "\u00a0") for number in known),  # no line break before a unit
        words.ratio(change) + (f" ({reach})" if reach else ""),
        _prose(change.reason, _SENTENCE),
    ]


def _code(text: str) -> str:
    """Plain text in a code span. One that a span cannot hold inside a table becomes an element of HTML."""
    if not text:
        return ""
    if not set(text) & set("|`\\"):
        return f"`{text}`"
    return f"<code>{_entities(text)}</code>"


def _entities(text: str) -> str:
    """Text of which nothing is markup, in HTML or in Markdown: all but letters, digits and blanks as numbers."""
    return "".join(one if one.isalnum() or one == " " or not one.isascii() else f"&#{ord(one)};" for one in text)


_ENTITIES = {letter: f"&#{ord(letter)};" for letter in "|$\\`"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ESCAPED = "*[]~_"
# The last three are no markup: GitHub looks for users, issues and addresses in the text that is left after it.
_RISKY = re.compile(r"(?i)[&<>|$\\`*\[\]~]|(?<!\w)_|_(?!\w)|[@#](?=\w)|\b(?:https?|ftp)(?=://)|\bwww(?=\.)")


def _prose(text: str, limit: int = 0) -> str:
    """Text as text: no markup, no link, no mention."""
    return _RISKY.sub(lambda found: _harmless(found[0]), words.plain(text, limit))


def _harmless(risky: str) -> str:
    if risky in _ENTITIES:
        return _ENTITIES[risky]
    return f"\\{risky}" if risky in _ESCAPED else f"{risky}<!-- -->"  # a comment breaks a word up, and is not seen


def _fence(text: str, least: int) -> str:
    """Backticks, more of them than stand in a row in the text."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
