"""What people and programs see: tables or one JSON document on stdout; notes, progress and errors on stderr."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kbench import __version__
from kbench.cli.output import one_line, state, write
from kbench.cli.table import Column, paint, render, width
from kbench.printable import printable
from kbench.results.schema import SCHEMA_VERSION
from kbench.results.strict_json import dumps

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


# Beside bar, counts and name in the line of progress: the elapsed time (0:00:00) between two blanks, and three for
# the "^C" that the terminal adds; a line that breaks could not be taken back.
_PROGRESS_SPARE = 1 + 7 + 1 + 3


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
        """A line on stdout as it is, unless a JSON document goes there. For commands, which are to be copied.

        What would command the terminal is escaped, here and below.
        """
        if not self.json:
            write(sys.stdout, printable(text, keep="\n\t") + "\n")

    def prose(self, text: str, first: str = "", rest: str | None = None, status: str = "") -> None:
        """Text on stdout, wrapped at words to the width of the terminal.

        first, rest: what its first line and the others begin with; rest is as many blanks as `first` is long if it
        is left out. status: a word at its start that gets its colour.
        """
        if self.json:
            return
        indent = " " * len(first) if rest is None else rest
        lines = textwrap.wrap(
            printable(text, keep="\n\t\r\v\f"),  # which become blanks
            width(),
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,  # a path cut in two cannot be copied
            break_on_hyphens=False,
        )
        if status and lines:
            lines[0] = lines[0].replace(status, paint(status), 1)
        write(sys.stdout, "".join(f"{line}\n" for line in lines or [first.rstrip()]))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], indent: int = 0) -> None:
        """A table on stdout as wide as the terminal, or 80 columns where there is none."""
        if not self.json:
            write(sys.stdout, render(columns, rows, indent))

    def document(self, command: str, content: dict[str, Any]) -> None:
        """The JSON document of a command, on stdout, if it was asked for."""
        if self.json:
            head = {"kbench": __version__, "schema": SCHEMA_VERSION, "command": command}
            write(sys.stdout, dumps({**head, **content}, indent=1) + "\n")
            state.documented = True

    @contextmanager
    def progress(self, names: Sequence[str]) -> Iterator[Callable[[], None]]:
        """A progress bar on a terminal, a spinner for a single row, nothing elsewhere.

        names: of the rows to come, shown while they run. Call what it yields after each row.
        """
        if not sys.stderr.isatty() or not names:
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True, markup=False, highlight=False)
        counts: list[ProgressColumn] = [SpinnerColumn()]
        taken = 1
        if len(names) > 1:
            bar_width = max(8, console.width // 4)
            counts = [BarColumn(bar_width), MofNCompleteColumn()]
            taken = bar_width + 1 + 2 * len(str(len(names))) + 1
        room = max(0, console.width - taken - _PROGRESS_SPARE)
        columns = (*counts, TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(_shortened(names[0], room), total=len(names))
            waiting = iter(names[1:])
            self._above = console.print
            try:
                yield lambda: bar.update(task, advance=1, description=_shortened(next(waiting, ""), room))
            finally:
                self._above = None


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 3)] + "..."


def document_error(message: str, status: int) -> None:
    """The JSON document of a command that ended before it had one of its own."""
    if not state.documented:
        write(sys.stdout, dumps({"error": one_line(message), "exit_status": int(status)}, indent=1) + "\n")
        state.documented = True
