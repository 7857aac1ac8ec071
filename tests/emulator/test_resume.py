"""A sweep that is really killed, and goes on: every row once, whatever the kill cut in two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kbench.results.store import Run, latest_run, newest, read_run, row_key

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler for the emulator"
)

SLEEPY_CU = """
__global__ void scale(float* out, const float* inp, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * inp[i];
}
"""
# A reference that takes its time, so that a kill finds the sweep in its middle.
SLEEPY_PY = """
import time
from kbench.family import Expected, Family, Launch, Tensor, Version, normal

def plan(problem, block, props):
    time.sleep(0.02)
    return (Launch("scale", (-(-problem["N"] // block),), (block,), ("out", "inp", problem["N"])),)

family = Family(
    name="sleepy", summary="doubles numbers", sizes={"N": "elements"}, dtypes=("fp32",),
    presets={"default": {"N": 1000}, "small": {"N": 100}}, check_shapes=(),
    tensors=lambda p: (
        Tensor("inp", (p["N"],), "fp32", "in", draw=normal(1, 2)), Tensor("out", (p["N"],), "fp32", "out")
    ),
    reference=lambda p, inputs, error, xp: {"out": Expected(2 * inputs["inp"])},
    versions=(
        Version(1, "plain", plan, ("fp32",)), Version(2, "the same", plan, ("fp32",)),
        Version(3, "one block size", plan, ("fp32",), fixed=64), Version(4, "none", plan, (), gpu_only="tensor cores"),
    ),
)
"""
ROWS = 13  # 4 block sizes of versions 1 and 2, one of 3, and 4 refused of version 4


@pytest.fixture
def sleepy(tmp_path: Path) -> Path:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "sleepy.cu").write_text(SLEEPY_CU)
    (folder / "sleepy.py").write_text(SLEEPY_PY)
    return folder


def command(tmp_path: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kbench", "sweep", *more, "--results", str(tmp_path / "r")]


def start(tmp_path: Path) -> subprocess.Popen[str]:
    words = command(tmp_path, "sleepy", "--device", "emulator", "--family-dir", "families", "--block-sizes", "32..256")
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path
    )


def resume(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = command(tmp_path, "--resume", *more)
    return subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=120, cwd="/")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def killed_after(tmp_path: Path, count: int) -> Run:
    """A sweep that was sent SIGKILL once it had written so many rows; before that, nobody else may write its file."""
    with start(tmp_path) as sweep:
        deadline = time.monotonic() + 60
        while rows_on_disk(tmp_path) < count:
            assert time.monotonic() < deadline and sweep.poll() is None, "the sweep did not get so far"
            time.sleep(0.01)
        sweep.send_signal(signal.SIGSTOP)
        done = resume(tmp_path)
        assert done.returncode == 2 and "is being written by another process" in done.stderr, done.stderr
        sweep.kill()
    run = read_run(latest_run(tmp_path / "r"))
    assert count <= len(run.rows) < ROWS and run.footer is None, "not in its middle"
    return run


def rows_on_disk(tmp_path: Path) -> int:
    paths = list((tmp_path / "r" / "runs").glob("*.jsonl"))
    return sum('"kind": "row"' in line for path in paths for line in path.read_text().splitlines(True) if "\n" in line)


def test_a_killed_sweep_goes_on_with_every_row_once(sleepy: Path, tmp_path: Path) -> None:
    before = killed_after(tmp_path, 3)
    before.path.write_bytes(before.path.read_bytes()[:-100])  # as if the kill had come in the middle of a write
    kept = len(before.rows) - 1
    done = resume(tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{kept} of {ROWS} rows kept, {ROWS - kept} to run" in done.stderr
    assert f"{kept} of {ROWS} rows kept from before" in done.stdout
    after = read_run(before.path)
    assert after.rows[:kept] == before.rows[:kept] and after.warnings == []
    assert len(after.rows) == len({row_key(row) for row in after.rows}) == ROWS
    assert {row.seed for row in after.rows} == {before.header["options"]["seed"]}
    assert after.footer is not None and after.footer["ended"] == "complete" and after.footer["rows"] == ROWS

    # A kernel that is edited now is run again, with all that share its file.
    (sleepy / "sleepy.cu").write_text(SLEEPY_CU.replace("2.0f *", "3.0f *"))
    done = resume(tmp_path, "--json")
    assert done.returncode == 3, "it is wrong now"
    assert f"0 of {ROWS} rows kept, {ROWS} to run (among them {ROWS} whose source changed)" in done.stderr
    assert {row["status"] for row in json.loads(done.stdout)["rows"]} == {"fail", "refused"}
    assert {row.status for row in newest(read_run(before.path).rows)} == {"fail", "refused"}
