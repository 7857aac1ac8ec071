"""Reading run files row by row, for those who keep little of a row: a file may hold a hundred thousand of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from kbench.errors import UsageError
from kbench.results.compressed import was_cut
from kbench.results.schema import Row, upgraded
from kbench.results.store import header_of, open_run, row_of, unreadable


class Scan:
    """A run file, read once: `header` at once, then the rows by iterating, after which `footer` and `warnings` are
    what `kbench.results.store.Run` has of them. A compressed file that was cut off is an error here and no warning:
    held against half a baseline, half of the rows would be new.

    path: the file, or what to call `data`, its text where it comes from elsewhere. Raises UsageError as `read_run`.
    """

    def __init__(self, path: Path | str, data: bytes | None = None):
        self.path = path
        self.footer: dict[str, Any] | None = None
        self.warnings: list[str] = []
        try:
            self._file: BinaryIO = open_run(Path(path)) if data is None else BytesIO(data)
            self.header = header_of(path, self._file.readline().decode("utf-8", errors="replace").removesuffix("\n"))
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(path, error) from error

    @property
    def id(self) -> str:
        return str(self.header.get("id", Path(self.path).name.split(".")[0]))

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """The rows with the numbers of their lines."""
        with self._file:
            try:
                yield from self._rows()
            except (OSError, EOFError, zlib.error) as error:
                raise unreadable(self.path, error) from error

    def _rows(self) -> Iterator[tuple[int, Row]]:
        decode = json.JSONDecoder().decode  # json.loads would look for the encoding of each line
        number = 1
        for number, line in enumerate(self._file, start=2):
            try:
                data = decode(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep to be a row
                if self._file.readline():
                    raise UsageError(
                        f"{self.path}:{number} is not JSON", "the file was damaged after it was written"
                    ) from error
                if was_cut(self._file):
                    raise EOFError from error
                where = f"{self.path}: line {number} is cut off and was left out"
                self.warnings.append(f"{where}: the run was killed there")
                return
            if isinstance(data, dict) and data.get("kind") == "footer":
                self.footer = data
                continue
            self.footer = None  # the run went on after it
            yield number, upgraded(row_of(self.path, number, data, times=False), self.header)
        if was_cut(self._file):
            raise EOFError
