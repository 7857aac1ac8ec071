"""Numbers as text, CSV and Markdown, winners, and best.json."""

from __future__ import annotations

import csv
import json
import multiprocessing
from pathlib import Path

import pytest

from fakes import failed, make_row, measured
from gpu_rows import CEILINGS, DEVICE, kernel
from kbench.errors import UsageError
from kbench.results import tables
from kbench.results.best import contest, load_best, merge, ties, update_best, winners
from kbench.results.facts import Card
from kbench.results.schema import Row


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (172.8, "172.8"),
        (14.5, "14.50"),
        (0.4981, "0.4981"),
        (0.00401, "0.004010"),
        (0.0000004, "0.000000"),
        (12345.6, "12346"),
        (1.0, "1.000"),
        (0.0, "0.000"),
    ],
)
def test_milliseconds(value: float, text: str) -> None:
    assert tables.milliseconds(value) == text


@pytest.mark.parametrize(
    ("used", "text"), [(None, ""), (0.0, "0%"), (0.004, "<1%"), (0.126, "13%"), (1.5, "150%"), (1e9, ">999%")]
)
def test_percent(used: float | None, text: str) -> None:
    assert tables.percent(used) == text


def test_worst_used_is_unknown_if_one_output_has_no_number() -> None:
    row = make_row(1)
    assert row.verdict is not None
    row.verdict["outputs"].append({"name": "b", "compared": 1, "wrong": 0, "used": 0.4})
    assert tables.worst_used(row) == 0.4
    row.verdict["outputs"].append({"name": "c", "compared": 1, "wrong": 1, "used": None})
    assert tables.worst_used(row) is None
    assert tables.worst_used(failed()) is None


def test_only_proven_timed_rows_by_their_own_bound_win() -> None:
    fastest = make_row(3, median_ms=3.0)
    rows = [
        make_row(1, median_ms=9.0),
        failed(2, measurement=measured(1.0)),
        make_row(4, median_ms=2.0, overridden=True),
        make_row(5),
        fastest,
    ]
    assert winners(rows) == {contest(fastest): fastest}
    assert winners([make_row(1), failed(2)]) == {}


def test_each_problem_and_dtype_has_its_own_winner() -> None:
    rows = [
        make_row(1, median_ms=2.0),
        make_row(1, median_ms=1.0, sizes={"N": 1}),
        make_row(1, median_ms=3.0, dtype="tf32"),
    ]
    assert list(winners(rows).values()) == rows


def test_ties_are_rows_whose_interval_reaches_the_winners() -> None:
    best, close, far = make_row(1, median_ms=1.0), make_row(2, median_ms=1.015), make_row(3, median_ms=1.1)
    assert [ties(row, best) for row in (best, close, far)] == [False, True, False]
    assert [tables.mark(row, best) for row in (best, close, far)] == ["*", "~", ""]
    assert tables.mark(best, None) == ""


def test_csv_and_markdown_of_a_run(tmp_path: Path) -> None:
    rows = [
        make_row(
            1,
            median_ms=2.5,
            traffic=5e9,
            steps={"Launch": 2},
            kernels=[kernel("k", 8, 128, 40), kernel("l", 1056, 256, 64, shared=512)],
        ),
        failed(2, reason="a | b"),
        make_row(1, family="other", sizes={"M": 3}),
    ]
    written = tables.write_tables(tmp_path, "ID", rows, Card.of({**DEVICE, "ceilings": CEILINGS.to_dict()}))
    assert [path.relative_to(tmp_path / "tables" / "ID").name for path in written] == [
        "toy.csv",
        "toy.md",
        "other.csv",
        "other.md",
    ]
    with written[0].open() as file:
        first, second = csv.DictReader(file)
    assert (first["N"], first["block"], first["status"], first["mark"]) == ("64", "256", "pass", "*")
    assert float(first["median_ms"]) == 2.5
    names = ("kernel", "registers", "dynamic_shared", "grid", "occupancy", "limiter", "waves", "tail", "launches")
    # Of the kernel with the most threads; 64 registers of 256 threads are four blocks a multiprocessor.
    assert [first[name] for name in names] == ["l", "64", "512", "1056", "0.5", "registers", "2.0", "1.0", "2"]
    assert (float(first["gbs"]), first["ceiling"]) == (2000.0, "copy")
    assert float(first["share"]) == pytest.approx(2000 / 4250)
    assert second["registers"] == second["gbs"] == second["waves"] == ""
    assert (second["status"], second["reason"], second["median_ms"]) == ("fail", "a | b", "")
    lines = written[1].read_text().splitlines()
    assert len(lines) == 4
    # Every line has the same number of unescaped bars, or the table falls apart.
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "a \\| b" in lines[3]
    assert "M" not in lines[0]


