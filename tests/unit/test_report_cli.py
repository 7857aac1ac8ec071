"""`kbench report`: the command, its files, and what is said of bad input before any work."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeBench
from gpu_rows import DEVICE
from kbench.cli import report as command
from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.results.baselines import save_baseline
from kbench.results.schema import Row
from kbench.results.store import read_run
from report_runs import plain, simulated, slower, write_run

Runner = Callable[[str], tuple[int, str, str]]
BASE = simulated(seed=1)
SLOW = simulated(seed=2, change=slower(1.06, 3))


@pytest.fixture
def kbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runner:
    """Runs a command line in a folder with two runs and a baseline; exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KBENCH_RESULTS", "results")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    first = write_run(Path("results/runs/20260101T000000Z-h200-aaaaaa.jsonl"), BASE)
    second = write_run(Path("results/runs/20260102T000000Z-h200-bbbbbb.jsonl"), SLOW)
    Path("results/latest").write_text(f"runs/{second.name}\n")
    save_baseline(Path("results"), "baseline", first)

    def runner(line: str) -> tuple[int, str, str]:
        status = run_command(shlex.split(line))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return runner


def test_what_a_user_sees(kbench: Runner) -> None:
    status, out, err = kbench("report baseline")
    assert status == Exit.REGRESSION and err == ""
    assert "Regressions (2)" in out and "layernorm_forward:3 @64 fp32 B=8 C=768" in out and "2 regressions; " in out
    assert max(map(len, out.splitlines())) <= 80
    assert kbench("report latest previous")[0] == Exit.OK, "faster"
    assert kbench("report baseline --fail-on none")[0] == Exit.OK
    assert kbench("report baseline --threshold 20%")[0] == Exit.OK
    assert "layernorm_forward:1 @64" in kbench("report baseline --all")[1]


def test_one_document_with_a_verdict(kbench: Runner) -> None:
    status, out, err = kbench("report baseline latest --json --markdown r.md")
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (document["command"], document["verdict"], document["exit_status"]) == ("report", "regression", 1)
    assert status == 1 and err == "" and document["counts"]["slower"] == 2
    change = document["changes"][0]
    assert change["subject"]["name"] == "layernorm_forward:3 @128 fp32 B=8 C=768" and change["verdict"] == "slower"
    assert len(change["rounds_after"]) == 3 and len(change["rounds_after"][0]) == 20
    assert Path("r.md").is_file()
    error = json.loads(kbench("report nothing --json")[1])
    assert error["exit_status"] == 2 and "nothing" in error["error"]


def test_every_format_goes_to_its_file(kbench: Runner) -> None:
    status, out, err = kbench("report baseline --markdown r.md --junit r.xml --sarif r.sarif --html r.html --github")
    assert status == Exit.REGRESSION and err == ""
    begins = {"r.md": "<!-- kbench", "r.xml": "<?xml", "r.sarif": "{", "r.html": "<!DOCTYPE html>"}
    for name, start in begins.items():
        assert Path(name).read_text().startswith(start) and name in out
    assert not list(Path().glob(".*")), "nothing half-written is left"
    lines = out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("::error file="))
    assert all(line.startswith("::") for line in lines[at:]), "annotations come after the table"


@pytest.mark.parametrize(("name", "start"), [("markdown", "<!-- kbench"), ("junit", "<?xml"), ("html", "<!DOCTYPE")])
def test_a_dash_is_standard_output_alone(kbench: Runner, name: str, start: str) -> None:
    status, out, err = kbench(f"report baseline --{name} -")
    assert status == Exit.REGRESSION and err == "" and out.startswith(start) and out.endswith("\n")


def test_the_summary_of_a_job_is_appended_to(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(Path("summary").absolute()))
    Path("summary").write_text("of another step\n")
    assert kbench('report baseline --markdown "summary"')[0] == Exit.REGRESSION
    text = Path("summary").read_text()
    assert text.startswith("of another step\n<!-- kbench") and text.count("<!-- kbench") == 1
    kbench("report baseline --markdown other --junit r.xml")
    kbench("report baseline --markdown other")
    assert Path("other").read_text().count("<!-- kbench") == 1, "any other file is replaced"


