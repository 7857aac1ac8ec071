"""What NVRTC says about a source, in one line for the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kbench.device.cuda.headers import remedy
from kbench.errors import CompileError
from kbench.source import Source

_ERROR = re.compile(
    r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<text>.*)$", re.MULTILINE
)
# ptxas, the option parser and the end of a file name no file and line.
_PLAIN_ERROR = re.compile(
    r"^\s*(?P<who>ptxas|nvrtc|At end of source)\b.*?(?:error|fatal) *: *(?P<text>.*)$", re.MULTILINE
)
_MISSING_HEADER = re.compile(r'cannot open source file "([^"]+)"')

# What stands behind the user's text: a pseudo file with one line per kernel, and the header that it includes.
TAIL_NAME = "kbench signatures"
SIGNATURE_HEADER = "kbench/signature.h"
_EXPRESSIONS_FILE = "__nv_name_map"  # NVRTC's own pseudo file for name expressions


def blames_tail(log: str) -> bool:
    """Whether the first error is behind the user's text."""
    match = _ERROR.search(log)
    return match is not None and match["file"] in (TAIL_NAME, SIGNATURE_HEADER, _EXPRESSIONS_FILE)


def explain(
    log: str, source: Source, kernels: Mapping[int, str], version: tuple[int, int], folders: Sequence[Path]
) -> CompileError:
    """The error for a compiler log. `kernels`: which name expression stands in which line of the pseudo file
    TAIL_NAME; `version`: of NVRTC; `folders`: where CUDA's headers were searched."""
    match = _ERROR.search(log)
    if match is None:
        plain = _PLAIN_ERROR.search(log)
        text = f"{plain['who']}: {plain['text']}" if plain else (log.splitlines() or ["no message"])[0]
        return CompileError(f"{source.path}: error: {text}", log)
    file, line, text = match["file"], int(match["line"]), match["text"]
    if blames_tail(log):
        kernel = kernels.get(line, ", ".join(kernels.values()))
        return CompileError(f"{source.path}: the plan's kernel `{kernel}` does not fit: {text}", log)
    where = f"{_as_given(file, source)}:{line}"
    if missing := _MISSING_HEADER.search(text):
        return _missing_header(where, missing[1], source, version, folders, log)
    return CompileError(f"{where}: error: {text}", log)


def _missing_header(
    where: str, header: str, source: Source, version: tuple[int, int], folders: Sequence[Path], log: str
) -> CompileError:
    searched = ", ".join(map(str, (*source.folders, *folders)))
    message = f'{where}: the header "{header}" is not found (searched {searched})'
    return CompileError(message, log, remedy(header, version))


def _as_given(file: str, source: Source) -> str:
    """Quoted includes are handed to the compiler by their names: back to where they were found."""
    return next((str(path) for name, path, _ in source.includes if name == file), file)
