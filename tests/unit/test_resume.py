"""`kbench sweep --resume`: which rows stay, what is run again, and what becomes of the run file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeBench, make_row
from kbench.cli.app import run_command
from kbench.cli.session import Session, _in_order
from kbench.errors import CannotRunError, Exit, UsageError
from kbench.jobs import Job
from kbench.results.best import load_best, merge, unsettled
from kbench.results.resume import ResumedRun, mend, remainder
from kbench.results.schema import SCHEMA_VERSION, Row
from kbench.results.store import Run, RunWriter, latest_run, newest, read_run, row_key

Runner = Callable[..., tuple[int, str, str]]


def row(version: int, block: int = 256, **more: Any) -> Row:
    return make_row(version, block=block, **{"median_ms": float(version), "source": f"files of {version}", **more})


ROWS = [row(version, block) for version in (1, 2) for block in (64, 128, 256)]


@pytest.fixture
def kbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runner:
    """Runs a command line, below `tmp_path`, on a bench that hands out `script`; exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def runner(command: str, script: Any = (), **settings: Any) -> tuple[int, str, str]:
        bench = type("Bench", (FakeBench,), {"script": list(script), **settings})
        monkeypatch.setattr("kbench.sweep.Bench", bench)
        monkeypatch.setattr("sys.argv", ["kbench", *command.split()])
        runner.bench = bench
        status = run_command(command.split())
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return runner


def killed(kbench: Runner, rows: int, script: Any = ROWS, options: str = "") -> Path:
    """The file of a sweep over `script` that was killed after so many rows."""
    stop = [*script[:rows], CannotRunError("stop"), *script[rows + 1 :]]
    kbench(f"sweep toy --versions 1-2 {options}", stop)
    path = latest_run(Path("results").absolute())
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"kind": "footer"' not in line))
    return path


def test_each_round_keeps_its_own_row() -> None:
    rows = [row(1, round=number, median_ms=1.0 + number) for number in range(3)]
    kept = remainder(_run(rows), [_job(rows[0])], rounds=3).kept
    assert {place: found.round for place, found in kept.items()} == {0: 0, 1: 1, 2: 2}


def test_rows_of_the_run_itself_and_of_older_ones_are_unsettled() -> None:
    for by, left in (("20260101T", 1), ("20260102T", 1), ("20260103T", 0)):
        document: dict[str, Any] = {"schema": 1, "gpus": {}}
        merge(document, [row(1)], by)
        assert len(unsettled(document, [row(1)], "20260102T")) == left, by
    assert len(unsettled({"gpus": {}}, [row(1)], "20260102T")) == 1


def keys(rows: Any) -> list[tuple[int, int]]:
    return [(each.version, each.block) for each in rows]


# ------------------------------------------------------------------------------------------- it goes on


def test_what_is_missing_is_run_with_the_options_of_the_run(kbench: Runner) -> None:
    path = killed(kbench, 2, options="--full --time-limit 7 --seed 3 --block-sizes 64..256 --family-dir .")
    status, out, err = kbench("sweep --resume", ROWS)
    assert status == Exit.OK
    assert f"going on with {path} with the options of `kbench sweep toy --versions 1-2 --full" in err
    assert "2 of 6 rows kept, 4 to run" in err and err.count("\n") == 1
    assert keys(kbench.bench.ran) == keys(ROWS[2:])
    asked = kbench.bench.asked
    assert (asked["targets"][0].family, [*asked["targets"][0].versions]) == ("toy", [1, 2])
    assert list(asked["block_sizes"]) == [64, 128, 256]
    assert kbench.bench.took.full and kbench.bench.took.time_limit == 7.0 and kbench.bench.took.seed == 7
    assert kbench.bench.took.family_dirs == (Path.cwd(),) and kbench.bench.took.device == "cuda"
    run = read_run(path)
    assert run.rows == ROWS and latest_run(Path("results").absolute()) == path
    assert run.footer is not None and (run.footer["rows"], run.footer["ended"]) == (6, "complete")
    assert "2 of 6 rows kept from before" in out and out.count("  kept\n") == 3, "a heading and two rows"
    assert "* fastest: version 1 at block size 64" in out, "of kept rows and new ones"


