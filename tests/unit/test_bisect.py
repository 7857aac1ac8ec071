"""Bisecting a repository: its commits, its work trees, and how a commit is judged."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from commits import BROKEN, FAMILY, git, kernel, make_repository
from fakes import failed, make_row
from kbench.bisect.measure import CommitFault, CountMeasurer, Kernels, TimeMeasurer
from kbench.bisect.repository import Repository, WorkTrees
from kbench.bisect.search import Trial, Verdict, search
from kbench.cli.app import run_command
from kbench.cli.bisect_shown import show, trial_text
from kbench.cli.screen import Screen
from kbench.compare import Answer, PlannedSide
from kbench.errors import CannotRunError, Exit, KbenchError, UsageError
from kbench.git import GitError
from kbench.jobs import Job
from kbench.measure.ab_statistics import Rule
from kbench.report.metrics import metric_of
from kbench.sides import Side

try:
    from kbench.device.cuda.compile import nvrtc_version

    nvrtc_version()
    NO_NVRTC = ""
except CannotRunError as error:
    NO_NVRTC = str(error)
needs_nvrtc = pytest.mark.skipif(bool(NO_NVRTC), reason=NO_NVRTC or "NVRTC is there")

# Twenty commits: number 13 doubles the shared memory; three are broken, three change other files, one a comment only.
STORY = [kernel(256, shift) for shift in range(13)] + [kernel(512, shift) for shift in range(13, 20)]
STORY[4] = STORY[9] = STORY[10] = BROKEN
STORY[3] = STORY[7] = STORY[16] = ""
STORY[6] = STORY[5] + "// nothing but a remark\n"
FIRST_BAD = 13


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    top = tmp_path_factory.mktemp("story") / "a repository"
    return top, make_repository(top, STORY)


def repository(top: Path) -> Repository:
    return Repository.of(top / "kernels")


# ------------------------------------------------------------------------------------------ repository


def test_commits_come_oldest_first_with_what_their_files_are(story: tuple[Path, list[str]]) -> None:
    top, hashes = story
    found = repository(top).commits(hashes[0], hashes[-1], "pad")
    assert [commit.name for commit in found] == hashes
    assert found[13].subject == "change 13" and found[13].date == "2027-01-28"
    assert found[3].files == found[2].files != found[4].files
    assert len({commit.files for commit in found}) == 20 - 3 - 2  # 4, 9 and 10 are broken alike


def test_a_subject_may_hold_what_breaks_lines_elsewhere(tmp_path: Path) -> None:
    hashes = make_repository(tmp_path, [kernel(256)])
    subject = "one\fpage\x1c, \u2028 and \x1f all"
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-m", subject)
    found = repository(tmp_path).commits(hashes[0], git(tmp_path, "rev-parse", "HEAD"), "pad")
    assert [commit.subject for commit in found] == ["change 0", subject]


def test_a_header_counts_and_another_family_does_not(tmp_path: Path) -> None:
    hashes = make_repository(tmp_path, [kernel(256)])
    for name in ("kernels/other.cu", "kernels/pad.extra.cu", "kernels/common.cuh"):
        (tmp_path / name).write_text("// new\n")
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "--quiet", "-m", name)
    found = repository(tmp_path).commits(hashes[0], git(tmp_path, "rev-parse", "HEAD"), "pad")
    assert found[0].files == found[1].files != found[2].files != found[3].files


def test_only_first_parents_are_followed(tmp_path: Path) -> None:
    hashes = make_repository(tmp_path, [kernel(256), kernel(257)])
    git(tmp_path, "checkout", "--quiet", "-b", "side", hashes[0])
    (tmp_path / "side.txt").write_text("x")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "--quiet", "-m", "on the side")
    git(tmp_path, "checkout", "--quiet", "main")
    git(tmp_path, "merge", "--quiet", "-m", "merge it", "side")
    found = repository(tmp_path).commits(hashes[0], git(tmp_path, "rev-parse", "HEAD"), "pad")
    assert [commit.subject for commit in found] == ["change 0", "change 1", "merge it"]


def test_revisions_that_cannot_be_are_named(story: tuple[Path, list[str]], tmp_path: Path) -> None:
    top, hashes = story
    found = repository(top)
    for name in ("nothing-of-the-name", "--help", "", "HEAD:notes.txt"):
        with pytest.raises(UsageError, match="--good .* git knows no such revision"):
            found.resolve(name, "--good")
    with pytest.raises(UsageError, match="the same commit"):
        found.commits(hashes[3], hashes[3], "pad")
    with pytest.raises(UsageError, match="exchange them"):
        found.commits(hashes[9], hashes[3], "pad")
    with pytest.raises(UsageError, match="is not in a git repository"):
        Repository.of(tmp_path)


def left_over(top: Path) -> list[str]:
    return git(top, "worktree", "list", "--porcelain").split("\n\n")[1:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_work_trees_go_when_a_job_is_ended(story: tuple[Path, list[str]], number: signal.Signals) -> None:
    top, hashes = story
    found = repository(top)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, WorkTrees(found) as trees:
        trees.folder(found.commits(hashes[0], hashes[-1], "pad")[2])
        base = trees._base
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert caught.value.code == 128 + number and base is not None and not base.exists() and left_over(top) == []
    assert signal.getsignal(number) == before


def test_nohup_stays(story: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with WorkTrees(repository(story[0])):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


KILLED = """
import sys, time
from pathlib import Path
from kbench.bisect.repository import Repository, WorkTrees
found = Repository.of(Path(sys.argv[1]))
with WorkTrees(found) as trees:
    trees.folder(found.commits(sys.argv[2], sys.argv[3], "pad")[1])
    print(trees._base, flush=True)
    time.sleep(60)
