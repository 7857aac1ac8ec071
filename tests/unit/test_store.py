"""Run files: written row by row, readable after a kill, refused where they are not kbench's."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fakes import failed, make_row, measured
from kbench.errors import CannotRunError, UsageError
from kbench.results.schema import SCHEMA_VERSION
from kbench.results.store import RunWriter, latest_run, read_run, replace_text, require_writable, row_key, run_files
from kbench.results.strict_json import dumps

DEVICE = {"name": "NVIDIA H200 (test/1)", "arch": "sm_90"}


def writer(folder: Path) -> RunWriter:
    return RunWriter(folder, device=DEVICE, command=["kbench", "sweep"], options={"seed": 7}, kbench_version="0.1.0")


def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CannotRunError, match="pipe: it is not an ordinary file"):
        replace_text(pipe, "text")
    assert pipe.is_fifo() and not list(tmp_path.glob(".*"))


def test_rows_come_back_as_they_went(tmp_path: Path) -> None:
    rows = [make_row(1, median_ms=2.5), failed(2, details=["at [0, 3]"]), make_row(3, idea="naïve | \u2028 line")]
    with writer(tmp_path) as run:
        for row in rows:
            run.append(row)
    back = read_run(run.path)
    assert back.rows == rows
    assert back.header["device"] == DEVICE
    assert back.header["command"] == ["kbench", "sweep"]
    assert back.id == run.id
    assert back.footer is not None
    assert back.footer["statuses"] == {"pass": 2, "fail": 1}
    assert back.footer["ended"] == "complete"
    assert back.warnings == []


def test_the_name_says_when_and_on_what_and_latest_follows(tmp_path: Path) -> None:
    with writer(tmp_path) as first:
        pass
    assert latest_run(tmp_path) == first.path
    with writer(tmp_path) as second:
        pass
    assert latest_run(tmp_path) == second.path
    assert first.path.parent == tmp_path / "runs"
    stamp, slug, _ = first.path.stem.partition("-nvidia-h200-test-1-")
    assert slug and len(stamp) == len("20260101T000000Z") and stamp.endswith("Z")


def test_every_row_is_on_disk_before_the_next(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        for count in range(1, 4):
            run.append(make_row(count))
            assert len(read_run(run.path).rows) == count


def test_a_killed_process_leaves_its_rows(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from fakes import make_row\n"
        "from kbench.results.store import RunWriter\n"
        "run = RunWriter(Path(sys.argv[1]), device={}, command=[], options={}, kbench_version='0')\n"
        "run.append(make_row(1)); run.append(make_row(2)); print('ready', flush=True); time.sleep(60)"
    )
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    back = read_run(latest_run(tmp_path))
    assert [row.version for row in back.rows] == [1, 2]
    assert back.footer is None


def test_a_cut_last_line_costs_that_line_only(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.append(make_row(1))
        run.append(make_row(2))
    header, first, second, _ = run.path.read_text().splitlines()
    run.path.write_text("\n".join([header, first, second[: len(second) // 2]]))
    back = read_run(run.path)
    assert [row.version for row in back.rows] == [1]
    assert len(back.warnings) == 1 and "line 3 is cut off" in back.warnings[0]


def test_a_file_cut_inside_a_character_is_still_read(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.append(make_row(1))
        run.append(make_row(2, idea="naïve"))
    data = run.path.read_bytes()
    run.path.write_bytes(data[: data.index("ï".encode()) + 1])
    assert [row.version for row in read_run(run.path).rows] == [1]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.append(make_row(1))
    lines = run.path.read_text().splitlines()
    run.path.write_text("\n".join([lines[0], "{oops", *lines[1:]]))
    with pytest.raises(UsageError, match=rf"{run.path.name}:2 is not JSON"):
        read_run(run.path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a run file"),
        ("hello\n", "not a run file"),
        ("[1, 2]\n", "not a run file"),
        ('{"kind": "row"}\n', "not a run file"),
        ('{"kind": "header"}\n', "not a run file"),
        (json.dumps({"kind": "header", "schema": SCHEMA_VERSION + 1, "kbench": "9.9"}), "kbench 9.9 with schema"),
        (json.dumps({"kind": "header", "schema": 1}) + '\n{"kind": "row", "status": "fine"}\n', ":2 is not a row"),
        (
            json.dumps({"kind": "header", "schema": 1}) + '\n{"kind": "row", "status": "pass"}\n',
            ":2 is not a row of results",
        ),
    ],
)
def test_foreign_files_are_refused_with_file_and_reason(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_run(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"sizes": 5}, {"sizes": {"N": "x"}}, {"params": []}, {"verdict": "x"}, {"kernels": "x"}, {"steps": [1]},
     {"measurement": {}}, {"measurement": {"median_ms": "x", "low_ms": 1, "high_ms": 1}},
     *({"measurement": measured(time)} for time in (0.0, -1.0, float("inf"), float("nan"))),
     *(
         {"measurement": {**measured(1.0), "samples_ms": [1.0, sample, 1.1]}}
         for sample in (0.0, -1.0, float("inf"), float("nan"), None, "x", True, [1.0], 10**400)
     ),
     {"measurement": {**measured(1.0), "median_ms": 10**400}}, {"measurement": {**measured(1.0), "samples_ms": "abc"}},
     *({"kernels": [{"name": "k", **kernel}]} for kernel in (
         {"registers": "many"}, {"registers": float("nan")}, {"grid": "x"}, {"block": [None]}, {"shared": -1},
         {"spill_bytes": True}, {"name": 5},
     )),
     {"block": "x"}, {"version": True}, {"source": None}, {"details": [1]}, {"traffic": "x"}],
)  # fmt: skip
def test_a_row_with_a_value_of_another_type_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "run.jsonl"
    lines = [{"kind": "header", "schema": 1}, {"kind": "row", **make_row(median_ms=1.0).to_dict(), **change}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match=re.escape(f"{path}:2 is not a row of results: ")):
        read_run(path)


def test_a_folder_of_runs_that_nobody_may_look_into_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_files(tmp_path) == {}

    def denied(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.listdir", denied)
    with pytest.raises(UsageError, match="cannot read .*runs: Permission denied"):
        run_files(tmp_path)


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_run(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="holds no runs"):
        latest_run(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "copied.jsonl").touch()
    with pytest.raises(UsageError, match="has no file `latest`; name a run; ids there: copied"):
        latest_run(tmp_path)
    (tmp_path / "latest").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match="which is not there"):
        latest_run(tmp_path)


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer(tmp_path) as run:
        run.append(make_row(1))
        raise KeyboardInterrupt
    back = read_run(run.path)
    assert back.footer is not None and back.footer["ended"] == "interrupted"


def test_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    require_writable(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_names_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below", Path("/proc/kbench-results")):
        with pytest.raises(CannotRunError, match="--results DIR"):
            require_writable(folder)
    with pytest.raises(CannotRunError, match="cannot write"):
        writer(file)


def test_a_runs_entry_that_is_a_file_is_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(CannotRunError, match="cannot write .*runs"):
        require_writable(tmp_path)


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run._file.close()
    run._file = open("/dev/full", "w")  # noqa: SIM115 - the writer closes it
    with pytest.raises(CannotRunError, match="No space left"), run:
        run.append(make_row(1))


def test_replacing_is_atomic_and_leaves_no_other_file(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "old")
    replace_text(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "new")]


def test_strict_json_has_no_nan() -> None:
    text = dumps({"a": [float("nan"), float("inf"), 1.5], "b": (2, float("-inf"))})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, None, 1.5], "b": [2, None]}


def test_names_that_are_no_text_come_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"/tmp/\xff.html")
    with RunWriter(tmp_path, device=DEVICE, command=[name], options={}, kbench_version="0.1.0") as run:
        run.append(make_row(1, reason=name))
    read = read_run(run.path)
    assert (read.header["command"], read.rows[0].reason) == ([name], name)
    replace_text(tmp_path / "a", name)
    assert (tmp_path / "a").read_text() == "/tmp/?.html"


def test_a_row_with_a_non_finite_number_is_kept(tmp_path: Path) -> None:
    with writer(tmp_path) as run:
        run.append(make_row(1, used=float("inf")))
    verdict = read_run(run.path).rows[0].verdict
    assert verdict is not None and verdict["outputs"][0]["used"] is None


def test_row_keys_tell_experiments_apart() -> None:
    row = make_row(1, median_ms=1.0)
    assert row_key(row) == row_key(make_row(1, median_ms=2.0, seed=8, sizes=dict(row.sizes)))
    changes = [{"block": 32}, {"dtype": "tf32"}, {"sizes": {"N": 65}}, {"params": {"tile": 2}}, {"cache_mode": "hot"}]
    changes += [{"device": "other"}, {"family": "other"}, {"version": 2}]
    assert len({row_key(make_row(**change)) for change in changes} | {row_key(row)}) == len(changes) + 1


def test_two_runs_of_one_second_do_not_clash(tmp_path: Path) -> None:
    start = time.monotonic()
    paths = set()
    for _ in range(20):
        with writer(tmp_path) as run:
            paths.add(run.path)
    assert len(paths) == 20 and time.monotonic() - start < 10
