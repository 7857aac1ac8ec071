"""Token files (llm.c's format, `*_train*.bin`) and the tokens that training reads.

A token file is a header of 256 int32, (magic, version, number of tokens, zeros), then the tokens as uint16; all of it
little-endian.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kbench.errors import CannotRunError, UsageError

Ids = npt.NDArray[np.uint16]

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
LARGEST_ID = 2**16 - 1
MOST_TOKENS = 2**31 - 1  # the header's count is an int32

# What a file is that begins with another magic number of the same tools. "the file holds ..." goes before it.
KINDS = {
    MAGIC: "tokens of 16 bits",
    20240801: "tokens of 32 bits, for Llama 3, and only those of 16 bits can be read",
    20240522: "multiple-choice questions",
    20240326: "a model's weights",
    20240327: "a model's reference values",
    20240527: "the state of an optimizer",
    20240328: "a tokenizer",
}

# Below this many tokens in all, files are searched for wrong ids when they are opened, in well under a second; in
# larger ones every batch is searched when it is read.
SEARCHED_WHEN_OPENED = 2**28
_CHUNK = 2**24  # tokens a step of a search: a block of 32 MiB needs no memory to speak of
_PRINTED = 2**16  # tokens at each end that a fingerprint covers: it has to be cheap for files of gigabytes


@dataclass(frozen=True, eq=False)
class Shard:
    """Tokens that lie side by side: a file, or a part of one, or a text.

    name: of the file, for messages. ids: (count,) uint16, memory-mapped or not. first: where in the file it begins,
    in tokens.
    """

    name: str
    ids: Ids
    first: int = 0

    @property
    def count(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> int:
        """Tells one shard's contents from another's: a CRC-32 of its first and last 65,536 tokens."""
        return zlib.crc32(self.ids[-_PRINTED:].tobytes(), zlib.crc32(self.ids[:_PRINTED].tobytes()))

    def largest(self) -> int:
        """The largest id."""
        return max(int(self.ids[start : start + _CHUNK].max()) for start in range(0, self.count, _CHUNK))

    def part(self, start: int, stop: int) -> Shard:
        """Its tokens from `start` on and before `stop`."""
        return Shard(self.name, self.ids[start:stop], self.first + start)

    def require_vocabulary(self, vocab: int, start: int = 0, stop: int | None = None) -> None:
        """Raises UsageError, naming file, position and id, where one of its tokens is not below `vocab`."""
        if vocab > LARGEST_ID:
            return
        stop = self.count if stop is None else stop
        for begin in range(start, stop, _CHUNK):
            chunk = self.ids[begin : min(begin + _CHUNK, stop)]
            if chunk.size and int(chunk.max()) >= vocab:
                at = int(np.argmax(chunk >= vocab))
                raise UsageError(
                    f"{self.name}: token {self.first + begin + at} is {chunk[at]}, and the model's vocabulary ends at "
                    f"{vocab - 1}",
                    "choose a model with the vocabulary that the file was made for (50257 for GPT-2), or make the file "
                    "again with `kbench data tokens --tokenizer bytes`",
                )


@dataclass(frozen=True)
class Tokens:
    """What training or validation reads: shards in their order, and the vocabulary that their ids have to be below."""

    shards: tuple[Shard, ...]
    vocab: int

    @property
    def count(self) -> int:
        return sum(shard.count for shard in self.shards)


def held_out(count: int) -> int:
    """How many tokens of a source that comes in one piece are kept for validation: the last tenth."""
    return count // 10


def read_header(path: Path) -> list[int]:
    """The 256 numbers at the start of one of the formats' files. Raises UsageError, naming it, where it has none."""
    with readable(path) as file:
        head = file.read(HEADER_BYTES)
    if not head:
        raise UsageError(f"{path} is empty")
    if len(head) < HEADER_BYTES:
        raise UsageError(f"{path} ends after {len(head)} bytes, inside its header of {HEADER_BYTES}")
    return [int(number) for number in np.frombuffer(head, "<i4")]


