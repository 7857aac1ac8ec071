"""Training checkpoints: everything that a run needs to go on as if it had never stopped, in files of one folder.

    model_00000100.bin        parameters, bit for bit as the run stores them: llm.c's model file
    state_00000100_00000.bin  AdamW's moments and the master weights: llm.c's state file
    train_00000100.json       the rest, as a document of the run, with size and CRC-32 of the two files above
    DONE_00000100             empty, and last: without it there is no checkpoint

All are complete on the disk under temporary names before the first gets its name, so a full disk changes nothing.
Deleting removes DONE first. What a kill leaves behind is never taken for a checkpoint, and goes at the next save.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench import __version__
from kbench.errors import UsageError
from kbench.train.log import JSON_LOG, MAIN_LOG
from kbench.train.model import Model
from kbench.train.state_file import OptimizerState, read_state, state_buffers
from kbench.train.weights_binary import (
    BF16,
    TEMPORARY,
    Array,
    DamagedFile,
    Staged,
    TensorFile,
    replace_files,
    require_tensors,
    stage,
    sync_folder,
    unwritable,
)
from kbench.train.weights_llmc import llmc_buffers, read_llmc

SCHEMA = 1
LAST_STEP = 99_999_999  # file names have eight digits
_DONE = re.compile(r"DONE_(\d{8})")
_DOCUMENT = re.compile(r"train_(\d{8})\.json")


@dataclass(frozen=True)
class TrainState:
    """A run's tensors at one step, as numpy arrays: name -> array of the full shape.

    params: all float32 or all ml_dtypes.bfloat16, as the run stores them. optimizer: float32.
    """

    model: Model
    params: dict[str, Array]
    optimizer: OptimizerState

    @property
    def dtype(self) -> str:
        """How parameters are stored: fp32 or bf16."""
        return "bf16" if self.params["wte"].dtype == BF16 else "fp32"


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found; document: what the run gave to `save_checkpoint`."""

    step: int
    state: TrainState
    document: dict[str, Any]


def prepare_folder(folder: Path, *, resuming: bool = False) -> None:
    """Prove, before any training, that `folder` can take checkpoints; create it where it is missing.

    Raises CannotRunError where it cannot be written; UsageError where it holds checkpoints of another run (not
    `resuming`), which would be mixed up with this one's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A file is really created, because permission bits say nothing about read-only mounts, quotas and root.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY):
            pass
    except OSError as error:
        raise unwritable(folder, error) from error
    steps = checkpoint_steps(folder)
    if steps and not resuming:
        raise UsageError(
            f"{folder} holds a checkpoint of step {steps[-1]}",
            f"go on with --resume {folder}, or choose another folder",
        )
    logs = [folder / name for name in (MAIN_LOG, JSON_LOG)]
    if not resuming and any(log.exists() and log.stat().st_size for log in logs):
        raise UsageError(
            f"{folder} holds the log of a run that left no checkpoint",
            f"delete {MAIN_LOG} and {JSON_LOG} there, or choose another folder",
        )


def save_checkpoint(
    folder: Path, step: int, state: TrainState, document: Mapping[str, Any], *, keep: int = 0, major: int = 0
) -> tuple[int, ...]:
    """Write the checkpoint of `step`, then delete old ones. Gives the steps deleted.

    document: what JSON gives back unchanged (no tuples, no keys but strings, no NaN). keep: how many of the newest
    stay, 0 for all; of steps divisible by `major` (if not 0) all stay. Checkpoints of later steps are left alone.
    One process at a time may save to a folder. Raises CannotRunError if it cannot be written: every other checkpoint is
    as it was; ValueError for a wrong argument.
    """
    names = _names(folder, step)
    text = _document_bytes(document)
    params, optimizer = state.params, state.optimizer
    for tensors in (params, optimizer.m, optimizer.v, optimizer.master):
        if tensors is not None:
            require_tensors(state.model, tensors)
    if len({array.dtype for array in params.values()}) != 1:
        raise ValueError("parameters are stored in one dtype")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    clean_folder(folder)
    staged: list[Staged] = []
    try:
        staged.append(stage(names.model, llmc_buffers(state.model, params, state.dtype)))
        staged.append(stage(names.state, state_buffers(state.model, step, optimizer)))
        envelope = _envelope(step, state, staged, json.loads(text))
        staged.append(stage(names.document, [envelope]))
        staged.append(stage(names.done, []))
        # Only now, so that a disk without room for the new one keeps the old one of the same step.
        _remove(names.done)
        # The document first: by it, clean_folder knows the others for a checkpoint that was not finished.
        replace_files([staged[2], staged[1], staged[0], staged[3]])
    except OSError as error:
        raise unwritable(names.done, error) from error
    finally:
        for file in staged:
            file.discard()
    return _prune(folder, step, keep, major)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints in `folder`, rising; none if it does not exist."""
    return _steps(folder, _DONE)


def latest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint. Raises UsageError if there is none."""
    steps = checkpoint_steps(folder)
    if not steps:
        raise UsageError(f"{folder} holds no checkpoint", "name the folder that a run saved to")
    return steps[-1]


def load_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of `step`, or the newest. Sizes, steps and checksums are proven.

    Raises UsageError. A damaged one is an error, never passed over in silence: the message names the file, and an
    older checkpoint to go on from if there is one.
    """
    steps = checkpoint_steps(folder)
    if step is None:
        step = latest_checkpoint(folder)
    if step not in steps:
        raise UsageError(f"{folder} holds no checkpoint of step {step}", f"there are: {steps}" if steps else "")
    try:
        return _load(folder, step)
    except DamagedFile as error:
        older = [s for s in steps if s < step]
        hint = f"to go on from step {older[-1]} instead, delete {_names(folder, step).done}" if older else error.hint
        raise DamagedFile(error.message, hint or "the folder holds no older checkpoint: start the run again") from error


