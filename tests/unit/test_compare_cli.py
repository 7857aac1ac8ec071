"""`kbench compare`: what it says and keeps of a comparison that a fake bench made, and its exit statuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kbench import compare as bench_module
from kbench.catalog import load_catalog
from kbench.cli import compare
from kbench.cli.app import run_command
from kbench.compare import Answer, PlannedSide
from kbench.errors import Exit
from kbench.measure.ab_statistics import Rule
from kbench.results.schema import Row
from kbench.selection import Selection
from kbench.sides import parse_sides

KERNEL = {"name": "k", "grid": [8], "block": [256], "shared": 0, "registers": 40, "static_shared": 0, "local_bytes": 0}


def comparison(ratio: float = 1.042, half: float = 0.004, differs: bool = True, **more: Any) -> dict[str, Any]:
    side = {"low_ms": 0.0119, "high_ms": 0.0121, "samples": 1280, "notes": []}
    return {
        "same_code": False, "mode": "cold", "places": 2, "overhead_ms": 0.002, "thrown_away": [],
        "rule": {"confidence": 0.999, "least": 0.005},
        "estimate": {
            "ratio": ratio, "low": ratio - half, "high": ratio + half, "confidence": 0.9991, "pairs": 640,
            "rounds": 16, "visible": 0.0058, "differs": differs,
        },
        "sides": [{**side, "median_ms": 0.0125}, {**side, "median_ms": 0.012}],
        "rounds": [[["ABBA", 0, 0.0125, 0.012, 0.012, 0.0125]]],
        **more,
    }  # fmt: skip


class FakeBench:
    """Answers with what a test wants; its families are real."""

    fallback, seed, device_kind = "", 7, "cuda"
    device = {"name": "Card", "arch": "sm_90"}
    statuses, found = ["pass", "pass"], comparison()
    asked: list[Any] = []
    blocks = (256, 256)

    def __init__(self, options: Any, note: Any):
        self.options = options

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sides(self, sides: Any, select: Selection, results: Path) -> list[PlannedSide]:
        family = load_catalog(self.options.family_dirs)[sides[0].family]
        dtype = select.dtype or family.dtypes[0]
        given = {name: values[0] for name, values in select.params.items()}
        planned = []
        for side in sides:
            declared = family.by_number[side.version].defaults
            params = {name: {**given, **side.params}.get(name, value) for name, value in declared.items()}
            origins = {name: "as given" if name in {**given, **side.params} else "the default" for name in params}
            sizes, block = dict(family.presets["small"]), side.block or FakeBench.blocks[len(planned)]
            job = bench_module.Job(family.name, side.version, "", sizes, dtype, block, params=params)
            planned.append(PlannedSide(side, job, "x", origins))
        return planned

    def compare(self, sides: Any, rule: Rule, again: str) -> Answer:
        FakeBench.asked.append((sides, rule, again))
        jobs = [side.job for side in sides]
        rows = [
            Row(
                j.family,
                j.version,
                "",
                j.sizes,
                j.dtype,
                j.block,
                "Card",
                status,
                7,
                "wrong",
                kernels=[KERNEL],
                params=j.params,
            )
            for j, status in zip(jobs, FakeBench.statuses, strict=True)
        ]
        passed = all(status == "pass" for status in FakeBench.statuses)
        return Answer((rows[0], rows[1]), FakeBench.found if passed and self.device_kind == "cuda" else None)


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_module, "CompareBench", FakeBench)
    for name, value in (
        ("asked", []),
        ("found", comparison()),
        ("statuses", ["pass", "pass"]),
        ("device_kind", "cuda"),
        ("blocks", (256, 256)),
    ):
        monkeypatch.setattr(FakeBench, name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.cu").touch()


SIDES = ("layernorm_forward:5", "layernorm_forward:6")


def output(capsys: pytest.CaptureFixture[str], *words: str, status: int = Exit.OK) -> str:
    assert run_command(["compare", *(words or SIDES)]) == status
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith(("record: ", "  again:")))
    return " ".join(text.split())


def test_the_faster_one_is_named_with_interval_and_what_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    assert (
        "layernorm_forward:6 is 1.042 times as fast as :5 (99.9% interval 1.038..1.046, 640 pairs, 16 rounds; "
        "smallest visible difference 0.58%)"
    ) in text
    assert "40 75%" in text, "registers and occupancy"


def test_a_first_side_that_is_faster_is_named_first(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeBench, "found", comparison(0.5, 0.1))
    text = output(capsys)
    assert "layernorm_forward:5 is 2.000 times as fast as :6 (99.9% interval 1.667..2.500, " in text


def test_no_difference_says_what_would_have_been_seen(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeBench, "found", comparison(1.0003, 0.002, differs=False))
    text = output(capsys)
    assert "no difference seen between layernorm_forward:5 and :6 (anything above 0.58% would have been seen;" in text
    monkeypatch.setattr(FakeBench, "found", comparison(1.003, 0.001, differs=False))
    assert "what there is lies below 0.5%; anything above" in output(capsys)


def test_the_same_code_is_said_to_be_so(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Even where the statistics saw a difference: it is the machine's, not the kernel's."""
    monkeypatch.setattr(FakeBench, "found", comparison(0.98, 0.002, same_code=True))
    text = output(capsys, "layernorm_forward:6", "mine.cu", "--fail-if-slower")
    assert "same code: layernorm_forward:6 and mine.cu run the same machine code" in text
    assert "they measured 2% apart" in text and "is this comparison's noise" in text


