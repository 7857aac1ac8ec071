"""The steps of docs/ci's workflow without a GPU, run as a runner would in a repository that copied it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ci_steps import FOLDER, scripts
from kbench.device.emulator.compiler import find_compiler
from kbench.errors import CannotRunError, Exit

# Changes no result, and takes shared memory and a barrier.
GROWN = """
    __shared__ int held[64];
    held[threadIdx.x % 64] = n;
    __syncthreads();
    n = held[threadIdx.x % 64];
"""
ROOT = Path(__file__).parents[2]
has_nvrtc = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(not has_nvrtc, reason="cuda-bindings, and with it NVRTC, is not installed"),
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With the family of the README, as the workflow files name it."""
    try:
        find_compiler()
    except CannotRunError as error:
        pytest.skip(str(error))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for _, name, code in re.findall(r"^```(cuda|python) (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    program = tmp_path / "bin" / "kbench"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kbench "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(repository: Path, name: str) -> list[int]:
    """Run the scripts of a file's first job but for the installation; their exit statuses, up to the first error."""
    mine = [script for script in scripts(FOLDER / name) if "pip install" not in script][:3]
    assert [re.findall(r"kbench (\w+)", script) for script in mine] == [["check"], ["sweep"], ["report"]]
    path = os.pathsep.join(map(str, [ROOT / "src", *filter(None, [os.environ.get("PYTHONPATH")])]))
    surroundings = {
        **{key: value for key, value in os.environ.items() if key != "KBENCH_RESULTS"},
        "PATH": f"{repository / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path, "GITHUB_STEP_SUMMARY": str(repository / "summary.md"),
    }  # fmt: skip
    statuses = []
    for script in mine:
        done = subprocess.run(
            ["bash", "-e"], input=script, cwd=repository, env=surroundings, capture_output=True, text=True, timeout=120
        )
        statuses.append(done.returncode)
        if done.returncode:
            break
    return statuses


def test_the_first_job_passes_and_a_later_one_finds_what_grew(repository: Path) -> None:
    assert run(repository, "github-no-gpu.yml") == [0, 0, 0], "there is no baseline yet"
    command = ["sweep", "scale", "--family-dir", "my_kernels", "--static", "--arch", "sm_90", "--save", "static"]
    subprocess.run([repository / "bin" / "kbench", *command], cwd=repository, check=True, capture_output=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "KBENCH_RESULTS": "results"})  # fmt: skip
    assert run(repository, "gitlab.yml") == [0, 0, 0]
    assert not ElementTree.parse(repository / "report.xml").findall(".//failure")

    kernel = repository / "my_kernels" / "scale.cu"
    kernel.write_text(kernel.read_text().replace("{\n", f"{{\n{GROWN}", 1))
    assert run(repository, "github-no-gpu.yml") == [0, 0, int(Exit.REGRESSION)]
    assert "static_shared" in (repository / "summary.md").read_text()
    assert ElementTree.parse(repository / "report.xml").findall(".//failure")

    kernel.write_text(kernel.read_text().replace("factor *", "2 *"))
    assert run(repository, "github-no-gpu.yml") == [int(Exit.WRONG)], "what is wrong is not compared at all"
