"""What files of weights share: tensors read and written in chunks, rounding, finite values, replacing in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kbench.errors import CannotRunError, UsageError
from kbench.train.model import Model

Array = npt.NDArray[Any]

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FP32: np.dtype[Any] = np.dtype(np.float32)
FP16: np.dtype[Any] = np.dtype(np.float16)
# How weights may be stored by what is written here, by the names of kbench's dtypes.
STORED = {"fp32": FP32, "bf16": BF16}
# Elements at a time: conversions and tests need temporaries, and tensors of large models have gigabytes.
CHUNK = 1 << 22
# Files that are not finished yet start so: no reader takes them for anything, and the next writer may delete them.
TEMPORARY = ".kbench-tmp-"


class DamagedFile(UsageError):
    """A file that is missing, or whose content is not what its kind demands."""


class TensorFile:
    """A binary file read front to back, or from given offsets. A context manager.

    size: in bytes. crc: CRC-32 of all that was read so far, if `checksum`. Raises DamagedFile where the file is missing
    or shorter than what is asked of it, UsageError where it cannot be read.
    """

    def __init__(self, path: Path, *, checksum: bool = False) -> None:
        self.path = path
        self.crc = 0
        self._checksum = checksum
        try:
            # Opening a pipe could wait for ever.
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise UsageError(f"{path} is not a regular file")
            self._file: FileIO = path.open("rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size
        except FileNotFoundError as error:
            raise DamagedFile(f"{path} does not exist") from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def seek(self, offset: int) -> None:
        self._file.seek(offset)

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def read_tensor(self, out: Array, stored: np.dtype[Any], name: str) -> None:
        """Fill `out` (contiguous) with the elements that follow, stored as `stored` and converted to out's dtype.

        16-bit floats become float32 exactly. Raises DamagedFile, naming the tensor `name` and the element, where a
        value is not finite.
        """
        flat = out.reshape(-1)
        same = out.dtype == stored
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            raw = part if same else np.empty(part.size, stored)
            self._fill(raw.view(np.uint8).data)
            bad = first_non_finite(raw)
            if bad is not None:
                at = ", ".join(str(int(i)) for i in np.unravel_index(start + bad, out.shape))
                raise DamagedFile(
                    f"{self.path}: {name}[{at}] is {float(raw[bad])}, and weights have to be finite",
                    "the run that wrote it had diverged, or the file was damaged",
                )
            if not same:
                part[...] = raw.astype(out.dtype)

    def _fill(self, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                count = self._file.readinto(buffer[done:])
                if not count:
                    raise DamagedFile(f"{self.path} ends at {self._file.tell()} bytes, where more are needed")
                done += count
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if self._checksum:
            self.crc = zlib.crc32(buffer, self.crc)


def first_non_finite(values: Array) -> int | None:
    """The index of the first NaN or infinity of a flat array, or None."""
    finite = _finite_bf16(values) if values.dtype == BF16 else np.isfinite(values)
    return None if finite.all() else int(np.argmin(finite))


def _finite_bf16(values: Array) -> npt.NDArray[np.bool_]:
    # NaN and infinity have all exponent bits set. numpy's own test of bf16 goes element by element.
    return (values.view(np.uint16) & np.uint16(0x7F80)) != np.uint16(0x7F80)


def require_tensors(model: Model, tensors: Mapping[str, Array]) -> None:
    """Prove that `tensors` are the 16 of `model`, in their shapes, as float32 or bf16. Raises ValueError."""
    if set(tensors) != {p.name for p in model.parameters}:
        raise ValueError(f"tensors {sorted(tensors)}: a model has {[p.name for p in model.parameters]}")
    for parameter in model.parameters:
        array = tensors[parameter.name]
        if array.shape != parameter.shape or array.dtype not in (FP32, BF16):
            raise ValueError(f"{parameter.name} is {array.dtype} {array.shape}, not floats {parameter.shape}")


def tensor_buffers(array: Array, stored: np.dtype[Any], name: str) -> Iterator[memoryview]:
    """The bytes of `array` as `stored`, rounded to nearest even, in chunks.

    Raises CannotRunError where a value is not finite after rounding, because no reader would take the file.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        # The largest float32 values round to infinity in bf16: the test below names them.
        with np.errstate(over="ignore"):
            part = np.ascontiguousarray(flat[start : start + CHUNK].astype(stored, copy=False))
        bad = first_non_finite(part)
        if bad is not None:
            at = ", ".join(str(int(i)) for i in np.unravel_index(start + bad, array.shape))
            raise CannotRunError(f"{name}[{at}] is {float(part[bad])} and cannot be saved", "the run has diverged")
        yield part.view(np.uint8).data


@dataclass(frozen=True)
class Staged:
    """A file that is complete on the disk under a temporary name. size in bytes, crc: its CRC-32."""

    path: Path
    temporary: Path
    size: int
    crc: int

    def commit(self) -> None:
        """Give it its name, in one step. Raises OSError."""
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        """Delete it, if it has not got its name."""
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)


def stage(path: Path, buffers: Iterable[bytes | memoryview]) -> Staged:
    """Write `buffers` to a temporary file beside `path`, down to the disk. Raises CannotRunError; leaves no rubbish."""
    temporary = path.parent / f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"
    size = crc = 0
    try:
        if path.exists() and not path.is_file():  # a name must not take the place of a device
            raise CannotRunError(f"cannot write {path}: it is there, and is not a regular file", "choose another name")
        with temporary.open("xb", buffering=0) as file:
            for buffer in buffers:
                write_all(file, buffer)
                size += len(buffer)
                crc = zlib.crc32(buffer, crc)
            os.fsync(file.fileno())  # some full disks only tell now
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise
    return Staged(path, temporary, size, crc)


def write_all(file: FileIO, buffer: bytes | memoryview) -> None:
    """Write the whole of `buffer` to an unbuffered file, which may take less at a time. Raises OSError."""
    view = memoryview(buffer)
    while view:
        view = view[file.write(view) or 0 :]


def replace_files(staged: Iterable[Staged]) -> None:
    """Give files their names, in order, down to the disk. Raises CannotRunError; what has no name yet is deleted."""
    waiting = list(staged)
    try:
        for file in waiting:
            try:
                file.commit()
                sync_folder(file.path.parent)
            except OSError as error:
                raise unwritable(file.path, error) from error
    finally:
        for file in waiting:
            file.discard()


def sync_folder(folder: Path) -> None:
    """Make names survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot do it for folders; there is nothing better then.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> CannotRunError:
    hint = "free some space, or choose another folder" if error.errno == errno.ENOSPC else "choose another folder"
    return CannotRunError(f"cannot write {path}: {error.strerror or error}", hint)


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {error.strerror or error}")