@pytest.mark.parametrize(("ratio", "differs", "status"), [(0.9, True, 1), (1.1, True, 0), (0.9, False, 0)])
def test_slower_fails_where_asked(ratio: float, differs: bool, status: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeBench, "found", comparison(ratio, 0.001, differs))
    assert run_command(["compare", *SIDES, "--fail-if-slower"]) == status
    assert run_command(["compare", *SIDES]) == Exit.OK


def test_a_record_is_kept_and_is_what_json_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["compare", *SIDES, "--json", "--results", "kept"]) == Exit.OK
    printed = json.loads(capsys.readouterr().out)
    (path,) = (tmp_path / "kept" / "compare").iterdir()
    kept = json.loads(path.read_text())
    assert printed["record"] == str(path.relative_to(tmp_path)) and printed["verdict"] == "B faster"
    assert kept["kind"] == "compare" and kept["schema"] == 2 and kept["id"] == path.stem
    shared = {"device", "seed", "verdict", "answer", "sides", "comparison", "exit_status"}
    assert all(kept[name] == printed[name] for name in shared)


def test_the_command_of_a_record_means_the_same(monkeypatch: Any, tmp_path: Path) -> None:
    words = ["layernorm_forward:5@64", "mine.cu", "--version", "6", "--least", "2%", "--budget", "3"]
    words += ["--confidence", "99%", "--dtype", "bf16"]
    assert run_command(["compare", *words]) == Exit.OK
    assert run_command(shlex.split(FakeBench.asked[0][2])[1:]) == Exit.OK
    first, again = ([(side.job, side.side.file) for side in asked[0]] for asked in FakeBench.asked)
    assert first == again
    assert FakeBench.asked[0][1:] == FakeBench.asked[1][1:]
    assert FakeBench.asked[0][1] == Rule(0.99, 0.02, 0.01, budget_s=3.0)


def test_the_command_of_a_record_names_all_parameters(monkeypatch: Any) -> None:
    """Those of --param and defaults too: a default may be another one tomorrow."""
    for words, sides in (
        (["residual_forward:2@64,PACKETS=1", "residual_forward:2"], ["2@64,PACKETS=1", "2@64,PACKETS=2"]),
        (["residual_forward:1", "residual_forward:2", "--param", "PACKETS=4"], ["1@256", "2@256,PACKETS=4"]),
    ):
        FakeBench.asked.clear()
        assert run_command(["compare", *words]) == Exit.OK
        again = shlex.split(FakeBench.asked[0][2])[1:]
        assert again[1:3] == [f"residual_forward:{side}" for side in sides] and "--param" not in again
        assert run_command(again) == Exit.OK
        first, second = ([side.job for side in asked[0]] for asked in FakeBench.asked)
        assert first == second


