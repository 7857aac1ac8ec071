"""Sweeps on a GPU held against each other: nothing changed, one kernel slowed, rounds added."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.results.store import latest_run, read_run

# Dependent multiply-adds, of which the time is made: what they multiply by and add is not known to the compiler.
KERNEL = """
__global__ void k{number}(float* out, const float* inp, float one, float zero, int n) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float x = i < n ? inp[i] : 0.0f;
    for (int k = 0; k < {steps}; ++k) x = fmaf(x, one, zero);
    if (i < n) out[i] = x;
}}
"""
PY = """
from kbench.family import Expected, Family, Launch, Tensor, Version, normal

def planned(number):
    def plan(problem, block, props):
        blocks = -(-problem["N"] // block)
        return (Launch(f"k{number}", (blocks,), (block,), ("out", "inp", 1.0, 0.0, problem["N"])),)
    return plan

family = Family(
    name="steps", summary="multiplies numbers", sizes={"N": "elements"}, dtypes=("fp32",),
    presets={"default": {"N": 50000}, "small": {"N": 100}}, check_shapes=(),
    tensors=lambda p: (
        Tensor("inp", (p["N"],), "fp32", "in", draw=normal(1, 2)), Tensor("out", (p["N"],), "fp32", "out")
    ),
    reference=lambda p, inputs, error, xp: {"out": Expected(inputs["inp"])},
    versions=tuple(Version(number, f"number {number}", planned(number), ("fp32",)) for number in (1, 2, 3, 4)),
)
"""
STEPS = {1: 20_000, 2: 20_500, 3: 21_000, 4: 21_500}  # 40 us; no two alike, or they would be the same code


def write_family(slower: float = 1.0) -> None:
    """Versions that multiply by 1. slower: version 2, by this factor."""
    Path("families").mkdir(exist_ok=True)
    steps = {**STEPS, 2: round(slower * STEPS[2])}
    kernels = [KERNEL.format(number=number, steps=count) for number, count in steps.items()]
    Path("families/steps.cu").write_text("".join(kernels))
    Path("families/steps.py").write_text(PY)


def kbench(line: str) -> int:
    time.sleep(1.1)  # ids tell runs apart by the second
    return run_command(line.split())


SWEEP = "sweep steps --device cuda --family-dir families --block-sizes 64,128 --seed 1"
REPORT = "report base latest --family-dir families --json"


@pytest.fixture
def found(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a report; its document."""

    def run(line: str) -> Any:
        capsys.readouterr()
        status = kbench(line)
        document = json.loads(capsys.readouterr().out)
        assert document["exit_status"] == status, document.get("error")
        return document

    return run


def test_a_kernel_that_became_slower_is_named_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KBENCH_RESULTS", raising=False)
    write_family()
    assert kbench(f"{SWEEP} --save base") == Exit.OK
    rows = read_run(latest_run(Path("results"))).rows
    assert len(rows) == 24 and all(len(row.code) == 64 for row in rows), "8 rows in 3 rounds, each with its code"
    assert len({row.code for row in rows}) == 8

    assert kbench(f"{SWEEP} --rounds 3") == Exit.OK
    same = found(REPORT)
    assert (same["exit_status"], same["verdict"]) == (Exit.OK, "fine")
    assert same["counts"]["slower"] == same["counts"]["unclear"] == same["counts"]["incomparable"] == 0

    write_family(1.06)
    assert kbench(f"{SWEEP} --rounds 3") == Exit.OK
    slow = found(REPORT)
    times = [change for change in slow["changes"] if change["verdict"] == "slower"]
    assert slow["exit_status"] == Exit.REGRESSION and slow["counts"]["incomparable"] == 0
    assert {(c["subject"]["version"], c["subject"]["block"]) for c in times} == {(2, 64), (2, 128)}
    assert all(1.04 < change["ratio"] < 1.08 for change in times)
    assert times[0]["subject"]["file"] == "families/steps.cu" and times[0]["subject"]["line"] > 1


def test_unclear_rows_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KBENCH_RESULTS", raising=False)
    write_family()
    assert kbench(f"{SWEEP} --save base") == Exit.OK
    write_family(1.10)  # other code in one version: the others are unchanged, and never unclear
    assert kbench(f"{SWEEP} --rounds 1") == Exit.OK
    assert {c["subject"]["version"] for c in found(REPORT)["changes"] if c["verdict"] == "unclear"} == {2}
    again = found(f"{REPORT} --rerun-unclear")
    assert again["counts"]["slower"] == 2 and again["counts"]["unclear"] == 0
    rows = read_run(latest_run(Path("results"))).rows
    assert max(row.round for row in rows) >= 2 and {row.version for row in rows if row.round} == {2}
