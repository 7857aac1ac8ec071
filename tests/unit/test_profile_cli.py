"""`kbench profile` as a whole, with a stand-in for ncu and a device of numpy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from check_fakes import COUNT
from fakes import FakeBench, failed, make_row
from kbench.cli.app import run_command
from kbench.device import open as opening
from kbench.errors import Exit

HELPERS = Path(__file__).parent / "helpers"
FAMILY = """
from check_fakes import PLAN, doubling_family
doubling = doubling_family(PLAN, block_sizes=(128,))
"""
KERNEL = {"name": "double", "grid": [3], "block": [128], "shared": 0, "registers": 16, "static_shared": 0}


class Bench(FakeBench):
    """Has one row."""


def row(**changes: Any) -> Any:
    usual: dict[str, Any] = {"family": "doubling", "sizes": {"N": COUNT}, "block": 128, "median_ms": 0.003}
    return make_row(1, **{**usual, "traffic": 4000.0, "kernels": [KERNEL], "idea": "two at a time", **changes})


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command on the doubling family with further words; ncu behaves as `mode` says."""
    families = tmp_path / "families"
    families.mkdir()
    (families / "doubling.py").write_text(FAMILY)
    (families / "doubling.cu").write_text("__global__ void double(float* out) {}\n")
    ncu = tmp_path / "ncu"
    ncu.write_text(
        f'#!/bin/sh\nPYTHONPATH={HELPERS}:$PYTHONPATH exec {sys.executable} {HELPERS / "fake_ncu.py"} "$@"\n'
    )
    ncu.chmod(0o755)
    monkeypatch.setattr("kbench.sweep.Bench", Bench)
    monkeypatch.setattr(opening, "choose_kind", lambda wanted: ("cuda", ""))
    monkeypatch.setattr(Bench, "script", [row()])

    def run(*words: str, mode: str = "", target: str = "doubling:1") -> int:
        monkeypatch.setenv("FAKE_NCU", mode)
        where = ["--ncu", str(ncu), "--results", str(tmp_path / "results"), "--family-dir", str(families)]
        return run_command(["profile", target, *where, *words])

    return run


def kept(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("results/profiles/*"))


def test_counters_stand_beside_our_own_figures_and_the_report_is_kept(
    profile: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile("--seed", "1") == Exit.OK
    captured = capsys.readouterr()
    out = captured.out
    assert all(len(line) <= 80 or "results/profiles" in line for line in out.splitlines())
    words = " ".join(out.split())
    for text in (
        "doubling version 1: two at a time", "ncu 2025.3.1.0", "2.50 us by ncu, 3.00 us by kbench's timer", ": 0.83x",
        "3.6 kB read, 1.2 kB written; any version has to move 4.0 kB: 1.20x", "bound by DRAM: 92% of its peak",
        "moves 1.20x the bytes that any version has to", "50% of the multiprocessor's warps; 100% would fit",
    ):  # fmt: skip
        assert text in words, text
    assert "hits" in out, "columns that nothing is known of stay, empty"
    csv, summary, report = kept(tmp_path)
    assert (csv.suffix, summary.suffix, report.suffix) == (".csv", ".json", ".ncu-rep")
    assert len({path.stem for path in (csv, summary, report)}) == 1 and str(report.name) in out
    assert re.fullmatch(r"\d{8}T\d{6}Z-doubling-1-[0-9a-f]{6}", csv.stem)
    # One launch between start and stop; those of the check and of the warm-up are not in it.
    ran = json.loads(report.read_text())
    assert ran["kernels"] == ["double"] and json.loads(summary.read_text())["kernels"][0]["us"] == 2.5
    assert ran["arguments"][ran["arguments"].index("--cache-control") + 1] == "all"
    assert "profiling with ncu 2025.3.1.0" in captured.err


def test_json_is_one_document_and_nothing_is_overwritten(
    profile: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile("--json", "--hot", mode="no-metric") == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["exit_status"]) == ("profile", 0)
    assert document["time"] == {"ncu_us": 2.5, "timer_us": 3.0, "ratio": None}  # hot and cold are not compared
    assert document["bytes"]["ratio"] == pytest.approx(1.2) and document["steps"] == {"Launch": 1}
    assert document["ncu"]["unknown_metrics"] == ["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"]
    command = document["ncu"]["command"]
    assert command[command.index("--cache-control") + 1] == "none" and document["ncu"]["cache"] == "hot"
    assert json.loads(Path(document["files"]["summary"]).read_text())["time"] == document["time"]
    assert profile("--json") == Exit.OK and len(kept(tmp_path)) == 6


def test_a_version_that_is_wrong_is_not_profiled(
    profile: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bench, "script", [failed(1, family="doubling")])
    assert profile() == Exit.WRONG
    captured = capsys.readouterr()
    assert "3 of 4096 elements wrong" in captured.out and "not profiled" in captured.err and not kept(tmp_path)


def test_a_version_that_is_wrong_only_under_ncu_is_not_profiled(
    profile: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "families" / "doubling.cu").write_text("__global__ void double(float* out) { spoilt(); }\n")
    assert profile() == Exit.WRONG
    assert "is wrong under ncu: out: 300 of 300 elements wrong" in capsys.readouterr().err and not kept(tmp_path)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("permission", "NVreg_RestrictProfilingToAdminUsers"),
        ("crash", "status 9 before the launches were made: ==ERROR== Profiling failed"),
        ("words", "cannot read what ncu printed"),
        ("no-kernels", "ncu saw no kernel"),
    ],
)
def test_failures_of_ncu_are_one_line(
    mode: str, words: str, profile: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(mode=mode) == Exit.CANNOT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 2 and words in captured.err and not kept(tmp_path)


def test_an_ncu_that_hangs_is_ended(profile: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert profile("--time-limit", "0.02", mode="hang") == Exit.CANNOT
    assert "ncu took longer than 0.4 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("doubling", (), "name it: kbench profile doubling --version N"),
        ("doubling:1,2", (), "a profile is of one version"),
        ("doubling", ("--version", "1-3"), "a profile is of one version"),
        ("doubling:1", ("--size", "N=1,2"), "--size N has several values"),
        ("doubling:1", ("--param", "A=1,2"), "--param A has several values"),
        ("doubling:1", ("--dtype", "fp32,bf16"), "profile takes one dtype"),
        ("doubling:1", ("--ncu", "/no/such/ncu"), "/no/such/ncu is no program"),
        ("doubling:1", ("--time-limit", "0"), "--time-limit"),
    ],
)
def test_bad_input(
    target: str, words: tuple[str, ...], message: str, profile: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(*words, target=target) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_results_that_cannot_be_written_are_found_before_any_work(
    profile: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_work(position: int) -> None:
        raise AssertionError("a row ran")

    monkeypatch.setattr(Bench, "before_row", staticmethod(no_work))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "profiles").write_text("a file")
    assert profile() == Exit.CANNOT
    assert f"cannot write {tmp_path / 'results' / 'profiles'}" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kbench.device.cuda.probe.probe_gpu", lambda: "no driver")
    assert run_command(["profile", "gelu_forward:1", "--ncu", "/no/such/ncu"]) == Exit.CANNOT
    err = capsys.readouterr().err
    assert "no GPU can be used: no driver" in err and "emulator" not in err
