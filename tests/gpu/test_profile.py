"""`kbench profile` with the real ncu: counters of kernels whose bytes and time are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kbench.cli.app import run_command
from kbench.errors import CannotRunError, Exit
from kbench.profile.ncu import find_ncu


@pytest.fixture
def profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with --json; its document. Skips where there is no ncu, or where it may not count."""
    try:
        find_ncu()
    except CannotRunError as error:
        pytest.skip(f"ncu cannot be used: {error}")

    def run(*words: str) -> dict[str, Any]:
        status = run_command(["profile", *words, "--json", "--seed", "1", "--results", str(tmp_path)])
        captured = capsys.readouterr()
        if status == Exit.CANNOT and "ERR_NVGPUCTRPERM" in captured.err:
            pytest.skip(captured.err)
        assert status == Exit.OK, captured.err
        document: dict[str, Any] = json.loads(captured.out)
        return document

    return run


def test_a_kernel_that_streams(profiled: Any) -> None:
    """512 MB in and as much out: nothing of it fits the L2 cache, so its bytes and its limit are known."""
    count = 1 << 27
    found = profiled("gelu_forward:2", "--size", f"N={count}", "--dtype", "fp32")
    (kernel,) = found["kernels"]
    assert found["bytes"]["read"] == pytest.approx(4 * count, rel=0.03)
    assert found["bytes"]["written"] == pytest.approx(4 * count, rel=0.15)  # what the L2 still holds is not written
    assert kernel["ours"] and kernel["name"].startswith("gelu_forward")
    # Seen on an H200: 81% of DRAM's peak, which is as fast as any copy, and 88% of L2's.
    assert kernel["dram"] > 0.75 and found["reading"][0].startswith(("bound by DRAM", "bound by the L2"))
    assert found["time"]["ratio"] == pytest.approx(1, abs=0.1)
    assert kernel["load_sectors"] == kernel["store_sectors"] == 16  # 32 lanes of 16 bytes, 32 bytes a sector
    assert kernel["registers"] == found["row"]["kernels"][0]["registers"]
    assert 0 < kernel["achieved"] <= kernel["possible"] + 0.02 and kernel["l2_hits"] is not None
    assert kernel["stalls"] and math.isclose(sum(s["share"] for s in kernel["stalls"]), 1, abs_tol=0.5)
    assert found["ncu"]["unknown_metrics"] == []
    for name in ("multiprocessors", "issue", "tensor", "l2", "conflicts"):
        assert kernel[name] is not None, name
    report = Path(found["files"]["report"])
    assert report.stat().st_size > 10_000 and Path(found["files"]["csv"]).stat().st_size > 1000


def test_a_plan_of_ours_and_a_librarys_kernels(profiled: Any) -> None:
    found = profiled("attention_backward:7", "--size", "B=2", "--size", "T=256")
    assert found["launches"]["seen"] == found["launches"]["planned"] >= 1
    assert {kernel["ours"] for kernel in found["kernels"]} == {True, False}
    assert all(kernel["us"] > 0 for kernel in found["kernels"])


def test_hot_caches_are_hot(profiled: Any) -> None:
    """4 MB stay in the L2 cache of every GPU of a data centre."""
    words = ("residual_forward:2", "--size", f"N={1 << 18}", "--dtype", "fp32")
    cold, hot = profiled(*words), profiled(*words, "--hot")
    assert hot["bytes"]["read"] < 0.5 * cold["bytes"]["read"]
    assert 0.8 < cold["bytes"]["read"] / (2 * 4 * (1 << 18)) < 2  # code and constants are a part of so little
    assert hot["time"]["ratio"] is None and hot["ncu"]["cache"] == "hot"
