"""Baselines of exact numbers: the committed file changes where a number does, and only there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fakes import make_row
from kbench.catalog import load_catalog
from kbench.errors import UsageError
from kbench.results.baselines import baseline_path, save_baseline
from kbench.results.schema import Row
from kbench.results.steady import says_the_same, steady
from kbench.results.store import RunWriter, read_bytes, read_run

ROOT = Path(__file__).parents[2]


def row(version: int, registers: int = 32, **more: Any) -> Row:
    metrics = {f"k{version}<float, 4>": {"registers": registers, "spill_bytes": 0}}
    return make_row(version, verdict=None, cache_mode="static", device="sm_90", metrics=metrics, **more)


def run_file(folder: Path, rows: list[Row], mode: str = "static", command: str = "kbench sweep --static") -> Path:
    device = {"kind": mode, "name": "sm_90", "compiler": "NVRTC 13.0.88"}
    writer = RunWriter(folder, device=device, command=command.split(), options={"mode": mode}, kbench_version="1")
    with writer:
        for each in rows:
            writer.append(each)
    return writer.path


def saved(folder: Path, rows: list[Row], **more: Any) -> bytes:
    return save_baseline(folder, "static", run_file(folder, rows, **more)).read_bytes()


def test_what_says_the_same_leaves_the_file_alone(tmp_path: Path) -> None:
    first = saved(tmp_path, [row(1, seconds=0.5), row(2, seconds=0.25)])
    again = saved(tmp_path, [row(2, seconds=3.0), row(1, seconds=4.0)], command="kbench sweep --static --results x")
    assert again == first, "other order, other seconds, another command, another time"
    run = read_run(baseline_path(tmp_path, "static"))
    assert [each.version for each in run.rows] == [1, 2] and {each.seconds for each in run.rows} == {0.0}
    assert "id" not in run.header and run.footer is not None and "finished" not in run.footer


@pytest.mark.parametrize(
    "others", [[row(1, 33), row(2)], [row(1)], [row(1), row(2), row(3)], [row(1), row(2, idea="x")]]
)
def test_what_says_something_else_is_written(tmp_path: Path, others: list[Row]) -> None:
    first = saved(tmp_path, [row(1), row(2)])
    assert saved(tmp_path, others) != first
    assert read_run(baseline_path(tmp_path, "static")).rows == others


def test_another_compiler_is_something_else(tmp_path: Path) -> None:
    path = run_file(tmp_path, [row(1)])
    data = read_bytes(path)
    assert says_the_same(data, data.replace(b'"kbench": "1"', b'"kbench": "2"'))
    assert not says_the_same(data, data.replace(b"13.0.88", b"13.0.89"))


def test_bytes_do_not_depend_on_when_they_are_compressed(tmp_path: Path) -> None:
    data = saved(tmp_path, [row(1)])
    assert data[4:8] == bytes(4) and data[3] == 0, "no time and no name in the header of gzip"
    assert steady(gzip.decompress(data)) == gzip.decompress(data)


def test_timed_runs_are_kept_as_they_are(tmp_path: Path) -> None:
    path = run_file(tmp_path, [make_row(2, median_ms=1.0, seconds=2.0), make_row(1, median_ms=1.0)], mode="cold")
    assert steady(read_bytes(path)) == read_bytes(path)
    assert gzip.decompress(save_baseline(tmp_path, "times", path).read_bytes()) == path.read_bytes()


def test_a_damaged_baseline_is_replaced_and_a_damaged_run_is_not_kept(tmp_path: Path) -> None:
    whole = saved(tmp_path, [row(1)])
    baseline_path(tmp_path, "static").write_bytes(whole[: len(whole) // 2])
    assert read_run(save_baseline(tmp_path, "static", run_file(tmp_path, [row(1)]))).rows == [row(1)]
    path = run_file(tmp_path, [row(1)])
    path.write_bytes(path.read_bytes().replace(b'"family"', b'"famly"'))
    with pytest.raises(UsageError, match="not written whole"):
        save_baseline(tmp_path, "static", path)


def test_the_committed_baseline_is_of_all_of_kbenchs_own_kernels() -> None:
    path = baseline_path(ROOT / "results", "static")
    assert path.stat().st_size < 200_000
    run = read_run(path)
    assert run.header["options"]["mode"] == "static" and run.header["device"]["compiler"].startswith("NVRTC 13.0")
    catalog = load_catalog()
    wanted = {(name, version.number) for name in catalog.names for version in catalog[name].versions}
    advice = "`make update-baseline` writes it anew"
    assert {(each.family, each.version) for each in run.rows} == wanted, advice
    assert {each.status for each in run.rows} <= {"pass", "refused", "skipped"}, advice
    assert {each.dtype for each in run.rows} == {"fp32", "bf16"}
    assert not any(known["spill_bytes"] for each in run.rows for known in each.metrics.values())
    text = gzip.decompress(path.read_bytes()).decode()
    assert not any(place in text for place in ("/home/", "/root/", "/tmp/", "/work", str(ROOT)))
    assert json.loads(text.partition("\n")[0])["selection"]["dtype"] == "fp32,bf16"
