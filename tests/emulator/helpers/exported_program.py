"""Exported programs built by the emulator's compiler and run as they are, `main` and all."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kbench.device.emulator import build
from kbench.device.emulator.compiler import find_compiler
from kbench.device.emulator.translate import write_translation
from kbench.source import Source

_LAUNCH = "kernel<<<grid, block, shared, stream>>>(argument<P>(arguments)...);"
_ON_CPU = "on_cpu::launch<P...>(kernel, grid, block, shared, argument<P>(arguments)...);"
_INCLUDE = Path(build.__file__).parent / "include"
_LIBRARIES = Path(__file__).parent / "on_cpu"  # a cuBLASLt that computes on the CPU


def build_on_cpu(text: str, folder: Path) -> Path:
    """The program of this text, to run on the CPU."""
    assert text.count(_LAUNCH) == 1
    folder.mkdir(parents=True, exist_ok=True)
    source = write_translation(Source(folder / "program.cu", text.replace(_LAUNCH, _ON_CPU), ()), (), folder)
    compiler, runtime, made = find_compiler(), build.build_runtime(), folder / "program"
    shim = Path(__file__).parent / "exported_on_cpu.h"
    done = subprocess.run(
        [
            *compiler.command, *compiler.options, *build.KERNEL_OPTIONS, f"-I{_INCLUDE}", f"-I{_LIBRARIES}",
            "-include", str(_INCLUDE / "cuda_emulator.h"), "-include", str(shim),
            str(source), str(runtime), f"-Wl,-rpath,{runtime.parent}", "-o", str(made),
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    return made


def run(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What it says is all in `stdout`: the emulator's printf writes to the other stream."""
    command = [str(program), *options]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
