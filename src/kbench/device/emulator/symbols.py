"""From code addresses to lines of the user's source."""

from __future__ import annotations

import logging
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

log = logging.getLogger("kbench.emulator")

_PLACE = re.compile(r"^(?P<file>.*):(?P<line>\d+)(?: \(discriminator \d+\))?$")
# Any of them reads the debug information and lists inlined frames, innermost first, in the same way.
_TOOLS = ("addr2line", "llvm-addr2line", "eu-addr2line")


def locate(library: Path, addresses: Sequence[int], files: Sequence[str]) -> str:
    """ "file.cu:LINE" of the innermost frame that lies in one of `files` (names without folders); "" if unknown.

    addresses: relative to the library, innermost first; frames of the emulator's own headers are skipped.
    """
    for file, line in _frames(library, tuple(addresses)):
        if file in files:
            return f"{file}:{line}"
    return ""


@lru_cache(maxsize=256)
def _frames(library: Path, addresses: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    tool = _tool()
    if not addresses or not tool:
        return ()
    command = [tool, "-e", str(library), "-i", *map(hex, addresses)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    places = (_PLACE.match(line) for line in done.stdout.splitlines())
    return tuple((Path(place["file"]).name, int(place["line"])) for place in places if place and int(place["line"]))


def inline_chains(library: Path, addresses: Sequence[int]) -> dict[int, tuple[tuple[str, int], ...]]:
    """By address, relative to the library: (path, line) of the code there and of the calls into which it was inlined,
    innermost first. An address of unknown place is left out; so are all of them without a tool that reads debug
    information."""
    tool = _tool()
    if not addresses or not tool:
        return {}
    command = [tool, "-e", str(library), "-a", "-i"]
    text = "\n".join(map(hex, addresses)) + "\n"
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    chains: dict[int, list[tuple[str, int]]] = {}
    frames: list[tuple[str, int]] = []
    for line in done.stdout.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            frames = chains.setdefault(int(line, 16), [])
        elif (place := _PLACE.match(line)) and int(place["line"]):
            frames.append((place["file"], int(place["line"])))
    return {address: tuple(found) for address, found in chains.items() if found}


@lru_cache(maxsize=64)
def guard_variables(library: Path) -> tuple[tuple[int, int], ...]:
    """(offset, size) in the library's thread-local storage of what g++ adds to `__shared__` variables of class types: a
    flag that says whether they were constructed, which it reads at each entry of the function."""
    thread_local, guard = 6, b"_ZGV"  # STT_TLS; Itanium C++ ABI: names of guard variables
    return tuple(
        (value, size)
        for name, kind, value, size in _symbols(library)
        if kind == thread_local and name.startswith(guard)
    )


def _symbols(library: Path) -> Iterator[tuple[bytes, int, int, int]]:
    """(name, type, value, size) of each symbol of a 64-bit ELF file."""
    data = library.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, strings, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[strings][4]
        for name, info, _, _, value, extent in struct.iter_unpack("<IBBHQQ", data[offset : offset + length]):
            start = names + name
            yield data[start : data.index(b"\0", start)], info & 0xF, value, extent


@lru_cache(maxsize=1)
def _tool() -> str:
    found = next((path for path in map(shutil.which, _TOOLS) if path), "")
    if not found:
        log.warning("no addr2line here, so some faults are reported without their line: install the package binutils")
    return found