"""


def test_a_search_that_was_killed_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    hashes = make_repository(tmp_path, [kernel(256), kernel(257)])
    command = [sys.executable, "-c", KILLED, str(tmp_path / "kernels"), *hashes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            base = Path(process.stdout.readline().strip())
            with WorkTrees(repository(tmp_path)):
                assert len(left_over(tmp_path)) == 1 and base.exists()  # it is alive
        finally:
            process.kill()
    assert len(left_over(tmp_path)) == 1
    with WorkTrees(repository(tmp_path)):
        assert left_over(tmp_path) == [] and not base.exists()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_work_trees_go_whatever_happens(story: tuple[Path, list[str]], error: type[BaseException] | None) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    (top / "notes.txt").write_text("not committed")
    base = None
    try:
        with WorkTrees(found) as trees:
            folder = trees.folder(commits[2])
            base = trees._base
            assert (folder / "pad.cu").read_text().strip() == STORY[2].strip()
            with trees.lent(commits[4]) as lent:
                assert "no C++" in (lent / "pad.cu").read_text()
            assert not lent.exists() and folder.exists()
            (folder / "pad.cu").write_text("changed by whoever ran there")
            if error is not None:
                raise error
    except BaseException as raised:
        if error is None or not isinstance(raised, error):
            raise
    assert base is not None and not base.exists()
    assert left_over(top) == []
    assert (top / "notes.txt").read_text() == "not committed"
    git(top, "checkout", "--quiet", "notes.txt")


def test_work_trees_of_the_user_that_are_not_there_just_now_are_kept(tmp_path: Path) -> None:
    hashes = make_repository(tmp_path / "top", [kernel(256), kernel(257)])
    git(tmp_path / "top", "worktree", "add", "--quiet", "--detach", str(tmp_path / "drive"), hashes[0])
    (tmp_path / "drive").rename(tmp_path / "away")
    found = repository(tmp_path / "top")
    with WorkTrees(found) as trees:
        trees.folder(found.commits(hashes[0], hashes[1], "pad")[1])
    (tree,) = left_over(tmp_path / "top")
    assert str(tmp_path / "drive") in tree


def test_a_commit_that_cannot_be_checked_out_leaves_nothing(story: tuple[Path, list[str]]) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    gone = type(commits[0])("0" * 40, "0000000", "", "", "")
    with WorkTrees(found) as trees:
        with pytest.raises(GitError):
            trees.folder(gone)
        base = trees._base
    assert base is not None and not base.exists() and left_over(top) == []


def test_no_hook_of_the_repository_runs(tmp_path: Path) -> None:
    hashes = make_repository(tmp_path, [kernel(256), kernel(257)])
    hook = tmp_path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    hook.chmod(0o755)
    found = repository(tmp_path)
    with WorkTrees(found) as trees:
        trees.folder(found.commits(hashes[0], hashes[1], "pad")[1])
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------- timing


@dataclass
class FakePairs:
    """Stands in for a CompareBench: what it answers for a commit's folder, by the room that its kernel takes."""

    slower: dict[str, float]
    asked: list[str] = field(default_factory=list)
    good_row: Any = None
    reach: float = 0.001  # of the interval, on either side
    same_code: bool = False

    def compare(self, sides: Any, rule: Rule, again: str, folders: list[str]) -> Answer:
        text = (Path(folders[0]) / "pad.cu").read_text()
        self.asked.append(text)
        good = self.good_row or make_row(1, family="pad")
        if text == BROKEN:
            return Answer((good, failed(1, "invalid", "it does not compile")), None)
        if "lost" in text:
            raise KbenchError("the worker is lost")
        ratio = next((ratio for word, ratio in self.slower.items() if word in text), 1.0)
        estimate = {"ratio": 1 / ratio, "low": (1 - self.reach) / ratio, "high": (1 + self.reach) / ratio}
        sides = [{"median_ms": 1.0}, {"median_ms": ratio}]
        return Answer((good, make_row(1)), {"estimate": estimate, "same_code": self.same_code, "sides": sides})


