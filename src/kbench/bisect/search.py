"""Which commit to try next: binary search over commits of which some cannot be tried.

Nothing here knows of git or of GPUs: commits are told apart by their files, and `test` says what a commit is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """What a commit is: as good as the good one, slower, or impossible to tell."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skipped"


@dataclass(frozen=True)
class Commit:
    """name: its hash, short: as people write it. files: what its kernel files are, as one text: equal for two commits
    whose files are equal."""

    name: str
    short: str
    date: str
    subject: str
    files: str

    def __str__(self) -> str:
        return f"{self.short} ({self.date}) {self.subject}"


@dataclass(frozen=True)
class Trial:
    """What was found of a commit. value: in the metric's unit; None where there is none. ratio: over the good commit's.
    reason: one line: why it was skipped, or how sure the number is."""

    commit: Commit
    verdict: Verdict
    value: float | None = None
    ratio: float | None = None
    reason: str = ""


@dataclass
class Found:
    """What the search came to. first: the first bad commit, None where skipped ones stand before it, or where the last
    commit is not bad. suspects: those it is one of, oldest first; empty where the last is not bad. good: the newest
    commit known to be good. alike: commits that were not tried, because their files equal those of the one before.
    """

    trials: list[Trial] = field(default_factory=list)
    suspects: list[Commit] = field(default_factory=list)
    good: Commit | None = None
    alike: int = 0

    @property
    def first(self) -> Commit | None:
        return self.suspects[0] if len(self.suspects) == 1 else None

    def trial_of(self, commit: Commit) -> Trial | None:
        return next((trial for trial in self.trials if trial.commit == commit), None)


def search(commits: Sequence[Commit], test: Callable[[Commit], Trial]) -> Found:
    """The first bad one of `commits`, oldest first, of which the first is good and the last is said to be bad.

    The last is tried before any other: without a bad end there is nothing to find, and where it cannot be tried, its
    trial is the only one and `suspects` is empty. It is taken for granted that what became bad stayed bad.
    """
    # A commit that leaves the files alone is what the commit before it is.
    groups = [
        commit for position, commit in enumerate(commits) if not position or commit.files != commits[position - 1].files
    ]
    found = Found(good=groups[0], alike=len(commits) - len(groups))
    known: dict[str, Trial] = {}

    def tried(commit: Commit) -> Verdict:
        # Files that were so before, and were changed back, need no second trial.
        if (before := known.get(commit.files)) is None:
            trial = test(commit)
            known[commit.files] = trial
        else:
            trial = Trial(
                commit, before.verdict, before.value, before.ratio, f"the same files as {before.commit.short}"
            )
        found.trials.append(trial)
        return trial.verdict

    good, bad = 0, len(groups) - 1
    if not bad or groups[bad].files == groups[0].files or tried(groups[bad]) is not Verdict.BAD:
        return found
    skipped: set[int] = set()
    while left := [place for place in range(good + 1, bad) if place not in skipped]:
        middle = (good + bad) / 2
        place = min(left, key=lambda place: abs(place - middle))
        match tried(groups[place]):
            case Verdict.GOOD:
                good = place
            case Verdict.BAD:
                bad = place
            case Verdict.SKIP:
                skipped.add(place)
    found.good, found.suspects = groups[good], groups[good + 1 : bad + 1]
    return found