def entry(document: dict, row: Row) -> dict | None:
    level = document["gpus"]
    for name in contest(row):
        level = level.get(name, {})
    return level.get(str(row.version))


def test_best_keeps_the_fastest_row_of_every_proven_version(tmp_path: Path) -> None:
    rows = [make_row(1, block=b, median_ms=m) for b, m in ((32, 3.0), (64, 1.0), (128, 2.0))]
    rows += [make_row(2, median_ms=5.0), failed(3), make_row(4, median_ms=0.1, overridden=True), make_row(5)]
    update_best(tmp_path, rows, "first")
    document = load_best(tmp_path)
    versions = document["gpus"]["Test GPU"]["toy"]["fp32"]["cold"]["N=64"]
    assert {number: (kept["row"]["block"], kept["run"]) for number, kept in versions.items()} == {
        "1": (64, "first"),
        "2": (256, "first"),
    }
    assert Row.from_dict(versions["1"]["row"]) == rows[1]


def test_best_merges_a_later_run(tmp_path: Path) -> None:
    update_best(tmp_path, [make_row(1, block=64, median_ms=1.0), make_row(2, block=64, median_ms=1.0)], "old")
    slower_elsewhere, faster = make_row(1, block=128, median_ms=2.0), make_row(2, block=128, median_ms=0.5)
    other_size = make_row(1, median_ms=9.0, sizes={"N": 1})
    update_best(tmp_path, [slower_elsewhere, faster, other_size], "new")
    document = load_best(tmp_path)
    kept = [entry(document, row) for row in (slower_elsewhere, faster, other_size)]
    assert [(k["run"], k["row"]["block"]) for k in kept if k] == [("old", 64), ("new", 128), ("new", 256)]


def test_a_repeated_experiment_replaces_what_it_repeats(tmp_path: Path) -> None:
    old = {"schema": 1, "gpus": {}}
    merge(old, [make_row(1, block=64, median_ms=1.0)], "old")
    # Both orders of the rows: the newer run has 64 slower than before, and 128 in between.
    for blocks in ((64, 128), (128, 64)):
        document = json.loads(json.dumps(old))
        merge(document, [make_row(1, block=b, median_ms={64: 3.0, 128: 2.0}[b]) for b in blocks], "new")
        kept = entry(document, make_row(1))
        assert kept is not None and (kept["row"]["block"], kept["run"]) == (128, "new")


def test_rows_of_one_run_compete_by_time_whenever_they_come(tmp_path: Path) -> None:
    """A sweep puts its rows in one by one; of two of a block size, as after --resume, the faster one is the best."""
    for ms in (1.0, 2.0):
        update_best(tmp_path, [make_row(1, median_ms=ms)], "run")
    kept = entry(load_best(tmp_path), make_row(1))
    assert kept is not None and kept["row"]["measurement"]["median_ms"] == 1.0


def test_a_version_now_proven_wrong_loses_its_entry(tmp_path: Path) -> None:
    for status in ("fail", "crashed", "hung"):
        update_best(tmp_path, [make_row(1, median_ms=1.0)], "old")
        assert update_best(tmp_path, [failed(1, status="refused")], "new") == 0
        assert update_best(tmp_path, [failed(1, block=32)], "new") == 0
        assert update_best(tmp_path, [failed(1, overridden=True)], "new") == 0
        assert update_best(tmp_path, [failed(1, status=status)], "new") == 1
        assert load_best(tmp_path)["gpus"] == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"gpus": 3}', '{"gpus": {}, "schema": 99}'])
def test_an_unreadable_best_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(UsageError, match=r"best\.json"):
        load_best(tmp_path)


def test_an_entry_edited_by_hand_is_named(tmp_path: Path) -> None:
    row = make_row(1, median_ms=1.0)
    update_best(tmp_path, [row], "old")
    path = tmp_path / "best.json"
    path.write_text(path.read_text().replace('"row"', '"rov"'))
    with pytest.raises(UsageError, match="no row of results"):
        update_best(tmp_path, [row], "new")


def _update(folder: Path, version: int) -> None:
    update_best(folder, [make_row(version, median_ms=1.0)], f"run{version}")


def test_processes_at_once_lose_no_entry(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=_update, args=(tmp_path, version)) for version in range(1, 17)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    versions = load_best(tmp_path)["gpus"]["Test GPU"]["toy"]["fp32"]["cold"]["N=64"]
    assert sorted(map(int, versions)) == list(range(1, 17))
