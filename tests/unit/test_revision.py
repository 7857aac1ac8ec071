"""Which commit kernels are of: what git is asked, what a record keeps of the answer, and where it is shown."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commits import git, kernel, make_repository
from fakes import FakeBench, make_row, measured
from kbench import revision
from kbench.bisect.repository import Repository
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, Exit
from kbench.plot.page import write_page
from kbench.report.surroundings import Surroundings
from kbench.results.baselines import baseline_path, save_baseline
from kbench.results.journal import Journal
from kbench.results.merge import merge, write_merged
from kbench.results.revisions import revision_text, revisions_of
from kbench.results.schema import SCHEMA_VERSION
from kbench.results.store import RunWriter, latest_run, read_bytes, read_run
from kbench.revision import OWN, revisions
from report_runs import simulated, write_run

ONE, TWO = "1" * 40, "2" * 40


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of a folder of kernels; kbench's own kernels are in none."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(revision, "kernel_folder", lambda: own)
    # No repository that the temporary folder happens to be in.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    make_repository(tmp_path / "top", [kernel(256), kernel(512)])
    return tmp_path / "top"


def of(folder: Path) -> dict[str, Any] | None:
    """What is known of a user's folder."""
    found = revisions([folder])
    assert all(entry["folder"] == str(folder) for entry in found)
    return found[0] if found else None


def dirty(folder: Path) -> bool:
    found = of(folder)
    assert found is not None
    return bool(found["dirty"])


# ---------------------------------------------------------------------------------------- asking git


def test_the_commit_of_a_folder(top: Path) -> None:
    head = git(top, "rev-parse", "HEAD")
    assert of(top / "kernels") == {"folder": str(top / "kernels"), "commit": head, "dirty": False}
    git(top, "checkout", "--quiet", "--detach", "HEAD~1")
    assert of(top / "kernels") == {"folder": str(top / "kernels"), "commit": git(top, "rev-parse", "HEAD"),
                                   "dirty": False}  # fmt: skip


