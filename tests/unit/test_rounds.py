"""Rounds: several measurements of one experiment as one row; sweeps that measure them, go on, and are kept."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeBench, failed, make_row, measured
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, Exit
from kbench.results.baselines import compressed
from kbench.results.best import load_best
from kbench.results.rounds import merged
from kbench.results.schema import Row
from kbench.results.store import latest_run, newest, read_run

Runner = Callable[..., tuple[int, str, str]]


def taken(number: int, *samples: float, **more: Any) -> Row:
    """A row of a round with these samples."""
    measurement = {**measured(samples[0]), "samples_ms": list(samples), "count": len(samples)}
    return make_row(1, measurement={**measurement, **more}, round=number)


# ------------------------------------------------------------------------------------------- merging


def test_samples_of_all_rounds_count_alike() -> None:
    (row,) = merged([taken(0, 1.0, 2.0), taken(1, 3.0, 4.0), taken(2, 5.0)])
    assert row.measurement is not None and row.measurement["samples_ms"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (row.measurement["median_ms"], row.measurement["count"], row.measurement["rounds"]) == (3.0, 5, 3)
    assert (row.measurement["low_ms"], row.measurement["high_ms"]) == (1.0, 5.0)


def test_quartiles_are_of_all_samples() -> None:
    (row,) = merged([taken(0, 1.0, 2.0, 3.0), taken(1, 4.0, 5.0)])
    assert row.measurement is not None and (row.measurement["q1_ms"], row.measurement["q3_ms"]) == (2.0, 4.0)


def test_rounds_are_put_together_in_their_order_and_a_repeated_one_counts_once() -> None:
    (row,) = merged([taken(1, 3.0), taken(0, 9.0), taken(0, 1.0)])
    assert row.measurement is not None and row.measurement["samples_ms"] == [1.0, 3.0]


def test_a_single_round_and_other_experiments_stay_themselves() -> None:
    rows = [taken(0, 1.0), make_row(2, median_ms=3.0), failed(3)]
    assert all(one is other for one, other in zip(merged(rows), rows, strict=True))


@pytest.mark.parametrize("status", ["fail", "crashed", "unable"])
def test_what_went_wrong_in_one_round_went_wrong(status: str) -> None:
    (row,) = merged([taken(0, 1.0), replace(failed(1, status, "why"), round=1), taken(2, 1.0)])
    assert (row.status, row.reason, row.measurement) == (status, "why", None)


def test_the_worst_of_several_faults_is_told() -> None:
    (row,) = merged([replace(failed(1, "crashed"), round=0), replace(failed(1, "fail"), round=1)])
    assert row.status == "fail"


def test_conditions_reach_over_all_rounds() -> None:
    clocks = [{"sm_mhz": [1900, 1980], "throttled": 1, "throttles": ["heat"]}, {"sm_mhz": [1800, 1950], "throttled": 2}]
    rows = [taken(number, 1.0, conditions=found, note=f"n{number}") for number, found in enumerate(clocks)]
    (row,) = merged(rows)
    assert row.measurement is not None and row.measurement["note"] == "n0; n1"
    assert row.measurement["conditions"] == {"sm_mhz": [1800, 1980], "throttled": 3, "throttles": ["heat"]}


# ------------------------------------------------------------------------------------------- sweeps

ROWS = [make_row(version, median_ms=float(version), source=f"files of {version}") for version in (1, 2)]
UNTIMED = [replace(failed(3, "refused", "rule"), source="files of 3"), make_row(4, source="files of 4")]


@pytest.fixture
def kbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runner:
    """Runs a command line, below `tmp_path`, on a bench that hands out `script`; exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def runner(command: str, script: Any = (*ROWS, *UNTIMED), **settings: Any) -> tuple[int, str, str]:
        bench = type("Bench", (FakeBench,), {"script": list(script), **settings})
        monkeypatch.setattr("kbench.sweep.Bench", bench)
        monkeypatch.setattr("sys.argv", ["kbench", *command.split()])
        runner.bench = bench  # type: ignore[attr-defined]  # what ran last
        status = run_command(command.split())
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return runner


def places() -> list[tuple[int, int]]:
    return [(row.version, row.round) for row in read_run(latest_run(Path("results"))).rows]


def test_after_the_whole_sweep_timed_rows_are_measured_again_in_the_same_order(kbench: Runner) -> None:
    status, out, _ = kbench("sweep toy --rounds 3 --json")
    assert status == Exit.OK
    assert places() == [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (1, 2), (2, 2)]
    document = json.loads(out)
    assert [entry["version"] for entry in document["rows"]] == [1, 2, 3, 4], "rows of a table are merged"
    assert len(document["rows"][0]["measurement"]["samples_ms"]) == 9 and document["planned"] == 8
    assert json.loads(latest_run(Path("results")).read_text().splitlines()[0])["options"]["rounds"] == 3
    best = load_best(Path("results"))["gpus"]["Test GPU"]["toy"]["fp32"]["cold"]["N=64"]["1"]["row"]
    assert best["measurement"]["rounds"] == 3


