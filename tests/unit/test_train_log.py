"""A run's log: its two formats, what a kill leaves, and that a resumed log is that of an unbroken run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kbench.errors import CannotRunError, UsageError
from kbench.train.log import JSON_LOG, MAIN_LOG, History, StepRecord, TrainLog, read_log, read_main_log

HEADER = {"model": "nano", "options": {"steps": 6}}


def record(step: int, loss: float | None = None) -> StepRecord:
    return StepRecord(step, 4.0 - step / 3 if loss is None else loss, 1.239, 3e-4, 0.807, ms=12.5, tokens_per_s=2e4)


def write(folder: Path, first: int, last: int, resume_step: int | None = None) -> None:
    """The steps first to last - 1 of a run that validates and samples at every second step, as the loop orders it."""
    with TrainLog(folder, HEADER, resume_step=resume_step) as log:
        for step in range(first, last):
            if step % 2 == 0:
                log.validation(step, 4.5 - step / 7)
                log.sample(step, f"text {step}")
            log.step(record(step))


def contents(folder: Path) -> list[bytes]:
    # Without the moment of the start, in which two runs differ.
    texts = [(folder / name).read_bytes() for name in (MAIN_LOG, JSON_LOG)]
    header = json.loads(texts[1].split(b"\n")[0])
    assert header.pop("started")
    return [texts[0], json.dumps(header).encode(), texts[1].split(b"\n", 1)[1]]


def test_main_log_has_its_exact_format(tmp_path: Path) -> None:
    with TrainLog(tmp_path, HEADER) as log:
        log.validation(0, 11.00694)
        log.evaluation(0, 0.25)
        log.sample(0, "not here")
        log.step(StepRecord(0, 10.98765, 12.3456, 0.0003))
        log.step(StepRecord(1, math.nan, math.inf, 6e-7))
    assert (tmp_path / MAIN_LOG).read_text() == (
        "s:0 tel:11.0069\ns:0 eval:0.2500\ns:0 trl:10.9877 lr:0.000300 norm:12.35\ns:1 trl:nan lr:0.000001 norm:inf\n"
    )
    history = read_main_log(tmp_path / MAIN_LOG)
    assert history.validation == [(0, 11.0069)] and history.evaluation == [(0, 0.25)] and not history.samples
    assert history.steps[0] == StepRecord(0, 10.9877, 12.35, 0.0003)
    assert math.isnan(history.steps[1].loss) and history.steps[1].norm == math.inf


def test_train_jsonl_has_everything_at_full_precision(tmp_path: Path) -> None:
    loss = 10.987654321012345
    with TrainLog(tmp_path / "deep" / "er", HEADER) as log:
        log.validation(0, loss)
        log.evaluation(0, 1 / 3)
        log.sample(0, "two\nlines\r, \u2028, \ud800, \0")
        log.step(StepRecord(0, loss, 12.5, 1 / 3, 0.08, True, 3.25, 1e6, 1.5, -2.5, 0.4, 1 << 33))
        log.step(StepRecord(1, math.nan, math.inf, 0.0))
    history = read_log(tmp_path / "deep" / "er")
    assert history.header["schema"] == 1 and history.header["model"] == "nano" and history.header["kbench"]
    assert history.validation == [(0, loss)] and history.evaluation == [(0, 1 / 3)] and not history.warnings
    assert history.samples == [(0, "two\nlines\r, \u2028, \ud800, \0")]
    assert history.steps[0] == StepRecord(0, loss, 12.5, 1 / 3, 0.08, True, 3.25, 1e6, 1.5, -2.5, 0.4, 1 << 33)
    assert math.isnan(history.steps[1].loss) and math.isnan(history.steps[1].norm) and history.steps[1].scale is None
    for line in (tmp_path / "deep" / "er" / JSON_LOG).read_text().removesuffix("\n").split("\n"):
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_each_line_is_out_before_the_next_step(tmp_path: Path) -> None:
    log = TrainLog(tmp_path, HEADER)
    log.step(record(0))
    assert len(read_log(tmp_path).steps) == 1 and len(read_main_log(tmp_path / MAIN_LOG).steps) == 1
    log.close()
    log.close()


# ---------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("killed_at", [3, 4, 5])
@pytest.mark.parametrize("rest", ["", "s:5 trl:2.3", "s:", "\0\0"])
def test_a_resumed_log_is_that_of_an_unbroken_run(killed_at: int, rest: str, tmp_path: Path) -> None:
    write(tmp_path / "whole", 0, 6)
    broken = tmp_path / "broken"
    write(broken, 0, killed_at)
    if rest:
        for name, text in ((MAIN_LOG, rest), (JSON_LOG, '{"kind": "step", "st')):
            with (broken / name).open("a") as file:
                file.write(text)
        assert len(read_log(broken).warnings) == 1 and len(read_log(broken).steps) == killed_at
    write(broken, 3, 6, resume_step=3)
    assert contents(broken) == contents(tmp_path / "whole")
    assert not [path for path in broken.iterdir() if path.name not in (MAIN_LOG, JSON_LOG)]


def test_resuming_keeps_the_first_header_and_may_start_from_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    with TrainLog(tmp_path, {"model": "other"}, resume_step=2):
        assert read_log(tmp_path).header["model"] == "nano"
    write(tmp_path / "new", 5, 7, resume_step=5)
    assert [step.step for step in read_log(tmp_path / "new").steps] == [5, 6]


def test_a_header_that_a_kill_broke_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / JSON_LOG).write_text('{"kind": "hea')
    write(tmp_path, 0, 1, resume_step=0)
    assert read_log(tmp_path).header["model"] == "nano" and len(read_log(tmp_path).steps) == 1


def test_the_cut_is_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, 5)
    before = contents(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(CannotRunError, match="No space left"):
        TrainLog(tmp_path, HEADER, resume_step=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [MAIN_LOG, JSON_LOG])
def test_a_run_that_is_not_resumed_writes_over_no_log(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("s:0 tel:1.0000\n")
    with pytest.raises(UsageError, match="holds the log of another run; resume that run, choose another folder"):
        TrainLog(tmp_path, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# ---------------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("name", [MAIN_LOG, JSON_LOG])
def test_a_full_disk_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(CannotRunError, match=rf"cannot write .*{name}: No space left on device; free space"):
        write(tmp_path, 0, 2)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotRunError, match="cannot write .*file"):
        TrainLog(tmp_path / "file" / "run", HEADER)


HEAD = '{"kind": "header", "schema": 1}\n'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (MAIN_LOG, "s:0 tel:1.0\nhello\n", "main.log:2 is not a line of a training log"),
        (MAIN_LOG, "s:0 tel:abc\n", "main.log:1 is not a line of a training log: what stands for a number is none"),
        (MAIN_LOG, "s:0 trl:1.0 lr:0.1\n", "main.log:1"),
        (MAIN_LOG, "\n", "main.log:1"),
        (JSON_LOG, "{}\n", "train.jsonl:1 is not a line of a training log: not a header"),
        (JSON_LOG, '{"kind": "header"}\n', "the header has no schema"),
        (JSON_LOG, '{"kind": "header", "schema": 99}\n', "schema 99, and this kbench reads schemas up to 1; update"),
        (JSON_LOG, HEAD + "[1]\n", "train.jsonl:2"),
        (JSON_LOG, HEAD + HEAD, "train.jsonl:2 .* a second header"),
        (JSON_LOG, HEAD + '{"kind": "step"}\n', "train.jsonl:2 .*: it has no kind or no step"),
        (
            JSON_LOG,
            HEAD + '{"kind": "step", "step": 3, "loss": 1.0}\n',
            "a step line of step 3 lacks or garbles 'norm'",
        ),
        (JSON_LOG, HEAD + '{"kind": "validation", "step": 3, "loss": "x"}\n', "train.jsonl:2"),
        (JSON_LOG, HEAD + '{"kind": "sample", "step": 3}\n', "lacks or garbles 'text'"),
        (JSON_LOG, "\udcff\udcfe\n", "train.jsonl:1"),
    ],
)
def test_a_damaged_log_is_named_with_its_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=words):
        read_log(tmp_path)
    assert path.read_bytes() == text.encode(errors="surrogateescape")


@pytest.mark.parametrize("name", [MAIN_LOG, JSON_LOG])
def test_a_damaged_log_is_not_cut(name: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    damaged = (tmp_path / name).read_bytes().replace(b"\n", b"\nhello\n", 1)
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(UsageError, match=f"{name}:2 is not a line"):
        TrainLog(tmp_path, HEADER, resume_step=2)
    assert (tmp_path / name).read_bytes() == damaged


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read .*main.log: No such file"):
        read_log(tmp_path)


def test_main_log_alone_and_events_of_a_later_kbench_are_read(tmp_path: Path) -> None:
    (tmp_path / MAIN_LOG).write_text("s:0 tel:4.5\ns:0 trl:4.25 lr:1.0e-03 norm:2.0\n")
    assert read_log(tmp_path) == History({}, [StepRecord(0, 4.25, 2.0, 1e-3)], [(0, 4.5)])
    more = '{"kind": "step", "step": 0, "loss": 1.0, "norm": null, "rate": 0.5, "colour": "red"}\n'
    (tmp_path / JSON_LOG).write_text(HEAD + more + '{"kind": "moon", "step": 1}\n')
    history = read_log(tmp_path)
    assert history.steps[0].loss == 1.0 and math.isnan(history.steps[0].norm)
    assert history.warnings == [f"{tmp_path / JSON_LOG}:3 is of a kind that this kbench does not know: moon"]
