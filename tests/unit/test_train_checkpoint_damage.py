"""Damaged and foreign checkpoints: an error that names the file, never another run's numbers in silence."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_states import complete, names, same, state_of
from kbench.errors import UsageError
from kbench.train.checkpoint import load_checkpoint, save_checkpoint


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


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def digit(path: Path) -> None:
    """One bit of the last number of the run: "10" becomes "11", which is as good a number."""
    text = path.read_text()
    changed = text.replace('"step": 10\n', '"step": 11\n')
    assert changed != text
    path.write_text(changed)


TENSORS = ("model_{}.bin", "state_{}_00000.bin")
DAMAGES = [
    *((file, damage) for file in TENSORS for damage in (cut, longer, empty, flipped, Path.unlink)),
    *(("train_{}.json", damage) for damage in (half, digit, empty, Path.unlink)),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_damage_is_an_error_that_names_the_file_and_the_way_back(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
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
