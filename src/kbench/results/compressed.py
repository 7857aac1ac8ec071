"""Compressed run files: read as far as they go, also where their writer was killed."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

MAGIC = b"\x1f\x8b"  # what every gzip file begins with (RFC 1952, 2.3.1)
_PIECE = 1 << 16  # bytes read at once
_GZIP = 16 + zlib.MAX_WBITS  # zlib's word for "with gzip's header and checksum"


class Unpacked(io.RawIOBase):
    """The text of a gzip file, one stream or several one after the other. One that was cut off ends where it was cut:
    `cut` says so, once its end was reached.

    Raises OSError; reading raises gzip.BadGzipFile or zlib.error for what is damaged or no gzip at all.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._stream = zlib.decompressobj(_GZIP)
        self._begun = False  # whether the stream has had any input
        self._streams = 0  # that came to their end
        self.cut = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # the stubs' own type is private
        found = self._read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def _read(self, most: int) -> bytes:
        while True:
            packed = self._stream.unconsumed_tail or self._file.read(_PIECE)
            if self._stream.eof:
                # Zeros pad the ends of streams, on tapes and in some archives.
                packed = (self._stream.unused_data + packed).lstrip(b"\0")
                self._stream, self._begun, self._streams = zlib.decompressobj(_GZIP), False, self._streams + 1
            if not packed:
                self.cut = self._begun or not self._streams
                return b""
            self._begun = True
            try:
                found = self._stream.decompress(packed, most)
            except zlib.error as error:
                raise gzip.BadGzipFile(str(error).removeprefix("Error -3 while decompressing data: ")) from error
            if found:
                return found


def is_compressed(path: Path, file: io.BufferedReader) -> bool:
    """Whether an open file is compressed, by its name or by how it begins, of which nothing is taken: a pipe gives its
    bytes once. Raises OSError."""
    return path.name.endswith(".gz") or file.peek(len(MAGIC)).startswith(MAGIC)


def was_cut(file: object) -> bool:
    """Whether a file that `kbench.results.store.open_run` opened and that was read to its end had lost a part of it."""
    raw = getattr(file, "raw", None)
    return isinstance(raw, Unpacked) and raw.cut
