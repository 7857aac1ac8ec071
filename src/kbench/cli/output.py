"""The two streams: writing to them, and what became of stdout, so that an unwritable one is an error of one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from kbench.errors import CompileError, KbenchError
from kbench.printable import printable

LOG_LINES = 20  # of a compiler's log: the first errors are the ones that matter, and they fit a screen

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


@dataclass
class State:
    """What has happened to stdout since the command began. documented: the JSON document stands there already.
    unwritable: something could not be written, and that was reported."""

    documented: bool = False
    unwritable: bool = False


state = State()


def start() -> None:
    """Make both streams fit to write to, and forget the command before."""
    state.documented = state.unwritable = False
    # A stream that was closed before Python started is None there; whoever closed it wants nothing from it.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        # A family's idea may hold characters that this terminal's encoding lacks: a "?" beats a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def write(stream: TextIO, text: str) -> None:
    """Write text at once.

    A reader that has gone away (`| head`) is no error. Where stdout cannot be written for another reason, such as a
    full disk, one line on stderr says so, and the command goes on: what it keeps on disk is worth having.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        silence(stream)
    except OSError as error:
        silence(stream)
        if stream is sys.stdout:
            report_unwritable(error)


def report_unwritable(error: OSError) -> None:
    """Say, once, that stdout cannot be written."""
    if not state.unwritable:
        state.unwritable = True
        remedy = "make room there, or send it elsewhere"
        write(sys.stderr, f"kbench: error: cannot write to standard output: {error.strerror or error}; {remedy}\n")


def is_unwritable(error: BaseException) -> bool:
    """Whether an exception says that a stream cannot be written: an error about a file would name it."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE


def silence(stream: TextIO) -> None:
    """Send whatever is still written to a stream nowhere, so that no later flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


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
    """Text without line breaks, because scripts read errors and notes line by line, and without commands to the
    terminal."""
    return printable(" ".join(text.split()))
