"""Checkpoints: bit for bit there and back, and no failure at any point costs the last good one."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kbench
from kbench.errors import CannotRunError, UsageError
from kbench.train import checkpoint, weights_binary
from kbench.train.checkpoint import (
    TrainState,
    checkpoint_steps,
    latest_checkpoint,
    load_checkpoint,
    prepare_folder,
    save_checkpoint,
)
from kbench.train.model import Model
from kbench.train.state_file import OptimizerState
from kbench.train.weights import load_weights

MODEL = Model(2, 2, 8, vocab=30, context=6)
DOCUMENT = {"options": {"lr": 3e-4, "use": ["a", "b"]}, "position": 2**60, "window": [0.1, 1 / 3, 5e-324], "none": None}
FILES = ["DONE_{}", "model_{}.bin", "state_{}_00000.bin", "train_{}.json"]


def state_of(seed: int, dtype: str = "bf16", master: bool = True) -> TrainState:
    """A run's tensors, all different from element to element and from seed to seed."""
    source = np.random.default_rng(seed)

    def tensors() -> dict[str, np.ndarray]:
        return {p.name: source.normal(0, 1, p.shape).astype(np.float32) for p in MODEL.parameters}

    params = tensors()
    if dtype == "bf16":
        params = {name: array.astype(ml_dtypes.bfloat16) for name, array in params.items()}
    return TrainState(MODEL, params, OptimizerState(tensors(), tensors(), tensors() if master else None))


def same(found: TrainState, expected: TrainState) -> None:
    assert found.model == expected.model and found.dtype == expected.dtype
    pairs = [(found.params, expected.params)]
    pairs += [(getattr(found.optimizer, kind), getattr(expected.optimizer, kind)) for kind in ("m", "v", "master")]
    for ours, theirs in pairs:
        if theirs is None:
            assert ours is None
            continue
        assert list(ours) == [p.name for p in MODEL.parameters]
        for name, array in theirs.items():
            assert ours[name].dtype == array.dtype
            assert ours[name].tobytes() == array.tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def complete(*steps: int) -> list[str]:
    return sorted(name.format(f"{step:08d}") for step in steps for name in FILES)


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
        died = killed_after(calls, lambda: save_checkpoint(folder, 3, good[3], {"n": 3}, keep=2))  # noqa: B023
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
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(kbench.__file__).parents[1])!r}]
import test_train_checkpoint as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    t.save_checkpoint(Path({str(tmp_path / "run")!r}), 2, t.state_of(2), {{}}, keep=1)
except t.CannotRunError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout and "model_00000002.bin" in done.stdout, done.stderr
    assert names(tmp_path / "run") == complete(1)


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    """The lowest bit of one mantissa: every value stays plausible."""
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model_{}.bin", "state_{}_00000.bin", "train_{}.json"])
@pytest.mark.parametrize("damage", [cut, longer, empty, flipped, Path.unlink])
def test_damage_is_an_error_that_names_the_file_and_the_way_back(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    if file.endswith("json") and damage in (cut, longer, flipped):
        damage = lambda path: path.write_text(path.read_text()[:50])  # noqa: E731
    for step in (5, 10):
        save_checkpoint(tmp_path, step, state_of(step), {"step": step})
    path = tmp_path / file.format("00000010")
    damage(path)
    with pytest.raises(UsageError) as caught:
        load_checkpoint(tmp_path)
    assert path.name in caught.value.message and "\n" not in str(caught.value)
    assert "step 5" in caught.value.hint and "delete" in caught.value.hint
    (tmp_path / "DONE_00000010").unlink()  # what the hint says
    same(load_checkpoint(tmp_path).state, state_of(5))
    if path.exists() or not path.name.endswith("json"):
        save_checkpoint(tmp_path, 6, state_of(6), {})
        assert names(tmp_path) == complete(5, 6)


def test_damage_without_an_older_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, state_of(5), {})
    flipped(tmp_path / "model_00000005.bin")
    with pytest.raises(UsageError, match=r"checksum differs; .*no older checkpoint"):
        load_checkpoint(tmp_path)


def test_files_of_another_step_or_model_are_found_out(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, step, state_of(step), {})
    (tmp_path / "state_00000010_00000.bin").write_bytes((tmp_path / "state_00000005_00000.bin").read_bytes())
    with pytest.raises(UsageError, match="state_00000010"):
        load_checkpoint(tmp_path)
    (tmp_path / "train_00000010.json").write_bytes((tmp_path / "train_00000005.json").read_bytes())
    with pytest.raises(UsageError, match="not the document of step 10"):
        load_checkpoint(tmp_path)


def rewritten(folder: Path, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / f"train_{step:08d}.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: data.update(schema=2), "update kbench"),
        (lambda data: data.update(schema="1"), "not the document"),
        (lambda data: data.update(run=[]), "not the document"),
        (lambda data: data.update(files=[]), "does not list its files"),
        (lambda data: data.update(files={}), "was saved with None"),
        (lambda data: data.update(dtype="fp32"), "fp32 was expected"),
        (lambda data: data.pop("dtype"), "was expected"),
    ],
)
def test_documents_that_do_not_fit(tmp_path: Path, edit: Callable[[dict[str, Any]], None], words: str) -> None:
    save_checkpoint(tmp_path, 5, state_of(5), {})
    rewritten(tmp_path, 5, edit)
    with pytest.raises(UsageError, match=words):
        load_checkpoint(tmp_path)


def header_changed(folder: Path, at: int, value: int) -> None:
    """Change an int of the state's header, and the checksum so that only the reader can notice."""
    import zlib

    path = folder / "state_00000005_00000.bin"
    data = bytearray(path.read_bytes())
    data[4 * at : 4 * at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    rewritten(folder, 5, lambda document: document["files"][path.name].update(crc32=zlib.crc32(data)))


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, 20240326, "starts with"),
        (1, 2, "starts with"),
        (2, 8, "several processes"),
        (3, 1, "several processes"),
        (4, 0, "is too long"),  # master weights are there, but the header denies it
        (4, 2, "several processes"),
        (5, 1, "another program"),
        (10, 6, "is of step 6"),
    ],
)
def test_state_headers_that_cannot_be(tmp_path: Path, at: int, value: int, words: str) -> None:
    save_checkpoint(tmp_path, 5, state_of(5), {})
    header_changed(tmp_path, at, value)
    with pytest.raises(UsageError, match=words):
        load_checkpoint(tmp_path)


def test_a_header_that_promises_master_weights_which_are_not_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, state_of(5, master=False), {})
    header_changed(tmp_path, 4, 1)
    with pytest.raises(UsageError, match="is cut off"):
        load_checkpoint(tmp_path)


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