@contextmanager
def readable(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading. Raises UsageError, naming it, where it is not there or is not a regular file."""
    try:
        # A pipe would lose what is read of it to find out what it holds; opening one could wait for ever.
        if path.exists() and not path.is_file():
            what = "a folder, not a file" if path.is_dir() else "not a regular file"
            raise UsageError(f"{path} is {what}", f"name its files, as in '{path}/*.bin'" if path.is_dir() else "")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def require_kind(path: Path, header: list[int], magic: int, version: int, kind: str) -> None:
    """Raises UsageError, naming the file, unless a header has this magic number and version."""
    if header[0] != magic:
        what = f"the file holds {KINDS[header[0]]}" if header[0] in KINDS else f"it begins with {header[0]}"
        raise UsageError(f"{path} is not a {kind} file: {what}; such a file begins with {magic}")
    if header[1] != version:
        raise UsageError(f"{path} is a {kind} file of version {header[1]}, and only version {version} can be read")


def read_tokens(path: Path) -> Shard:
    """A token file, memory-mapped. Raises UsageError, naming the file and the reason, where it is not a whole one."""
    header = read_header(path)
    require_kind(path, header, MAGIC, VERSION, "token")
    count = header[2]
    size = path.stat().st_size - HEADER_BYTES
    if count < 0:
        raise UsageError(f"{path}: its header counts {count} tokens", "the file is damaged: make it again")
    if size % 2:
        raise UsageError(f"{path} ends in the middle of a token", "the file is cut off or damaged: make it again")
    if size != 2 * count:
        raise UsageError(
            f"{path}: its header counts {count} tokens, and the file holds {size // 2}",
            "the file is cut off or damaged: make it again",
        )
    if count == 0:
        raise UsageError(f"{path} holds no tokens")
    try:
        return Shard(str(path), np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(count,)))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def is_token_file(path: Path) -> bool:
    """Whether a file is to be read as a token file: by its name, or because it begins like one of the formats'.

    Raises UsageError where it cannot be read.
    """
    if path.suffix == ".bin":
        return True
    with readable(path) as file:
        head = file.read(4)
    return len(head) == 4 and int(np.frombuffer(head, "<i4")[0]) in KINDS


def write_tokens(path: Path, ids: npt.NDArray[np.integer], remedy: str = "choose another place") -> None:
    """Write a token file in one step: a reader sees the old file or the new one.

    ids: (count,) integers from 0 to 65,535. remedy: what to do where it cannot be written. Raises UsageError where
    there are none or they are out of range, and CannotRunError where the file cannot be written.
    """
    if ids.ndim != 1 or not 0 < ids.size <= MOST_TOKENS:
        raise UsageError(f"{path}: a token file holds 1 to {MOST_TOKENS} tokens, not {ids.size}")
    if int(ids.min()) < 0 or int(ids.max()) > LARGEST_ID:
        raise UsageError(f"{path}: tokens from {ids.min()} to {ids.max()} do not fit 16 bits")
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, VERSION, ids.size
    chunks = (ids[start : start + _CHUNK].astype("<u2").tobytes() for start in range(0, ids.size, _CHUNK))
    replace_bytes(path, chain([header.tobytes()], chunks), remedy)


def replace_bytes(path: Path, pieces: Iterable[bytes], remedy: str) -> None:
    """Replace a file in one step by the pieces given. Raises CannotRunError; the old file then stays."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a name must not take the place of a device
            raise CannotRunError(f"cannot write {path}: it is there, and is not a regular file", remedy)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path) as file:
            for piece in pieces:
                file.write(piece)
    except OSError as error:
        raise CannotRunError(f"cannot write {path}: {error.strerror or error}", remedy) from error


@contextmanager
def _beside(path: Path) -> Iterator[BinaryIO]:
    """A new file in the same folder that takes the place of `path` once it is whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name with none of the contents
        os.chmod(temporary, 0o644)  # mkstemp makes it private; data is as readable as any other file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
