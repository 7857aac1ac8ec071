"""Checkpoints: bit for bit there and back, and no failure at any point costs the last good one."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kbench
from checkpoint_states import MODEL, complete, names, same, state_of
from kbench.errors import CannotRunError, UsageError
from kbench.train import checkpoint, weights_binary
from kbench.train.checkpoint import (
    checkpoint_steps,
    latest_checkpoint,
    load_checkpoint,
    prepare_folder,
    save_checkpoint,
)
from kbench.train.weights import load_weights

DOCUMENT = {"options": {"lr": 3e-4, "use": ["a", "b"]}, "position": 2**60, "window": [0.1, 1 / 3, 5e-324], "none": None}


@pytest.mark.parametrize(("dtype", "master"), [("bf16", True), ("bf16", False), ("fp32", False)])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, dtype: str, master: bool) -> None:
    state = state_of(1, dtype, master)
    save_checkpoint(tmp_path, 7, state, DOCUMENT)
    found = load_checkpoint(tmp_path)
    assert found.step == 7 and found.document == DOCUMENT
    same(found.state, state)
    assert names(tmp_path) == complete(7) and (tmp_path / "DONE_00000007").stat().st_size == 0


def test_the_padding_is_kept_as_it_is(tmp_path: Path) -> None:
    # load_weights would zero it; going on with a run must change nothing.
    state = state_of(1)
    assert state.params["wte"][MODEL.vocab :].astype(np.float32).any()
    save_checkpoint(tmp_path, 0, state, {})
    same(load_checkpoint(tmp_path).state, state)


def test_the_files_are_llmcs(tmp_path: Path) -> None:
    state = state_of(1)
    save_checkpoint(tmp_path, 7, state, {})
    header = np.fromfile(tmp_path / "state_00000007_00000.bin", "<i4", 256)
    assert header[:5].tolist() == [20240527, 1, 1, 0, 1] and header[10] == 7
    floats = np.fromfile(tmp_path / "state_00000007_00000.bin", "<f4", offset=1024)
    assert state.optimizer.master is not None
    blocks = (state.optimizer.m, state.optimizer.v, state.optimizer.master)
    np.testing.assert_array_equal(floats, np.concatenate([a.ravel() for block in blocks for a in block.values()]))
    model_file = load_weights(str(tmp_path / "model_00000007.bin"))
    np.testing.assert_array_equal(model_file.weights["fcw"], state.params["fcw"].astype(np.float32))


def test_newest_and_named_steps(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        save_checkpoint(tmp_path, step, state_of(step), {"step": step})
    assert checkpoint_steps(tmp_path) == [5, 10, 100] and latest_checkpoint(tmp_path) == 100
    assert load_checkpoint(tmp_path).step == 100
    same(load_checkpoint(tmp_path, 10).state, state_of(10))
    with pytest.raises(UsageError, match=r"no checkpoint of step 11; there are: \[5, 10, 100\]"):
        load_checkpoint(tmp_path, 11)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert checkpoint_steps(folder) == []
        with pytest.raises(UsageError, match="holds no checkpoint"):
            load_checkpoint(folder)


def test_keep_and_major(tmp_path: Path) -> None:
    removed = [save_checkpoint(tmp_path, step, state_of(step), {}, keep=2, major=20) for step in range(10, 70, 10)]
    assert removed == [(), (), (10,), (), (30,), ()]
    assert names(tmp_path) == complete(20, 40, 50, 60)
    assert save_checkpoint(tmp_path, 70, state_of(7), {}, keep=1) == (20, 40, 50, 60)


def test_later_checkpoints_push_nothing_out(tmp_path: Path) -> None:
    # After going back to step 50, step 60 must not be deleted at once because 100 is "newer".
    for step in (50, 100):
        save_checkpoint(tmp_path, step, state_of(step), {})
    assert save_checkpoint(tmp_path, 60, state_of(60), {}, keep=1) == (50,)
    assert checkpoint_steps(tmp_path) == [60, 100]


def test_the_same_step_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, state_of(1, "fp32", master=False), {"a": 1})
    save_checkpoint(tmp_path, 5, state_of(2), {"a": 2})
    same(load_checkpoint(tmp_path).state, state_of(2))
    assert load_checkpoint(tmp_path).document == {"a": 2} and names(tmp_path) == complete(5)


def test_documents_that_json_would_change_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for document in ({"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}):
        with pytest.raises(ValueError):
            save_checkpoint(tmp_path, 1, state_of(1), document)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, state_of(1), {"a": np.float32(1)})
    with pytest.raises(ValueError, match="step -1"):
        save_checkpoint(tmp_path, -1, state_of(1), {})
    assert names(tmp_path) == []


def test_a_state_that_diverged_is_not_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), {})
    state = state_of(2)
    state.optimizer.v["wpe"][3, 4] = np.inf
    with pytest.raises(CannotRunError, match=r"v of wpe\[3, 4\] is inf"):
        save_checkpoint(tmp_path, 2, state, {})
    assert names(tmp_path) == complete(1)


# Failures


def no_space(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_at(real: Callable[..., Any], number: int) -> tuple[Callable[..., Any], list[int]]:
    """`real`, but its call `number` finds the disk full; and how often it was called."""
    calls = [0]

    def function(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return no_space() if calls[0] == number else real(*args, **options)

    return function, calls


@pytest.mark.parametrize("place", ["write", "fsync", "open"])
def test_a_disk_that_is_full_at_any_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), {"n": 1})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    number = 0
    while True:
        number += 1
        with monkeypatch.context() as patched:
            if place == "write":
                function, calls = failing_at(weights_binary.write_all, number)
                patched.setattr(weights_binary, "write_all", function)
            elif place == "fsync":
                function, calls = failing_at(os.fsync, number)
                patched.setattr(weights_binary.os, "fsync", function)
            else:
                function, calls = failing_at(Path.open, number)
                patched.setattr(Path, "open", function)
            staging_only = place != "fsync" or number <= 4  # later ones are of the folder, between the names
            try:
                # Step 1 again: the hardest case, because the old one has to stand until the new one is complete.
                save_checkpoint(tmp_path, 1, state_of(2), {"n": 2}, keep=1)
            except CannotRunError as error:
                assert "No space left" in error.message and str(tmp_path) in error.message and "free some" in error.hint
                if staging_only:
                    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
                else:
                    save_checkpoint(tmp_path, 1, state_of(1), {"n": 1})
            else:
                assert calls[0] < number
                break
    assert number > 4
    same(load_checkpoint(tmp_path).state, state_of(2))
    assert names(tmp_path) == complete(1)


def test_a_disk_that_fails_while_names_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), {})
    for number in range(1, 5):
        with monkeypatch.context() as patched:
            patched.setattr(weights_binary.os, "replace", failing_at(os.replace, number)[0])
            with pytest.raises(CannotRunError, match="No space left"):
                save_checkpoint(tmp_path, 2, state_of(2), {}, keep=1)
        assert load_checkpoint(tmp_path).step == 1
        same(load_checkpoint(tmp_path).state, state_of(1))
        assert not list(tmp_path.glob(".*"))
    save_checkpoint(tmp_path, 3, state_of(3), {})
    assert names(tmp_path) == complete(1, 3)


def killed_after(calls: int, action: Callable[[], object]) -> bool:
    """Run `action` in a process that dies before its call number `calls` to the file system; whether it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    left = calls

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)  # no handler, no `finally`: what a kill does
            return real(*args, **options)

        return function

    try:
        for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (weights_binary, "write_all")):
            setattr(place, name, dying(getattr(place, name)))
        action()
        os._exit(0)
    finally:
        os._exit(8)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which only Unix has")