def test_mode_and_values_of_parameters_are_those_of_the_run(kbench: Runner) -> None:
    rows = [row(version, params={"A": n}, cache_mode="graph") for version in (1, 2) for n in (1, 2, 4)]
    path = killed(kbench, 2, rows, "--graph --param A=1,2,4")
    _, out, err = kbench("sweep --resume", rows)
    assert "2 of 6 rows kept, 4 to run" in err
    assert [(job.version, job.params["A"]) for job in kbench.bench.ran] == [(1, 4), (2, 1), (2, 2), (2, 4)]
    assert kbench.bench.took.mode == "graph" and kbench.bench.asked["params"] == {"A": [1, 2, 4]}
    assert read_run(path).rows == rows and "hot L2, seed 7" in out and out.count("A=1") >= 2


def test_a_complete_run_has_nothing_left_to_do(kbench: Runner) -> None:
    kbench("sweep toy", ROWS)
    path = latest_run(Path("results").absolute())
    before = path.read_bytes()
    status, out, err = kbench("sweep --resume --html p.html", ROWS)
    assert status == Exit.OK and err == f"kbench: nothing left to do: {path} has all of its 6 rows\n"
    assert "* fastest: version 1" in out and Path("p.html").is_file()
    assert path.read_bytes() == before and kbench.bench.ran == []
    document = json.loads(kbench("sweep --resume --json", ROWS)[1])
    assert [entry["kept"] for entry in document["rows"]] == [True] * 6 and document["planned"] == 6


def test_a_run_killed_after_its_last_row_gets_its_footer(kbench: Runner) -> None:
    path = killed(kbench, 6, [*ROWS, ROWS[0]])
    assert read_run(path).footer is None
    assert "nothing left to do" in kbench("sweep --resume", ROWS)[2]
    footer = read_run(path).footer
    assert footer is not None and footer["ended"] == "complete" and footer["statuses"] == {"pass": 6}


def test_an_interrupted_run_goes_on_and_may_be_interrupted_again(kbench: Runner) -> None:
    kbench("sweep toy", [*ROWS[:2], KeyboardInterrupt(), *ROWS[3:]])
    path = latest_run(Path("results").absolute())
    status, out, err = kbench("sweep --resume", [*ROWS[:3], KeyboardInterrupt(), *ROWS[4:]])
    assert status == Exit.INTERRUPTED and "interrupted after 3 of 6 rows" in err and "fastest" in out
    footer = read_run(path).footer
    assert footer is not None and (footer["ended"], footer["rows"]) == ("interrupted", 3)
    assert kbench("sweep --resume", ROWS)[0] == Exit.OK
    assert read_run(path).rows == ROWS


def test_rows_kept_from_the_end_are_shown_though_it_stops_at_once(kbench: Runner) -> None:
    """Those of the start are run again; the bench stops before the first of them."""
    path = killed(kbench, 4)
    edited = [replace(each, source="new files") if each.version == 1 else each for each in ROWS]
    status, out, _ = kbench("sweep --resume", [KeyboardInterrupt(), *edited[1:]])
    assert status == Exit.INTERRUPTED and "  2     64  pass" in out
    run = read_run(path)
    assert run.rows == ROWS[:4] and run.footer is not None
    assert (run.footer["ended"], run.footer["rows"]) == ("interrupted", 1)


