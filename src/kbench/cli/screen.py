"""What people and programs see: tables or one JSON document on stdout; notes, progress and errors on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from kbench import __version__
from kbench.errors import CompileError, KbenchError
from kbench.results.schema import SCHEMA_VERSION
from kbench.results.strict_json import dumps

if TYPE_CHECKING:
    from rich.console import Console

LOG_LINES = 20  # of a compiler's log: the first errors are the ones that matter, and they fit a screen

STATUS_STYLES = {"pass": "green", "refused": "yellow", "skipped": "yellow"}
FAULT_STYLE = "bold red"


@dataclass(frozen=True)
class Column:
    """A column of a table. flexible: it takes the width that is left and wraps; others keep theirs."""

    title: str
    align: Literal["left", "right"] = "left"
    flexible: bool = False


class Screen:
    """Output of one command. `json` keeps everything but the document off stdout."""

    def __init__(self, json: bool = False):
        self.json = json
        self._above: Callable[[str], None] | None = None  # prints above a progress bar while there is one

    def note(self, text: str) -> None:
        """One line for people, on stderr."""
        line = f"kbench: {one_line(text)}"
        if self._above is not None:
            self._above(line)
        else:
            write(sys.stderr, line + "\n")

    def say(self, text: str = "") -> None:
        """Text on stdout, unless a JSON document goes there."""
        if not self.json:
            write(sys.stdout, text + "\n")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """A table on stdout as wide as the terminal, or 80 columns where there is none."""
        if self.json:
            return
        if title:
            self.say(title)
        write(sys.stdout, render(columns, rows))

    def document(self, command: str, content: dict[str, Any]) -> None:
        """The JSON document of a command, on stdout, if it was asked for."""
        if self.json:
            head = {"kbench": __version__, "schema": SCHEMA_VERSION, "command": command}
            write(sys.stdout, dumps({**head, **content}, indent=1) + "\n")

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar on a terminal, nothing elsewhere; call what it yields after each row, with its name."""
        if not sys.stderr.isatty() or total < 2:
            yield lambda name: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True, markup=False, highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            self._above = console.print
            try:
                yield lambda name: bar.update(task, advance=1, description=name)
            finally:
                self._above = None


def report_error(error: KbenchError, debug: bool = False) -> None:
    """One line on stderr for an error; below it, for one of the compiler's, the start of its log."""
    write(sys.stderr, f"kbench: error: {one_line(str(error))}\n")
    if isinstance(error, CompileError) and error.log.strip():
        write(sys.stderr, "".join(f"    {line}\n" for line in cut(error.log.splitlines(), debug)))


def cut(lines: Sequence[str], whole: bool = False, limit: int = LOG_LINES) -> list[str]:
    """The first lines of a long text, and how many are left out."""
    if whole or len(lines) <= limit:
        return list(lines)
    return [*lines[:limit], f"... and {len(lines) - limit} more lines; --debug shows them"]


def one_line(text: str) -> str:
    """Text without line breaks, because scripts read errors and notes line by line."""
    return " ".join(text.split())


def write(stream: TextIO, text: str) -> None:
    """Write text at once. A reader that has gone away (`| head`) is no error: the exit status still counts."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Send whatever is still written to a stream nowhere, so that no later flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def render(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, coloured where stdout is a terminal. Cells are plain text; STATUSES get their colour."""
    from rich import box
    from rich.table import Table

    console = _console()
    # Two blanks between columns, one of them the box's: wide tables still fit 80 columns.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, justify=column.align, no_wrap=not column.flexible, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _cell(text: str) -> Any:
    from rich.text import Text

    from kbench.results.schema import STATUSES

    style = STATUS_STYLES.get(text, FAULT_STYLE) if text in STATUSES else ""
    return Text(text, style=style)


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)
