"""Compiled libraries on disk: found by the hash of all that went into them, checked before they are loaded."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kbench.device.cache_folder import cache_folder
from kbench.errors import CannotRunError

log = logging.getLogger("kbench.emulator")

# A library cut short by a full disk or a crash would kill the process that maps it, so its digest is appended to
# it: what follows an ELF file's last section is nobody's business.
_MARK = b"kbench-sha256\n"
# A compilation that was killed leaves its work folder behind. None takes this long, so an older one is nobody's.
_ABANDONED_S = 3600
_TRAILER = len(_MARK) + hashlib.sha256().digest_size


def key_of(parts: Iterable[str]) -> str:
    """A name for what `parts` make: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="surrogateescape")  # a path may hold any bytes
        digest.update(f"{len(encoded)}\n".encode() + encoded)
    return digest.hexdigest()[:32]


@functools.cache
def folder() -> Path:
    """Where libraries are kept: $KBENCH_CACHE/emulator, the user's cache or, with a note, a temporary folder."""
    wanted = cache_folder() / "emulator"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            _remove_abandoned(wanted)
            return wanted
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="kbench-"))
        log.warning(
            "cache folder %s cannot be written (%s): using %s, so kernels are compiled again every time",
            wanted, error.strerror, temporary,
        )  # fmt: skip
        return temporary


def _remove_abandoned(cache: Path) -> None:
    """Remove the work folders of compilations that never came to their end."""
    for work in cache.glob(".*.so-*"):
        with contextlib.suppress(OSError):  # another process may be quicker
            if work.is_dir() and time.time() - work.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(work, ignore_errors=True)


def library(name: str, make: Callable[[Path], None]) -> Path:
    """The library `name` of the cache, made by `make(path)` if it is missing or damaged.
    Raises CannotRunError if it cannot be written.

    Two processes at once may both make it; whichever finishes last replaces the other's in one step.
    """
    path = folder() / name
    if path.exists():
        if _is_whole(path):
            return path
        log.warning("%s in the cache is damaged: compiling it again", name)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder()) as work:
            fresh = Path(work) / name
            make(fresh)
            content = fresh.read_bytes()
            fresh.write_bytes(content + _MARK + hashlib.sha256(content).digest())
            fresh.chmod(0o755)
            os.replace(fresh, path)
    except OSError as error:
        hint = "make room there, or set KBENCH_CACHE to another folder"
        raise CannotRunError(f"cannot write to the cache folder {folder()}: {error.strerror}", hint) from error
    return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, trailer = content[:-_TRAILER], content[-_TRAILER:]
    return trailer == _MARK + hashlib.sha256(body).digest()
