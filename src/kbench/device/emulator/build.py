"""Compiling for the emulator: its runtime library, once per machine, and kernels, once per source."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kbench.device.emulator import cache
from kbench.device.emulator.compiler import Compiler, find_compiler
from kbench.device.emulator.translate import TRAILER, write_translation
from kbench.errors import CannotRunError, CompileError
from kbench.source import Source, base_name

__all__ = ["KERNEL_OPTIONS", "build_kernels", "build_runtime", "find_compiler"]

_HERE = Path(__file__).parent
_INCLUDE = _HERE / "include"
_SIGNATURE = _HERE.parent / "signature.h"

RUNTIME_OPTIONS = ("-O2", "-pthread")
# -O1: kernels are compiled more often than they run for long; -O2 saves less time than it takes to compile.
KERNEL_OPTIONS = ("-O1", "-DKBENCH_EMULATOR=1", "-w")
# Calls of the runtime before each access and at the start of each basic block: see hooks.cpp. Without more, g++ would
# take a 16-byte structure apart and load its parts one by one. Blocks of code must stand in the order of the source:
# by it the runtime finds out which lanes of a warp run together.
COUNT_OPTIONS = (
    "-DKBENCH_EMULATOR_COUNTS=1", "-fsanitize=thread", "-fsanitize-coverage=trace-pc", "-fno-tree-sra", "-fno-ipa-sra",
    "-fno-reorder-blocks", "-fno-reorder-blocks-and-partition",
)  # fmt: skip

_ERROR = re.compile(r"^(?P<file>.+?):(?P<line>\d+)(?::\d+)?:\s*(?:fatal )?error:\s*(?P<text>.*)$", re.MULTILINE)
# Said by a compiler that lacks a part of itself, memory or disk space: no fault of the source. A line of
# source that a message quotes does not begin with the name of a program or a place and a colon.
_TROUBLE = re.compile(
    r"^(?:[^\s:]+: |\S.*\b(?i:error): ).*?"
    r"(?:cannot find [`']?(?:\S*ld|as)\b|cannot (?:execute|exec) |error trying to exec|unable to execute command"
    r"|cannot find (?:-lstdc|-lgcc|-lc\b|-lm\b|S?crt)|No space left on device|signal terminated program"
    r"|virtual memory exhausted|invalid linker name|unsupported linker).*$",
    re.MULTILINE,
)
# What compilers say of a name that is not there.
_UNKNOWN_NAME = re.compile(r"not declared|undeclared|not a member|no member named|no template named|not a template")
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


@functools.cache
def _runtime_text() -> tuple[str, ...]:
    """All that goes into the runtime: its sources and the header that it shares with kernels."""
    return tuple(_named_text(path) for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h"), _INCLUDE / "abi.h"]))


@functools.cache
def _headers_text() -> tuple[str, ...]:
    """All that goes into a kernel module apart from the user's source."""
    return tuple(_named_text(path) for path in [*sorted(p for p in _INCLUDE.rglob("*") if p.is_file()), _SIGNATURE])


def _named_text(path: Path) -> str:
    return f"{path.name}\n{path.read_text(encoding='utf-8')}"


def build_runtime() -> Path:
    """The emulator's runtime library."""
    compiler = find_compiler()
    key = cache.key_of([*_identity(compiler), *RUNTIME_OPTIONS, *_runtime_text()])
    name = f"libkbench-emulator-{key}.so"
    with _locks[name]:
        return cache.library(name, lambda path: _make_runtime(compiler, path))


def build_kernels(source: Source, kernels: Sequence[str], counts: bool = False) -> Path:
    """A library that exports `kernels`, which are C++ name expressions, as emu_kernel_0, emu_kernel_1, ...

    counts: built so that the runtime sees each access to memory, which makes it slow.
    Raises CompileError, whose message names the user's file and line, and CannotRunError if the compiler is broken.
    """
    # __global__ is an empty word here, so the compiler would not mind.
    if message := source.no_kernel(kernels):
        raise CompileError(message)
    compiler = find_compiler()
    runtime = build_runtime()
    includes = [str(path) for _, path, _ in source.includes]
    places = (str(source.path), *includes)  # they stand in the debug information
    if counts:
        require_counting()
    options = [*KERNEL_OPTIONS, *(COUNT_OPTIONS if counts else ())]
    key = cache.key_of(
        [*_identity(compiler), *options, *_headers_text(), runtime.name, *places, source.digest, *kernels]
    )
    name = f"{source.path.stem}-{key}.so"
    with _locks[name]:
        return cache.library(name, lambda path: _make_kernels(compiler, source, kernels, options, runtime, path))


def require_counting() -> None:
    """Raises CannotRunError if the compiler's code is none that accesses can be counted in, or there is no compiler."""
    compiler = find_compiler()
    if compiler.kind != "gcc":
        raise CannotRunError(
            f"accesses are counted in code of g++ only, and the compiler here is {compiler}: it would take 16-byte "
            "accesses apart and hide copies",
            "install the system package g++, and unset $KBENCH_CXX and $CXX or name it there",
        )


