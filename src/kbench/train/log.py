"""The log of a training run, in two files of its folder, and readers of both.

`main.log` has llm.c's format, for programs that draw its curves:

    s:STEP tel:LOSS                      validation loss, 4 decimals
    s:STEP eval:ACCURACY                 multiple-choice accuracy, 4 decimals
    s:STEP trl:LOSS lr:RATE norm:NORM    a training step: 4, 6 and 2 decimals

`train.jsonl` has everything at full precision, one JSON object a line. The first is the header ("kind": "header", with
"schema"); then "step", "validation", "evaluation" and "sample", each with its "step", which counts from 0.

Each line is handed to the operating system as it is written: after a kill at most the last line is unfinished. A line
without its line feed counts as not written, whatever it holds.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from kbench import __version__
from kbench.errors import CannotRunError, UsageError
from kbench.results.store import replace_text
from kbench.results.strict_json import dumps

MAIN_LOG = "main.log"
JSON_LOG = "train.jsonl"
SCHEMA_VERSION = 1  # 1: the first

_MAIN_LINE = re.compile(r"s:(\d+) (?:(tel|eval):(\S+)|trl:(\S+) lr:(\S+) norm:(\S+))")
_BEFORE_ALL = -1  # the place of the header among the steps


@dataclass(frozen=True)
class StepRecord:
    """One training step. None: not known.

    step: counted from 0. loss: mean of the batch. norm: of all gradients, before clipping. rate: the learning rate.
    scale: what the gradients were multiplied with; 0 where the update was skipped. ms: milliseconds of the whole step.
    loss_z, norm_z: in standard deviations from the recent mean. mfu: fraction of the measured GEMM rate.
    memory: bytes of the device in use.
    """

    step: int
    loss: float
    norm: float
    rate: float
    scale: float | None = None
    skipped: bool = False
    ms: float | None = None
    tokens_per_s: float | None = None
    loss_z: float | None = None
    norm_z: float | None = None
    mfu: float | None = None
    memory: int | None = None


@dataclass
class History:
    """A log as read back. Pairs are of a step with its loss, accuracy or text; warnings are one line each."""

    header: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    evaluation: list[tuple[int, float]] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class TrainLog:
    """Writes both files. Use it as a context manager, or call close.

    folder: is made where it is missing. header: facts of the run for train.jsonl's first line. resume_step: the step
    that a resumed run does next. Lines of that step and later ones are cut away first, in one move each file; the run
    writes them anew, so that its log ends as one that was never broken. So a checkpoint of step N may be written only
    after the lines of all steps before N.
    Raises UsageError where a run that is not resumed would write over a log, and where a log to go on with is not
    readable; CannotRunError where a file cannot be written.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        main, detailed = folder / MAIN_LOG, folder / JSON_LOG
        if resume_step is None:
            _require_absent(folder, main, detailed)
        else:
            _cut(main, resume_step, _main_step)
            _cut(detailed, resume_step, _json_step)
        with contextlib.ExitStack() as opened:
            self._main = opened.enter_context(_open(main))
            self._json = opened.enter_context(_open(detailed))
            if self._json.tell() == 0:
                started = datetime.now(UTC).isoformat(timespec="seconds")
                self._event("header", schema=SCHEMA_VERSION, kbench=__version__, started=started, **header)
            self._files = opened.pop_all()

    def step(self, record: StepRecord) -> None:
        """A training step."""
        self._line(f"s:{record.step} trl:{record.loss:.4f} lr:{record.rate:.6f} norm:{record.norm:.2f}")
        self._event("step", **asdict(record))

    def validation(self, step: int, loss: float) -> None:
        """The validation loss before the step."""
        self._line(f"s:{step} tel:{loss:.4f}")
        self._event("validation", step=step, loss=loss)

    def evaluation(self, step: int, accuracy: float) -> None:
        """The fraction of multiple-choice questions that the model answers right before the step."""
        self._line(f"s:{step} eval:{accuracy:.4f}")
        self._event("evaluation", step=step, accuracy=accuracy)

    def sample(self, step: int, text: str) -> None:
        """A text that the model wrote before the step; main.log has no line for it."""
        self._event("sample", step=step, text=text)

    def close(self) -> None:
        """Writes nothing: every line is out already. Calling it twice does no harm."""
        self._files.close()

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _line(self, text: str) -> None:
        _write(self._main, text)

    def _event(self, kind: str, **data: Any) -> None:
        _write(self._json, dumps({"kind": kind, **data}))


# ---------------------------------------------------------------------------------------------- reading


def read_log(folder: Path) -> History:
    """A run's log: train.jsonl where it exists, else main.log. Raises UsageError where neither does or it is no log."""
    detailed = folder / JSON_LOG
    return read_json_log(detailed) if detailed.exists() else read_main_log(folder / MAIN_LOG)


