"""Which C++ compiler this machine has."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kbench.errors import CannotRunError, UsageError
from kbench.install import install_command

# Options on which the emulator relies, for its runtime and for kernels alike.
# The line of a fault: frame pointers, line tables, no call stubs that belong to no line. __shared__ variables of
# templates stay apart between two builds of one kernel only if symbols are neither exported nor unified
# (GNU_UNIQUE). Kernels reinterpret memory freely. Fibers cannot unwind. The same numbers on every CPU need the same
# contraction into fused multiply-adds: none.
COMMON = (
    "-std=c++17", "-fPIC", "-g1", "-gdwarf-4", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-plt",
    "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
)  # fmt: skip
_CANDIDATES = ("g++", "clang++", "c++")
_ADVICE = f"install the system package g++ (apt install g++, dnf install gcc-c++) or {install_command('compiler')}"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. kind: "gcc", "clang" or "zig". version: the first line that it prints of itself."""

    command: tuple[str, ...]
    kind: str
    version: str

    @property
    def options(self) -> tuple[str, ...]:
        """COMMON, and what only this kind of compiler takes or needs."""
        # Frames larger than the guard page below a stack must not jump over it.
        special = {
            "gcc": ("-fno-gnu-unique", "-fstack-clash-protection"),
            "clang": ("-fstack-clash-protection", "-Wno-unused-command-line-argument"),
            # zig turns asserts off and the undefined-behaviour sanitizer on: its traps would be taken for the kernel's.
            "zig": (
                "-fno-sanitize=undefined", "-UNDEBUG", "-fno-stack-protector", "-fstack-clash-protection",
                "-Wno-unused-command-line-argument",
            ),
        }  # fmt: skip
        return COMMON + special[self.kind]

    def __str__(self) -> str:
        return f"{' '.join(self.command)} ({self.version})"


@functools.cache
def find_compiler() -> Compiler:
    """The compiler of $KBENCH_CXX or $CXX, else g++, clang++, c++, else zig's from the package `ziglang`.

    Raises CannotRunError if there is none, or if the one that a variable names does not run; UsageError if the
    variable is not a command line.
    """
    for variable in ("KBENCH_CXX", "CXX"):
        if os.environ.get(variable, "").strip():
            return _named_by(variable)
    for name in _CANDIDATES:
        path = shutil.which(name)
        version = path and _version((path,))
        if path and version:
            return Compiler((path,), _kind(version), version)
    if importlib.util.find_spec("ziglang"):
        command = (sys.executable, "-m", "ziglang", "c++")
        version = _version(command)
        if version:
            return Compiler(command, "zig", version)
    raise CannotRunError("the CPU emulator needs a C++ compiler and found none", _ADVICE)


def _named_by(variable: str) -> Compiler:
    try:
        words = shlex.split(os.environ[variable])
    except ValueError as error:  # a quote or a backslash without its other half
        raise UsageError(f"${variable} is not a command line: {str(error).lower()}: {os.environ[variable]}") from error
    advice = f"unset ${variable}, or {_ADVICE}"
    path = shutil.which(words[0])
    if path is None:
        raise CannotRunError(f"the compiler `{words[0]}` that ${variable} names is not there", advice)
    command = (path, *words[1:])
    version = _version(command)
    if not version:
        raise CannotRunError(f"`{' '.join(command)} --version`, which ${variable} names, fails", advice)
    return Compiler(command, _kind(version, command), version)


def _kind(version: str, command: tuple[str, ...] = ()) -> str:
    if any("zig" in Path(word).name for word in command):
        return "zig"
    return "clang" if "clang" in version.lower() else "gcc"


def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""