def test_parameters_of_sides_are_in_labels_lines_and_records(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = "residual_forward:2@PACKETS=1", "residual_forward:2"
    text = output(capsys, one, other)
    assert "residual_forward:2@256,PACKETS=2 is 1.042 times as fast as :2@256,PACKETS=1 (" in text
    assert "A at block size 256: x; PACKETS=1: as given B at block size 256: x; PACKETS=2: the default" in text
    assert "block sizes differ" not in text
    assert run_command(["compare", one, other, "--json"]) == Exit.OK
    sides = json.loads(capsys.readouterr().out)["sides"]
    assert [side["label"] for side in sides] == [f"residual_forward:2@256,PACKETS={value}" for value in (1, 2)]
    assert [side["row"]["params"] for side in sides] == [{"PACKETS": 1}, {"PACKETS": 2}]
    assert [side["params_from"] for side in sides] == [{"PACKETS": "as given"}, {"PACKETS": "the default"}]


def test_block_sizes_that_differ_beside_parameters_are_remarked(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(FakeBench, "blocks", (64, 256))
    remark = "the block sizes differ, too: name one to compare the parameters alone"
    assert remark in output(capsys, "residual_forward:2@PACKETS=1", "residual_forward:2@PACKETS=4")
    for words in (
        ("residual_forward:2@32,PACKETS=1", "residual_forward:2@64,PACKETS=4"),
        ("residual_forward:2@PACKETS=1", "residual_forward:1"),
        ("residual_forward:2@PACKETS=1", "residual_forward:2@PACKETS=1"),
    ):
        assert remark not in output(capsys, *words)


def test_several_values_of_param_say_how_they_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compare", "residual_forward:2", "--param", "PACKETS=1,4"]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "give one, or write FAMILY:N@PACKETS=1 FAMILY:N@PACKETS=4" in error and error.count("\n") == 1


def test_a_side_that_fails_has_no_ratio_and_no_record(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeBench, "statuses", ["pass", "fail"])
    text = output(capsys, *SIDES, "--results", "kept", status=Exit.WRONG)
    assert "B FAIL: wrong" in text and "no ratio: both sides have to be proven first" in text
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(("refused", "status"), [("refused", 2), ("skipped", 5), ("unable", 5)])
def test_a_side_that_does_not_run_is_an_error(
    refused: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(FakeBench, "statuses", ["pass", refused])
    assert run_command(["compare", *SIDES, "--json"]) == status
    streams = capsys.readouterr()
    assert json.loads(streams.out)["exit_status"] == status
    assert streams.err.count("\n") == 1 and streams.err.startswith("kbench: error: ")


def test_without_times_nothing_is_compared(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeBench, "device_kind", "emulator")
    assert run_command(["compare", *SIDES, "--results", "kept"]) == Exit.NOTHING
    assert "nothing compared: the emulator has no times" in capsys.readouterr().err
    assert not Path("kept").exists()


def test_a_contract_beside_a_file_is_said_not_to_count(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").touch()
    assert run_command(["compare", "layernorm_forward:6", "mine.cu"]) == Exit.OK
    assert "mine.py is not read: layernorm_forward's own plan of version 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--least", "0.5"], "--least '0.5' is not a percentage"),
        (["--least", "x%"], "--least 'x%' is not a percentage"),
        (["--least", "-1%"], "--least -1% is out of range"),
        (["--least", "nan%"], "--least nan% is out of range"),
        (["--confidence", "100%"], "--confidence 100% is out of range"),
        (["--resolution", "0%"], "--resolution 0% is out of range"),
        (["--budget", "0"], "--budget 0 is out of range"),
        (["--budget", "soon"], "--budget 'soon' is not a number"),
        (["--budget", "nan"], "--budget nan is out of range"),
    ],
)
def test_options_that_cannot_be_read(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compare", *SIDES, *options]) == Exit.USAGE
    assert message in capsys.readouterr().err
    assert not FakeBench.asked


def test_an_unwritable_folder_is_found_before_any_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert run_command(["compare", *SIDES, "--results", "taken"]) == Exit.CANNOT
    assert not FakeBench.asked


@pytest.mark.parametrize("line", compare.EXAMPLES)
def test_the_examples_of_the_help_can_be_read(line: str) -> None:
    assert run_command(shlex.split(line)[1:]) == Exit.OK
    assert len(parse_sides(("softmax_forward:5,6",))) == 2
