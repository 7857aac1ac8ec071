"""The safetensors format: a JSON header with every tensor's type, shape and place, then the tensors' bytes.

A reader of our own, because the format is small and a file of weights comes from anywhere: nothing is believed that the
file's size does not bear out, and errors name the file and the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from kbench.train.weights_binary import BF16, FP16, FP32, Array, DamagedFile, TensorFile

HEADER_LIMIT = 100_000_000  # the format's own
_LENGTH_BYTES = 8
# The types that are read; tensors of the others can be there, but only to be passed over.
READ: dict[str, np.dtype[Any]] = {"F32": FP32, "BF16": BF16, "F16": FP16}
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
_MENDING = "copy or download it again"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: type by the format's name, shape, first byte and the one after the last, in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file that begins with `start` (9 bytes or more) can be meant as one."""
    return start[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_header(file: TensorFile) -> tuple[dict[str, Entry], dict[str, str]]:
    """Every tensor by name, and the metadata. The file is at its start. Raises DamagedFile.

    Proven: the header fits and is JSON of the right form without repeated names; each tensor has the bytes that its
    type and shape ask for; tensors fill the file without overlap or gaps.
    """
    path = file.path
    if file.size < _LENGTH_BYTES:
        raise DamagedFile(f"{path} has {file.size} bytes, fewer than a safetensors header", _MENDING)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > HEADER_LIMIT:
        raise DamagedFile(f"{path}: a header of {length} bytes, and the format allows {HEADER_LIMIT}")
    data = _LENGTH_BYTES + length
    if data > file.size:
        raise DamagedFile(f"{path} is cut off: its header alone needs {data} bytes, and it has {file.size}", _MENDING)
    header = _json(file, length)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFile(f"{path}: __metadata__ has to hold strings")
    entries = {name: _entry(file, name, value, data) for name, value in header.items()}
    _require_filled(file, entries, data)
    return entries, metadata


def read_into(file: TensorFile, name: str, entry: Entry, out: Array) -> None:
    """Fill `out` (float32, contiguous, of the entry's shape) with one tensor. Raises DamagedFile."""
    if entry.dtype not in READ:
        raise DamagedFile(f"{file.path}: {name} is {entry.dtype}, and weights are read from {', '.join(READ)}")
    file.seek(entry.begin)
    file.read_tensor(out, READ[entry.dtype], name)


def header_bytes(
    shapes: Sequence[tuple[str, tuple[int, ...]]], stored: np.dtype[Any], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file that holds tensors of one type, one after the other in this order."""
    dtype = next(name for name, of in READ.items() if of == stored)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in shapes:
        end = offset + math.prod(shape) * stored.itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file into memory want tensors aligned
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _json(file: TensorFile, length: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        # RecursionError: brackets can be nested deeper than the parser goes.
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{file.path}: its header is not proper JSON ({str(error)[:100]})", _MENDING) from error
    if not isinstance(header, dict):
        raise DamagedFile(f"{file.path}: its header is not a JSON object")
    return header


def _entry(file: TensorFile, name: str, value: Any, data: int) -> Entry:
    shown = f"{file.path}: tensor {name[:80]!r}"
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise DamagedFile(f"{shown} lacks a proper dtype, shape or data_offsets")
    if dtype not in _BYTES:
        raise DamagedFile(f"{shown} has the unknown dtype {dtype[:20]!r}")
    begin, end = data + offsets[0], data + offsets[1]
    needed = math.prod(shape) * _BYTES[dtype]
    if end - begin != needed:
        raise DamagedFile(f"{shown} takes {end - begin} bytes, and {dtype} {shape} needs {needed}")
    if end > file.size:
        raise DamagedFile(f"{file.path} is cut off in {name[:80]!r}: {file.size} bytes, {end} are needed", _MENDING)
    return Entry(dtype, tuple(shape), begin, end)


def _counts(value: Any) -> TypeGuard[list[int]]:
    # type(), because True is an int too.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _require_filled(file: TensorFile, entries: Mapping[str, Entry], data: int) -> None:
    at, before = data, "its header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps" if entry.begin < at else "leaves a gap after"
            raise DamagedFile(f"{file.path}: tensor {name[:80]!r} {what} {before}")
        at, before = entry.end, repr(name[:80])
    if at != file.size:
        raise DamagedFile(f"{file.path} is too long: {file.size} bytes, and its tensors end at {at}", _MENDING)