def test_special_files_are_written_to_and_not_replaced(kbench: Runner) -> None:
    os.mkfifo("pipe")  # never a real device: a bug here would replace it for the whole machine
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert kbench("report baseline --junit pipe")[0] == Exit.REGRESSION
    assert os.read(reader, 5) == b"<?xml" and Path("pipe").is_fifo()
    os.close(reader)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ("baseline --markdown .", 2, "is a folder"),
        ("baseline --markdown results/runs/20260102T000000Z-h200-bbbbbb.jsonl", 2, "would replace what is no report"),
        ("a-copy b-copy --markdown a-copy", 2, "no baseline and no run"),
        ("./a-copy latest --markdown a-copy", 2, "would replace what is no report"),
        ("baseline --junit kernel.cu", 2, "would replace what is no report"),
        ("baseline --html page.txt", 2, "has to end in .html"),
        ("baseline --markdown ''", 2, "--markdown names no file; is a variable empty?"),
        ("baseline --markdown a --junit ./a", 2, "--markdown and --junit name one file"),
        ("baseline --markdown - --junit -", 2, "both write to standard output"),
        ("baseline --markdown - --json", 2, "both write to standard output"),
        ("baseline --json --github", 2, "both write to standard output"),
        ("baseline --junit latest/x.xml", 5, "cannot write latest"),
        ("baseline --threshold 5", 2, "--threshold '5' is not a threshold"),
        ("baseline --fail-on odd", 2, "'odd' is nothing to fail on"),
        ("baseline --fail-on none,gone", 2, "'none' is nothing to fail on"),
        ("baseline --config nope.toml", 2, "cannot read nope.toml"),
        ("nothing latest", 2, "no baseline and no run of the name 'nothing'"),
        ("baseline gone.jsonl --first-run", 2, "gone.jsonl is not there"),
        ("baseline latest third", 2, "unexpected extra argument"),
        ("", 2, "BEFORE"),
        ("baseline --self-test --html r.html", 2, "--self-test writes no report"),
        ("latest baseline --rerun-unclear", 2, "name one run, such as latest"),
    ],
)
def test_bad_input_is_one_line_before_any_work(kbench: Runner, options: str, status: int, words: str) -> None:
    write_run(Path("a-copy"), BASE)
    Path("latest").write_text("in the way of a folder")
    got, out, err = kbench(f"report {options}")
    assert got == status and words in err
    assert err.count("\n") == 1 and (out == "" or "--json" in options)
    assert not Path("r.html").exists() and Path("a-copy").read_text().startswith('{"kind"')


def test_a_folder_that_cannot_be_written_is_found_before_the_report(kbench: Runner) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    Path("locked").mkdir(mode=0o500)
    assert kbench("report baseline --junit locked/r.xml")[0] == Exit.CANNOT


def test_the_first_run(kbench: Runner) -> None:
    status, out, err = kbench("report nothing latest --first-run --junit r.xml")
    assert status == Exit.OK and "first run: " in err and "kbench sweep --save writes" in " ".join(out.split())
    assert "New: only after (10)" in out and Path("r.xml").is_file()
    status, out, err = kbench("report baseline latest --first-run")
    assert status == Exit.REGRESSION and err == "", "what is there is used"
    Path("results/baselines/baseline.jsonl.gz").write_bytes(b"")
    assert kbench("report baseline latest --first-run")[0] == Exit.USAGE, "a broken baseline is no first run"


def test_the_configuration_of_the_folder(kbench: Runner) -> None:
    Path("kbench.toml").write_text('[report.thresholds]\nlayernorm_forward = "9%"\n')
    assert kbench("report baseline")[0] == Exit.OK
    assert kbench("report baseline --threshold 1%")[0] == Exit.OK, "a family's own stands"
    Path("own.toml").write_text('[report]\nfail_on = []\n[report.budgets]\n"*.registers" = "<= 30"\n')
    status, out, _ = kbench("report baseline --config own.toml")
    assert status == Exit.OK and "Over budget" in out
    assert kbench("report baseline --config own.toml --fail-on regression")[0] == Exit.REGRESSION


