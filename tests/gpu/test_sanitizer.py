"""compute-sanitizer finds nothing in any version at a small odd shape, and does find a planted bug."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
pytestmark = pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")

# T is odd, no multiple of 4, and longer than one tile of the smaller blocks; HS = 3 takes the scalar paths.
SIZES, BLOCKS = "B=2,T=67,C=6,NH=2", "32,128,1024"


def sanitize(tool: str, kernel: str, *arguments: str) -> str:
    # The kernels under test only: cuBLASLt's are not ours to judge, and take the sanitizer minutes.
    command = [SANITIZER, "--tool", tool, "--kernel-name", f"kns={kernel}", "--report-api-errors", "no"]
    script = str(Path(__file__).with_name("sanitized.py"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*map(str, command), sys.executable, script, *arguments], capture_output=True, text=True, env=environment
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_attention_backward_is_clean(tool: str) -> None:
    text = sanitize(tool, "softmax_backward", "attention_backward", SIZES, BLOCKS)
    verdicts = re.findall(r"^version (\d+) block (\d+): (.*)$", text, re.MULTILINE)
    assert {(int(version), verdict) for version, _, verdict in verdicts} == {(n, "pass") for n in range(1, 9)}, text
    summary = "RACECHECK SUMMARY: 0 hazards displayed" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert summary in text, text


def test_a_missing_barrier_is_found() -> None:
    planted = str(Path(__file__).resolve().parents[1] / "planted")
    text = sanitize("racecheck", "totals", "planted", "N=7,C=301", "128", "6", planted)
    assert "version 6 block 128" in text, text
    assert "hazard" in text and "RACECHECK SUMMARY: 0 hazards displayed" not in text, text
