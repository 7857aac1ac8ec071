"""What BEFORE and AFTER may name, and what is said of files that are none."""

from __future__ import annotations

import gzip
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import make_row
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, KbenchError, UsageError
from kbench.report.records import Loaded, load
from kbench.report.sources import MissingBaseline, find_sources
from kbench.results.baselines import save_baseline
from kbench.results.merge import merge, write_merged
from kbench.results.store import read_run
from report_runs import plain, simulated, slower, write_run

ROWS = simulated(versions=(1,), blocks=(64,))
GIT = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "init.defaultBranch=main"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder with two runs and a baseline, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("results")
    write_run(folder / "runs/20260101T000000Z-h200-aaaaaa.jsonl", ROWS)
    second = write_run(folder / "runs/20260102T000000Z-h200-bbbbbb.jsonl", ROWS)
    (folder / "latest").write_text(f"runs/{second.name}\n")
    save_baseline(folder, "base", second)
    return folder


def names(folder: Path, text: str) -> list[str]:
    return [Path(source.path).name for source in find_sources(folder, text)]


def test_every_kind_of_name(results: Path) -> None:
    first, second = "20260101T000000Z-h200-aaaaaa.jsonl", "20260102T000000Z-h200-bbbbbb.jsonl"
    assert names(results, "latest") == [second] and names(results, "previous") == [first]
    assert names(results, "20260101") == [first] and names(results, "aaaaaa") == [first]
    assert names(results, "base") == ["base.jsonl.gz"]
    assert names(results, f"results/runs/{first}") == [first]
    assert names(results, "previous, latest") == [first, second]
    odd = write_run(Path("a, b.jsonl"), ROWS)
    assert names(results, str(odd)) == [odd.name], "a name with a comma is first of all a name"


def test_a_compressed_run_has_its_id_too(results: Path) -> None:
    first = results / "runs" / "20260101T000000Z-h200-aaaaaa.jsonl"
    packed = first.with_name(first.name + ".gz")
    packed.write_bytes(gzip.compress(first.read_bytes()))
    first.unlink()
    assert names(results, "aaaaaa") == names(results, "previous") == [packed.name]


