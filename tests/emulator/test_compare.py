"""`kbench compare` where there are no times: both sides are proven, a wrong one is found, and no ratio is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kbench.catalog import kernel_folder
from kbench.cli.app import run_command
from kbench.errors import Exit

pytestmark = pytest.mark.emulator
OPTIONS = ["--size", "N=1000", "--device", "emulator", "--json", "--seed", "1"]


def compare(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> dict:
    assert run_command(["compare", *words, *OPTIONS]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["comparison"] is None and document["exit_status"] == status
    return document


def mine(folder: Path, before: str, after: str) -> str:
    text = (kernel_folder() / "residual_forward.cu").read_text(encoding="utf-8")
    assert before in text
    path = folder / "mine.cu"
    path.write_text(text.replace(before, after), encoding="utf-8")
    return str(path)


def test_both_sides_are_proven_and_nothing_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    document = compare(capsys, "residual_forward:2@64", "residual_forward:2@256", status=Exit.NOTHING)
    assert [side["row"]["status"] for side in document["sides"]] == ["pass", "pass"]
    assert [side["row"]["block"] for side in document["sides"]] == [64, 256]


def test_parameters_are_those_of_both_sides_that_declare_them(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("residual_forward:1@64", "residual_forward:2@64")
    document = compare(capsys, *both, "--param", "PACKETS=4", status=Exit.NOTHING)
    assert [side["row"]["params"] for side in document["sides"]] == [{}, {"PACKETS": 4}]
    assert [side["row"]["status"] for side in document["sides"]] == ["pass", "pass"]
    for words in ("PACKETS=1,2", "OTHER=1"):
        assert run_command(["compare", *both, "--param", words, *OPTIONS]) == Exit.USAGE


def test_sides_have_parameters_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = mine(tmp_path, "to_float(a) + to_float(b)", "to_float(b) + to_float(a)")
    document = compare(capsys, "residual_forward:2@64,PACKETS=4", f"{path}@PACKETS=1", status=Exit.NOTHING)
    first, second = (side["row"] for side in document["sides"])
    assert (first["status"], first["block"], first["params"]) == ("pass", 64, {"PACKETS": 4})
    assert (second["status"], second["block"], second["params"]) == ("pass", 64, {"PACKETS": 1})
    assert first["kernels"][0]["grid"] != second["kernels"][0]["grid"]
    assert "--param PACKETS=4" in first["reproduce"] and f"{path}@64,PACKETS=1 " in second["reproduce"]
    for words in ("PACKETS=3", "ROWS=1"):
        assert run_command(["compare", "residual_forward:2", f"{path}@{words}", *OPTIONS]) == Exit.USAGE
        assert "it has PACKETS=2 (1, 2, 4)" in capsys.readouterr().err


def test_a_wrong_file_in_place_of_the_source_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = mine(tmp_path, "to_float(a) + to_float(b)", "to_float(a) - to_float(b)")
    document = compare(capsys, "residual_forward:2", path, status=Exit.WRONG)
    assert [side["row"]["status"] for side in document["sides"]] == ["pass", "fail"]
    again = document["sides"][1]["row"]["reproduce"]
    assert again.startswith(
        f"kbench compare residual_forward:2@256,PACKETS=2 {path}@256,PACKETS=2 --family residual_forward --version 2 "
    )


def test_a_file_without_the_plans_kernel_says_which_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = mine(tmp_path, "void residual_forward2(", "void residual_forward9(")
    document = compare(capsys, path, "residual_forward:2", status=Exit.USAGE)
    row = document["sides"][0]["row"]
    assert row["status"] == "invalid" and "mine.cu has no kernel `residual_forward2`" in row["reason"]