def test_a_kill_at_any_point_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    good = {step: state_of(step) for step in (1, 2, 3, 4)}
    for step in (1, 2):
        save_checkpoint(tmp_path / "start", step, good[step], {"n": step})
    newest = []
    # Writing tensors is much the same all along; from 64 on come the last of them, the names, and deleting step 1.
    for calls in itertools.chain((0, 1, 16, 17, 18, 40), itertools.count(64)):
        folder = tmp_path / str(calls)
        shutil.copytree(tmp_path / "start", folder)
        died = killed_after(calls, partial(save_checkpoint, folder, 3, good[3], {"n": 3}, keep=2))
        found = load_checkpoint(folder)
        assert found.document == {"n": found.step}
        for step in checkpoint_steps(folder):
            same(load_checkpoint(folder, step).state, good[step])
        save_checkpoint(folder, 4, good[4], {"n": 4}, keep=2)
        assert names(folder) == complete(found.step, 4)
        newest.append(found.step)
        if not died:
            break
    # Both sides of the moment in which the new one becomes good were met, in this order.
    assert len(newest) > 20 and newest[8] == 2 and newest[-2:] == [3, 3] and newest == sorted(newest)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a limit on file sizes, which only Unix has")
def test_a_limit_of_the_system_on_file_sizes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", 1, state_of(1), {})
    code = f"""
import resource, signal, sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent / "helpers")!r}, {str(Path(kbench.__file__).parents[1])!r}]
from checkpoint_states import state_of
from kbench.errors import CannotRunError
from kbench.train.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    save_checkpoint(Path({str(tmp_path / "run")!r}), 2, state_of(2), {{}}, keep=1)
except CannotRunError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout and "model_00000002.bin" in done.stdout, done.stderr
    assert names(tmp_path / "run") == complete(1)


# The folder


def test_the_next_save_cleans_up_but_touches_nothing_foreign(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), {})
    foreign = ["model_00000099.bin", "notes.txt", "train_1.json", "DONE_7"]
    for name in [*foreign, ".kbench-tmp-model_00000002.bin-abcd", "train_00000050.json", "state_00000050_00000.bin"]:
        (tmp_path / name).write_text("x")
    assert checkpoint_steps(tmp_path) == [1]
    save_checkpoint(tmp_path, 2, state_of(2), {})
    assert names(tmp_path) == sorted([*complete(1, 2), *foreign])


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), {})
    monkeypatch.setattr(checkpoint, "remove_checkpoint", no_space)
    assert save_checkpoint(tmp_path, 2, state_of(2), {}, keep=1) == ()
    assert checkpoint_steps(tmp_path) == [1, 2]


def test_a_checkpoint_of_another_program(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, state_of(5), {})
    (tmp_path / "train_00000005.json").unlink()
    with pytest.raises(UsageError, match=r"train_00000005.json does not exist; .*--weights"):
        load_checkpoint(tmp_path)


def test_folders_are_proven_before_training(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []
    save_checkpoint(tmp_path / "a" / "b", 12, state_of(1), {})
    with pytest.raises(UsageError, match="checkpoint of step 12; go on with --resume"):
        prepare_folder(tmp_path / "a" / "b")
    prepare_folder(tmp_path / "a" / "b", resuming=True)
    (tmp_path / "file").touch()
    with pytest.raises(CannotRunError, match="file"):
        prepare_folder(tmp_path / "file")
    with pytest.raises(CannotRunError, match="file"):
        save_checkpoint(tmp_path / "file", 1, state_of(1), {})


def test_a_log_without_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint leaves one; there is nothing to resume."""
    (tmp_path / "main.log").write_text("s:0 tel:5.5375\n")
    with pytest.raises(UsageError, match=r"left no checkpoint; delete main.log and train.jsonl there, or choose"):
        prepare_folder(tmp_path)
    prepare_folder(tmp_path, resuming=True)
    (tmp_path / "main.log").write_text("")
    prepare_folder(tmp_path)


@pytest.mark.parametrize("name", ["model_00000001.bin", "state_00000001_00000.bin", "train_00000001.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), {})
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=f"{name} is not a regular file"):
        load_checkpoint(tmp_path)