def _identity(compiler: Compiler) -> tuple[str, ...]:
    return (platform.machine(), *compiler.command, compiler.version, *compiler.options)


def _make_runtime(compiler: Compiler, path: Path) -> None:
    sources = sorted(_HERE.glob("*.cpp"))
    objects = [path.with_name(source.name + ".o") for source in sources]
    command = [*compiler.command, *compiler.options, *RUNTIME_OPTIONS]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        tasks = [
            pool.submit(_run, compiler, [*command, "-c", str(source)], made)
            for source, made in zip(sources, objects, strict=True)
        ]
        logs = [task.result() for task in tasks]
    if not any(logs):
        logs.append(_run(compiler, [*command, "-shared", f"-Wl,-soname,{path.name}", *map(str, objects)], path))
    failed = next((log for log in logs if log), "")
    if failed:
        raise CompileError(f"the emulator's runtime does not compile with {compiler}: {_first_line(failed)}", failed)


def _make_kernels(
    compiler: Compiler, source: Source, kernels: Sequence[str], own: Sequence[str], runtime: Path, path: Path
) -> None:
    main = write_translation(source, kernels, path.parent)
    folders = [f"-I{folder}" for folder in (_INCLUDE, *source.folders)]
    options = [*compiler.options, *own, *folders, "-include", str(_INCLUDE / "cuda_emulator.h")]
    # The runtime is named, and found again by its soname: already loaded, wherever the cache has moved to since.
    libraries = ["-shared", "-Wl,-z,defs", str(runtime)]
    if "-fsanitize=thread" in own:
        # Compiled and linked apart: else the sanitizer's own library would come in, in whose place the runtime stands.
        compiled = main.with_suffix(".o")
        failed = _run(compiler, [*compiler.command, *options, "-c", str(main)], compiled)
        failed = failed or _run(compiler, [*compiler.command, *compiler.options, str(compiled), *libraries], path)
    else:
        failed = _run(compiler, [*compiler.command, *options, str(main), *libraries], path)
    if failed:
        message = _summary(source, kernels, failed)
        # Of a kernel that is not there the compiler only shows the macros that ask for it, which nobody wrote.
        raise CompileError(message, "" if message == source.lacks(kernels) else failed)


def _run(compiler: Compiler, command: list[str], made: Path) -> str:
    """Run the compiler to make a file; returns what it wrote if it refused the source, else "".

    Python's other threads go on meanwhile. Raises CannotRunError if the compiler itself is at fault.
    """
    environment = os.environ | {"LC_ALL": "C"}  # messages are searched for "error:"
    for variable in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment.setdefault(variable, str(cache.folder() / "zig"))
    command = [*command, "-o", str(made)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="surrogateescape", env=environment, check=False
        )
    except OSError as error:
        raise _broken(compiler, f"cannot be started: {error.strerror}") from error
    if done.returncode < 0:
        raise _broken(compiler, f"was killed by signal {-done.returncode}")
    if done.returncode == 0:
        if not made.is_file():
            raise _broken(compiler, "says that all is well and has written no file")
        return ""
    if trouble := _TROUBLE.search(done.stderr):
        raise _broken(compiler, f"does not work: {trouble[0].strip()}")
    return done.stderr.strip() or f"{command[0]} ended with status {done.returncode} and no message"


def _broken(compiler: Compiler, what: str) -> CannotRunError:
    hint = "try it on a small program, or name another one in $KBENCH_CXX"
    return CannotRunError(f"the compiler {compiler} {what}", hint)


def _summary(source: Source, kernels: Sequence[str], log: str) -> str:
    """One line: the first error, with the user's file and line."""
    errors = list(_ERROR.finditer(log))
    own = {str(source.path), *(str(path) for _, path, _ in source.includes)}
    error = next((e for e in errors if e["file"] in own), None)
    if error:
        return f"{error['file']}:{error['line']}: {error['text']}"
    named = next((e for e in errors if e["file"] == TRAILER), None)
    if named:
        kernel = kernels[int(named["line"]) - 1]
        unknown = _UNKNOWN_NAME.search(named["text"]) and re.search(rf"\b{base_name(kernel)}\b", named["text"])
        if unknown and (missing := source.lacks([kernel])):
            return missing
        return f"{source.path.name}: kernel `{kernel}`, which the plan names, cannot be instantiated: {named['text']}"
    if errors:
        place = _user_of_header(log, own)
        return f"{place or source.path}: {errors[0]['text']}"
    return f"{source.path.name} does not compile: {_first_line(log)}"


def _user_of_header(log: str, own: set[str]) -> str:
    """The user's line from which an error inside a header was reached."""
    places = "|".join(re.escape(path) for path in own)
    found = re.search(rf"(?:{places}):\d+", log)
    return found[0] if found else ""


def _first_line(log: str) -> str:
    return next((line.strip() for line in log.splitlines() if "error" in line), log.splitlines()[0].strip())
