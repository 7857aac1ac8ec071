"""Asking git about a folder: what it runs touches nothing, waits for nobody and looks at no other repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kbench.errors import CannotRunError, KbenchError

# A checkout of a large repository takes minutes; beyond this something hangs.
_SECONDS = 600.0
# By these a hook's git tells another which repository it is in, and users how all paths are meant: here the folder
# alone says where, and the command itself what a path is.
_NOT_INHERITED = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY",
    "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS",
)  # fmt: skip
# No large file is fetched, nobody is asked for a password, and no lock is taken only to write an index anew.
_OWN = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_OPTIONAL_LOCKS": "0"}
# No hook of the repository runs, a daemon that watches its files being one.
_NO_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")


class GitError(KbenchError):
    """git refused. The message is its own last line."""


def git(
    folder: Path,
    *words: str,
    needed_by: str = "this",
    seconds: float = _SECONDS,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What git writes, as text. See `git_bytes`."""
    data = git_bytes(folder, *words, needed_by=needed_by, seconds=seconds, environment=environment)
    return data.decode("utf-8", errors="surrogateescape")


def git_bytes(
    folder: Path,
    *words: str,
    needed_by: str = "this",
    seconds: float = _SECONDS,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """What git writes when it runs in a folder.

    needed_by: who asks, for the message where there is no git. environment: what is added to that of this process.
    Raises GitError where it fails, CannotRunError where there is none or it takes longer than `seconds`.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *_NO_HOOKS, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={**inherited, **_OWN, **(environment or {})},
        )
    except OSError as error:
        why = "is not on the path" if isinstance(error, FileNotFoundError) else f"cannot be run: {error.strerror}"
        raise CannotRunError(f"{needed_by} needs git, which {why}", "install it") from error
    except subprocess.TimeoutExpired as error:
        raise CannotRunError(f"git {words[0]} takes longer than {seconds:g} s", "see what it waits for") from error
    if done.returncode:
        raise GitError(_last_line(done.stderr) or f"git {words[0]} ended with status {done.returncode}")
    return done.stdout


def _last_line(text: bytes) -> str:
    lines: Sequence[str] = text.decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("fatal: ").removeprefix("error: ") if lines else ""
