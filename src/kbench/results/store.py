"""Run files: one per run under `results/runs/`, written row by row, so that a killed run keeps what it had.

A run file is JSON Lines. Line 1 is the header ("kind": "header"), then one line a row ("kind": "row"), and a
footer ("kind": "footer") if the run came to its end. `results/README.md` describes the fields.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import json
import os
import re
import secrets
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TextIO, cast

from kbench.errors import CannotRunError, UsageError
from kbench.results.compressed import Unpacked, is_compressed, was_cut
from kbench.results.schema import SCHEMA_VERSION, STATUSES, Row, upgraded
from kbench.results.strict_json import dumps

RUNS = "runs"
BASELINES = "baselines"
LATEST = "latest"
TABLES = "tables"
SUFFIX = ".jsonl"
COMPRESSED = SUFFIX + ".gz"


_GZIP = b"\x1f\x8b"  # how its files begin
_ROW = '{"kind": "row", '  # how a row that kbench wrote begins
_NO_RUN = "the first line of a run file has to be a header with a schema"


def new_id(device: Mapping[str, Any], started: datetime) -> str:
    """The name of a record: when and on what, and a random part that keeps two of one second apart."""
    return f"{started:%Y%m%dT%H%M%SZ}-{_slug(str(device.get('name', 'device')))}-{secrets.token_hex(3)}"


def row_key(row: Row) -> tuple[object, ...]:
    """What makes two rows the same experiment: family, version, sizes, dtype, block, params, cache mode, device."""
    sizes, params = tuple(sorted(row.sizes.items())), tuple(sorted(row.params.items()))
    return (row.family, row.version, sizes, row.dtype, row.block, params, row.cache_mode, row.device)


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of experiments that were repeated the last row of each round, in the place of the first."""
    return list({(row_key(row), row.round): row for row in rows}.values())


def require_writable(folder: Path, below: Sequence[str] = (RUNS, TABLES), hint: str = "") -> None:
    """Prove, before any work, that results can be written in `folder` and in the folders `below` it, and leave nothing
    behind.

    None of them need exist. hint: what to do where it cannot be written. Raises CannotRunError.
    """
    # A file is really created, because permission bits say nothing about read-only mounts, quotas and root.
    for needed in (folder, *(folder / name for name in below)):
        existing = needed
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        try:
            with tempfile.NamedTemporaryFile(dir=existing, prefix=".kbench-"):
                pass
        except OSError as error:
            raise unwritable(existing, error, hint) from error


