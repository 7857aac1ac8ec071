"""What `kbench report` says on a terminal: what was compared, the rows by verdict, and the answer in the last line."""

from __future__ import annotations

from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.report.model import Change, Report
from kbench.report.surfaces import words

# Rows of a section: more than a few screens of them are read in a page, not in a terminal.
ROWS_OF_FAILURES, ROWS_OF_OTHERS = 50, 10
_IN_A_LINE = ("incomparable", "gone", "new")  # their reason is all that there is to say
_ALL = "--html, --json and --markdown give them too"


def show(report: Report, screen: Screen, whole: bool = False) -> None:
    """The report on stdout. whole: every row of every section, unchanged ones too; otherwise long ones are cut, with
    the number of rows that are left out, and unchanged rows are only counted."""
    _sides(report, screen)
    screen.prose(f"limits: {words.limits(report)}", "  ", "    ")
    for finding in report.findings:
        screen.say()
        screen.prose(words.plain(finding), rest="  ")
    failing = words.failing(report)
    for verdict, changes in words.sections(report):
        if verdict == "same" and not whole:
            continue
        most = ROWS_OF_FAILURES if verdict in failing else ROWS_OF_OTHERS
        shown = changes if whole else changes[:most]
        title = words.TITLES.get(verdict, words.plain(verdict))
        screen.say()
        screen.prose(f"{title} ({len(changes)})", status=title.partition(":")[0])
        for change in shown:
            _in_a_line(change, screen) if verdict in _IN_A_LINE else _in_full(change, screen)
        if rest := len(changes) - len(shown):
            screen.prose(f"and {rest} more; {_ALL}", "  ")
    screen.say()
    screen.prose(words.headline(report), rest="  ")


def _sides(report: Report, screen: Screen) -> None:
    rows = [[fact, before or words.NONE, after or words.NONE] for fact, before, after in words.sides(report)]
    rows = [[fact, before, "same" if after == before != words.NONE else after] for fact, before, after in rows]
    screen.table([Column(""), Column("before", flexible=True), Column("after", flexible=True)], rows, indent=2)


def _in_a_line(change: Change, screen: Screen) -> None:
    reason = words.plain(change.reason)
    screen.prose(f"{words.title(change)}: {reason}" if reason else words.title(change), "  ", "    ")


def _in_full(change: Change, screen: Screen) -> None:
    """Its name, numbers, reason and command below each other: beside each other they fit no terminal."""
    screen.prose(words.name(change), "  ", "      ")
    if told := words.told(change):
        screen.prose(f"{words.plain(change.metric.name)}: {told}", "    ", "      ")
    if reason := words.beyond(change):
        screen.prose(reason, "    ", "      ")
    if change.reproduce:
        screen.say(f"    again: {words.plain(change.reproduce)}")  # whole, to be copied
