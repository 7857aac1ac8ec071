"""Rows that did not pass, as text: which of many are shown, where they went wrong and how to see them again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from kbench.cli.output import cut
from kbench.cli.screen import Screen
from kbench.errors import Exit
from kbench.params import params_text
from kbench.results.schema import Row

# A bug that breaks one version breaks most of its rows in the same way: the first few tell the story.
SHOWN = 3
_NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")


def went_wrong(row: Row) -> bool:
    """Whether a row counts against its version; a refused or skipped one does not."""
    return row.exit_status != Exit.OK


def show_failures(rows: Sequence[Row], screen: Screen, whole: bool) -> None:
    """The failures of one family by version, versions with a wrong result first. whole: all rows and whole logs."""
    by_version: dict[int, list[Row]] = {}
    for row in filter(went_wrong, rows):
        by_version.setdefault(row.version, []).append(row)
    for number, bad in sorted(by_version.items(), key=lambda item: (not any(map(_is_wrong, item[1])), item[0])):
        shown = bad if whole else choose(_different(bad), SHOWN)
        for row in shown:
            _show(row, screen, whole)
        # By identity: two rows may be equal.
        left = Counter(row.status for row in bad if all(row is not other for other in shown))
        if left:
            counts = ", ".join(f"{count} {status}" for status, count in left.items())
            screen.prose(f"version {number}: not shown are {counts}; --debug shows all rows", "  ")
        screen.say()


def _different(bad: Sequence[Row]) -> list[Row]:
    """Without the rows that are invalid as an earlier one is: a `.cu` that does not compile, or a contract that fails,
    says the same at every block size. At which of them a result is wrong, tells something."""
    told: set[tuple[str, ...]] = set()
    rows = []
    for row in bad:
        story = (row.reason, *row.details)
        if row.status != "invalid" or story not in told:
            rows.append(row)
        if row.status == "invalid":
            told.add(story)
    return rows


def choose(bad: Sequence[Row], limit: int) -> list[Row]:
    """At most `limit` rows, wrong results first, one of each kind of reason before any kind comes twice."""
    seen: Counter[tuple[str, str]] = Counter()
    ranked = []
    for position, row in enumerate(bad):
        kind = _kind(row)
        ranked.append((seen[kind], not _is_wrong(row), position, row))
        seen[kind] += 1
    chosen = sorted(ranked, key=lambda entry: entry[:3])[:limit]
    return [entry[3] for entry in sorted(chosen, key=lambda entry: entry[1:3])]


def _is_wrong(row: Row) -> bool:
    return row.exit_status == Exit.WRONG


def _kind(row: Row) -> tuple[str, str]:
    """What tells one reason from another: its words. Indices and values differ in every row."""
    return row.status, _NUMBER.sub("#", row.reason)


def _show(row: Row, screen: Screen, whole: bool) -> None:
    status = row.status.upper()
    where = f" version {row.version}, {row.problem}, {row.dtype}, block size {row.place}" if row.block else ""
    screen.prose(f"{status} {row.family}{where}", rest="  ", status=status)
    screen.prose(row.reason, "  ")
    show_details(row, screen, whole)
    show_commands(row, screen, "  again:   ", "  smaller: ")


def show_details(row: Row, screen: Screen, whole: bool, indent: str = "    ") -> None:
    """What is known beyond the reason. A compiler's log stays as it is: its marks point at columns."""
    for line in cut(row.details, whole):
        if row.status == "invalid":
            screen.say(f"{indent}{line}")
        else:
            screen.prose(line, indent, f"{indent}  ")


def show_commands(row: Row, screen: Screen, again: str, smaller: str) -> None:
    """The commands that repeat a row, each whole on its line so that it can be copied."""
    if row.reproduce:
        screen.say(f"{again}{row.reproduce}")
    if row.smaller and row.smaller != row.reproduce:
        screen.say(f"{smaller}{row.smaller}")


def show_reasons(rows: Sequence[Row], screen: Screen) -> None:
    """Below a table: why its rows did not pass, or what is to be said of them; equal reasons once."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if text := row.reason or (row.measurement or {}).get("note", ""):
            groups.setdefault((row.status, text, params_text(row.params)), []).append(row)
    for (status, text, params), mine in groups.items():
        shown = "" if status == "pass" else f" {status}"
        where = f"{_blocks(mine)}{f', {params}' if params else ''}"
        # Of a family that cannot be loaded there is neither version nor block size.
        told = f"{_versions(mine)}{shown} at {where}" if mine[0].block else f"{mine[0].family}{shown}"
        screen.prose(f"{told}: {text}", rest="    ", status=shown.strip())
        if went_wrong(mine[0]):
            show_commands(mine[0], screen, "    again:   ", "    smaller: ")


def show_refusals(rows: Sequence[Row], screen: Screen) -> None:
    """Why rows of a family were skipped, and why versions that ran nowhere were refused: each reason once, with how
    many rows it has.

    What a version refuses beside what it runs is in its contract; what was skipped is this machine's doing, and leaves
    a gap in what was proved.
    """
    ran = {row.version for row in rows if row.status not in ("refused", "skipped")}
    # A rule is told once, not again for every problem that breaks it.
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status == "skipped" or row.version not in ran:
            groups.setdefault((row.status, row.reason.removesuffix(f" (here {row.problem})")), []).append(row)
    for (status, reason), mine in groups.items():
        many = f" ({len(mine)} rows)" if len(mine) > 1 else ""
        screen.prose(f"{_versions(mine)} {status}: {reason}{many}", rest="    ", status=status)


def _versions(rows: Sequence[Row]) -> str:
    return _named("version", dict.fromkeys(row.version for row in rows))


def _blocks(rows: Sequence[Row]) -> str:
    return _named("block size", dict.fromkeys(row.block for row in rows))


def _named(what: str, numbers: Collection[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