def test_a_pipe_is_read_once(results: Path) -> None:
    text = (results / "runs" / "20260101T000000Z-h200-aaaaaa.jsonl").read_bytes()
    for data in (text, gzip.compress(text)):
        readable, writable = os.pipe()
        with open(writable, "wb") as file:
            file.write(data)
        try:
            assert read(Path(f"/dev/fd/{readable}")).side.rows == len(ROWS)
        finally:
            os.close(readable)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("n" * 300, UsageError, "'nnnn"),
        ("./" + "n" * 300, UsageError, "cannot look for './nnn"),
        ("nothing", MissingBaseline, "no baseline and no run of the name 'nothing'; `kbench sweep --save nothing`"),
        ("nothing", MissingBaseline, "baselines there: base; newest run: 20260102T000000Z"),
        ("2026", UsageError, "holds 2 runs with '2026' in their ids"),
        ("gone.jsonl", MissingBaseline, "gone.jsonl is not there"),
        ("results/runs", UsageError, "is a folder"),
        ("latest,,base", UsageError, "empty name"),
        ("", UsageError, "empty name"),
        ("git:", UsageError, "names no revision"),
        ("git:--upload-pack=x", UsageError, "names no revision"),
        ("git:main:../x", UsageError, "cannot be the name of a baseline"),
    ],
)
def test_names_of_nothing(results: Path, text: str, kind: type[KbenchError], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_sources(results, text)
    assert type(caught.value) is kind and words in str(caught.value) and "\n" not in str(caught.value)


def test_the_first_run_has_no_run_before(results: Path) -> None:
    next(results.glob("runs/*aaaaaa*")).unlink()
    with pytest.raises(MissingBaseline, match="no run before"):
        find_sources(results, "previous")


# ------------------------------------------------------------------------------------------- git


def git(*words: str) -> None:
    subprocess.run([*GIT, *words], check=True, capture_output=True)


@pytest.fixture
def repository(results: Path) -> Path:
    """The results in a repository, the baseline committed; then changed in the working tree, and not committed."""
    git("init", "-q")
    git("add", "-f", "results/baselines/base.jsonl.gz")
    (results / "baselines" / "baseline.jsonl.gz").write_bytes(gzip.compress(b"version https://git-lfs.github.com/spec"))
    git("add", "-f", "results/baselines/baseline.jsonl.gz")
    git("commit", "-q", "-m", "baselines")
    (results / "baselines" / "base.jsonl.gz").write_bytes(b"changed since")
    return results


def test_a_committed_baseline_is_read_as_it_was_committed(repository: Path) -> None:
    (source,) = find_sources(repository, "git:main:base")
    assert len(source.revision) == 12 and source.path == "git:main:base"
    loaded = load("git:main:base", [source])
    assert loaded.side.rows == len(ROWS) and loaded.side.facts["committed"] == source.revision
    assert (repository / "baselines" / "base.jsonl.gz").read_bytes() == b"changed since"
    # Also where the results are not checked out.
    for path in sorted(repository.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    repository.rmdir()
    assert find_sources(repository, "git:main:base")[0].data == source.data


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("git:nope", UsageError, "git knows no revision 'nope' here; fetch it"),
        ("git:main:other", MissingBaseline, "holds no baselines/other.jsonl.gz below results"),
        ("git:main:other", MissingBaseline, "; committed there: git:main:base, git:main:baseline"),
    ],
)
def test_revisions_and_baselines_that_are_not_there(
    repository: Path, text: str, kind: type[KbenchError], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        find_sources(repository, text)
    assert type(caught.value) is kind and words in str(caught.value)


def test_where_no_baseline_is_committed_none_is_named(results: Path) -> None:
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "nothing")
    with pytest.raises(MissingBaseline, match="writes it, to be committed$"):
        find_sources(results, "git:HEAD")


