"""compute-sanitizer finds nothing in any version at a small odd shape, and does find a planted bug."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kbench.catalog import load_catalog

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
pytestmark = pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")

CATALOG = load_catalog()
# Libraries' kernels are not ours to judge, and take the sanitizer minutes.
FOREIGN = ("cupy", "cutlass", "gemm", "cublas", "cudnn", "splitK", "nccl")
SUMMARY = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}


def sanitize(tool: str, *arguments: str) -> str:
    command = [str(SANITIZER), "--tool", tool, "--report-api-errors", "no"]
    for name in FOREIGN:
        command += ["--kernel-name-exclude", f"kns={name}"]
    script = str(Path(__file__).with_name("sanitized.py"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, sys.executable, script, *arguments], capture_output=True, text=True, env=environment
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_all_versions_of_all_families_are_clean(tool: str) -> None:
    text = sanitize(tool, ",".join(CATALOG.names), *(["--shared-only"] if tool == "racecheck" else []))
    verdicts = re.findall(r"^(\w+):(\d+) \w+ block \d+: (.*)$", text, re.MULTILINE)
    versions = {(name, str(version.number)) for name in CATALOG.names for version in CATALOG[name].versions}
    assert {(name, number) for name, number, _ in verdicts} == versions, text[-4000:]
    wrong = [verdict for verdict in verdicts if verdict[2] != "pass" and not verdict[2].startswith("skipped")]
    assert not wrong, text[-4000:]
    assert SUMMARY[tool] in text, text[-8000:]


def test_a_missing_barrier_is_found() -> None:
    planted = str(Path(__file__).resolve().parents[1] / "planted")
    text = sanitize("racecheck", "planted", "--version", "6", "--folder", planted)
    assert "planted:6" in text, text
    assert "hazard" in text and "RACECHECK SUMMARY: 0 hazards displayed" not in text, text
