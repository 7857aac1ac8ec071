"""What an export needs is proven before any training."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.errors import CannotRunError, UsageError
from kbench.train.model import PRESETS
from kbench.train.weights import require_exportable

MODEL = PRESETS["nano"]


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    require_exportable(tmp_path / "new" / "a.bin", MODEL)
    require_exportable(tmp_path / "a.safetensors", MODEL)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("config", "words"), [('{"n_head": 8}', r"config\.json is of another model"), ("{", "is not JSON")]
)
def test_a_config_that_belongs_to_others(config: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=words):
        require_exportable(tmp_path / "a.safetensors", MODEL)
    require_exportable(tmp_path / "a.bin", MODEL)


@pytest.mark.parametrize(("name", "words"), [("a.pt", r"neither \.bin nor \.safetensors"), ("b.bin", "no file")])
def test_names_that_are_no_files_of_weights(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "b.bin").mkdir()
    with pytest.raises(UsageError, match=words):
        require_exportable(tmp_path / name, MODEL)


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CannotRunError, match="cannot write"):
        require_exportable(Path("/proc/kbench/a.bin"), MODEL)


def test_a_name_too_long_for_the_disk_is_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match="cannot write .*: File name too long"):
        require_exportable(tmp_path / f"{'x' * 260}.bin", MODEL)
    assert not list(tmp_path.iterdir())