def test_a_hook_of_another_repository_does_not_lead_there(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    git("-C", "other", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert find_sources(repository, "git:main:base")[0].data is not None


def test_a_pointer_of_git_lfs_is_called_one(repository: Path) -> None:
    with pytest.raises(UsageError, match="git lfs pull"):
        load("git:main", find_sources(repository, "git:main"))


def test_outside_of_a_repository_and_without_git(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="not in a git repository"):
        find_sources(results, "git:main")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotRunError, match="needs git"):
        find_sources(results, "git:main")


# ------------------------------------------------------------------------------------------- files


def read(path: Path, *others: Path) -> Loaded:
    return load("side", find_sources(Path("results"), ",".join(map(str, (path, *others)))))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n", "its first line is"),
        (b"\xef\xbb\xbf{}", "begins with a byte-order mark"),
        (b"{}", "is not a run file of kbench"),
        (b"[" * 100_000 + b"\n", "is not a run file of kbench"),
        (b'{"kind": "header", "schema": 4}\n' + b"[" * 100_000 + b'\n{"kind": "footer"}\n', ":2 is not JSON"),
        (b"[1, 2]\n", "is not a run file of kbench"),
        (b"name,time\na,1\n", "is not a run file of kbench"),
        (b'{"kind": "header", "schema": 99, "kbench": "9"}\n', "was written by kbench 9 with schema 99"),
        (b'{"kind": "header", "schema": "4"}\n', "is not a run file of kbench"),
        (b'{"kind": "header", "schema": 4}\n', "holds no rows"),
        (b'{"kind": "header", "schema": 4}\nnot JSON\n{"kind": "footer"}\n', ":2 is not JSON"),
        (b'{"kind": "header", "schema": 4}\n{"kind": "row", "status": "odd"}\n', ":2 is not a row"),
        (
            b'{"kind": "header", "schema": 4}\n{"kind": "row", "status": "pass"}\n',
            ":2 is not a row of results: it lacks block, ",
        ),
        (b'{"kind": "header", "schema": 4}\n{"kind": "header", "schema": 4}\n', ":2 is a second header"),
        (b"\xff\xfe\x00\x01", "is no UTF-8 text: it begins as UTF-16 does"),
    ],
)
def test_files_that_are_no_runs_are_one_line_with_their_name(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert words in str(caught.value) and str(caught.value).count(str(path)) == 1 and "\n" not in str(caught.value)


def test_damage_to_a_compressed_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(write_run(tmp_path / "r.jsonl", ROWS * 5).read_bytes(), mtime=0)
    path = tmp_path / "r.jsonl.gz"
    for data, words in ((whole[: len(whole) // 2], "cut off"), (b"plain", "not what its name says"), (b"", "is empty")):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=words):
            read(path)
    path.write_bytes(whole[:200] + b"\0" * 50 + whole[250:])
    with pytest.raises(UsageError, match=r"r\.jsonl\.gz"):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": None},
        {"sizes": [1]},
        {"params": 3},
        {"steps": 4},
        {"block": [1]},
        {"family": ["x"]},
        {"measurement": 3},
    ],
)
def test_a_row_with_a_field_of_another_kind_is_named_with_its_line(tmp_path: Path, change: dict[str, Any]) -> None:
    row = plain(1, 64)
    for name, value in change.items():
        setattr(row, name, value)
    path = write_run(tmp_path / "r.jsonl", [ROWS[0], row])
    with pytest.raises(UsageError, match=r"r\.jsonl:3 is not a row of results: "):
        read(path)


def test_a_last_line_that_was_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r.jsonl", ROWS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:100])
    loaded = read(path)
    assert loaded.side.rows == len(ROWS) - 1
    assert "line 4 is cut off" in loaded.warnings[0] and "the run was killed" in loaded.findings[0]
    path.write_text("".join(lines[:-2]) + lines[-2][:100].encode().decode() + "\xff")
    assert read(path).side.rows == len(ROWS) - 1


def test_several_files_are_rounds_of_one_side_and_none_is_read_twice(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / f"{name}.jsonl", ROWS) for name in "ab")
    loaded = read(one, two)
    (experiment,) = (each for by_device in loaded.experiments.values() for each in by_device.values())
    assert len(experiment.samples) == 6 and loaded.side.runs == ("a", "b") and not experiment.mixed
    with pytest.raises(UsageError, match="run a is named twice"):
        read(one, one)


def test_a_row_that_was_repeated_counts_once_the_last_time(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r.jsonl", [*ROWS, make_row(9, family="x"), ROWS[0]])
    loaded = read(path)
    assert sorted(len(each.rounds) for by in loaded.experiments.values() for each in by.values()) == [1, 3]


def rounds_in(loaded: Loaded) -> list[int]:
    return sorted(len(each.rounds) for by in loaded.experiments.values() for each in by.values())


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_stand_twice_count_once_and_are_told(tmp_path: Path, packed: bool) -> None:
    path = write_run(tmp_path / "r.jsonl", [*ROWS, *ROWS])
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    loaded = read(path)
    assert rounds_in(loaded) == [len(ROWS)] and loaded.side.rows == len(ROWS)
    (warning,) = loaded.warnings
    assert warning.startswith(f"{path}: {len(ROWS)} rows repeat the experiment and round of another")
    assert f"(the first in line {len(ROWS) + 2})" in warning and "each counts once" in warning


def test_rows_of_an_older_kbench_are_copies_if_all_samples_are(tmp_path: Path) -> None:
    """Without a fingerprint of its files a row may have been measured again, with other samples."""
    old = [replace(row, source="") for row in ROWS]
    assert "3 rows repeat" in read(write_run(tmp_path / "a.jsonl", [*old, *old])).warnings[0]
    other = replace(simulated(versions=(1,), blocks=(64,), seed=5)[0], source="")
    assert not read(write_run(tmp_path / "b.jsonl", [*old, other])).warnings


def test_other_numbers_of_the_same_round_are_no_further_round(tmp_path: Path) -> None:
    others = simulated(versions=(1,), blocks=(64,), seed=5)
    loaded = read(write_run(tmp_path / "r.jsonl", [*ROWS, others[0]]))
    assert rounds_in(loaded) == [len(ROWS)] and "1 row repeats" in loaded.warnings[0]


def test_rows_of_two_runs_in_one_file_are_no_copies(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / f"{name}.jsonl", ROWS) for name in "ab")
    write_merged(tmp_path / "m.jsonl", merge([read_run(one), read_run(two)]))
    loaded = read(tmp_path / "m.jsonl")
    assert rounds_in(loaded) == [2 * len(ROWS)] and not loaded.warnings


@pytest.mark.parametrize(
    "before",
    [
        {"status": "crashed", "measurement": None},
        {"status": "unable", "measurement": None},
        {"source": "files of yesterday"},
        {"source": "", "measurement": None},
    ],
)
def test_rows_that_a_run_measured_again_are_no_copies(tmp_path: Path, before: dict[str, Any]) -> None:
    """As `sweep --resume` does with what the machine had a part in, and with versions whose files changed."""
    loaded = read(write_run(tmp_path / "r.jsonl", [replace(ROWS[0], **before), *ROWS]))
    assert rounds_in(loaded) == [len(ROWS)] and loaded.side.rows == len(ROWS) and not loaded.warnings


def test_a_report_warns_of_copies_on_stderr_and_decides_as_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_run = write_run(tmp_path / "a.jsonl", ROWS[:2])
    others = simulated(versions=(1,), blocks=(64,), rounds=2, change=slower(1.3, 1))
    once, doubled = (write_run(tmp_path / f"b{n}.jsonl", others * n) for n in (1, 2))
    told = []
    for path in (once, doubled):
        run_command(["report", str(plain_run), str(path), "--all"])
        told.append(capsys.readouterr())
    assert not told[0].err and told[1].err.count("\n") == 1 and f"{doubled}: 2 rows repeat" in told[1].err
    assert all("too few: 2 rounds" in each.out for each in told), "copies would be four rounds, which are enough"
    assert told[0].out.splitlines()[-1] == told[1].out.splitlines()[-1]


def test_runs_of_one_side_that_differ_are_not_mixed(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a.jsonl", ROWS)
    two = write_run(tmp_path / "b.jsonl", ROWS, {"driver": "570.1"})
    loaded = read(one, two)
    (experiment,) = (each for by_device in loaded.experiments.values() for each in by_device.values())
    assert experiment.mixed == "runs of one side differ: driver 580.159.04 and 570.1"
    assert loaded.side.facts["driver"] == "580.159.04; 570.1"


def test_runs_of_a_merged_file_keep_their_surroundings_and_rounds(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a.jsonl", ROWS)
    again = write_run(tmp_path / "b.jsonl", simulated(versions=(1,), blocks=(64,), seed=2))
    other = write_run(tmp_path / "c.jsonl", ROWS, {"driver": "570.1"})

    def merged(*paths: Path) -> Path:
        write_merged(tmp_path / "m.jsonl", merge([read_run(path) for path in paths]))
        return tmp_path / "m.jsonl"

    (experiment,) = (each for by_device in read(merged(one, again)).experiments.values() for each in by_device.values())
    assert len(experiment.samples) == 6 and not experiment.mixed, "no run's rounds stand in the place of another's"
    loaded = read(merged(one, other))
    (experiment,) = (each for by_device in loaded.experiments.values() for each in by_device.values())
    assert experiment.mixed == "runs of one side differ: driver 580.159.04 and 570.1"
    assert loaded.side.runs == ("a", "c") and loaded.side.facts["driver"] == "580.159.04; 570.1"
    with pytest.raises(UsageError, match="run a is named twice"):
        read(one, merged(one, other))
