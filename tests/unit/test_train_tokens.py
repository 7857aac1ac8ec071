"""Token files: what is written comes back, and every malformed one is an error of one line with the reason."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from kbench.errors import CannotRunError, UsageError
from kbench.train.tokens import HEADER_BYTES, Shard, is_token_file, read_tokens, write_tokens

IDS = np.array([50256, 0, 1, 65535, 300], np.uint16)


def raw(*header: int, body: bytes = b"") -> bytes:
    numbers = np.zeros(256, "<i4")
    numbers[: len(header)] = header
    return numbers.tobytes() + body


def test_a_file_is_as_the_format_says_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokens.bin"
    write_tokens(path, IDS)
    assert path.read_bytes() == raw(20240520, 1, 5, body=b"\x50\xc4\x00\x00\x01\x00\xff\xff\x2c\x01")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    shard = read_tokens(path)
    assert isinstance(shard.ids, np.memmap) and shard.name == str(path)
    np.testing.assert_array_equal(shard.ids, IDS)
    assert shard.largest() == 65535
    write_tokens(path, IDS[:1])
    assert read_tokens(path).count == 1 and [each.name for each in path.parent.iterdir()] == ["tokens.bin"]


MALFORMED = {
    "empty": (b"", "is empty"),
    "a part of the header": (raw(20240520, 1, 5)[:1000], "ends after 1000 bytes, inside its header of 1024"),
    "the header alone": (raw(20240520, 1, 5), "its header counts 5 tokens, and the file holds 0"),
    "no tokens": (raw(20240520, 1, 0), "holds no tokens"),
    "odd length": (raw(20240520, 1, 2, body=b"abc"), "ends in the middle of a token"),
    "wrong magic": (raw(7, 1, 2, body=b"abcd"), "it begins with 7; such a file begins with 20240520"),
    "wrong version": (raw(20240520, 2, 2, body=b"abcd"), "a token file of version 2, and only version 1"),
    "count above the size": (raw(20240520, 1, 3, body=b"abcd"), "counts 3 tokens, and the file holds 2"),
    "count below the size": (raw(20240520, 1, 1, body=b"abcd"), "counts 1 tokens, and the file holds 2"),
    "negative count": (raw(20240520, 1, -2, body=b"abcd"), "its header counts -2 tokens"),
    "32 bits": (raw(20240801, 7, 1, body=b"abcd"), "tokens of 32 bits, for Llama 3, and only those of 16 bits"),
    "weights": (raw(20240326, 3, 1024, body=b"abcd"), "the file holds a model's weights"),
    "text": (b"It was a dark and stormy night. " * 40, "it begins with"),
}


@pytest.mark.parametrize(("content", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_one_line_with_its_name_and_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_tokens(path)
    assert str(path) in str(error.value) and reason in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} is a folder, not a file; name its files"):
        read_tokens(tmp_path)
    with pytest.raises(UsageError, match=r"none.bin: no such file"):
        read_tokens(tmp_path / "none.bin")
    with pytest.raises(UsageError, match="cannot read .*: File name too long"):
        read_tokens(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(UsageError, match="not a regular file"):
        read_tokens(tmp_path / "pipe.bin")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret.bin"
    write_tokens(path, IDS)
    path.chmod(0)
    with pytest.raises(UsageError, match=r"cannot read .*secret.bin: Permission denied"):
        read_tokens(path)


def test_the_kind_of_a_file_is_known_by_its_name_or_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "b.txt").write_bytes(raw(20240520, 1, 0))
    (tmp_path / "c.txt").write_bytes(b"ab")
    assert [is_token_file(tmp_path / name) for name in ("a.bin", "a.txt", "b.txt", "c.txt")] == [
        True,
        False,
        True,
        False,
    ]
    with pytest.raises(UsageError, match="no such file"):
        is_token_file(tmp_path / "none.txt")


@pytest.mark.parametrize("ids", [np.array([], np.uint16), np.array([-1]), np.array([65536]), np.zeros((2, 2), int)])
def test_what_does_not_fit_is_not_written(tmp_path: Path, ids: np.ndarray) -> None:
    with pytest.raises(UsageError, match=r"t\.bin: "):
        write_tokens(tmp_path / "t.bin", ids)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.bin"
    write_tokens(path, IDS)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CannotRunError, match=r"cannot write .*tokens.bin: No space left on device; choose another"):
        write_tokens(path, IDS[:2])
    assert [each.name for each in tmp_path.iterdir()] == ["tokens.bin"]
    np.testing.assert_array_equal(read_tokens(path).ids, IDS)


def test_an_id_beyond_the_vocabulary_is_named_with_its_place_in_the_file() -> None:
    shard = Shard("some.bin", IDS)
    shard.require_vocabulary(65536)
    shard.require_vocabulary(50257, 0, 3)
    with pytest.raises(UsageError, match=r"some.bin: token 3 is 65535, and the model's vocabulary ends at 50256"):
        shard.require_vocabulary(50257)
    with pytest.raises(UsageError, match="token 4 is 300, .* ends at 255"):
        shard.part(1, 5).part(3, 4).require_vocabulary(256)


def test_a_search_goes_through_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.train.tokens._CHUNK", 4)
    ids = np.zeros(11, np.uint16)
    ids[10] = 9
    with pytest.raises(UsageError, match="token 10 is 9"):
        Shard("x", ids).require_vocabulary(9)
    assert Shard("x", ids).largest() == 9


def test_a_fingerprint_tells_contents_apart() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    other = ids.copy()
    other[500] += 1
    assert Shard("x", ids).fingerprint == Shard("y", ids.copy()).fingerprint != Shard("x", other).fingerprint


def test_a_file_over_two_gigabytes_is_read_at_its_end(tmp_path: Path) -> None:
    count = 2**30 + 2**20
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.write(raw(20240520, 1, count))
        file.truncate(HEADER_BYTES + 2 * count)  # a hole: it takes no room on the disk
        file.seek(-6, os.SEEK_END)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    shard = read_tokens(path)
    assert list(shard.ids[-4:]) == [0, 7, 8, 9]
    from kbench.train.batches import Batches
    from kbench.train.tokens import Tokens

    batches = Batches(Tokens((shard,), 256), 1, 1, shuffle_seed=None)
    batches.drawn = count - 3
    assert [int(array[0, 0]) for array in next(batches)] == [7, 8]


def test_a_name_does_not_take_the_place_of_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # a device would do the same, and takes root to make
    with pytest.raises(CannotRunError, match=r"cannot write .*pipe: it is there, and is not a regular file"):
        write_tokens(tmp_path / "pipe", np.array([1, 2], np.uint16))
    assert not (tmp_path / "pipe").is_file() and [path.name for path in tmp_path.iterdir()] == ["pipe"]