def remove_checkpoint(folder: Path, step: int) -> None:
    """Delete one checkpoint; interrupted at any point, it is gone or whole. Raises OSError."""
    names = _names(folder, step)
    _remove(names.done)
    for path in (names.model, names.state, names.document):
        path.unlink(missing_ok=True)


def clean_folder(folder: Path) -> None:
    """Delete what killed saves and deletions left: temporary files, and files of a document that no DONE completes.

    Nothing else is touched: a model file that somebody put here has no document. Failures are left to the writing
    that follows.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{TEMPORARY}*"):
            path.unlink(missing_ok=True)
        for step in set(_steps(folder, _DOCUMENT)) - set(checkpoint_steps(folder)):
            remove_checkpoint(folder, step)


@dataclass(frozen=True)
class _Names:
    model: Path
    state: Path
    document: Path
    done: Path


def _names(folder: Path, step: int) -> _Names:
    if not 0 <= step <= LAST_STEP:
        raise ValueError(f"step {step}: checkpoints are named by steps from 0 to {LAST_STEP}")
    number = f"{step:08d}"
    return _Names(
        folder / f"model_{number}.bin",
        folder / f"state_{number}_00000.bin",
        folder / f"train_{number}.json",
        folder / f"DONE_{number}",
    )


def _steps(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        return sorted(int(found[1]) for path in folder.iterdir() if (found := pattern.fullmatch(path.name)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from error


def _remove(path: Path) -> None:
    """Delete a file for good before anything after it happens."""
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def _prune(folder: Path, step: int, keep: int, major: int) -> tuple[int, ...]:
    if not keep:
        return ()
    removed = []
    older = [s for s in checkpoint_steps(folder) if s < step]
    for old in older[: max(0, len(older) - (keep - 1))]:
        if major and old % major == 0:
            continue
        # The new checkpoint is safe: an old one that cannot be deleted is no reason to end a run.
        with contextlib.suppress(OSError):
            remove_checkpoint(folder, old)
            removed.append(old)
    return tuple(removed)


def _document_bytes(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, allow_nan=False)
    if json.loads(text) != document:
        raise ValueError("a checkpoint's document has to come back from JSON as it went: lists, and strings as keys")
    return text.encode()


def _envelope(step: int, state: TrainState, files: list[Staged], document: Any) -> bytes:
    data = {
        "schema": SCHEMA,
        "kbench": __version__,
        "step": step,
        "dtype": state.dtype,
        "files": {file.path.name: {"bytes": file.size, "crc32": file.crc} for file in files},
        "run": document,
        "crc32": _crc_of(document),
    }
    return (json.dumps(data, indent=1) + "\n").encode()


def _crc_of(document: Any) -> int:
    """Of a run's document whatever its layout: a digit that changed would go on as other numbers."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _load(folder: Path, step: int) -> Checkpoint:
    names = _names(folder, step)
    data = _read_envelope(names.document, step)
    with TensorFile(names.model, checksum=True) as file:
        _require_size(file, data)
        model, params, _ = read_llmc(file, exact=True)
        _require_crc(file, data)
    with TensorFile(names.state, checksum=True) as file:
        _require_size(file, data)
        found, optimizer = read_state(file, model)
        _require_crc(file, data)
    state = TrainState(model, params, optimizer)
    if (found, state.dtype) != (step, data.get("dtype")):
        expected = f"step {step}, {data.get('dtype')}"
        raise DamagedFile(f"{names.state} is of step {found}, {state.dtype}, and {expected} was expected")
    return Checkpoint(step, state, data["run"])


def _read_envelope(path: Path, step: int) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # opening a pipe could wait for ever
        raise UsageError(f"{path} is not a regular file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = "it was written by another program: start from its model file with --weights"
        raise DamagedFile(f"{path} does not exist", hint) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is not JSON: it was cut off or damaged") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise UsageError(
            f"{path} has schema {schema} of kbench {data.get('kbench', '?')}, and this one reads {SCHEMA}",
            "update kbench",
        )
    if schema != SCHEMA or data.get("step") != step or not isinstance(data.get("run"), dict):
        raise DamagedFile(f"{path} is not the document of step {step}")
    if data.get("crc32") != _crc_of(data["run"]):
        raise DamagedFile(f"{path} was changed or damaged after it was saved: its checksum differs")
    files = data.get("files")
    if not isinstance(files, dict) or not all(isinstance(value, dict) for value in files.values()):
        raise DamagedFile(f"{path} does not list its files")
    return data


def _require_size(file: TensorFile, data: Mapping[str, Any]) -> None:
    expected = data["files"].get(file.path.name, {}).get("bytes")
    if file.size != expected:
        raise DamagedFile(f"{file.path} has {file.size} bytes, and was saved with {expected}")


def _require_crc(file: TensorFile, data: Mapping[str, Any]) -> None:
    if file.crc != data["files"][file.path.name].get("crc32"):
        raise DamagedFile(f"{file.path} was changed or damaged after it was saved: its checksum differs")
