"""Files that are costly to make again, one per entry, under kbench's cache folder.

An entry is a checksum, a JSON object and bytes. It is written beside its place and moved there, so that two
processes never see half of one; what cannot be read is made again, and a folder that cannot be written to only
costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbench.device.cache_folder import cache_folder

logger = logging.getLogger(__name__)

# The format is in the first line: a later one makes old entries unreadable, that is, made again.
_MAGIC = b"kbench cache entry 1\n"

Key = Mapping[str, Any]


def load(kind: str, key: Key) -> tuple[dict[str, Any], bytes] | None:
    """The entry stored under `key`, or None. Warns about an entry that is there but is not whole."""
    path = _path(kind, key)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read the cache entry %s (%s): made again", path, error.strerror)
        return None
    entry = _decode(content, key)
    if entry is None:
        logger.warning("the cache entry %s is damaged: made again", path)
    return entry


def store(kind: str, key: Key, fields: Mapping[str, Any], data: bytes = b"") -> bool:
    """Store `fields` and `data` under `key`; False where the folder cannot be written to."""
    path = _path(kind, key)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(_encode(key, fields, data))
        os.replace(temporary, path)
    except OSError as error:
        logger.debug("cannot write the cache entry %s: %s", path, error)
        with contextlib.suppress(OSError):
            if temporary:
                os.unlink(temporary)
        return False
    return True


def _path(kind: str, key: Key) -> Path:
    return cache_folder() / kind / hashlib.sha256(_json(key)).hexdigest()


def _encode(key: Key, fields: Mapping[str, Any], data: bytes) -> bytes:
    body = _json({"key": dict(key), "fields": dict(fields)}) + b"\n" + data
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(content: bytes, key: Key) -> tuple[dict[str, Any], bytes] | None:
    if not content.startswith(_MAGIC):
        return None
    checksum, _, body = content[len(_MAGIC) :].partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        return None
    head, _, data = body.partition(b"\n")
    try:
        entry = json.loads(head)
        # Another key under the same name would be a broken hash or a file that somebody renamed.
        same = _json(entry["key"]) == _json(key)
        fields = entry["fields"]
    except (ValueError, KeyError, TypeError):  # whole, but written by something else
        return None
    return (fields, data) if same and isinstance(fields, dict) else None


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