class RunWriter:
    """Writes one run file. Use it as a context manager: leaving it writes the footer.

    folder: the results folder. device: what Device.describe() says; its "name" becomes part of the file name.
    selection: what was asked for, of a run that can go on (`kbench.results.resume`). revisions: which commits the
    kernels are of (`kbench.revision.revisions`). The file is locked as long as it is written. Raises CannotRunError
    when a write fails.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: Mapping[str, Any],
        command: Sequence[str],
        options: Mapping[str, Any],
        kbench_version: str,
        selection: Mapping[str, Any] | None = None,
        revisions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        started = datetime.now(UTC)
        self.id = new_id(device, started)
        self.folder = folder
        self.path = folder / RUNS / (self.id + SUFFIX)
        self._statuses: Counter[str] = Counter()
        self._file = self._open()
        self._write(
            {
                "kind": "header",
                "schema": SCHEMA_VERSION,
                "kbench": kbench_version,
                "id": self.id,
                "started": _stamp(started),
                "command": list(command),
                "device": dict(device),
                "options": dict(options),
                **({"selection": dict(selection)} if selection is not None else {}),
                **({"revisions": list(map(dict, revisions))} if revisions else {}),
            }
        )
        replace_text(folder / LATEST, f"{RUNS}/{self.path.name}\n")

    def append(self, row: Row) -> None:
        """Write one row and hand it to the operating system: from then on, killing this process loses nothing."""
        self._write({"kind": "row", **row.to_dict()})
        self._statuses[row.status] += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if not isinstance(error, CannotRunError):  # the disk that refused a row refuses a footer too
                self._write(
                    {
                        "kind": "footer",
                        "finished": _stamp(datetime.now(UTC)),
                        "rows": self._statuses.total(),
                        "statuses": dict(self._statuses),
                        "ended": _ending(error),
                    }
                )
        finally:
            # Closing tries once more to write what a full disk refused; that error was reported already.
            with contextlib.suppress(OSError):
                self._file.close()

    def _open(self) -> TextIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("x", encoding="utf-8")
        except OSError as error:
            raise unwritable(self.path, error) from error
        lock(file)
        return file

    def _write(self, data: Mapping[str, Any]) -> None:
        try:
            self._file.write(dumps(data) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error


def lock(file: TextIO) -> bool:
    """Take the lock of who writes a run file; whether it was free. The system gives it back when the file is closed,
    also when this process is killed. Where a file system has no locks, it is free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_running(path: Path) -> bool:
    """Whether somebody writes a run file at this moment."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, or no such file
        return False
    return False


@dataclass
class Run:
    """A run file as read back. footer is None if the run was killed; warnings are one line each."""

    path: Path
    header: dict[str, Any]
    rows: list[Row]
    footer: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.header.get("id", self.path.stem))


def read_run(path: Path, family: str = "", times: bool = True) -> Run:
    """Read a run file. A last line that was cut off is dropped with a warning.

    family: the only one whose rows are read; "" reads all. times: see `row_of`. Raises UsageError, naming file and
    line, for a file of another kind or of a newer schema.
    """
    lines, cut = _lines(path)
    run = Run(path, header_of(path, lines[0]), [])
    seen: dict[str, int] = {}
    copies: list[tuple[int, int]] = []
    mark = json.dumps(family, ensure_ascii=False) if family else ""
    for number, line in enumerate(lines[1:], start=2):
        # To read that a row is of another family takes longer than to see that the name does not stand in it.
        if mark not in line and number < len(lines) and line.startswith(_ROW):
            run.footer = None
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:  # brackets can be nested deeper than the parser goes
            if number == len(lines):
                run.warnings.append(f"{path}: line {number} is cut off and was left out: the run was killed there")
                break
            raise UsageError(f"{path}:{number} is not JSON", "the file was damaged after it was written") from error
        if isinstance(data, dict) and data.get("kind") == "footer":
            run.footer = data
        else:
            row = upgraded(row_of(path, number, data, times), run.header)
            run.footer = None  # the run went on after it
            if family and row.family != family:
                continue
            run.rows.append(row)
            if seen.setdefault(line, number) != number:
                copies.append((number, seen[line]))
    run.warnings += duplicates(path, copies)
    if cut and not any("is cut off" in warning for warning in run.warnings):
        run.warnings.append(cut_off(path, len(lines)))
    return run


def duplicates(path: Path | str, copies: Sequence[tuple[int, int]]) -> list[str]:
    """The warning for rows that stand in a file twice, by the lines of the second and the first: no two rows that were
    measured are equal in every sample. They are kept: which of them is too many, nobody knows."""
    if not copies:
        return []
    (again, first), more = copies[0], len(copies) - 1
    others = f", and {more} other {'row is' if more == 1 else 'rows are'} repeated" if more else ""
    return [f"{path}: line {again} repeats line {first}{others}: the file was put together from overlapping parts"]


def cut_off(path: Path | str, lines: int) -> str:
    """The warning for a compressed file that ends too early, after so many lines."""
    return f"{path} is cut off after line {lines}: it is compressed, and its end is missing"


def latest_run(folder: Path) -> Path:
    """The run file that `results/latest` names. Raises UsageError if there is none."""
    try:
        path = folder / (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        if ids := list(run_files(folder)):
            raise UsageError(f"{folder} has no file `latest`", f"name a run; ids there: {_few(ids)}") from error
        raise UsageError(f"{folder} holds no runs", "`kbench sweep` writes one") from error
    if not path.is_file():
        raise UsageError(f"{folder / LATEST} names {path}, which is not there", "run `kbench sweep` again")
    return path


def find_run(folder: Path, name: str) -> Path:
    """The run file that a name stands for: "latest", the path of a file, or an id or a part of it that only one has.

    Raises UsageError if there is none, or more than one.
    """
    if name == LATEST:
        return latest_run(folder)
    if is_path(name):
        return Path(name)
    paths = run_files(folder)
    ids = list(paths)
    found = [known for known in ids if known == name] or [known for known in ids if name and name in known]
    if len(found) != 1:
        kept = folder / BASELINES / (name + COMPRESSED)
        if not found and kept.is_file():
            raise UsageError(
                f"{folder / RUNS} holds no run of the id {name!r}, which is a baseline's name", f"write {kept}"
            )
        what = f"{len(found)} runs with {name!r} in their ids" if found else f"no run of the id {name!r}"
        raise UsageError(f"{folder / RUNS} holds {what}", f"ids there: {_few(found or ids)}")
    return paths[found[0]]


def run_files(folder: Path) -> dict[str, Path]:
    """The run files of a results folder by their ids, in the order of these, which is that of time. Raises UsageError
    for a folder that is there and cannot be looked into: to say that it holds none would be a lie."""
    try:
        names = os.listdir(folder / RUNS)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {folder / RUNS}: {error.strerror or error}", "see who may read it") from error
    # Hidden files are an editor's or a system's own; and an id of dots would be another folder to whoever joins paths.
    files = [folder / RUNS / name for name in names if not name.startswith(".")]
    found = {run_id(path): path for path in files if path.name.endswith(COMPRESSED)}
    found |= {run_id(path): path for path in files if path.name.endswith(SUFFIX)}
    return dict(sorted(found.items()))


def run_id(path: Path) -> str:
    """The id that a run file has by its name."""
    return path.name.removesuffix(COMPRESSED).removesuffix(SUFFIX)


def is_path(name: str) -> bool:
    """Whether the name of a run is that of a file, and not an id."""
    return "/" in name or name.endswith((SUFFIX, COMPRESSED))


def replace_text(path: Path, text: str, hint: str = "") -> None:
    """Replace a file in one step, so that a reader sees the old text or the new.

    hint: what to do where it cannot be written. Raises CannotRunError.
    """
    replace_bytes(path, text.encode("utf-8", errors="replace"), hint)  # a name may hold what is no text


def replace_bytes(path: Path, data: bytes, hint: str = "") -> None:
    """As `replace_text`."""
    # A rename would put a file in the place of a device, for everybody on the machine.
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not an ordinary file"
        raise CannotRunError(f"cannot write {path}: it is {kind}", hint or "choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # mkstemp makes it private; results are as readable as any other file
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise unwritable(path, error, hint) from error


def _lines(path: Path) -> tuple[list[str], bool]:
    """The lines of a run file, and whether it is compressed and has lost its end."""
    try:
        with open_run(path) as file:
            data, cut = file.read(), was_cut(file)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error
    # splitlines() would also break at U+2028 and the like, which JSON strings may hold.
    return data.decode("utf-8", errors="replace").removesuffix("\n").split("\n"), cut


def read_bytes(path: Path) -> bytes:
    """The text of a run file, compressed or not. Raises UsageError for one that cannot be read, and for a compressed
    one that was cut off."""
    try:
        with open_run(path) as file:
            data = file.read()
            if was_cut(file):
                raise EOFError
            return data
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def read_text_of(name: Path | str, data: bytes) -> bytes:
    """The text of a run file that was read already. name: what to call it. Raises UsageError as `read_bytes`."""
    if not data.startswith(_GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(name, error) from error


def open_run(path: Path) -> BinaryIO:
    """Open a run file to read its text, compressed or not. A compressed one that was cut off is read as far as it goes
    (`kbench.results.compressed.was_cut`). Raises OSError; reading raises OSError where a compressed one is damaged."""
    file = path.open("rb")
    try:
        return cast(BinaryIO, io.BufferedReader(Unpacked(file)) if is_compressed(path, file) else file)
    except BaseException:
        file.close()
        raise


def unreadable(path: Path | str, error: Exception) -> UsageError:
    """The error of a run file whose text cannot be read."""
    if isinstance(error, EOFError):
        return UsageError(f"{path} is cut off: it is compressed, and its end is missing", "copy or write it again")
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return UsageError(f"{path} is not what its name says, a file compressed by gzip: {error}")
    return UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


def header_of(path: Path | str, line: str) -> dict[str, Any]:
    """The header that a run file's first line is. Raises UsageError, naming the file, if it is none."""
    if not line.strip():
        raise UsageError(f"{path} is not a run file of kbench: it is empty, or its first line is", _NO_RUN)
    if line.startswith("\ufeff"):
        raise UsageError(f"{path} begins with a byte-order mark, which an editor put there", "save it as plain UTF-8")
    if line.startswith("\ufffd\ufffd"):
        raise UsageError(f"{path} is no UTF-8 text: it begins as UTF-16 does", "save it as plain UTF-8")
    if line.startswith("version https://git-lfs"):
        raise UsageError(f"{path} is only a pointer to a file in Git LFS", "`git lfs pull` fetches the file")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if header is None and line.startswith('{"kind": "header"'):
        raise UsageError(f"{path}:1 is cut off: nothing of the run is left", "copy the file again")
    if not isinstance(header, dict) or header.get("kind") != "header" or not isinstance(header.get("schema"), int):
        raise UsageError(f"{path} is not a run file of kbench", _NO_RUN)
    if header["schema"] > SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by kbench {header.get('kbench', '?')} with schema {header['schema']}, "
            f"and this kbench reads schemas up to {SCHEMA_VERSION}",
            "update kbench",
        )
    return header


