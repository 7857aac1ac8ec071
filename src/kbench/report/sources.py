"""What BEFORE and AFTER of a report name: files, runs, baselines, and baselines as they were committed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kbench.errors import UsageError
from kbench.git import GitError, git_bytes
from kbench.results.baselines import PREVIOUS, USUAL, baseline_names, baseline_path, require_name
from kbench.results.store import (
    BASELINES,
    COMPRESSED,
    LATEST,
    find_run,
    is_path,
    latest_run,
    read_text_of,
    run_files,
    run_id,
)

GIT = "git:"
# Reading one file out of a repository takes milliseconds; one that is fetched on demand, seconds.
_GIT_SECONDS = 120.0


@dataclass(frozen=True)
class Source:
    """A file of records. path: the file, or what to call `data`. data: its text, where it comes from a revision.
    revision: the commit that it comes from, shortened."""

    path: Path | str
    data: bytes | None = None
    revision: str = ""


class MissingBaseline(UsageError):
    """What a report was to be held against is not there."""


def find_sources(folder: Path, text: str) -> list[Source]:
    """The files that one side of a report names, several with commas between them.

    folder: of the results. Raises MissingBaseline for a name that nothing has, UsageError for one that is none or that
    several runs have, CannotRunError without git.
    """
    try:
        names = [text] if _is_file(text) else [name.strip() for name in text.split(",")]
        if not all(names):
            raise UsageError(
                f"{text!r} holds an empty name", "write one name, or several with single commas between them"
            )
        return [_find(folder, name) for name in names]
    except OSError as error:  # a name longer than any file's, a folder that nobody may look into
        raise UsageError(f"cannot look for {text[:60]!r}: {error.strerror}", "see whether it is a name") from error


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # several names may be longer together than a file's may be
        return False


def _find(folder: Path, name: str) -> Source:
    if name.startswith(GIT):
        return _committed(folder, name.removeprefix(GIT))
    if name == PREVIOUS:
        return Source(_previous(folder))
    if name == LATEST:
        return Source(latest_run(folder))
    if is_path(name):
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"{path} is a folder", "name a run file in it, or its results with --results")
        if not path.exists():
            raise MissingBaseline(f"{path} is not there", _first_run(name))
        return Source(path)
    path = baseline_path(folder, name)
    if path.exists():
        return Source(path)
    ids = list(run_files(folder))
    if any(name in known for known in ids):
        return Source(find_run(folder, name))  # which says where there are several
    baselines, newest = ", ".join(baseline_names(folder)) or "none", max(ids, default="none")
    raise MissingBaseline(
        f"{folder} holds no baseline and no run of the name {name!r}",
        f"`kbench sweep --save {name}` writes one; baselines there: {baselines}; newest run: {newest}",
    )


def _first_run(name: str) -> str:
    return f"see whether the name {name!r} is right; of a BEFORE that there cannot be yet, --first-run says so"


def _previous(folder: Path) -> Path:
    """The run before the latest one, by the times at which they started, with which ids begin."""
    latest = latest_run(folder)
    older = [path for known, path in run_files(folder).items() if known < run_id(latest)]
    if not older:
        raise MissingBaseline(f"{latest.parent} holds no run before {latest.stem}", "sweep once more, or name a file")
    return older[-1]


# ---------------------------------------------------------------------------------------------- git


def _committed(folder: Path, text: str) -> Source:
    """The baseline of `REV` or `REV:NAME`, as it is committed there; the working tree is left alone."""
    revision, _, name = text.partition(":")
    name = name or USUAL
    require_name(name)
    # What begins with a dash would be an option of git.
    if not revision or revision.startswith("-"):
        raise UsageError(f"{GIT}{text} names no revision", f"write {GIT}REV or {GIT}REV:NAME, such as {GIT}main")
    path = baseline_path(folder, name).absolute()
    inside = next(parent for parent in path.parents if parent.is_dir())
    try:
        commit = (
            _git(inside, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
            .decode()
            .strip()
        )
    except GitError:
        raise _no_revision(inside, revision) from None
    relative = path.relative_to(inside).as_posix()
    shown = f"{GIT}{revision}:{name}"
    try:
        _git(inside, "cat-file", "-e", f"{commit}:./{relative}")
    except GitError:
        raise MissingBaseline(
            f"{commit[:12]} ({revision}) holds no {BASELINES}/{name}{COMPRESSED} below {folder}",
            f"`kbench sweep --save {name}` writes it, to be committed{_others(inside, commit, revision, relative)}",
        ) from None
    try:
        data = _git(inside, "show", f"{commit}:./{relative}")
    except GitError as error:
        raise UsageError(f"git cannot show {shown}: {error}") from error
    return Source(shown, read_text_of(shown, data), commit[:12])


def _others(inside: Path, commit: str, revision: str, relative: str) -> str:
    """The baselines that stand beside one that is not in a commit, as a clause of a hint."""
    with contextlib.suppress(GitError):
        found = _git(inside, "ls-tree", "--name-only", "-z", commit, f"./{relative.rpartition('/')[0]}/").decode()
        names = [path.rpartition("/")[2] for path in found.split("\0")]
        known = [f"{GIT}{revision}:{name.removesuffix(COMPRESSED)}" for name in names if name.endswith(COMPRESSED)]
        return f"; committed there: {', '.join(known)}" if known else ""
    return ""


def _no_revision(inside: Path, revision: str) -> UsageError:
    """Why git knows no such revision."""
    try:
        _git(inside, "rev-parse", "--is-inside-work-tree")
    except GitError:
        return UsageError(f"{inside} is not in a git repository", f"{GIT} needs one; name a file instead")
    return UsageError(
        f"git knows no revision {revision!r} here",
        "fetch it; a CI job's clone may hold one commit only (actions/checkout: fetch-depth: 0)",
    )


def _git(folder: Path, *words: str) -> bytes:
    return git_bytes(folder, *words, needed_by=f"{GIT}REV", seconds=_GIT_SECONDS)
