"""The text that is trained on where no other is named: a story of our own writing, 15 KB of plain ASCII."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kbench.errors import UsageError

PATH = Path(__file__).with_name("corpus.txt")
# Losses can be compared only between runs that read the same text.
SHA256 = "4e81ee281dc6209692340cb08863ded08a7c823b64f358055dba5823f0dd1a4a"


def corpus() -> bytes:
    """The text. Raises UsageError where its file is not the one that kbench came with."""
    try:
        text = PATH.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {PATH}: {error.strerror or error}", "install kbench again") from error
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise UsageError(f"{PATH} was changed: its SHA-256 differs", "install kbench again")
    return text