def test_rows_whose_source_changed_are_run_again(kbench: Runner) -> None:
    path = killed(kbench, 4)
    edited = [replace(each, source="new files") if each.version == 1 else each for each in ROWS]
    _, out, err = kbench("sweep --resume --json", edited)
    shown = [(entry["version"], entry["block"], entry["kept"]) for entry in json.loads(out)["rows"]]
    assert shown == [(v, b, (v, b) == (2, 64)) for v, b in keys(ROWS)], "in the order of a sweep that was not stopped"
    assert "1 of 6 rows kept, 5 to run (among them 3 whose source changed)" in err
    assert keys(kbench.bench.ran) == [(1, 64), (1, 128), (1, 256), (2, 128), (2, 256)]
    rows = read_run(path).rows
    assert len(rows) == 9 and [each.source for each in newest(rows)].count("new files") == 3
    assert {row_key(each) for each in newest(rows)} == {row_key(each) for each in ROWS} and len(newest(rows)) == 6


@pytest.mark.parametrize("status", ["pass", "fail", "refused", "skipped", "hung", "invalid", "unlaunchable"])
def test_what_became_of_a_row_stays(status: str) -> None:
    assert set(remainder(_run([row(1, status=status)]), [_job(row(1))]).kept) == {0}


@pytest.mark.parametrize(("status", "why"), [("crashed", "crashed"), ("unable", "could not"), ("internal", "internal")])
def test_what_the_machine_had_a_part_in_is_run_again(status: str, why: str) -> None:
    found = remainder(_run([row(1, status=status)]), [_job(row(1))])
    assert not found.kept and why in next(iter(found.again))
    assert set(remainder(_run([row(1, status=status), row(1)]), [_job(row(1))]).kept) == {0}, "the newest counts"


def test_rows_of_other_experiments_are_not_taken_for_those_that_are_missing() -> None:
    changes = [{"block": 32}, {"dtype": "tf32"}, {"sizes": {"N": 65}}, {"family": "other"}, {"params": {"A": 1}}]
    for change in changes:
        assert not remainder(_run([replace(row(1), **change)]), [_job(row(1))]).kept, change
    assert not remainder(_run([row(1, source="")]), [_job(row(1, source=""))]).kept, "whose files are not known"


def _job(of: Row) -> Job:
    return Job(of.family, of.version, of.idea, of.sizes, of.dtype, of.block, params=of.params, source=of.source)


def _run(rows: list[Row]) -> Run:
    return Run(Path("r.jsonl"), {}, rows)


def test_rows_kept_from_before_do_not_replace_those_of_a_newer_run(kbench: Runner) -> None:
    results = Path("results").absolute()

    def kept() -> dict[str, float]:
        versions = load_best(results)["gpus"]["Test GPU"]["toy"]["fp32"]["cold"]["N=64"]
        return {number: entry["row"]["measurement"]["median_ms"] for number, entry in versions.items()}

    old = killed(kbench, 4)
    time.sleep(1.1)  # ids tell runs apart by the second
    kbench("sweep toy", [row(1, 64, median_ms=9.0), row(3, 64, median_ms=9.0)])
    kbench(f"sweep {old.stem} --resume", ROWS)
    assert kept() == {"1": 9.0, "2": 2.0, "3": 9.0}, "version 1 was measured anew since, version 2 nowhere else"


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "options", ["--version 1", "--dtype bf16", "--size N=2", "--seed 1", "--device emulator", "--full", "--workers 2",
                "--block-sizes 32", "--preset small", "--rtol 1", "--atol 1", "--time-limit 30", "--family-dir .",
                "--hot", "--graph", "--param A=1", "--strategy brute_force", "--max-rows 3"],
)  # fmt: skip
def test_options_of_the_run_cannot_be_given_again(kbench: Runner, options: str) -> None:
    killed(kbench, 2)
    status, out, err = kbench(f"sweep --resume {options}", ROWS)
    assert status == Exit.USAGE and out == "" and err.count("\n") == 1
    assert f"--resume takes no {options.split()[0].replace('--block-size ', '--block-sizes')}" in err