def test_kbenchs_own_kernels_come_first(top: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(revision, "kernel_folder", lambda: top / "kernels")
    make_repository(tmp_path / "mine", [kernel(256)])
    found = revisions([tmp_path / "mine" / "kernels"])
    assert [entry["folder"] for entry in found] == [OWN, str(tmp_path / "mine" / "kernels")]
    assert found[0]["commit"] == git(top, "rev-parse", "HEAD") != found[1]["commit"]


@pytest.mark.parametrize("name", ["pad.cu", "new.cu", "new.py", "common.cuh", "below/header.cuh", "below/tensor.h"])
def test_files_that_differ_and_kernels_that_are_new_make_it_dirty(top: Path, name: str) -> None:
    assert not dirty(top / "kernels")
    path = top / "kernels" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("// other\n")
    assert dirty(top / "kernels")


@pytest.mark.parametrize("change", ["staged", "removed", "ignored", "excluded", "data"])
def test_whatever_the_commit_does_not_have_makes_it_dirty(top: Path, change: str) -> None:
    kernels = top / "kernels"
    if change == "staged":
        (kernels / "pad.cu").write_text("// other\n")
        git(top, "add", "-A")
    elif change == "removed":
        (kernels / "pad.cu").unlink()
    elif change == "data":  # which a family's file may read
        (kernels / "table.bin").write_text("one")
        git(top, "add", "-A")
        git(top, "commit", "--quiet", "-m", "data")
        (kernels / "table.bin").write_text("another")
    else:
        # Of no commit, although git keeps quiet about it: families in it are loaded all the same.
        ignore = top / ".git" / "info" / "exclude"
        ignore.write_text("generated.cu\n" if change == "ignored" else "*.cu\n")
        (kernels / "generated.cu").write_text("// made\n")
    assert dirty(kernels)


@pytest.mark.parametrize("name", ["kernels/notes.md", "kernels/__pycache__/pad.pyc", "elsewhere.cu", "other/pad.cu"])
def test_what_is_no_kernel_or_not_in_the_folder_makes_nothing_dirty(top: Path, name: str) -> None:
    (top / name).parent.mkdir(exist_ok=True)
    (top / name).write_text("new\n")
    (top / "notes.txt").write_text("changed, beside the kernels\n")
    assert not dirty(top / "kernels")


def test_records_that_kbench_writes_beside_the_kernels_make_nothing_dirty(top: Path) -> None:
    baseline = top / "kernels" / "results" / "baselines" / "baseline.jsonl.gz"
    baseline.parent.mkdir(parents=True)
    for text in ("one", "another"):
        baseline.write_text(text)
        if text == "one":
            git(top, "add", "-A")
            git(top, "commit", "--quiet", "-m", "a baseline")
    assert git(top, "status", "--porcelain") and not dirty(top / "kernels")


@pytest.mark.parametrize("name", ["a [b] *?", ":(glob)x", "-x"])
def test_a_folder_may_have_any_name(top: Path, tmp_path: Path, name: str) -> None:
    (top / "kernels").rename(top / name)
    git(top, "add", "-A")
    git(top, "commit", "--quiet", "-m", "another name")
    (top / "b.cu").write_text("beside it\n")
    assert not dirty(top / name)
    (top / name / "pad.cu").write_text("// other\n")
    assert dirty(top / name)


def test_an_installed_package_is_not_of_the_repository_around_it(top: Path) -> None:
    installed = top / ".venv" / "site-packages" / "kbench" / "dev_kernels"
    installed.mkdir(parents=True)
    (installed / "pad.cu").write_text(kernel(256))
    assert of(installed) is None, "nobody has added it"
    (top / ".gitignore").write_text(".venv\n")
    assert of(installed) is None
    git(top, "add", "--force", str(installed))
    assert of(installed) is not None, "somebody keeps it there on purpose"
    assert of(top) is None, "it has no kernels itself, only a folder below it"


def test_without_a_repository_a_commit_or_git_nothing_is_known(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(top / "kernels", tmp_path / "sdist")
    shutil.copytree(top / "kernels", tmp_path / "young" / "kernels")
    git(tmp_path / "young", "init", "--quiet")
    git(tmp_path / "young", "add", "-A")
    for folder in (tmp_path / "sdist", tmp_path / "young" / "kernels", tmp_path / "gone", top / ".git"):
        assert of(folder) is None
    assert of(top / "kernels") is not None
    (top / ".git" / "HEAD").write_text("damaged\n")
    assert of(top / "kernels") is None
    monkeypatch.setenv("PATH", "")
    assert of(top / "kernels") is None


def test_a_repository_of_somebody_else_is_left_alone(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as git's own tests do it
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    assert of(top / "kernels") is None


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 60",
        "sleep 60",  # by a child, which outlives it and holds its output
        "echo oops >&2; exit 128",
        "printf 'no answer of git'",
        "head -c 100000 /dev/urandom",
        "kill -9 $$",
    ],
)
def test_a_git_that_hangs_or_babbles_costs_little_and_no_error(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(revision, "_SECONDS", 0.4)
    began = time.monotonic()
    assert revisions([top / "kernels"] * 5) == []
    assert time.monotonic() - began < 2.0, "of all folders together"


def test_a_git_that_cannot_be_run_is_no_error(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("no program\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert of(top / "kernels") is None
    with pytest.raises(CannotRunError, match="bisect needs git, which cannot be run: "):
        Repository.of(top / "kernels")


@pytest.mark.parametrize("locked", [False, True])
def test_no_hook_runs_no_lock_is_taken_and_none_stands_in_the_way(top: Path, locked: bool) -> None:
    ran = top / "hook-ran"
    for name in ("post-index-change", "fsmonitor"):
        hook = top / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
        hook.chmod(0o755)
    git(top, "config", "core.fsmonitor", str(top / ".git" / "hooks" / "fsmonitor"))
    index = top / ".git" / "index"
    if locked:
        (top / ".git" / "index.lock").write_text("")
    os.utime(top / "kernels" / "pad.cu", (10**9, 10**9))  # for which an index is written anew, where that may be
    before = index.read_bytes()
    assert not dirty(top / "kernels")
    assert index.read_bytes() == before and not ran.exists()


def test_the_environment_leads_nowhere_else(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repository(tmp_path / "other", [kernel(64)])
    expected = of(top / "kernels")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    monkeypatch.setenv("GIT_LITERAL_PATHSPECS", "1")
    assert of(top / "kernels") == expected is not None


def test_settings_of_the_user_do_not_change_the_answer(top: Path) -> None:
    for name, value in (
        ("status.showUntrackedFiles", "no"), ("status.relativePaths", "true"), ("core.quotePath", "true"),
        ("status.branch", "false"), ("color.ui", "always"), ("status.renames", "copies"),
    ):  # fmt: skip
        git(top, "config", name, value)
    assert not dirty(top / "kernels")
    (top / "kernels" / "ünï.cuh").write_text("// new\n")
    assert dirty(top / "kernels")


# ------------------------------------------------------------------------------------------- records


def entry(commit: str, folder: str = OWN, dirty: bool = False) -> dict[str, Any]:
    return {"folder": folder, "commit": commit, "dirty": dirty}


@pytest.mark.parametrize(
    ("found", "family_dirs", "text"),
    [
        ([entry(ONE)], [], "1111111111"),
        ([entry(ONE, dirty=True)], [], "1111111111+"),
        ([entry(ONE), entry(TWO, "/x/mine", True)], ["/x/mine"], "kbench 1111111111, mine 2222222222+"),
        ([entry(ONE), entry(ONE, "/x/mine", True)], ["/x/mine"], "1111111111+"),
        # That the other folder is of the same commit is not known.
        ([entry(ONE)], ["/x/mine"], "kbench 1111111111"),
        ([entry(TWO, "/x/mine")], ["/x/mine"], "mine 2222222222"),
        ([entry(TWO, "/x/mine")], [], "mine 2222222222"),
        ([], [], ""),
        (None, None, ""),
        ("text", "text", ""),
        ([3, {}, {"commit": 3, "folder": OWN}, {"commit": ONE}, entry("<b>"), entry(ONE[:4])], [], ""),
    ],
)
def test_revisions_in_words(found: Any, family_dirs: Any, text: str) -> None:
    assert revision_text({"revisions": found, "options": {"family_dirs": family_dirs}}) == text


def test_headers_without_revisions_have_no_words() -> None:
    assert revision_text({}) == "" and revision_text({"revisions": [entry(ONE)]}) == "1111111111"
    assert revisions_of({}) == []
    sources = [{"id": name, "revisions": [entry(commit)]} for name, commit in (("a", ONE), ("b", TWO), ("c", ONE))]
    assert revisions_of({"sources": [*sources, {"id": "d"}]}) == ["1111111111", "2222222222"]


def written(folder: Path, commit: str = "", mode: str = "cold", dirty: bool = False) -> Path:
    row = make_row(1, median_ms=1.0) if mode == "cold" else make_row(1, verdict=None, cache_mode=mode, device="sm_90")
    with RunWriter(
        folder, device={"kind": mode, "name": "sm_90"}, command=["kbench", "sweep"], options={"mode": mode},
        kbench_version="1", revisions=[entry(commit, dirty=dirty)] if commit else (),
    ) as run:  # fmt: skip
        run.append(row)
    return run.path


def test_the_header_has_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, ONE)).header["revisions"] == [entry(ONE)]
    assert "revisions" not in read_run(written(tmp_path)).header


def test_a_baseline_of_exact_numbers_does_not_change_with_the_commit(tmp_path: Path) -> None:
    first = save_baseline(tmp_path, "static", written(tmp_path, ONE, "static")).read_bytes()
    for commit in (TWO, ""):
        assert save_baseline(tmp_path, "static", written(tmp_path, commit, "static", True)).read_bytes() == first
    kept = read_run(baseline_path(tmp_path, "static"))
    assert revision_text(kept.header) == "1111111111", "the first that gave these numbers"
    timed = written(tmp_path, ONE)
    assert read_bytes(save_baseline(tmp_path, "timed", timed)) == timed.read_bytes()


def test_runs_of_a_merged_file_keep_their_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs" / "merged.jsonl"
    write_merged(path, merge([read_run(written(tmp_path, commit)) for commit in (ONE, TWO)]))
    assert revisions_of(read_run(path).header) == ["1111111111", "2222222222"]
    assert run_command(["results", "show", str(path)]) == Exit.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("kernels at 1111111111") == shown.count("kernels at 2222222222") == 1


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, top: Path, tmp_path: Path) -> Callable[..., Path]:
    """Runs `kbench sweep` on a bench that hands out rows; returns the run file."""
    monkeypatch.setenv("KBENCH_RESULTS", str(tmp_path / "results"))

    def run(*options: str, rows: Any = (), expect: int = Exit.OK) -> Path:
        monkeypatch.setattr("kbench.sweep.Bench", type("Bench", (FakeBench,), {"script": list(rows)}))
        monkeypatch.setattr("sys.argv", ["kbench", "sweep", *options])
        assert run_command(["sweep", *options]) == expect
        return latest_run(tmp_path / "results")

    return run


ROWS = [make_row(version, median_ms=1.0, source="files") for version in (1, 2)]


def test_a_sweep_records_its_commits_and_keeps_the_first_where_it_goes_on(
    sweep: Callable[..., Path], top: Path
) -> None:
    kernels = top / "kernels"
    path = sweep("toy", "--family-dir", str(kernels), rows=[ROWS[0], CannotRunError("stop")], expect=Exit.CANNOT)
    first = read_run(path).header["revisions"]
    assert first == [{"folder": str(kernels), "commit": git(top, "rev-parse", "HEAD"), "dirty": False}]
    (kernels / "pad.cu").write_text(kernel(512) + "// a remark\n")
    git(top, "commit", "--quiet", "--all", "-m", "a remark")
    assert sweep("--resume", rows=ROWS) == path
    run = read_run(path)
    assert run.header["revisions"] == first and len(run.rows) == 2
    assert read_run(sweep("toy", "--family-dir", str(kernels), rows=ROWS)).header["revisions"] != first


def test_rows_that_training_keeps_have_their_commit(top: Path, tmp_path: Path) -> None:
    with Journal(tmp_path, {"kind": "cuda", "name": "Test GPU"}, [top / "kernels"]) as journal:
        journal.keep(ROWS)
    (path,) = (tmp_path / "runs").iterdir()
    assert read_run(path).header["revisions"][0]["commit"] == git(top, "rev-parse", "HEAD")


# -------------------------------------------------------------------------------------------- shown


def run_at(folder: Path, day: int, commit: str, ms: float = 1.0, dirty: bool = False) -> Path:
    header = {
        "started": f"2026-01-{day:02}T00:00:00+00:00",
        **({"revisions": [entry(commit, dirty=dirty)]} if commit else {}),
    }
    row = make_row(1, measurement=measured(ms, 0.002))
    return write_run(folder / "runs" / f"run{day:02}.jsonl", [row], **header)


def test_lists_and_tables_of_runs_name_the_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_at(tmp_path, 1, ONE, dirty=True)
    last = run_at(tmp_path, 2, "")
    assert run_command(["results", "list", "--results", str(tmp_path)]) == Exit.OK
    shown = capsys.readouterr().out
    assert "at 1111111111+" in shown and shown.count(" at ") == 1
    assert all(len(line) <= 80 or "/" in line for line in shown.splitlines())
    run_command(["results", "list", "--results", str(tmp_path), "--json"])
    assert [run["revision"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["", "1111111111+"]
    run_command(["results", "show", "run01", "--results", str(tmp_path)])
    assert "kernels at 1111111111+" in " ".join(capsys.readouterr().out.split())
    run_command(["results", "show", str(last)])
    assert "kernels at" not in capsys.readouterr().out


def test_the_page_of_a_run_names_the_commit(tmp_path: Path) -> None:
    for commit, count in ((ONE, 1), ("", 0)):
        write_page(tmp_path / "page.html", read_run(run_at(tmp_path, 1, commit)))
        assert (tmp_path / "page.html").read_text().count("kernels at 1111111111") == count


def test_a_report_names_both_sides_and_compares_them_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = simulated(versions=(1,), blocks=(64,), rounds=4)
    old = write_run(tmp_path / "old.jsonl", rows, revisions=[entry(ONE)])
    new = write_run(tmp_path / "new.jsonl", rows, revisions=[entry(TWO, dirty=True)])
    words = ["report", str(old), str(new)]
    files = {name: tmp_path / f"out.{name}" for name in ("markdown", "junit", "html")}
    files |= {"html": tmp_path / "out.html"}
    assert run_command([*words, *(word for name, path in files.items() for word in (f"--{name}", str(path)))]) == 0
    assert any(
        line.split() == ["revision", "1111111111", "2222222222+"] for line in capsys.readouterr().out.split("\n")
    )
    for path in files.values():
        assert "1111111111" in path.read_text() and "2222222222+" in path.read_text(), path
    assert run_command([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["before"]["facts"]["revision"] == "1111111111"
    assert document["after"]["facts"]["revision"] == "2222222222+" and document["counts"]["same"] >= 1
    headers = [{"device": {}, "revisions": [entry(commit)]} for commit in (ONE, TWO)]
    assert Surroundings.of(headers[0]) == Surroundings.of(headers[1])


def test_a_report_names_a_baselines_own_commit_beside_that_of_its_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    save_baseline(Path("results"), "baseline", written(tmp_path, ONE))
    git(tmp_path, "add", "results")
    git(tmp_path, "commit", "--quiet", "-m", "a baseline")
    run_command(["report", "git:main", str(written(tmp_path, TWO)), "--results", "results", "--json"])
    facts = json.loads(capsys.readouterr().out)["before"]["facts"]
    assert facts["revision"] == "1111111111" and facts["committed"] == git(tmp_path, "rev-parse", "HEAD")[:12]


def test_a_history_names_the_commit_of_a_change_and_of_both_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in range(1, 9):
        run_at(tmp_path, day, f"{day}" * 40, 1.0 if day < 5 else 1.2, dirty=day == 8)
    page = tmp_path / "page.html"
    words = ["history", "toy", "--results", str(tmp_path)]
    assert run_command([*words, "--html", str(page)]) == Exit.OK
    out = capsys.readouterr().out
    shown = " ".join(out.split())
    assert "first run at 1111111111, last run at 8888888888+" in shown
    assert all(
        len(line) <= 80 for line in out.splitlines() if not line.startswith("page:")
    )  # a path is as long as it is
    assert "slower +20%" in shown and "since run run05 at 5555555555" in shown
    text = page.read_text()
    assert "first run at 1111111111, last run at 8888888888+" in text and "since run run05 at 5555555555" in text
    assert "run run03 at 3333333333" in text, "each dot says of which commit it is"
    run_command([*words, "--json"])
    (series,) = json.loads(capsys.readouterr().out)["series"]
    assert series["points"][0]["revision"] == "1111111111" and series["points"][-1]["revision"] == "8888888888+"
    assert series["changes"][0]["revision"] == "5555555555"


@pytest.mark.parametrize(
    ("commits", "said"),
    [
        ((), ""),
        ((ONE, ONE), "first and last run at 1111111111"),
        (("", TWO), "first run at an unknown commit, last run at 2222222222"),
        ((ONE,), "at 1111111111"),
        (("", ""), ""),
    ],
)
def test_ends_of_a_history(
    tmp_path: Path, commits: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for day, commit in enumerate(commits, 1):
        run_at(tmp_path, day, commit)
    run_command(["history", "toy", "--results", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert (said in lines) if said else not any("run at" in line for line in lines)


def test_files_that_say_nothing_of_it_are_read(tmp_path: Path) -> None:
    assert SCHEMA_VERSION == 5, "the field came without a new number: older headers just lack it"
    for path in (Path(__file__).parent / "records").glob("schema*.jsonl"):
        assert revisions_of(read_run(path).header) == []
