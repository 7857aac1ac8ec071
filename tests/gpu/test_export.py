"""Exported programs of all families, built by nvcc and run on the GPU; and a planted bug, which they have to find."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kbench.catalog import load_catalog
from kbench.export.problem import data_of, subject_of
from kbench.export.program import program
from kbench.family import Gemm
from kbench.grammar import Target
from kbench.selection import Selection

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")

CATALOG = load_catalog()
# Family, version, preset, dtype ("" for the usual one).
PROGRAMS = [
    ("adamw", 3, "small", "bf16"),
    ("attention_backward", 8, "small", "bf16"),
    ("attention_backward", 9, "small", "tf32"),
    ("attention_forward", 2, "small", "fp32"),
    ("attention_forward", 6, "small", "fp16"),
    ("classifier_fused", 5, "small", "bf16"),
    ("crossentropy_forward", 1, "small", ""),
    ("crossentropy_softmax_backward", 1, "small", "fp16"),
    ("encoder_backward", 3, "small", "bf16"),
    ("encoder_forward", 3, "small", ""),
    ("fused_residual_forward", 6, "small", ""),
    ("gelu_backward", 2, "small", ""),
    ("gelu_forward", 2, "small", ""),
    ("global_norm", 5, "small", ""),
    ("layernorm_backward", 8, "small", ""),
    ("layernorm_backward", 10, "small", "fp32"),
    ("layernorm_forward", 6, "small", ""),
    ("layernorm_forward", 6, "default", "bf16"),  # inputs of few different rows, and sampled outputs
    ("matmul_backward", 1, "small", "bf16"),
    ("matmul_backward_bias", 9, "small", ""),
    ("matmul_forward", 3, "small", "bf16"),  # bias in the epilogue
    ("matmul_forward", 4, "small", "fp32"),
    ("permute", 1, "small", ""),
    ("residual_forward", 2, "default", ""),
    ("softmax_forward", 7, "small", "bf16"),
    ("step_control", 1, "small", ""),
    ("trimat_forward", 0, "small", "fp16"),
    ("trimat_forward", 4, "small", ""),
]
IDS = [f"{name}:{version}-{preset}-{dtype or 'usual'}" for name, version, preset, dtype in PROGRAMS]
PLANTED = "layernorm_forward:6 with another epsilon"
_one_at_a_time = threading.Lock()  # on the GPU: programs that are built meanwhile disturb the host alone


@dataclass(frozen=True)
class Built:
    """A program, or why there is none: "" if all is well, what nvcc said, and whether a library is missing."""

    path: Path
    log: str
    missing: str = ""


def cublas() -> tuple[list[str], str]:
    """Options that find cuBLASLt: of nvcc's own toolkit, or of the Python package; and why it cannot be used."""
    assert NVCC is not None
    toolkit = Path(NVCC).resolve().parent.parent
    if (toolkit / "include" / "cublasLt.h").is_file():
        return ["-lcublasLt"], ""
    spec = importlib.util.find_spec("nvidia")
    for place in map(Path, (spec and spec.submodule_search_locations) or ()):
        for include in place.glob("c*/include/cublasLt.h"):
            library = next((include.parents[1] / "lib").glob("libcublasLt.so*"), None)
            if library is not None:
                folder = str(library.parent)
                return [f"-I{include.parent}", f"-L{folder}", f"-l:{library.name}", "-Xlinker", f"-rpath={folder}"], ""
    return [], "cublasLt.h is neither in nvcc's toolkit nor in a Python package"


def build(folder: Path, name: str, version: int, preset: str, dtype: str, plant: bool = False) -> Built:
    selection = Selection([Target(name, [version])], "run", preset=preset, dtype=dtype or None)
    subject = subject_of(CATALOG, next(selection.jobs(CATALOG, "emulator")), None)
    text = program(subject, data_of(subject, seed=11), "a", "kbench export")
    if plant:
        assert text.count("kEpsilon = 1e-5f") == 1
        text = text.replace("kEpsilon = 1e-5f", "kEpsilon = 2e-4f")
    libraries, missing = cublas() if any(isinstance(step, Gemm) for step in subject.plan) else ([], "")
    folder.mkdir()
    source, made = folder / "a.cu", folder / "a"
    if missing:
        return Built(made, "", missing)
    source.write_text(text, encoding="utf-8")
    command = [
        str(NVCC),
        "-O3",
        "-std=c++17",
        "-arch=sm_90",
        "-Xcompiler",
        "-Wall,-Wextra",
        "-o",
        str(made),
        str(source),
    ]
    done = subprocess.run([*command, *libraries], capture_output=True, text=True, timeout=300, check=False)
    return Built(made, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Built]]]:
    folder = tmp_path_factory.mktemp("exported")
    with ThreadPoolExecutor(os.cpu_count() or 4) as pool:
        made = {
            name: pool.submit(build, folder / str(i), *case)
            for i, (name, case) in enumerate(zip(IDS, PROGRAMS, strict=True))
        }
        made[PLANTED] = pool.submit(build, folder / "planted", "layernorm_forward", 6, "small", "", True)
        yield made


def run(built: Built, *options: str) -> subprocess.CompletedProcess[str]:
    if built.missing:
        pytest.skip(built.missing)
    assert built.path.is_file(), built.log
    with _one_at_a_time:
        return subprocess.run([str(built.path), *options], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", IDS)
def test_an_exported_program_is_right_and_has_a_time(name: str, programs: dict[str, Future[Built]]) -> None:
    built = programs[name].result()
    done = run(built, "--samples", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in built.log, built.log
    time = re.search(r"time: median ([\d.]+) us of 20 samples, quartiles ([\d.]+) to ([\d.]+) us", done.stdout)
    assert time is not None, done.stdout
    median, low, high = map(float, time.groups())
    assert 0.5 < low <= median <= high < 10_000, done.stdout
    assert done.stdout.count(" 0 wrong") >= 2 and "WRONG" not in done.stdout


def test_a_planted_bug_is_found(programs: dict[str, Future[Built]]) -> None:
    done = run(programs[PLANTED].result())
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"rstd: WRONG, first at \[\d+, \d+\]: expected [\d.]+ \([\d.]+ to [\d.]+\), got [\d.]+", done.stdout
    )
    assert "time:" not in done.stdout


def test_a_failed_launch_is_status_2(programs: dict[str, Future[Built]]) -> None:
    built = programs[IDS[PROGRAMS.index(("layernorm_forward", 6, "small", ""))]].result()
    done = subprocess.run(
        [str(built.path)], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False
    )
    assert done.returncode == 2 and "error: no GPU: " in done.stderr
