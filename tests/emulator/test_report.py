"""Sweeps on the emulator held against each other: verdicts, no numbers, and a version that turned wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.results.store import read_run

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler for the emulator"
)

CU = """
/* __global__ void scale(
   is no kernel in a comment */
__global__ void scale(float* out, const float* inp, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * inp[i];
}
"""
PY = """
from kbench.family import Expected, Family, Launch, Tensor, Version, normal

def plan(problem, block, props):
    return (Launch("scale", (-(-problem["N"] // block),), (block,), ("out", "inp", problem["N"])),)

family = Family(
    name="doubled", summary="doubles numbers", sizes={"N": "elements"}, dtypes=("fp32",),
    presets={"default": {"N": 1000}, "small": {"N": 100}}, check_shapes=(),
    tensors=lambda p: (
        Tensor("inp", (p["N"],), "fp32", "in", draw=normal(1, 2)), Tensor("out", (p["N"],), "fp32", "out")
    ),
    reference=lambda p, inputs, error, xp: {"out": Expected(2 * inputs["inp"])},
    versions=(Version(1, "plain", plan, ("fp32",)), Version(2, "none", plan, (), gpu_only="tensor cores")),
)
"""
SWEEP = "sweep doubled --device emulator --family-dir families --block-sizes 32,64 --results r"


def kbench(line: str) -> int:
    return run_command(line.split())


def test_from_a_baseline_to_a_version_that_turned_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("families").mkdir()
    Path("families/doubled.cu").write_text(CU)
    Path("families/doubled.py").write_text(PY)
    assert kbench(f"{SWEEP} --save base") == Exit.OK
    assert "holds verdicts and no times" in capsys.readouterr().err
    rows = read_run(Path("r/baselines/base.jsonl.gz")).rows
    assert len(rows) == 4 and {row.round for row in rows} == {0}, "what has no times is run once"

    assert kbench(SWEEP) == Exit.OK
    capsys.readouterr()
    assert kbench("report base latest --results r --family-dir families") == Exit.NOTHING
    out = capsys.readouterr().out
    assert "2 rows were proven, and without a number to compare: the emulator has no times" in out
    assert out.endswith("nothing was compared\n")

    Path("families/doubled.cu").write_text(CU.replace("2.0f", "2.5f"))
    assert kbench(SWEEP) == Exit.WRONG
    capsys.readouterr()
    assert kbench("report base latest --results r --family-dir families --json") == Exit.WRONG
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "wrong" and found["counts"]["wrong"] == 2
    subject = found["changes"][0]["subject"]
    assert (subject["file"], subject["line"]) == ("families/doubled.cu", 4)
    assert found["changes"][0]["reason"].startswith("fail: ") and "wrong" in found["changes"][0]["reason"]
    assert found["changes"][0]["reproduce"].startswith("kbench run doubled --version 1")
