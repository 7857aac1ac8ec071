"""Two kernels timed alternately on a GPU: a known difference is found, none is where there is none."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kbench.catalog import kernel_folder
from kbench.cli.app import run_command
from kbench.compare import CompareBench
from kbench.errors import Exit
from kbench.measure.ab_statistics import Rule
from kbench.selection import Selection
from kbench.sides import Side
from kbench.sweep import Options


def noise() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "compare_noise.py"
    spec = importlib.util.spec_from_file_location("compare_noise", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def contests(folder):
    return noise().contests(folder)


@pytest.fixture(scope="module")
def bench(folder, contests):
    with CompareBench(Options(device="cuda", family_dirs=(folder,), seed=1), lambda note: None) as opened:
        yield opened


def compare(bench, folder, sides, sizes):
    planned = bench.sides(sides, Selection([], "run", sizes=sizes, dtype="bf16"), folder)
    answer = bench.compare(planned, Rule(), "kbench compare")
    assert [(row.status, row.reason) for row in answer.rows] == [("pass", "")] * 2
    return answer.comparison


def test_a_kernel_against_a_copy_of_its_file_is_the_same_code_and_no_difference(bench, folder, contests):
    found = compare(bench, folder, contests[0].sides, contests[0].sizes)
    assert found["same_code"] is True and found["places"] == 2
    assert not found["estimate"]["differs"]
    assert found["estimate"]["ratio"] == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("swapped", [False, True])
def test_two_percent_of_a_hundred_microseconds_are_found(bench, folder, contests, swapped):
    contest = contests[2]
    found = compare(bench, folder, contest.sides[::-1] if swapped else contest.sides, contest.sizes)
    ratio = found["estimate"]["ratio"]
    assert found["same_code"] is False and found["estimate"]["differs"]
    assert (ratio if swapped else 1 / ratio) == pytest.approx(1.02, abs=0.004)


def test_a_block_more_in_fifty_is_found(bench, folder, contests):
    found = compare(bench, folder, contests[1].sides, contests[1].sizes)
    assert found["estimate"]["differs"] and found["estimate"]["ratio"] < 1


def test_rounds_lie_in_different_places_and_memory_is_given_back(bench, folder, contests):
    sides = contests[2].sides
    first, second = (compare(bench, folder, sides, contests[2].sizes) for _ in range(2))
    assert first["rounds"] != second["rounds"]
    assert {block[1] for one in first["rounds"] for block in one} == {0, 1}


def test_a_side_that_is_wrong_is_not_timed(bench, folder):
    text = (kernel_folder() / "residual_forward.cu").read_text(encoding="utf-8")
    wrong = folder / "wrong.cu"
    wrong.write_text(text.replace("to_float(a) + to_float(b)", "to_float(a) - to_float(b)"), encoding="utf-8")
    sides = Side("residual_forward", 2), Side("residual_forward", 2, None, str(wrong))
    planned = bench.sides(sides, Selection([], "run", preset="small"), folder)
    answer = bench.compare(planned, Rule(), "kbench compare")
    assert [row.status for row in answer.rows] == ["pass", "fail"] and answer.comparison is None


def test_inout_tensors_start_anew_at_every_launch(bench, folder):
    """adamw changes what it reads: the proof after the timing would not hold otherwise, nor would its own outputs."""
    sides = Side("adamw", 1), Side("adamw", 2)
    planned = bench.sides(sides, Selection([], "run", preset="small"), folder)
    answer = bench.compare(planned, Rule(), "kbench compare")
    assert [(row.status, row.reason) for row in answer.rows] == [("pass", "")] * 2


def test_two_values_of_a_parameter_are_told_apart(bench, folder):
    """At blocks of one warp few loads are in flight, so that a second packet makes an H200 1.37 times as fast."""
    one, two = (Side("residual_forward", 2, 32, params={"PACKETS": value}) for value in (1, 2))
    planned = bench.sides((one, two), Selection([], "run", dtype="bf16"), folder)
    answer = bench.compare(planned, Rule(), "kbench compare")
    assert [(row.status, row.reason, row.params["PACKETS"]) for row in answer.rows] == [
        ("pass", "", 1),
        ("pass", "", 2),
    ]
    found = answer.comparison
    assert found["same_code"] is False and found["estimate"]["differs"]
    assert found["estimate"]["ratio"] > 1.1


def test_a_parameter_at_its_default_is_the_same_code_as_one_left_open(bench, folder):
    named, open_ = Side("residual_forward", 2, 256, params={"PACKETS": 2}), Side("residual_forward", 2, 256)
    assert compare(bench, folder, (named, open_), {})["same_code"] is True


def test_the_command_keeps_a_record_and_fails_where_asked(folder, contests, tmp_path, capsys):
    words = ["residual_forward:911,912@256", "--family-dir", str(folder), "--size", "N=65536", "--json"]
    assert run_command(["compare", *words, "--results", str(tmp_path), "--fail-if-slower"]) == Exit.REGRESSION
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "A faster"
    assert document["answer"].startswith("residual_forward:911@256 is 1.0")
    (path,) = (tmp_path / "compare").iterdir()
    assert json.loads(path.read_text())["answer"] == document["answer"]