def measurer(trees: WorkTrees, good: Any, bench: Any, least: float = 0.03, code: Any = lambda tree: "") -> TimeMeasurer:
    job = Job("pad", 1, "", {"N": 256}, "fp32", 256)
    found = TimeMeasurer(Kernels(trees), good, bench, PlannedSide(Side("pad", 1), job, ""), Rule(), least, code)
    found.begin()
    return found


def test_the_commit_that_made_it_slower_is_named(story: tuple[Path, list[str]]) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    bench = FakePairs({"room[512]": 1.10})
    with WorkTrees(found) as trees:
        answer = search(commits, measurer(trees, commits[0], bench))
    assert answer.first is not None and answer.first.name == hashes[FIRST_BAD]
    trial = answer.trial_of(answer.first)
    assert trial is not None and trial.ratio == pytest.approx(1.10) and trial.value == 1.10
    assert len(bench.asked) <= 6
    assert left_over(top) == []


@pytest.mark.parametrize(("slower", "verdict"), [(1.029, Verdict.GOOD), (1.031, Verdict.BAD), (0.9, Verdict.GOOD)])
def test_slower_is_more_than_the_threshold(story: tuple[Path, list[str]], slower: float, verdict: Verdict) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    with WorkTrees(found) as trees:
        trial = measurer(trees, commits[0], FakePairs({"room[512]": slower}))(commits[-1])
    assert trial.verdict is verdict
    assert trial.ratio == pytest.approx(slower)


@pytest.mark.parametrize(("reach", "verdict"), [(0.001, Verdict.BAD), (0.1, Verdict.GOOD)])
def test_slower_needs_an_interval_above_the_good_one(
    story: tuple[Path, list[str]], reach: float, verdict: Verdict
) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    with WorkTrees(found) as trees:
        trial = measurer(trees, commits[0], FakePairs({"room[512]": 1.06}, reach=reach))(commits[-1])
    assert trial.verdict is verdict
    assert trial.reason.startswith(f"interval {1.06 / (1 + reach):.3f}..{1.06 / (1 - reach):.3f}")


def test_machine_code_that_the_comparison_finds_equal_is_not_slower(story: tuple[Path, list[str]]) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    with WorkTrees(found) as trees:
        trial = measurer(trees, commits[0], FakePairs({"room[512]": 1.06}, same_code=True))(commits[-1])
    assert trial.verdict is Verdict.GOOD


