"""Which commit the kernels in a folder are of, for the record of what was measured: as far as git knows, and quickly.

Nothing needs it: whatever is in the way (no git, no repository, one of somebody else, one that takes too long), there
is no answer and no error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kbench.catalog import kernel_folder
from kbench.errors import CannotRunError, KbenchError
from kbench.git import git

# What kbench's own kernels are called where a user's have a folder; every such folder has a slash in it.
OWN = "kbench"
# Of all folders together. It takes hundredths of a second; a sweep that waits longer would seem to hang.
_SECONDS = 1.5
_SOURCES = (".cu", ".cuh", ".py", ".h", ".hpp", ".inc")
# What a clone lacks would be fetched, by any protocol that is allowed; a git before 2.44 knows only the second.
_NO_FETCHING = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
# kbench itself writes records, also into the folder of the kernels, and committed baselines are among them.
_NO_RECORDS = (":(exclude)*.jsonl", ":(exclude)*.jsonl.gz")
_COMMIT = "# branch.oid "
_UNTRACKED = "? "


def revisions(family_dirs: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Of kbench's own kernels and of each folder of a user's, in this order, those that git knows.

    Each is {"folder" (OWN, or an absolute path), "commit" (a whole hash), "dirty" (whether files in the folder differ
    from it, or kernels and headers stand there that it does not have)}.
    """
    end = time.monotonic() + _SECONDS
    found = []
    for name, folder in ((OWN, kernel_folder()), *((str(each.absolute()), each) for each in family_dirs)):
        with contextlib.suppress(KbenchError, OSError, ValueError):
            if known := _revision(folder, end):
                found.append({"folder": name, "commit": known[0], "dirty": known[1]})
    return found


def _revision(folder: Path, end: float) -> tuple[str, bool] | None:
    """A folder's commit, and whether it differs; None where git has none, or does not know the folder's files.

    end: when to give up. Raises KbenchError and OSError.
    """
    # A folder that is only inside of somebody's repository, as an installed package may be, is not of its commits.
    known = set(_asked(folder, end, "ls-files", "-z", "--", ":(glob)*"))
    if not any(name.endswith(_SOURCES) for name in known):
        return None
    lines = _asked(
        folder, end, "status", "--porcelain=v2", "-z", "--branch", "--no-ahead-behind", "--no-renames",
        "--untracked-files=all", "--", ".", *_NO_RECORDS,
    )  # fmt: skip
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), "")
    if not commit.isalnum():  # "(initial)": there is none yet
        return None
    changes = [line for line in lines if not line.startswith("#")]
    dirty = any(not line.startswith(_UNTRACKED) or line.endswith(_SOURCES) for line in changes)
    # Families are loaded whether or not git is told to ignore them.
    return commit, dirty or any(name.endswith(_SOURCES) and name not in known for name in os.listdir(folder))


def _asked(folder: Path, end: float, *words: str) -> list[str]:
    left = end - time.monotonic()
    if left <= 0:
        raise CannotRunError("there is no time left to ask git")
    return [line for line in git(folder, *words, seconds=left, environment=_NO_FETCHING).split("\0") if line]
