"""Which commit is tried next, and what comes of it: a measurer made of a list."""

from __future__ import annotations

import math

import pytest

from kbench.bisect.search import Commit, Found, Trial, Verdict, search

WORDS = {"g": Verdict.GOOD, "b": Verdict.BAD, "s": Verdict.SKIP}


def commits(count: int, files: str = "") -> list[Commit]:
    """files: a letter a commit; equal letters are equal files. All differ if left out."""
    return [Commit(f"c{i}", f"c{i}", "2026-01-01", f"change {i}", files[i] if files else str(i)) for i in range(count)]


def searched(story: str, files: str = "") -> tuple[Found, list[str]]:
    """story: what each commit is when it is tried; returns the tried ones too."""
    tried: list[str] = []

    def test(commit: Commit) -> Trial:
        tried.append(commit.name)
        return Trial(commit, WORDS[story[int(commit.name[1:])]])

    return search(commits(len(story), files), test), tried


@pytest.mark.parametrize("first", range(1, 21))
def test_any_first_bad_commit_of_twenty_is_found_in_few_trials(first: int) -> None:
    found, tried = searched("g" * first + "b" * (21 - first))
    assert found.first is not None and found.first.name == f"c{first}"
    assert found.good is not None and found.good.name == f"c{first - 1}"
    assert len(tried) == len(set(tried)) <= 2 + math.ceil(math.log2(20))
    assert "c0" not in tried  # that it is good was given


@pytest.mark.parametrize("first", range(1, 21))
def test_broken_commits_between_are_passed_over(first: int) -> None:
    """Every third one, but neither the first bad one nor the one before it."""
    story = ["g" if i < first else "b" for i in range(21)]
    story = ["s" if i % 3 == 1 and i not in (0, first - 1, first, 20) else what for i, what in enumerate(story)]
    found, _ = searched("".join(story))
    assert found.first is not None and found.first.name == f"c{first}"


def test_skipped_commits_before_the_first_bad_one_make_a_range() -> None:
    found, tried = searched("ggggsssbbb")
    assert found.first is None
    assert [commit.name for commit in found.suspects] == ["c4", "c5", "c6", "c7"]
    assert found.good is not None and found.good.name == "c3"
    assert {"c4", "c5", "c6"} <= set(tried)


def test_with_everything_between_broken_all_are_suspects() -> None:
    found, _ = searched("gssssb")
    assert [commit.name for commit in found.suspects] == ["c1", "c2", "c3", "c4", "c5"]


def test_skipped_commits_that_a_good_one_follows_are_not_suspected() -> None:
    found, _ = searched("gssggbb")
    assert found.first is not None and found.first.name == "c5"


@pytest.mark.parametrize("end", ["g", "s"])
def test_without_a_bad_end_nothing_else_is_tried(end: str) -> None:
    found, tried = searched("ggggg" + end)
    assert tried == ["c5"] and not found.suspects and found.first is None


def test_commits_that_leave_the_files_alone_are_not_tried() -> None:
    found, tried = searched("ggggbbbb", "aaabcccc")
    assert found.first is not None and found.first.name == "c4"
    assert set(tried) == {"c4", "c3"} and found.alike == 5


def test_files_that_came_back_are_known_already() -> None:
    """Slow, reverted, and slow again: what was measured at the end is not measured at the start."""
    found, tried = searched("gbgb", "abcb")
    assert tried == ["c3"]
    assert found.first is not None and found.first.name == "c1"
    assert [trial.reason for trial in found.trials if trial.commit.name == "c1"] == ["the same files as c3"]


def test_equal_files_at_both_ends_need_no_trial() -> None:
    found, tried = searched("ggg", "aba")
    assert not tried and not found.suspects
    found, tried = searched("gg", "aa")
    assert not tried and not found.trials