@pytest.mark.parametrize(
    ("metric", "good", "later", "verdict", "value"),
    [
        ("occupancy", (64, 48), (64, 32), Verdict.BAD, 32),  # of all kernels the fewest warps
        ("occupancy", (32, 32), (64, 48), Verdict.GOOD, 48),
        ("registers", (20, 40), (20, 41), Verdict.BAD, 41),
        ("registers", (20, 40), (30, 40), Verdict.GOOD, 40),  # the worst kernel is as it was
        ("spill_bytes", (0, 0), (0, 4), Verdict.BAD, 4),
    ],
)
def test_counts_are_those_of_the_worst_kernel(
    story: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, metric: str, good: tuple[int, int],
    later: tuple[int, int], verdict: Verdict, value: int,
) -> None:  # fmt: skip
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    rows = iter([make_row(1, metrics={"a": {metric: a}, "b": {metric: b}}) for a, b in (good, later)])
    monkeypatch.setattr("kbench.bisect.measure.compiled", lambda catalog, job: next(rows))
    with WorkTrees(found) as trees:
        measure = CountMeasurer(Kernels(trees), commits[0], Job("pad", 1, "", {}, "fp32", 256), metric_of(metric))
        measure.begin()
        trial = measure(commits[-1])
    assert (trial.verdict, trial.value) == (verdict, value)


def test_the_same_machine_code_is_not_timed_again(story: tuple[Path, list[str]]) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    bench = FakePairs({})

    def code(tree: Path) -> str:
        return (tree / "pad.cu").read_text().partition("//")[0]

    with WorkTrees(found) as trees:
        measure = measurer(trees, commits[0], bench, code=code)
        first, second = measure(commits[5]), measure(commits[6])
        good = measure(commits[0])
    assert len(bench.asked) == 1
    assert second.verdict is first.verdict is Verdict.GOOD
    assert second.reason == f"the same machine code as {commits[5].short}" and second.commit == commits[6]
    assert good.reason == f"the same machine code as {commits[0].short}"