def test_how_it_is_shown_may_be_chosen_again(kbench: Runner) -> None:
    killed(kbench, 2)
    status, out, _ = kbench("sweep --resume --top 1 --sort -time --columns version,time --debug", ROWS)
    assert status == Exit.OK and "the first 1 of 6 rows by time, largest first" in out


def test_the_run_is_named_like_everywhere(kbench: Runner) -> None:
    first = killed(kbench, 2)
    kbench("sweep toy", ROWS)
    for name in (str(first), first.stem, first.stem[-6:]):
        assert f"{first}" in kbench(f"sweep {name} --resume", ROWS)[2]
    assert latest_run(Path("results").absolute()) == first
    assert "no run of the id 'toy'" in kbench("sweep --resume toy", ROWS)[2]
    assert "--resume takes one run, not a b" in kbench("sweep a b --resume", ROWS)[2]
    assert "holds no runs" in kbench("sweep --resume --results elsewhere", ROWS)[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Other GPU"}, "its device was Other GPU, this one is Test GPU; go on there, or sweep again here"),
        ({"driver": "1.0"}, "its driver was 1.0, this one is 580.1"),
        ({"cudnn": "9.1"}, "its cudnn was 9.1, this one is none"),
        ({"compiler": "NVRTC 12.0"}, "its compiler was NVRTC 12.0"),
    ],
)
def test_a_run_of_another_device_stays_there(kbench: Runner, change: dict[str, Any], words: str) -> None:
    path = killed(kbench, 2)
    _edit_header(path, lambda header: header["device"].update(change))
    before = path.read_bytes()
    status, out, err = kbench("sweep --resume", ROWS)
    assert status == Exit.CANNOT and out == "" and words in err and err.count("\n") == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header.update(schema=SCHEMA_VERSION + 1), "reads schemas up to"),
        (lambda header: header.pop("selection"), "an older kbench wrote it; repeat `kbench sweep toy --versions 1-2"),
        (lambda header: header.update(selection=None, command=["kbench", "train", "gpt2"]), "run of `kbench train"),
        (lambda header: header["selection"].pop("targets"), "its selection is none"),
        (lambda header: header["selection"].update(odd=1), "its selection is none"),
        (lambda header: header.update(options=3), "its options are none"),
        (lambda header: header["options"].update(strategy="pso"), "is a search by pso, which cannot go on"),
        (lambda header: header.pop("device"), "its options are none"),
        (lambda header: header["options"].update(time_limit="x"), "its options are none"),
        (lambda header: header["options"].update(workers=True), "its options are none"),
        (lambda header: header["selection"].update(targets=[{"family": 5}]), "its selection is none"),
        (lambda header: header["selection"].update(sizes={"T": "x"}), "its selection is none"),
        (lambda header: header["selection"].update(params=None), "its selection is none"),
        (lambda header: header["selection"].update(dtype=5), "its selection is none"),
    ],
)  # fmt: skip
def test_files_that_cannot_go_on_are_one_line(kbench: Runner, change: Callable[[Any], Any], words: str) -> None:
    path = killed(kbench, 2)
    _edit_header(path, change)
    status, out, err = kbench("sweep --resume", ROWS)
    assert status == Exit.USAGE and out == "" and err.count("\n") == 1 and words in err and str(path) in err


def test_a_file_that_somebody_writes_is_left_alone(kbench: Runner, tmp_path: Path) -> None:
    device = {"kind": "cuda", "name": "Test GPU"}
    with RunWriter(Path("results").absolute(), device=device, command=[], options={}, kbench_version="1") as writing:
        status, _, err = kbench("sweep --resume", ROWS)
        assert status == Exit.USAGE and "is being written by another process; wait for its end, or stop it" in err
        with pytest.raises(UsageError, match="being written"):
            ResumedRun(Path("results").absolute(), writing.path)
    ResumedRun(Path("results").absolute(), writing.path).close()


