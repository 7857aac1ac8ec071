"""`kbench results`: lists, tables, exports, merged files, and what prune removes and what it never does."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes import failed, make_row
from kbench.cli.app import run_command
from kbench.errors import Exit, UsageError
from kbench.results.baselines import save_baseline
from kbench.results.best import update_best
from kbench.results.formats.benchmarks import bencher, github_action_benchmark, google_benchmark
from kbench.results.merge import merge, parts, write_merged
from kbench.results.prune import parse_age
from kbench.results.schema import SCHEMA_VERSION, Row
from kbench.results.store import RunWriter, read_run
from kbench.results.strict_json import dumps

DEVICE = {"kind": "cuda", "name": "Test GPU", "arch": "sm_90", "driver": "1.0", "compiler": "NVRTC 13.0"}
NOW = datetime(2026, 6, 1, tzinfo=UTC)


def make_run(
    folder: Path, age_days: float, *rows: Row, name: str = "", device: dict[str, Any] = DEVICE, end: str = "complete"
) -> Path:
    """A run file of some age, as a sweep would have left it."""
    started = datetime.now(UTC) - timedelta(days=age_days)
    name = name or f"{started:%Y%m%dT%H%M%SZ}-test-gpu-{int(age_days * 100):06x}"
    rows = rows or (make_row(1, median_ms=2.0), make_row(2, median_ms=1.0), failed(3))
    header = {
        "kind": "header", "schema": SCHEMA_VERSION, "kbench": "0.1.0", "id": name,
        "started": started.isoformat(timespec="seconds"), "command": ["kbench", "sweep", "toy"], "device": device,
        "options": {"seed": 7},
    }  # fmt: skip
    statuses: dict[str, int] = {}
    for row in rows:
        statuses[row.status] = statuses.get(row.status, 0) + 1
    footer = {"kind": "footer", "rows": len(rows), "statuses": statuses, "ended": end}
    lines = [header, *({"kind": "row", **row.to_dict()} for row in rows), *([footer] if end else [])]
    path = folder / "runs" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(dumps(line) + "\n" for line in lines))
    return path


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = run_command(["results", *words])
    told = capsys.readouterr()
    if "--json" not in words and words[0] != "export":  # paths stay whole: they are to be copied
        assert all(len(line) <= 80 or "/" in line for line in told.out.splitlines())
    return status, told.out, told.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KBENCH_RESULTS", str(tmp_path))
    return tmp_path


# ------------------------------------------------------------------------------------------ show, list


def test_the_list_has_the_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = make_run(folder, 9), make_run(folder, 2, end="")
    stopped = make_run(folder, 5, end="interrupted")
    (folder / "latest").write_text(f"runs/{new.name}\n")
    (folder / "runs" / "19990101T000000Z-x-000000.jsonl").write_text("hello\n")
    status, out, _ = call(capsys, "list")
    assert status == Exit.OK
    places = [out.index(path.stem) for path in (new, stopped, old)]
    assert places == sorted(places)
    assert f"{new.stem} *" in out and "2 pass, 1 fail; killed" in out and "2 pass, 1 fail; interrupted" in out
    assert "unreadable: is not a run file" in " ".join(out.split())
    assert "4 runs in" in out
    document = json.loads(call(capsys, "list", "--json")[1])
    assert [run["id"] for run in document["runs"]][:3] == [path.stem for path in (new, stopped, old)]
    assert document["runs"][0]["latest"] and document["runs"][0]["statuses"] == {"pass": 2, "fail": 1}


@pytest.mark.parametrize(("mode", "word"), [("static", "compiled"), ("counts", "counted"), ("cold", "pass")])
def test_the_list_calls_nothing_passed_that_nothing_proved(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: str, word: str
) -> None:
    path = make_run(folder, 1)
    path.write_text(path.read_text().replace('"seed": 7', f'"seed": 7, "mode": "{mode}"', 1))
    assert f" 2 {word}, 1 fail " in " ".join(call(capsys, "list")[1].split())
    (entry,) = json.loads(call(capsys, "list", "--json")[1])["runs"]
    assert entry["statuses"] == {"pass": 2, "fail": 1}, "as the rows have it"


def test_the_name_of_a_baseline_in_place_of_a_run_is_answered_with_its_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = save_baseline(folder, "static", make_run(folder, 1))
    status, _, err = call(capsys, "show", "static")
    assert status == Exit.USAGE and err.endswith(f"which is a baseline's name; write {kept}\n")
    assert call(capsys, "show", str(kept))[0] == Exit.OK


def test_a_run_that_is_being_written_is_named_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunWriter(folder, device=DEVICE, command=[], options={}, kbench_version="0") as run:
        run.append(make_row(1))
        assert "1 pass; is being written" in " ".join(call(capsys, "list")[1].split())
        assert run_command(["results", "prune", "--keep", "0", "--yes"]) == Exit.OK
        assert run.path.exists()


def test_a_run_is_shown_as_its_sweep_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(folder, 1)
    (folder / "latest").write_text(f"runs/{path.name}\n")
    status, out, _ = call(capsys, "show")
    assert status == Exit.OK
    assert out.startswith(f"run {path.stem}") and "* fastest: version 2 at block size 256" in out
    assert "3 fail" in " ".join(out.split())
    status, out, _ = call(capsys, "show", path.stem[-6:], "--columns", "version,time", "--sort", "-time", "--top", "1")
    assert "the first 1 of 3 rows by time, largest first" in " ".join(out.split())
    document = json.loads(call(capsys, "show", "--json")[1])
    assert [row["version"] for row in document["runs"][0]["rows"]] == [1, 2, 3]


def test_numbers_that_are_none_are_one_line_and_no_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bad in ("text", None, -1.0, 0, [1]):
        row = make_row(1, median_ms=1.0)
        assert row.measurement is not None
        row.measurement["median_ms"] = bad
        path = make_run(folder, 1, row, name="bad")
        for command in (["show"], ["export", "--format", "bencher"], ["export"]):
            status, _, err = call(capsys, *command, str(path))
            assert status == Exit.USAGE and err.count("\n") == 1
            assert "bad.jsonl:2 is not a row of results: a measurement has median_ms" in err


def test_rounds_are_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(folder, 1, *(make_row(1, median_ms=1.0 + number / 100, round=number) for number in range(3)))
    document = json.loads(call(capsys, "show", str(path), "--json")[1])
    assert len(document["runs"][0]["rows"]) == 1
    assert len(json.loads(call(capsys, "export", str(path), "--format", "bencher")[1])) == 1


# --------------------------------------------------------------------------------------------- exports


def test_csv_has_every_row_and_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = 'an idea, with "quotes",\nlines and | bars'
    path = make_run(folder, 1, make_row(1, idea=nasty, median_ms=1.25), failed(2))
    status, out, _ = call(capsys, "export", str(path))
    assert status == Exit.OK
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["status"] for row in rows] == ["pass", "fail"]
    assert rows[0]["idea"] == nasty and rows[0]["run"] == path.stem and rows[0]["median_ms"] == "1.25"


def test_google_benchmark_json_has_what_its_tools_read(folder: Path) -> None:
    document = json.loads(google_benchmark(read_run(make_run(folder, 1))))
    assert document["context"]["library_build_type"] == "release" and document["context"]["gpu"] == "Test GPU"
    single = [entry for entry in document["benchmarks"] if entry["run_type"] == "iteration"]
    assert len(single) == 6  # three samples of each of two rows: the failed one has no time
    assert {"name", "run_name", "repetitions", "repetition_index", "threads", "iterations"} <= set(single[0])
    assert single[0]["name"] == "toy/1/N:64/fp32/block:256" and single[0]["time_unit"] == "ms"
    assert [entry["real_time"] for entry in single[:3]] == [1.98, 2.0, 2.02]
    aggregates = [entry for entry in document["benchmarks"] if entry["run_type"] == "aggregate"]
    assert [entry["aggregate_name"] for entry in aggregates[:4]] == ["mean", "median", "stddev", "cv"]
    assert aggregates[1]["name"] == "toy/1/N:64/fp32/block:256_median" and aggregates[1]["real_time"] == 2.0
    assert aggregates[2]["real_time"] == pytest.approx(0.02) and aggregates[3]["aggregate_unit"] == "percentage"
    assert aggregates[3]["real_time"] == pytest.approx(0.01), "of the mean"


def test_google_benchmark_json_says_how_many_runs_a_sample_is_of(folder: Path) -> None:
    row = make_row(1, median_ms=2.0)
    row.measurement = {**(row.measurement or {}), "runs": 16}
    entries = json.loads(google_benchmark(read_run(make_run(folder, 1, row))))["benchmarks"]
    assert [entry["iterations"] for entry in entries if entry["run_type"] == "iteration"] == [16, 16, 16]


def test_bencher_takes_nanoseconds_with_the_interval(folder: Path) -> None:
    document = json.loads(bencher(read_run(make_run(folder, 1))))
    assert document["toy/2/N:64/fp32/block:256"] == {
        "latency": {"value": 1_000_000.0, "lower_value": 990_000.0, "upper_value": 1_010_000.0}
    }


def test_github_action_benchmark_takes_a_list(folder: Path) -> None:
    document = json.loads(github_action_benchmark(read_run(make_run(folder, 1))))
    assert [entry["value"] for entry in document] == [2.0, 1.0]
    assert document[0]["unit"] == "ms" and document[0]["range"] == "± 1.00%" and "idea number 1" in document[0]["extra"]


def test_counts_of_a_static_run_are_measures(folder: Path) -> None:
    row = make_row(1, cache_mode="static", device="sm_90", metrics={"k<float>": {"registers": 40, "occupancy": 32}})
    run = read_run(make_run(folder, 1, row))
    name = "toy/1/N:64/fp32/block:256/static/k<float>"
    assert json.loads(bencher(run)) == {name: {"registers": {"value": 40}, "occupancy": {"value": 32}}}
    assert json.loads(github_action_benchmark(run)) == [
        {"name": f"{name} registers", "unit": "registers", "value": 40}
    ]  # more occupancy is better: it must raise no alarm


@pytest.mark.parametrize("form", ["google-benchmark", "bencher", "github-action-benchmark"])
def test_nothing_to_export_is_said_and_writes_nothing(
    folder: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(folder, 1, failed(1))
    status, out, err = call(capsys, "export", str(path), "--format", form, "-o", str(folder / "out"))
    assert status == Exit.NOTHING and not out and "holds no time" in err and not (folder / "out").exists()
    overridden = make_run(folder, 2, make_row(1, median_ms=1.0, overridden=True))
    assert call(capsys, "export", str(overridden), "--format", form)[0] == Exit.NOTHING


def test_an_export_says_what_it_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(folder, 1)
    status, out, err = call(capsys, "export", str(path), "--format", "bencher", "-o", str(folder / "b.json"), "--json")
    assert status == Exit.OK and "left out: 1 experiments" in err
    assert json.loads(out)["entries"] == 2
    assert len(json.loads((folder / "b.json").read_text())) == 2


def test_parquet_is_optional(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(folder, 1)
    out = folder / "rows.parquet"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = call(capsys, "export", str(path), "--format", "parquet", "-o", str(out))
    assert status == Exit.CANNOT and "[parquet]" in err and not out.exists()
    assert call(capsys, "export", str(path), "--format", "parquet")[0] == Exit.USAGE


def test_parquet_keeps_types(folder: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pandas as pd

    path = make_run(folder, 1)
    out = folder / "rows.parquet"
    assert run_command(["results", "export", str(path), "--format", "parquet", "-o", str(out)]) == Exit.OK
    table = pd.read_parquet(out)
    assert list(table["version"]) == [1, 2, 3] and table["median_ms"][0] == 2.0


def test_exports_that_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(folder, 1)
    assert call(capsys, "export", str(path), "--format", "xml")[0] == Exit.USAGE
    assert call(capsys, "export", str(path), "--json")[0] == Exit.USAGE
    assert call(capsys, "export", "nothing")[0] == Exit.USAGE
    (folder / "file").write_text("")
    assert call(capsys, "export", str(path), "-o", str(folder / "file" / "out.csv"))[0] == Exit.CANNOT


# ---------------------------------------------------------------------------------------------- merge


OTHER = {**DEVICE, "name": "Other GPU", "driver": "2.0"}


def test_files_of_two_machines_become_one_and_come_apart_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(folder, 3, name="one")
    two = make_run(folder, 2, make_row(1, median_ms=3.0, device="Other GPU"), name="two", device=OTHER, end="")
    out = folder / "both.jsonl.gz"
    status, said, err = call(capsys, "merge", str(one), str(two), "-o", str(out))
    assert status == Exit.OK and "4 rows of 2 runs" in said and not err
    run = read_run(out)
    assert [(row.run, row.version) for row in run.rows] == [("one", 1), ("one", 2), ("one", 3), ("two", 1)]
    assert [header["id"] for header in run.header["sources"]] == ["one", "two"]
    assert run.header["device"]["name"] == "Test GPU, Other GPU" and run.header["device"]["compiler"] == "NVRTC 13.0"
    assert "driver" not in run.header["device"]
    first, second = parts(run)
    assert first.header["device"] == DEVICE and second.header["device"] == OTHER
    assert first.footer == {"ended": "complete"} and second.footer is None
    assert [row.version for row in first.rows] == [1, 2, 3]
    shown = call(capsys, "show", str(out))[1]
    assert "on Test GPU" in shown and "on Other GPU" in shown and shown.count("it did not come to its end") == 1
    assert run_command(["plot", str(out), "-o", str(folder / "p.html")]) == Exit.OK


def test_merging_again_changes_nothing_and_copies_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(folder, 3, name="one"), make_run(folder, 2, name="two")
    out = folder / "both.jsonl.gz"
    assert call(capsys, "merge", str(one), str(two), "-o", str(out))[0] == Exit.OK
    before = out.read_bytes()
    status, said, err = call(capsys, "merge", str(out), str(two), "-o", str(out))
    assert status == Exit.OK and "6 rows of 2 runs" in said
    assert f"{two}: 3 rows stand in a file before it too, and are kept once" in err
    assert out.read_bytes() == before


def test_rounds_of_a_run_that_stands_in_two_files_are_kept_once(folder: Path) -> None:
    rows = [make_row(1, median_ms=1.0 + number, round=number) for number in range(3)]
    one = make_run(folder, 3, *rows, name="one")
    found = merge([read_run(one), read_run(make_run(folder / "elsewhere", 3, *rows, name="one"))])
    assert [row.round for row in found.rows] == [0, 1, 2] and "3 rows stand in a file before it" in found.remarks[0]


def test_of_one_experiment_in_two_runs_the_last_is_exported(folder: Path) -> None:
    files = [make_run(folder, age, make_row(1, median_ms=ms), name=f"r{age}") for age, ms in ((3, 1.0), (2, 2.0))]
    write_merged(folder / "both.jsonl", merge([read_run(path) for path in files]))
    (entry,) = json.loads(bencher(read_run(folder / "both.jsonl"))).values()
    assert entry["latency"]["value"] == 2_000_000.0


def test_rows_of_one_run_that_differ_are_all_kept_and_said(folder: Path) -> None:
    one = make_run(folder, 3, make_row(1, median_ms=1.0), name="one")
    changed = make_run(folder / "elsewhere", 3, make_row(1, median_ms=9.0), name="one")
    found = merge([read_run(one), read_run(changed)])
    assert [row.measurement["median_ms"] for row in found.rows if row.measurement] == [1.0, 9.0]
    assert len(found.remarks) == 1 and "of run one differs between" in found.remarks[0]
    sides = [[make_row(1, median_ms=ms, round=number) for number in range(3)] for ms in (1.0, 9.0)]
    rounds = [make_run(folder / str(place), 3, *rows, name="one") for place, rows in enumerate(sides)]
    assert len(merge([read_run(path) for path in rounds]).remarks) == 1, "once, not of each round"


def test_two_runs_of_one_id_are_not_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make_run(folder, 3, name="one")
    other = make_run(folder / "elsewhere", 3, name="one", device=OTHER)
    out = folder / "both.jsonl"
    status, _, err = call(capsys, "merge", str(one), str(other), "-o", str(out))
    assert status == Exit.USAGE and f"{one} and {other} hold different runs of the id 'one'" in err
    assert not out.exists()


def test_runs_without_an_id_come_apart_again(folder: Path) -> None:
    """Baselines of exact numbers have none: they are named by their files."""
    paths = [make_run(folder, 3, name="one"), make_run(folder, 3, name="two", device=OTHER)]
    for path in paths:
        head, *rest = path.read_text().splitlines(keepends=True)
        header = {name: value for name, value in json.loads(head).items() if name != "id"}
        path.write_text(json.dumps(header) + "\n" + "".join(rest))
    write_merged(folder / "both.jsonl", merge([read_run(path) for path in paths]))
    assert [(part.id, len(part.rows)) for part in parts(read_run(folder / "both.jsonl"))] == [("one", 3), ("two", 3)]


def test_an_id_that_is_no_text_is_merged_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(folder, 3, name="one"), make_run(folder, 2, name="two")
    one.write_text(one.read_text().replace('"id": "one"', '"id": "\\ud800"'))
    assert call(capsys, "merge", str(one), str(two), "-o", str(folder / "both.jsonl"))[0] == Exit.OK


def test_a_device_of_an_odd_kind_is_merged_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(folder, 3, name="one"), make_run(folder, 2, name="two", device={**DEVICE, "kind": []})
    assert call(capsys, "merge", str(one), str(two), "-o", str(folder / "both.jsonl"))[0] == Exit.OK


def test_a_run_is_never_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(folder, 3, name="one"), make_run(folder, 2, name="two")
    before = one.read_bytes()
    status, _, err = call(capsys, "merge", str(one), str(two), "-o", str(one))
    assert status == Exit.USAGE and "is no merged file" in err and one.read_bytes() == before
    notes = folder / "notes.jsonl"
    notes.write_text("mine")
    with pytest.raises(UsageError, match="is no merged file"):
        write_merged(notes, merge([read_run(one), read_run(two)]))
    assert call(capsys, "merge", str(one), str(two), "-o", str(folder / "both.json"))[0] == Exit.USAGE
    assert call(capsys, "merge", str(one), "-o", str(folder / "both.jsonl"))[0] == Exit.USAGE
    assert sorted(path.name for path in folder.iterdir()) == ["notes.jsonl", "runs"]


# ---------------------------------------------------------------------------------------------- prune


@pytest.mark.parametrize(
    ("text", "age"), [("12h", timedelta(hours=12)), ("30d", timedelta(days=30)), ("8w", timedelta(weeks=8))]
)
def test_ages(text: str, age: timedelta) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "30", "d", "-3d", "3 months", "1e9d", "3d3h", "٣d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(UsageError, match="is not an age"):
        parse_age(text)


def left(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in (folder / "runs").iterdir())


@pytest.fixture
def runs(folder: Path) -> Path:
    """Ten runs, a day apart, of which three must stay whatever happens."""
    for number in range(10):
        make_run(folder, 10 - number, name=f"run{number}")
    (folder / "latest").write_text("runs/run1.jsonl\n")  # not the newest: a run that went on is the latest
    update_best(folder, [make_row(1, median_ms=1.0)], "run2")
    (folder / "runs" / "run3.jsonl").write_text("damaged")
    save_baseline(folder, "good", folder / "runs" / "run0.jsonl")
    for name in ("run0", "run4"):
        (folder / "tables" / name).mkdir(parents=True)
        (folder / "tables" / name / "toy.csv").write_text("a,b\n")
    return folder


def test_what_is_referred_to_stays(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "prune", "--keep", "2", "--yes")
    assert status == Exit.OK
    assert left(runs) == ["run1", "run2", "run3", "run8", "run9"]
    assert not (runs / "tables" / "run0").exists() and not (runs / "tables" / "run4").exists()
    assert (runs / "baselines" / "good.jsonl.gz").exists()
    assert "run1: it is the latest" in out and "run2: best.json has rows of it" in out
    assert "run3: it cannot be read" in out and "5 runs removed" in out


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden"])
def test_a_file_whose_id_would_be_a_folder_takes_nothing_with_it(
    runs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "runs" / f"{name}.jsonl").write_bytes((runs / "runs" / "run9.jsonl").read_bytes())
    assert call(capsys, "prune", "--keep", "0", "--yes")[0] == Exit.OK
    assert (runs / "baselines" / "good.jsonl.gz").exists() and (runs / "runs" / "run1.jsonl").exists()
    assert (runs / "tables").is_dir() and (runs / "runs" / f"{name}.jsonl").exists()


def test_an_age_before_the_calendar_keeps_all(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "prune", "--older-than", "999999w", "--yes")
    assert status == Exit.OK and "nothing to remove" in out


def test_both_limits_have_to_be_passed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "prune", "--keep", "8", "--older-than", "1d", "--yes")[0] == Exit.OK
    assert left(runs) == [f"run{number}" for number in range(1, 10)]
    assert call(capsys, "prune", "--older-than", "132h", "--yes")[0] == Exit.OK
    assert left(runs) == [f"run{number}" for number in (1, 2, 3, 5, 6, 7, 8, 9)]


def test_nothing_goes_without_yes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(runs)
    status, out, err = call(capsys, "prune", "--keep", "2")
    assert status == Exit.USAGE and "add --yes" in err and "5 runs to remove" in out
    status, out, err = call(capsys, "prune", "--keep", "2", "--dry-run")
    assert status == Exit.OK and not err and "5 runs to remove" in out
    assert call(capsys, "prune")[0] == Exit.USAGE
    assert call(capsys, "prune", "--keep", "-1", "--yes")[0] == Exit.USAGE
    assert call(capsys, "prune", "--keep", "2", "--yes", "--dry-run")[0] == Exit.USAGE
    assert left(runs) == before
    (runs / "best.json").write_text("{")
    assert call(capsys, "prune", "--keep", "2", "--yes")[0] == Exit.USAGE  # who knows what it refers to
    assert left(runs) == before
