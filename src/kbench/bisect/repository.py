"""The repository that holds a family's files: its commits, and checking them out beside the work tree."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from kbench.bisect.search import Commit
from kbench.errors import KbenchError, UsageError
from kbench.git import GitError, git
from kbench.results.store import is_running, lock

_HEADERS = (".cuh", ".h", ".hpp", ".inc")
_SEPARATOR = "\x1f"
# Of the temporary folder that holds a search's work trees, and of the file in it that is locked while the search lives.
_PREFIX = "kbench-bisect-"
_LOCK = "lock"


@dataclass(frozen=True)
class Repository:
    """top: the folder of the work tree. folder: of the families in it, relative to it, "." for itself."""

    top: Path
    folder: str

    @classmethod
    def of(cls, folder: Path) -> Repository:
        """The one that a folder of families is in. Raises UsageError outside of any, CannotRunError without git."""
        try:
            top = Path(git(folder, "rev-parse", "--show-toplevel", needed_by="bisect").strip())
        except GitError as error:
            what = f"{folder} is not in a git repository"
            raise UsageError(what, "commits are compared: bisect needs the repository of the kernels") from error
        return cls(top, folder.resolve().relative_to(top.resolve()).as_posix())

    def resolve(self, revision: str, option: str) -> str:
        """The hash of a commit. Raises UsageError for what names none."""
        # What begins with a dash would be an option of git.
        with contextlib.suppress(GitError):
            if revision and not revision.startswith("-"):
                return git(
                    self.top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
                ).strip()
        raise UsageError(
            f"{option} {revision!r}: git knows no such revision in {self.top}",
            "write a commit, a tag or a branch; a clone of one commit only needs `git fetch --unshallow`",
        )

    def commits(self, good: str, bad: str, family: str) -> list[Commit]:
        """The good commit, then those up to the bad one along its first parents, oldest first.

        good, bad: hashes. Raises UsageError where the one does not come before the other.
        """
        if good == bad:
            raise UsageError("--good and --bad name the same commit", "nothing can have changed in between")
        if not self._is_ancestor(good, bad):
            back = self._is_ancestor(bad, good)
            hint = "exchange them" if back else "they are on different branches; take their merge base as --good"
            raise UsageError("--good is not a commit before --bad", hint)
        form = _SEPARATOR.join(("%H", "%h", "%as", "%s"))
        lines = git(self.top, "log", "--first-parent", "--reverse", f"--format={form}", f"{good}..{bad}")
        first = git(self.top, "log", "-1", f"--format={form}", good)
        # splitlines() would also break at form feeds and the like, which a subject may hold.
        return [self._commit(line, family) for line in (first + lines).split("\n") if line]

    def _is_ancestor(self, older: str, newer: str) -> bool:
        try:
            git(self.top, "merge-base", "--is-ancestor", older, newer)
        except GitError:
            return False
        return True

    def _commit(self, line: str, family: str) -> Commit:
        name, short, date, subject = line.split(_SEPARATOR, 3)
        return Commit(name, short, date, subject, self._files(name, family))

    def _files(self, commit: str, family: str) -> str:
        """What the family's files, and all headers that they may include, are in a commit."""
        listed = git(self.top, "ls-tree", "-r", "-z", "--full-tree", commit, "--", self.folder)
        digest = hashlib.sha256()
        for entry in filter(None, listed.split("\0")):
            path = Path(entry.partition("\t")[2])
            mine = path.name.partition(".")[0] == family and path.suffix in (".cu", ".py")
            if mine or path.suffix in _HEADERS:
                digest.update(f"{entry}\0".encode("utf-8", errors="surrogateescape"))
        return digest.hexdigest()


@dataclass
class WorkTrees:
    """Commits checked out in a temporary folder; all are removed at the end, also after Ctrl-C, SIGTERM, by which CI
    jobs end, and SIGHUP, by which terminals do. What a search that was killed left behind, the next one removes.

    The user's work tree, index and branches are not touched: git records a work tree of its own for each.
    """

    repository: Repository
    _base: Path | None = None
    _trees: dict[str, Path] = field(default_factory=dict)
    _before: dict[int, Any] = field(default_factory=dict)
    _lock: TextIO | None = None

    def __enter__(self) -> WorkTrees:
        if threading.current_thread() is threading.main_thread():  # no other may have handlers
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
                    self._before[number] = signal.signal(number, _leave)
        self._base = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = (self._base / _LOCK).open("w", encoding="utf-8")
        lock(self._lock)
        self._remove_abandoned()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for commit in list(self._trees):
            self.drop(commit)
        if self._base is not None:
            shutil.rmtree(self._base, ignore_errors=True)
            # Not otherwise: it would also forget the user's own work trees on drives that are not there just now.
            with contextlib.suppress(KbenchError):
                if str(self._base) in git(self.repository.top, "worktree", "list", "--porcelain"):
                    git(self.repository.top, "worktree", "prune")
        if self._lock is not None:
            self._lock.close()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _remove_abandoned(self) -> None:
        """Remove the work trees of searches that were killed: git would keep their commits for ever."""
        with contextlib.suppress(KbenchError):
            for line in git(self.repository.top, "worktree", "list", "--porcelain").splitlines():
                path = Path(line.removeprefix("worktree "))
                mine = line.startswith("worktree ") and path.parent.name.startswith(_PREFIX)
                # Locked before git hears of the first of its trees, so that no lock is nobody's.
                if mine and not is_running(path.parent / _LOCK):
                    _remove_tree(self.repository.top, path)
                    shutil.rmtree(path.parent, ignore_errors=True)

    def folder(self, commit: Commit) -> Path:
        """The folder of families as it is in a commit. Raises GitError where it cannot be checked out."""
        assert self._base is not None
        if commit.name not in self._trees:
            path = self._base / commit.name[:16]
            self._trees[commit.name] = path  # before git begins: what it leaves half done has to go, too
            git(self.repository.top, "worktree", "add", "--quiet", "--detach", str(path), commit.name)
        return self._trees[commit.name] / self.repository.folder

    @contextlib.contextmanager
    def lent(self, commit: Commit) -> Iterator[Path]:
        """The same for a while: a search over many commits of a large repository must not fill the disk."""
        try:
            yield self.folder(commit)
        finally:
            self.drop(commit.name)

    def plain(self, text: str) -> str:
        """A message without the temporary folders that paths in it begin with: they are gone when it is read."""
        for path in self._trees.values():
            text = text.replace(f"{path}{os.sep}", "")
        return text

    def drop(self, commit: str) -> None:
        """Remove a work tree."""
        path = self._trees.pop(commit, None)
        if path is not None:
            _remove_tree(self.repository.top, path)


def _remove_tree(top: Path, path: Path) -> None:
    with contextlib.suppress(KbenchError):
        git(top, "worktree", "remove", "--force", "--force", str(path))
    shutil.rmtree(path, ignore_errors=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells tell of a signal