def row_of(path: Path | str, number: int, data: Any, times: bool = True) -> Row:
    """The row that a line of a run file is. times: whether times and counts that are none make it no row; else whoever
    reads looks at `Row.time_fault` and `Row.kernel_fault`. Raises UsageError, naming file and line, if it is no row."""
    if isinstance(data, dict) and data.get("kind") == "header":
        raise UsageError(f"{path}:{number} is a second header: run files were put together", "name them one by one")
    if not isinstance(data, dict) or data.pop("kind", None) != "row" or data.get("status") not in STATUSES:
        raise UsageError(f"{path}:{number} is not a row of results")
    try:
        row = Row.from_dict(data)
    except TypeError as error:
        raise UsageError(f"{path}:{number} is not a row of results: {error}") from error
    if times and (fault := row.time_fault or row.kernel_fault):
        raise UsageError(f"{path}:{number} is not a row of results: {fault}")
    return row


def _slug(name: str) -> str:
    # Device names hold spaces, slashes and parentheses; 24 characters tell cards apart.
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24].strip("-") or "device"


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "complete"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {error}"


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _few(ids: Sequence[str]) -> str:
    newest = ", ".join(reversed(ids[-3:]))
    return f"{newest} and {len(ids) - 3} older" if len(ids) > 3 else newest or "none"


def unwritable(path: Path, error: OSError, hint: str = "") -> CannotRunError:
    """The error of a file below the results folder that cannot be written."""
    return CannotRunError(
        f"cannot write {path}: {error.strerror or error}",
        hint or "choose another folder with --results DIR or $KBENCH_RESULTS",
    )
