"""Tables and coloured words as text, as wide as the terminal and only as colourful as it wants."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kbench.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"pass": "green", "ok": "green", "refused": "yellow", "skipped": "yellow", "missing": "yellow"}
STYLES |= {"faster": "green", "unclear": "yellow", "not comparable": "yellow", "gone": "yellow"}
FAULT_STYLE = "bold red"
FAULTS = {"fail", "invalid", "unable", "unlaunchable", "crashed", "hung", "stopped"}
FAULTS |= {"wrong", "regressions", "over budget"}

NO_TERMINAL_WIDTH = 80  # of a pipe or a file: what most people's editors and logs show whole
MIN_WIDTH = 40  # narrower, nothing would be left of a line but its breaks
MIN_FLEXIBLE = 20  # of a column of prose: narrower, it breaks at nearly every word
# To which it shrinks where no other column can go: a path in pieces can be read, one letter a line cannot.
LEAST_FLEXIBLE = 10
GAP = 2  # blanks between two columns


@dataclass(frozen=True)
class Column:
    """A column of a table. flexible: it takes the width that is left and wraps; others keep theirs.

    short: its heading where space is short. drop: the order in which columns go where it is shorter still, 1 first;
    0 stays.
    """

    title: str
    align: Literal["left", "right"] = "left"
    flexible: bool = False
    short: str = ""
    drop: int = 0


def width() -> int:
    """Characters in a line of the terminal; $COLUMNS overrides it."""
    return max(MIN_WIDTH, shutil.get_terminal_size((NO_TERMINAL_WIDTH, 24)).columns)


def render(columns: Sequence[Column], rows: Sequence[Sequence[str]], indent: int = 0) -> str:
    """A table as text, statuses coloured where stdout is a terminal. Cells are plain text.

    Where the terminal is too narrow, headings are shortened and then columns dropped; numbers are never cut: what is
    still too wide stays so, and the terminal breaks its lines.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    room = width() - indent
    columns, rows = fit(columns, rows, room)
    # Two blanks between columns, one of them the box's: wide tables still fit 80 columns.
    rule = box.SIMPLE_HEAD if _draws_lines() else box.Box(str(box.SIMPLE_HEAD).replace("─", "-"), ascii=True)
    table = Table(box=rule, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, justify=column.align, no_wrap=not column.flexible, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell, keep="\n"), style=_style(cell)) for cell in row))
    paper = _Paper()
    # A cell that is cut is another number: 1024 without its last digit is a block size, too.
    needed = _needed(columns, [[row[i] for row in rows] for i in range(len(columns))], LEAST_FLEXIBLE)
    _console(paper, max(room, needed)).print(table)
    return "".join(f"{' ' * indent}{line}".rstrip() + "\n" for line in paper.getvalue().splitlines())


def fit(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int
) -> tuple[list[Column], list[Sequence[str]]]:
    """The columns that `room` characters hold, and the rows' cells in them."""
    shown = [i for i, column in enumerate(columns) if column.title or any(row[i] for row in rows)]
    columns = list(columns)
    if _needed([columns[i] for i in shown], [[row[i] for row in rows] for i in shown]) > room:
        columns = [Column(c.short or c.title, c.align, c.flexible, c.short, c.drop) for c in columns]
    for index in sorted((i for i in shown if columns[i].drop), key=lambda i: columns[i].drop):
        if _needed([columns[i] for i in shown], [[row[i] for row in rows] for i in shown]) <= room:
            break
        shown.remove(index)
    return [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]


def stacks(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int, keys: Sequence[int]) -> list[list[int]]:
    """The columns of a table that is too wide, as positions, in parts that fit one below the other. keys: positions
    that every part has, at its start."""
    parts: list[list[int]] = []
    for index in range(len(columns)):
        if index in keys:
            continue
        part = [*parts[-1], index] if parts else [*keys, index]
        short = [Column(columns[i].short or columns[i].title, flexible=columns[i].flexible) for i in part]
        if parts and _needed(short, [[row[i] for row in rows] for i in part]) <= room:
            parts[-1] = part
        else:
            parts.append([*keys, index])
    return [sorted(part) for part in parts] or [list(keys)]


def _needed(columns: Sequence[Column], cells: Sequence[Sequence[str]], flexible: int = MIN_FLEXIBLE) -> int:
    """The width that a table needs, in characters. flexible: the least of a column of prose."""
    from rich.cells import cell_len  # a letter of Chinese takes two places

    widths = [
        max(cell_len(line) for text in (column.title, *mine) for line in text.split("\n"))
        for column, mine in zip(columns, cells, strict=True)
    ]
    least = [min(w, flexible) if c.flexible else w for c, w in zip(columns, widths, strict=True)]
    return sum(least) + GAP * (len(columns) - 1)


def paint(word: str) -> str:
    """A status, or another verdict, in its colour where stdout is a terminal."""
    from rich.text import Text

    paper = _Paper()
    _console(paper, width()).print(Text(word, style=_style(word)), end="")
    return paper.getvalue()


def _style(text: str) -> str:
    word = text.lower()
    return FAULT_STYLE if word in FAULTS else STYLES.get(word, "")


def _draws_lines() -> bool:
    """Whether stdout's encoding has the character of a rule; a row of "?" is none."""
    try:
        "─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Paper(io.StringIO):
    """Takes text that is meant for stdout, and says that it is a terminal where stdout is one."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def _console(paper: _Paper, columns: int) -> Console:
    from rich.console import Console

    # https://no-color.org asks for no colour; bold text is drawn in another colour by many terminals.
    if os.environ.get("NO_COLOR"):
        return Console(file=paper, width=columns, markup=False, highlight=False, emoji=False, color_system=None)
    return Console(file=paper, width=columns, markup=False, highlight=False, emoji=False)
