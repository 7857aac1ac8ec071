"""Bisecting times on a GPU: a loop that a commit put in, between commits that change nothing, and broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commits import BROKEN, git, make_repository
from kbench.cli.app import run_command
from kbench.errors import Exit

FAMILY = """
from kbench.family import *
family = Family(
    name="scale", summary="s", sizes={"N": "elements"}, dtypes=("fp32",),
    presets={"default": {"N": 1 << 22}, "small": {"N": 1 << 10}}, check_shapes=(),
    tensors=lambda p: (
        Tensor("inp", (p["N"],), "fp32", "in", ("n",), normal(0.5, 1.0)),
        Tensor("out", (p["N"],), "fp32", "out", ("n",)),
    ),
    reference=lambda p, i, e, xp: {"out": Expected(2.0 * i["inp"])},
    versions=(
        Version(
            1, "doubles", dtypes=("fp32",),
            plan=lambda p, b, d: (Launch("scale", (-(-p["N"] // b),), (b,), ("out", "inp", p["N"])),),
        ),
    ),
)
"""
# What is read in the loop is multiplied by zero, which no compiler may leave out: it might be NaN.
KERNEL = """
__global__ void scale(float* out, const float* inp, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float other = 0.0f;
    for (int k = 0; k < {loops}; k++) other += inp[(i + 32 * k) % n];
    out[i] = {factor} * inp[i] + 0.0f * other;
}}
// {remark}
"""
FIRST_BAD = 9


def text(number: int) -> str:
    loops = 8 if number >= FIRST_BAD else 1
    return KERNEL.format(loops=loops, factor="2.0f", remark=f"remark {number}")


def test_the_commit_that_put_a_loop_in_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text(number) for number in range(16)]
    texts[4] = BROKEN
    texts[6] = KERNEL.format(loops=1, factor="3.0f", remark="wrong")
    hashes = make_repository(tmp_path, texts, "scale", FAMILY)
    command = ["bisect", "scale:1", "--good", hashes[0], "--family-dir", str(tmp_path / "kernels"), "--json"]
    assert run_command(command) == Exit.OK
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["first"]["commit"] == hashes[FIRST_BAD], told.err
    bad = next(trial for trial in found["trials"] if trial["commit"]["commit"] == hashes[FIRST_BAD])
    assert bad["ratio"] > 1.03
    # Only remarks differ between the others: each machine code is timed once.
    timed = [trial for trial in found["trials"] if trial["reason"].startswith("interval")]
    assert len(timed) == 1 and all("same machine code" in t["reason"] for t in found["trials"] if t not in timed)
    assert git(tmp_path, "worktree", "list", "--porcelain").count("worktree ") == 1


def test_what_is_wrong_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = KERNEL.format(loops=1, factor="3.0f", remark="wrong")
    hashes = make_repository(tmp_path, [text(0), wrong, BROKEN, text(15)], "scale", FAMILY)
    command = ["bisect", "scale:1", "--good", hashes[0], "--family-dir", str(tmp_path / "kernels"), "--json"]
    assert run_command(command) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert found["first"] is None and [each["commit"] for each in found["suspects"]] == hashes[1:]
    reasons = {trial["commit"]["commit"]: trial["reason"] for trial in found["trials"]}
    assert "fail" in reasons[hashes[1]] and "invalid" in reasons[hashes[2]]


def test_the_same_code_at_both_ends_is_nothing_to_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hashes = make_repository(tmp_path, [text(0), text(1), text(2)], "scale", FAMILY)
    command = ["bisect", "scale:1", "--good", hashes[0], "--family-dir", str(tmp_path / "kernels")]
    assert run_command(command) == Exit.NOTHING
    assert "is not slower" in " ".join(capsys.readouterr().out.split())