def read_json_log(path: Path) -> History:
    """Reads train.jsonl. Numbers that were not finite are NaN. Raises UsageError naming the file and the line."""
    history = History()
    for number, line in _finished(path, history.warnings):
        event = _json_event(path, number, line)
        kind, step = event.pop("kind"), event.get("step")
        try:
            if kind == "header":
                history.header = event
            elif kind == "step":
                history.steps.append(_step_record(event))
            elif kind == "validation":
                history.validation.append((int(event["step"]), _number(event["loss"])))
            elif kind == "evaluation":
                history.evaluation.append((int(event["step"]), _number(event["accuracy"])))
            elif kind == "sample":
                history.samples.append((int(event["step"]), str(event["text"])))
            else:
                history.warnings.append(f"{path}:{number} is of a kind that this kbench does not know: {kind}")
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, number, f"a {kind} line of step {step} lacks or garbles {error}") from None
    return history


def read_main_log(path: Path) -> History:
    """Reads main.log, of kbench or llm.c. Raises UsageError naming the file and the line."""
    history = History()
    for number, line in _finished(path, history.warnings):
        found = _main_match(path, number, line)
        step, kind, value, loss, rate, norm = found.groups()
        try:
            if kind is None:
                history.steps.append(StepRecord(int(step), float(loss), float(norm), float(rate)))
            else:
                pairs = history.validation if kind == "tel" else history.evaluation
                pairs.append((int(step), float(value)))
        except ValueError:
            raise _damaged(path, number, "what stands for a number is none") from None
    return history


def _step_record(event: Mapping[str, Any]) -> StepRecord:
    known = {entry.name: event[entry.name] for entry in fields(StepRecord) if entry.name in event}
    # The three that a step always has: null says that the number was not finite, not that there was none.
    return StepRecord(**known | {name: _number(event[name]) for name in ("loss", "norm", "rate")})


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _finished(path: Path, warnings: list[str]) -> Iterator[tuple[int, str]]:
    """The finished lines of a file with their numbers."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith("\n"):
                    yield number, line[:-1]
                else:
                    warnings.append(f"{path}:{number} is unfinished and was left out: the run was killed")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _json_event(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or (event.get("kind") == "header") != (number == 1):
        raise _damaged(path, number, "not a header" if number == 1 else "no JSON object, or a second header")
    if number == 1 and not isinstance(event.get("schema"), int):
        raise _damaged(path, number, "the header has no schema")
    if number == 1 and event["schema"] > SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema {event['schema']}, and this kbench reads schemas up to {SCHEMA_VERSION}",
            "update kbench",
        )
    if number > 1 and not (isinstance(event.get("kind"), str) and type(event.get("step")) is int):
        raise _damaged(path, number, "it has no kind or no step")
    return event


def _main_match(path: Path, number: int, line: str) -> re.Match[str]:
    found = _MAIN_LINE.fullmatch(line)
    if found is None:
        raise _damaged(path, number, "it is none of the three kinds of line")
    return found


def _damaged(path: Path, number: int, what: str) -> UsageError:
    return UsageError(f"{path}:{number} is not a line of a training log: {what}", "mend the file or move it away")


# ---------------------------------------------------------------------------------------------- writing


def _require_absent(folder: Path, *paths: Path) -> None:
    if any(path.exists() and path.stat().st_size for path in paths):
        hint = "resume that run, choose another folder, or delete the log if the run left no checkpoint"
        raise UsageError(f"{folder} holds the log of another run", hint)


def _cut(path: Path, step: int, step_of: Callable[[Path, int, str], int]) -> None:
    """Cuts away lines of `step` and later, and an unfinished one. A file that is missing stays so."""
    if not path.exists():
        return
    before = path.stat().st_size
    kept = [line for number, line in _finished(path, []) if step_of(path, number, line) < step]
    text = "".join(f"{line}\n" for line in kept)
    if len(text.encode()) != before:
        replace_text(path, text)


def _main_step(path: Path, number: int, line: str) -> int:
    return int(_main_match(path, number, line)[1])


def _json_step(path: Path, number: int, line: str) -> int:
    return int(_json_event(path, number, line).get("step", _BEFORE_ALL))


def _open(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line goes out as it is written, and closing has nothing left that a full disk could refuse.
        return path.open("ab", buffering=0)
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(file: FileIO, line: str) -> None:
    # Half of a surrogate pair, which UTF-8 cannot hold, becomes an escape that JSON reads back as the same text.
    left = memoryview((line + "\n").encode(errors="backslashreplace"))
    try:
        while left:  # a disk that is nearly full takes a part
            left = left[file.write(left) :]
    except OSError as error:
        raise _unwritable(Path(str(file.name)), error) from error


def _unwritable(path: Path, error: OSError) -> CannotRunError:
    return CannotRunError(f"cannot write {path}: {error.strerror or error}", "free space, or choose another folder")
