"""The summary of a sweep: which row stands for a problem, its rates and its share of the card's ceilings."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeBench, failed, make_row
from kbench.ceilings import Ceilings
from kbench.cli.app import run_command
from kbench.device.worker import WorkerError
from kbench.errors import CannotRunError, Exit, KernelFault
from kbench.results.schema import SCHEMA_VERSION, Row
from kbench.results.store import latest_run, read_run
from kbench.results.summary import Line, summarise, write_summary
from kbench.sweep import Bench, Options

CARD = Ceilings(4000.0, "a kernel", 2 << 30, {"fp32": 50.0, "bf16": 800.0}, 8192)
FAMILIES = ("attention_backward", "crossentropy_softmax_backward", "gelu_forward")


def rows() -> list[Row]:
    """Three families: one bound by GEMMs, one by copying, one of which nothing is right."""
    sizes = {"B": 4, "T": 1024, "C": 768, "NH": 12}
    return [
        make_row(1, family=FAMILIES[0], sizes=sizes, median_ms=4.0, traffic=4e9, flops=100e9),
        make_row(7, family=FAMILIES[0], sizes=sizes, block=128, median_ms=2.5, traffic=4e9, flops=100e9),
        make_row(8, family=FAMILIES[0], sizes=sizes, median_ms=1.0, traffic=4e9, flops=100e9, overridden=True),
        make_row(1, family=FAMILIES[1], sizes={"N": 8}, dtype="bf16", block=32, median_ms=0.0125, traffic=36e6),
        failed(1, family=FAMILIES[2]),
    ]


EXPECTED = [
    Line(FAMILIES[0], "B=4 T=1024 C=768 NH=12", "fp32", 7, 128, 2.5, 1600.0, 40.0, 0.8, "gemm"),
    Line(FAMILIES[1], "N=8", "bf16", 1, 32, 0.0125, 2880.0, None, 0.72, "copy"),
    Line(FAMILIES[2], "N=64", "fp32"),
]


def test_each_problem_has_its_best_proven_row() -> None:
    found = summarise(rows(), CARD)
    assert [line.version for line in found] == [7, 1, None]
    for line, expected in zip(found, EXPECTED, strict=True):
        for name, value in vars(expected).items():
            got = getattr(line, name)
            assert got == pytest.approx(value) if isinstance(value, float) else got == value, name


def test_launches_bound_what_is_small() -> None:
    card = replace(CARD, launch_us=1.25, fma_tflops=60.0)
    kernels = [{"name": name} for name in ("first", "second")]
    small = make_row(1, median_ms=0.005, traffic=4e6, flops=1e6, kernels=kernels)
    library = make_row(1, sizes={"N": 2}, median_ms=0.005, traffic=4e3, dtype="bf16")  # its own launches are not known
    large = make_row(1, sizes={"N": 3}, median_ms=2.0, traffic=4e6, flops=60e9, kernels=kernels)
    graph = make_row(1, sizes={"N": 4}, median_ms=0.002, traffic=4e6, kernels=kernels, cache_mode="graph")
    found = [(pytest.approx(line.share), line.ceiling) for line in summarise([small, library, large, graph], card)]
    assert found == [(0.5, "launch"), (0.25, "launch"), (0.5, "fma"), (0.5, "copy")]


def test_problems_and_dtypes_are_lines_of_their_own() -> None:
    many = [make_row(1, median_ms=1.0, sizes={"N": n}, dtype=dtype) for dtype in ("fp32", "bf16") for n in (8, 16)]
    found = summarise(many, Ceilings())
    assert [(line.problem, line.dtype) for line in found] == [
        ("N=8", "fp32"), ("N=16", "fp32"), ("N=8", "bf16"), ("N=16", "bf16"),
    ]  # fmt: skip
    assert all(line.share is None and line.ceiling is None and line.gbs is None for line in found)
    assert summarise([], CARD) == []


def test_files_hold_whole_numbers_and_gaps(tmp_path: Path) -> None:
    paths = write_summary(tmp_path, "run", EXPECTED)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "tables/run/summary.csv",
        "tables/run/summary.md",
    ]
    table = list(csv.DictReader(paths[0].open()))
    assert table[0] | {"share": "0.8"} == {
        "family": FAMILIES[0], "problem": "B=4 T=1024 C=768 NH=12", "dtype": "fp32", "version": "7", "block": "128",
        "ms": "2.5", "gbs": "1600.0", "tflops": "40.0", "share": "0.8", "ceiling": "gemm",
        "params": "",
    }  # fmt: skip
    assert table[2]["version"] == table[2]["ms"] == "" and table[1]["tflops"] == ""
    lines = paths[1].read_text().splitlines()
    assert lines[0].startswith("| family | problem |") and "| 7 | 128 | 2.5 | 1600 | 40 | 0.8 | gemm |" in lines[2]
    assert lines[4] == f"| {FAMILIES[2]} | N=64 | fp32 |  |  |  |  |  |  |  |"


# ---------------------------------------------------------------------------------------------- kbench sweep


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Sweeps over a script of rows; the exit status, what came on stdout, and the results folder."""

    def run(script: Iterable[Row | BaseException], options: str = "", **settings: Any) -> tuple[int, str, Path]:
        bench = type("Bench", (FakeBench,), {"script": list(script), "card": CARD.to_dict(), **settings})
        monkeypatch.setattr("kbench.sweep.Bench", bench)
        status = run_command([*f"sweep toy --results {tmp_path} {options}".split()])
        return status, capsys.readouterr().out, tmp_path

    return run