def test_the_self_test(kbench: Runner) -> None:
    status, out, err = kbench("report baseline previous --self-test")
    assert status == Exit.OK and out.startswith("the gate fires: layernorm_forward:1 made 2 times as slow")
    status, out, _ = kbench("report baseline previous --self-test --fail-on none --json")
    assert status == Exit.NOTHING and json.loads(out)["self_test"] is False


def test_warnings_go_to_stderr(kbench: Runner) -> None:
    path = Path("results/runs/20260102T000000Z-h200-bbbbbb.jsonl")
    path.write_text(path.read_text()[:-200])
    _, out, err = kbench("report baseline latest --json")
    assert "is cut off and was left out" in err and json.loads(out)["findings"]


def test_examples_of_the_help(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in command.EXAMPLES:
        if "git:" not in line:
            assert run_command(shlex.split(line)[1:]) in (Exit.OK, Exit.REGRESSION), line


# ------------------------------------------------------------------------------------------- measuring again


class Rerun(FakeBench):
    """The H200 again; its rows are those of another simulated sweep."""

    name = DEVICE["name"]

    def __init__(self, options: Any, note: Any):
        super().__init__(options, note)
        self.device = {**DEVICE, "name": self.name}

    def rows(self, jobs: Sequence[Any], earlier: Any = (), again: bool = False) -> Any:
        assert again
        type(self).ran = [*type(self).ran, *jobs]
        number = len(type(self).ran)
        for job in jobs:
            (row,) = simulated([job.version], [job.block], rounds=1, seed=100 + number)
            yield replace(row, source=job.source)


@pytest.fixture
def unclear(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> Path:
    """AFTER has two rounds, where three are needed."""

    class Files:
        def fingerprint(self, family: str, version: int) -> str:
            return f"files of {version}"

    Rerun.ran = []
    monkeypatch.setattr(Rerun, "name", DEVICE["name"])
    monkeypatch.setattr("kbench.sweep.Bench", Rerun)
    monkeypatch.setattr("kbench.cli.report_rerun.load_catalog", lambda folders: Files())
    path = Path("results/runs/20260102T000000Z-h200-bbbbbb.jsonl")
    rows = simulated(versions=(1, 2), rounds=2, seed=5)
    rows = [replace(row, code="") for row in rows]
    return write_run(path, rows, options={"device": "cuda", "seed": 7, "mode": "cold"})


def test_unclear_rows_are_measured_again_and_decided(kbench: Runner, unclear: Path) -> None:
    assert "unclear" in kbench("report baseline")[1]
    before = unclear.read_text()
    status, out, err = kbench("report baseline latest --rerun-unclear")
    assert status == Exit.OK and "measuring 4 unclear rows again" in err
    assert [(job.version, job.block) for job in Rerun.ran] == [(1, 64), (1, 128), (2, 64), (2, 128)]
    rows = read_run(unclear).rows
    assert [row.round for row in rows[-4:]] == [2] * 4 and unclear.read_text().startswith(before)
    assert "unclear" not in out


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("report baseline latest,previous --rerun-unclear", 2, "adds rounds to a run"),
        ("report baseline latest --rerun-unclear", 5, "its device was NVIDIA H200, this one is Other"),
    ],
)
def test_measuring_again_needs_a_run_and_its_gpu(
    kbench: Runner, unclear: Path, monkeypatch: pytest.MonkeyPatch, line: str, status: int, words: str
) -> None:
    monkeypatch.setattr(Rerun, "name", "Other GPU")
    before = unclear.read_bytes()
    assert kbench(line)[0] == status and unclear.read_bytes() == before
    assert words in kbench(line)[2]


def test_rounds_of_other_files_are_not_added(kbench: Runner, unclear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Edited:
        def fingerprint(self, family: str, version: int) -> str:
            return "edited since"

    monkeypatch.setattr("kbench.cli.report_rerun.load_catalog", lambda folders: Edited())
    status, _, err = kbench("report baseline latest --rerun-unclear")
    assert status == Exit.USAGE and "the files of layernorm_forward version 1 are not those of AFTER any more" in err
    assert Rerun.ran == []


def test_rows_of_an_old_run_lack_what_is_new() -> None:
    old = {key: value for key, value in plain(1, 64).to_dict().items() if key not in ("round", "code", "metrics")}
    row = Row.from_dict(old)
    assert (row.round, row.code, row.metrics) == (0, "", {})
