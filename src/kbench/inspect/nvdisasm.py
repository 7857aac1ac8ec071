"""Machine code as text, by NVIDIA's disassembler nvdisasm: from its Python package, or from a CUDA toolkit."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kbench.device.cuda import cache as disk
from kbench.errors import CannotRunError
from kbench.install import install_command

_SECONDS = 60.0  # the largest cubin of a version takes under one
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)", re.MULTILINE)
# An instruction begins with its address in the kernel, a label with a dot; directives are the assembler's business.
_ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*$")
_LABEL = re.compile(r"(\.L_\w+):")
# What -gi writes: a line for the place, and one for each call that it was inlined into.
_PLACE = re.compile(r'\s*//## File "(.*?)", line (\d+)(?: inlined at "(.*?)", line (\d+))?')


class DisassemblyError(CannotRunError):
    """nvdisasm is there and does not do its work."""


def find_nvdisasm() -> Path | None:
    """The program: of the package nvidia-cuda-nvdisasm, else on $PATH, else of the toolkit that $CUDA_HOME names."""
    spec = importlib.util.find_spec("nvidia")  # a namespace: each of NVIDIA's packages adds folders to it
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for found in sorted(Path(folder).glob("*/bin/nvdisasm"), reverse=True):  # cu13 before cu12
            if os.access(found, os.X_OK):
                return found
    if on_path := shutil.which("nvdisasm"):
        return Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable, "")
        if root and (in_toolkit := shutil.which("nvdisasm", path=str(Path(root, "bin")))):
            return Path(in_toolkit)
    return None


def require_nvdisasm() -> Path:
    """As `find_nvdisasm`. Raises CannotRunError, which says how to get it, if there is none."""
    found = find_nvdisasm()
    if found is None:
        raise CannotRunError(
            "--sass needs NVIDIA's nvdisasm: it is in no Python package here, not on $PATH and not in $CUDA_HOME/bin",
            install_command("sass"),
        )
    return found


def disassemble(cubin: bytes, program: Path, lines: bool = False) -> dict[str, str]:
    """By the lowered name of each kernel: nvdisasm's text of its code, which is kept in the cache.

    lines: with comments that say which lines of the source the code comes from. Raises CannotRunError where the program
    cannot be run or does not know the architecture.
    """
    entry = disk.load("sass", key := _key(cubin, program, lines))
    if entry is not None:
        text = entry[1].decode()
    else:
        text = _run(cubin, program, lines)
        disk.store("sass", key, {}, text.encode())
    starts = list(_SECTION.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(starts, ends, strict=True)}


def listing(text: str, sources: Mapping[str, str]) -> Iterator[str]:
    """The lines of one kernel to be read: instructions with their addresses, labels, and where `disassemble` was asked
    for them, lines of the source in comments.

    sources: path to text. The line of the first of them is shown, as the innermost call in it; else the innermost line.
    """
    place: list[tuple[str, int]] = []
    shown = ""
    for line in text.splitlines():
        if match := _PLACE.match(line):
            frames = [(match[1], int(match[2]))] + ([(match[3], int(match[4]))] if match[3] else [])
            place += [frame for frame in frames if frame not in place]
            continue
        if place:
            comment = _comment(place, sources)
            if comment != shown:
                yield comment
            place, shown = [], comment
        if match := _LABEL.match(line):
            yield f"{match[1]}:"
        elif match := _ADDRESS.match(line):
            yield f"    /*{match[1]}*/  {match[2]}"


def instructions(text: str) -> Iterator[str]:
    """The instructions of one kernel, with operands and without predicates; the padding behind its end is left out."""
    found = [match[2] for line in text.splitlines() if (match := _ADDRESS.match(line))]
    # Behind the last instruction: a branch to itself, then nothing, up to the length in which code is fetched.
    while found and found[-1] == "NOP":
        found.pop()
    if found and re.fullmatch(r"BRA `\(\.L_\w+\)", found[-1]):
        found.pop()
    for instruction in found:
        yield re.sub(r"^\{?\s*(?:@!?U?P\w+\s+)?", "", instruction)


def _comment(place: list[tuple[str, int]], sources: Mapping[str, str]) -> str:
    own = next(iter(sources), "")
    path, line = next((frame for frame in place if frame[0] == own), place[0])
    lines = sources.get(path, "").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    inside = "" if place[0] == (path, line) else f" (in {Path(place[0][0]).name}:{place[0][1]})"
    return f"  // {Path(path).name}:{line}{inside}  {text}".rstrip()


def _key(cubin: bytes, program: Path, lines: bool) -> dict[str, object]:
    facts = program.stat()
    return {
        "cubin": hashlib.sha256(cubin).hexdigest(),
        "program": [str(program), facts.st_size, facts.st_mtime_ns],
        "lines": lines,
    }


def _run(cubin: bytes, program: Path, lines: bool) -> str:
    with tempfile.NamedTemporaryFile(prefix="kbench-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "-c", *(("-gi",) if lines else ()), file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
            )
        except OSError as error:
            raise DisassemblyError(f"{program} cannot be started: {error.strerror or error}") from error
        except subprocess.TimeoutExpired:
            raise DisassemblyError(f"{program} did not end within {_SECONDS:g} s") from None
    if done.returncode or not _SECTION.search(done.stdout):
        said = next((line.strip() for line in done.stderr.splitlines() if line.strip()), "it wrote no code")
        hint = f"a newer one may know the architecture: {install_command('sass')}"
        raise DisassemblyError(f"{program} failed: {said}", hint)
    return done.stdout