def test_a_sweep_over_several_families_ends_with_the_summary(sweep: Any) -> None:
    status, out, folder = sweep(rows())
    assert status == Exit.WRONG
    summary = out[out.index("best proven version of") :]
    assert all(len(line) <= 80 for line in summary.splitlines())
    assert out.index("records:") < out.index("best proven version of")
    lines = summary.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("attention_backward"))
    assert lines[at].split() == ["attention_backward", "7", "128", "2.500", "1,600", "40.0", "80%", "gemm"]
    assert lines[at + 1] == "  B=4 T=1024 C=768 NH=12 fp32"
    assert any(line.split() == ["gelu_forward", "none"] for line in lines)
    flat = " ".join(summary.split())
    assert "N=8 bf16" in flat and "72% copy" in flat and "0.01250" in flat
    assert flat.endswith("ceilings of this card: copy 4,000 GB/s, read and written; gemm fp32 50.0, bf16 800 TFLOP/s")
    run = read_run(latest_run(folder))
    assert run.header["device"]["ceilings"] == CARD.to_dict() and run.header["schema"] == SCHEMA_VERSION
    assert [row.traffic for row in run.rows[:2]] == [4e9, 4e9] and run.rows[0].flops == 100e9
    assert {"summary.csv", "summary.md"} <= {path.name for path in (folder / "tables" / run.id).iterdir()}


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_the_summary_fits_the_terminal(sweep: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = sweep(rows())[1]
    summary = out[out.index("best proven version of") :]
    assert all(len(line) <= int(columns) for line in summary.splitlines())
    assert "80% gemm" in summary and "2.500" in summary


def test_one_family_needs_no_summary(sweep: Any) -> None:
    _, out, folder = sweep(rows()[:3])
    assert "best proven version of" not in out
    assert not list((folder / "tables").glob("*/summary.*"))


def test_the_emulator_has_no_times_to_sum_up(sweep: Any) -> None:
    emulated = [make_row(1, family=family, device="emulator") for family in FAMILIES]
    _, out, folder = sweep(emulated, kind="emulator", card=None)
    assert "best proven version of" not in out and "ceilings" not in out
    assert "ceilings" not in read_run(latest_run(folder)).header["device"]


def test_unknown_ceilings_are_said(sweep: Any) -> None:
    out = sweep(rows(), card=None)[1]
    assert out.rstrip().endswith("ceilings of this card: not known") and "gemm" not in out.split("ver  block")[-1]
    whole = replace(CARD, read_gbs=4400.0, write_gbs=4600.0, l2_gbs=7000.0, fma_tflops=61.2, launch_us=1.25)
    flat = " ".join(sweep(rows(), card=whole.to_dict())[1].split())
    assert flat.endswith(
        "copy 4,000 GB/s, read and written; read 4,400, write 4,600, L2 read 7,000 GB/s; gemm fp32 50.0, bf16 800 "
        "TFLOP/s; fma fp32 61.2 TFLOP/s; launch 1.25 us"
    )
    partly = Ceilings(4000.0, notes=("fp32 GEMM not measured: nvmath is missing",))
    out = sweep(rows(), card=partly.to_dict())[1]
    assert "copy 4,000 GB/s, read and written\nfp32 GEMM not measured: nvmath is missing\n" in out


def test_the_json_document_has_the_summary(sweep: Any) -> None:
    document = json.loads(sweep(rows(), "--json")[1])
    assert [line["version"] for line in document["summary"]] == [7, 1, None]
    assert [(row["version"], row["dtype"]) for row in document["winners"]] == [(7, "fp32"), (1, "bf16")]
    assert document["device"]["ceilings"]["gemm_tflops"] == {"fp32": 50.0, "bf16": 800.0}


# ---------------------------------------------------------------------------------------------- Bench.ceilings


@pytest.mark.parametrize(
    ("answer", "note", "dropped"),
    [
        (CARD.to_dict(), "", False),
        (CannotRunError("no memory"), "the card's ceilings could not be measured: no memory", False),
        (KernelFault("illegal-access", "gone"), "the card's ceilings could not be measured: gone", True),
        (
            WorkerError("Traceback\n  ...\nZeroDivisionError: by zero\n"),
            "the card's ceilings could not be measured: internal error: ZeroDivisionError: by zero",
            True,
        ),
    ],
)
def test_ceilings_that_cannot_be_measured_stop_nothing(
    monkeypatch: pytest.MonkeyPatch, answer: Any, note: str, dropped: bool
) -> None:
    notes: list[str] = []
    bench = Bench(Options(device="cuda"), notes.append)
    bench.device_kind = "cuda"
    drops: list[bool] = []

    def call(request: dict[str, Any]) -> Any:
        assert request == {"do": "ceilings"}
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(bench, "_call", call)
    monkeypatch.setattr(bench, "_drop_worker", lambda: drops.append(True))
    assert bench.ceilings() == (None if note else answer)
    assert notes == ([note] if note else []) and bool(drops) == dropped
    bench.device_kind = "emulator"
    assert bench.ceilings() is None