def test_a_file_that_cannot_be_written_is_named(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    path = killed(kbench, 2)
    real = Path.open

    def denied(self: Path, mode: str = "r", **more: Any) -> Any:
        if self == path and "a" in mode:
            raise PermissionError(13, "Permission denied")
        return real(self, mode, **more)

    monkeypatch.setattr(Path, "open", denied)
    status, _, err = kbench("sweep --resume", ROWS)
    assert status == Exit.CANNOT and f"cannot write {path}: Permission denied; make it writable" in err


def _edit_header(path: Path, change: Callable[[Any], Any]) -> None:
    first, rest = path.read_text().split("\n", 1)
    header = json.loads(first)
    change(header)
    path.write_text(json.dumps(header) + "\n" + rest)


# --------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_cut_line_is_taken_off_before_rows_follow(kbench: Runner, cut: int) -> None:
    path = killed(kbench, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    kept = len(read_run(path).rows)
    assert kept == (3 if cut == 1 else 2)
    err = kbench("sweep --resume", ROWS)[2]
    assert f"{kept} of 6 rows kept" in err
    run = read_run(path)
    assert run.rows == ROWS and run.warnings == [] and run.footer is not None


def test_mending_leaves_whole_files_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for before, after in (
        (b"", b""),
        (b"{}\n", b"{}\n"),
        (b"{}\n[1", b"{}\n"),
        (b"{}\n[1]", b"{}\n[1]\n"),
        (b"{", b""),
    ):
        path.write_bytes(before)
        with path.open("a") as file:
            mend(path, file.fileno())
        assert path.read_bytes() == after


def test_a_kill_while_it_goes_on_leaves_no_old_end(tmp_path: Path) -> None:
    device = {"kind": "cuda", "name": "Test GPU"}
    with RunWriter(tmp_path, device=device, command=[], options={}, kbench_version="1") as run:
        run.append(row(1))
    again = ResumedRun(tmp_path, run.path)
    again.append(row(2))
    again.close()
    back = read_run(run.path)
    assert keys(back.rows) == [(1, 256), (2, 256)] and back.footer is None, "it was killed: it did not end"


def test_ceilings_are_those_that_the_run_began_with(kbench: Runner) -> None:
    stop = [*ROWS[:2], CannotRunError("stop"), *ROWS[3:]]
    kbench("sweep toy --versions 1-2", stop, card={"copy_gbs": 4000.0})
    status, out, _ = kbench("sweep --resume --json", ROWS[2:])
    assert status == Exit.OK and json.loads(out)["device"]["ceilings"] == {"copy_gbs": 4000.0}


def test_rows_that_came_stand_between_those_that_were_there() -> None:
    session = Session()
    with _in_order(session, {1: row(1, 1), 3: row(1, 3)}, jobs=6) as places:
        places.update({block: row(1, block) for block in (5, 0, 2, 4)})
    assert [each.block for each in session.rows] == list(range(6))


@pytest.mark.parametrize("full", [False, True])
def test_what_was_slow_before_is_timed_at_one_block_size_still(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    from kbench.sweep import Bench, Options

    bench = Bench(Options(device="cuda", full=full), lambda note: None)
    bench.device_kind = "cuda"
    asked: list[str] = []

    def answer(job: Job) -> Row:
        asked.append(job.purpose)
        return row(job.version, job.block, median_ms=None)

    monkeypatch.setattr(bench, "_announce", lambda jobs: None)
    monkeypatch.setattr(bench, "_row", answer)
    jobs = [_job(row(1, 64)), _job(row(2, 64)), _job(row(1, 64, dtype="bf16")), _job(row(1, 64, params={"A": 1}))]
    came = list(bench.rows(jobs, [row(1, 32, median_ms=500.0)]))
    assert asked == ["time" if full else "prove", "time", "time", "time"]
    assert came[0].reason == ("" if full else "slow: timed at one block size only (--full times all)")