def test_a_row_that_turns_wrong_in_a_later_round_is_wrong(kbench: Runner) -> None:
    def rows(bench: FakeBench, jobs: Any, earlier: Any = (), again: bool = False) -> Any:
        for row in FakeBench.rows(bench, jobs, earlier):
            yield replace(row, status="fail", measurement=None) if again and row.version == 2 else row

    status, _, _ = kbench("sweep toy --rounds 2", ROWS, rows=rows)
    assert status == Exit.WRONG
    assert "2" not in load_best(Path("results"))["gpus"]["Test GPU"]["toy"]["fp32"]["cold"]["N=64"]


def test_a_sweep_that_was_stopped_in_its_second_round_goes_on_there(kbench: Runner) -> None:
    stops = {"left": 5}

    def stop(position: int) -> None:
        stops["left"] -= 1
        if stops["left"] < 0:
            raise CannotRunError("stop")

    status, _, _ = kbench("sweep toy --rounds 3", before_row=staticmethod(stop))
    assert status == Exit.CANNOT and places()[-1] == (1, 1)
    status, out, err = kbench("sweep --resume --save kept")
    assert status == Exit.OK and "5 rows kept, at most 3 to run" in err
    assert places()[5:] == [(2, 1), (1, 2), (2, 2)]
    assert "2 of 4 rows kept from before" in out, "of the other two a round was missing"
    assert Path("results/baselines/kept.jsonl.gz").is_file()
    assert "nothing left to do" in kbench("sweep --resume")[2] and len(places()) == 8


def test_rounds_of_other_files_are_all_run_again(kbench: Runner) -> None:
    kbench("sweep toy --rounds 2", ROWS)
    edited = [replace(ROWS[0], source="new"), ROWS[1]]
    assert "2 whose source changed" in kbench("sweep --resume", edited)[2]
    rows = read_run(latest_run(Path("results"))).rows
    assert [(row.version, row.round) for row in rows[4:]] == [(1, 0), (1, 1)]
    assert len(newest(rows)) == 4 and len(merged(rows)) == 2


def test_an_interruption_counts_the_rows_of_all_rounds(kbench: Runner) -> None:
    stops = {"left": 3}

    def stop(position: int) -> None:
        stops["left"] -= 1
        if stops["left"] < 0:
            raise KeyboardInterrupt

    status, _, err = kbench("sweep toy --rounds 2 --save kept", ROWS, before_row=staticmethod(stop))
    assert status == Exit.INTERRUPTED and "interrupted after 3 of 4 rows" in err
    assert "not saved as kept: the sweep was stopped" in err and not Path("results/baselines/kept.jsonl.gz").exists()


@pytest.mark.parametrize("rounds", ["0", "-1", "x", "1.5", "101", "²"])
def test_a_number_of_rounds_that_is_none_is_one_line(kbench: Runner, rounds: str) -> None:
    status, _, err = kbench(f"sweep toy --rounds {rounds}")
    assert status == Exit.USAGE and err.count("\n") == 1 and "--rounds" in err


# ------------------------------------------------------------------------------------------- baselines


def test_a_baseline_is_the_whole_run_and_equal_runs_give_equal_bytes(kbench: Runner) -> None:
    status, out, _ = kbench("sweep toy --save base", ROWS)
    path = Path("results/baselines/base.jsonl.gz")
    run = latest_run(Path("results"))
    assert status == Exit.OK and "saved:   " in out and str(path) in out
    assert gzip.decompress(path.read_bytes()) == run.read_bytes()
    assert [row.round for row in read_run(path).rows] == [0, 0, 1, 1, 2, 2], "three rounds, as a report needs them"
    before = path.read_bytes()
    kbench("sweep --resume --save base", ROWS)
    assert path.read_bytes() == before


def test_the_time_of_day_is_not_in_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for moment in (1e9, 1.5e9):
        monkeypatch.setattr("time.time", lambda moment=moment: moment)
        found.add(compressed(b"rows"))
    assert len(found) == 1 and gzip.decompress(found.pop()) == b"rows"


def test_what_a_baseline_lacks_is_said(kbench: Runner) -> None:
    status, _, err = kbench("sweep toy --save base", [*ROWS, failed(3), failed(4, "crashed")])
    assert status == Exit.WRONG and "holds rows that did not pass, too: 1 fail, 1 crashed" in err
    _, _, err = kbench("sweep toy --save base", [make_row(1, device="emulator")], kind="emulator")
    assert "holds verdicts and no times: the emulator is not a GPU" in err


@pytest.mark.parametrize(
    "name", ["latest", "previous", "a/b", "../x", ".x", "-x", "a b", "a,b", "git:x", "a.gz", "", "é"]
)
def test_names_that_no_baseline_can_have(kbench: Runner, name: str) -> None:
    status = run_command(["sweep", "toy", "--save", name])
    assert status == Exit.USAGE and not Path("results").exists()


def test_what_no_baseline_can_be_made_of_is_said_before_any_work(kbench: Runner) -> None:
    status, _, err = kbench("sweep toy --save base --rtol 1")
    assert status == Exit.USAGE and "a baseline is judged by the family's bound" in err
    Path("results").mkdir()
    Path("results/baselines").write_text("a file")
    status, _, err = kbench("sweep toy --save base")
    assert status == Exit.CANNOT and "results/baselines: Not a directory" in err
    assert not Path("results/latest").exists()