def test_a_bad_commit_with_the_good_ones_machine_code_is_not_slower(
    story: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    with WorkTrees(found) as trees:
        answer = search(commits, measurer(trees, commits[0], FakePairs({}), code=lambda tree: "the same"))
    show(answer, "pad:1", metric_of("time"), commits, Screen(False))
    told = " ".join(capsys.readouterr().out.split())
    assert f"pad:1 is not slower at {commits[-1].short} than at {commits[0].short} (the same machine code as" in told


def test_what_does_not_run_is_passed_over_and_a_broken_good_one_is_an_error(story: tuple[Path, list[str]]) -> None:
    top, hashes = story
    found = repository(top)
    commits = found.commits(hashes[0], hashes[-1], "pad")
    with WorkTrees(found) as trees:
        trial = measurer(trees, commits[0], FakePairs({}))(commits[4])
        assert trial.verdict is Verdict.SKIP and "does not compile" in trial.reason
        broken = FakePairs({}, good_row=failed(1, "fail", "3 elements wrong"))
        with pytest.raises(CommitFault, match="the good commit, is fail: 3 elements wrong") as caught:
            measurer(trees, commits[0], broken)(commits[5])
        assert caught.value.exit_status is Exit.WRONG


def test_times_need_a_gpu(
    story: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbench.device.cuda.probe.probe_gpu", lambda: "none is here")
    top, hashes = story
    command = ["bisect", "pad:1", "--good", hashes[0], "--family-dir", str(top / "kernels")]
    assert run_command(command) == Exit.CANNOT
    assert "--metric registers" in capsys.readouterr().err
    assert left_over(top) == []


# ---------------------------------------------------------------------------------------------- counts


@needs_nvrtc
def test_counts_are_bisected_without_a_gpu(story: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    top, hashes = story
    (top / "kernels" / "pad.cu").write_text(BROKEN)  # a work tree with changes is nobody's business
    command = ["bisect", "pad:1", "--good", hashes[0], "--metric", "static_shared", "--json"]
    assert run_command([*command, "--family-dir", str(top / "kernels")]) == Exit.OK
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["first"]["commit"] == hashes[FIRST_BAD]
    bad = next(trial for trial in document["trials"] if trial["commit"]["commit"] == hashes[FIRST_BAD])
    assert (bad["value"], bad["ratio"], bad["verdict"]) == (2048, 2.0, "bad")
    assert document["commits"] == 19 and document["unchanged"] == 4  # three other files, and 9 and 10 are alike
    assert len(document["trials"]) <= 8
    assert "the good commit: static_shared 1024" in told.err
    assert left_over(top) == []
    assert (top / "kernels" / "pad.cu").read_text() == BROKEN
    git(top, "checkout", "--quiet", "kernels/pad.cu")


PARAMETER = FAMILY.replace(
    'plan=lambda p, b, d: (Launch("pad", (1,)', 'plan=lambda p, b, d, ROOM: (Launch(f"pad<{ROOM}>", (1,)'
).replace('dtypes=("fp32",)),),', 'dtypes=("fp32",), params={"ROOM": Param(256, (256, 512))}),),')


def test_a_value_of_a_parameter_is_bisected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A commit that takes more room with 512 alone, which is not the default."""
    kernels = ["template <int Room>" + kernel(256).replace("256", room) for room in ("Room", "(Room + Room / 512)")]
    hashes = make_repository(tmp_path, kernels, family=PARAMETER)
    command = ["bisect", "pad:1", "--good", hashes[0], "--metric", "static_shared", "--json"]
    command += ["--family-dir", str(tmp_path / "kernels")]
    assert run_command([*command, "--param", "ROOM=256,512"]) == Exit.USAGE
    assert "one value of a parameter, and --param ROOM has several" in capsys.readouterr().err
    assert run_command([*command, "--param", "ROM=512"]) == Exit.USAGE
    assert "ROM" in capsys.readouterr().err
    if NO_NVRTC:
        return
    assert run_command(command) == Exit.NOTHING
    capsys.readouterr()
    assert run_command([*command, "--param", "ROOM=512"]) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert document["first"]["commit"] == hashes[1] and document["trials"][0]["value"] == 4 * 513


def test_counts_are_shown_with_all_of_their_digits(
    story: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    top, hashes = story
    commits = repository(top).commits(hashes[0], hashes[1], "pad")
    trial = Trial(commits[1], Verdict.BAD, 1234568.0, math.inf)
    show(search(commits, lambda commit: trial), "pad:1", metric_of("static_shared"), commits, Screen(False))
    told = " ".join(capsys.readouterr().out.split())
    assert "bad 1234568 from 0 change 1" in told and "static_shared: 1234568 bytes, from 0 against" in told
    assert "(1 commit, 1 tried)" in told
    assert trial_text(replace(trial, value=0.023744), "ms").startswith(f"{commits[1].short} bad 0.02374 ms")


@needs_nvrtc
def test_broken_commits_before_it_make_a_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hashes = make_repository(tmp_path, [kernel(256), BROKEN, BROKEN + "\n", kernel(512)])
    folder = str(tmp_path / "kernels")
    command = ["bisect", "pad:1", "--good", hashes[0], "--metric", "static_shared", "--family-dir", folder]
    assert run_command(command) == Exit.OK
    shown = capsys.readouterr().out
    assert "one of 3 commits made pad:1 worse in static_shared" in shown
    assert all(f"change {number}" in shown for number in (1, 2, 3))
    assert "kbench-bisect-" not in shown and "kernels/pad.cu:1: error" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@needs_nvrtc
def test_nothing_to_find_and_what_cannot_be_asked(
    story: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    top, hashes = story
    command = ["bisect", "pad:1", "--good", hashes[0], "--family-dir", str(top / "kernels"), "--metric"]
    assert run_command([*command, "static_shared", "--bad", hashes[12]]) == Exit.NOTHING
    assert "is not worse in static_shared" in capsys.readouterr().out
    assert run_command([*command, "nonsense"]) == Exit.USAGE
    assert "there is no metric 'nonsense'; write time, or one of" in capsys.readouterr().err
    assert run_command([*command, "static_shared", "--threshold", "150%"]) == Exit.NOTHING
    assert run_command([*command, "static_shared", "--threshold", "3"]) == Exit.USAGE
    assert run_command([*command, "static_shared", "--arch", "sm_1"]) == Exit.USAGE
    assert run_command(["bisect", "pad", *command[2:], "static_shared"]) == Exit.USAGE
    assert run_command([*command, "static_shared", "--bad", hashes[0]]) == Exit.USAGE
    assert left_over(top) == []
