"""History: change points of hand-made signals, series over run files, and what is said of them."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import failed, make_row, measured
from kbench.cli.app import run_command
from kbench.cli.sparkline import BLOCKS, PLAIN, WIDEST, sparkline
from kbench.errors import Exit
from kbench.history.segments import changes_of, scatter, segments_of
from kbench.history.series import Point
from kbench.report.surroundings import Surroundings
from kbench.results.baselines import save_baseline
from kbench.results.schema import SCHEMA_VERSION, Row
from kbench.results.strict_json import dumps

Found = list[tuple[str, int, float]]


def found(values: list[float], error: float = 0.002, least: float = 0.03) -> Found:
    """Kind, place and ratio of the changes of a series."""
    y, errors = [math.log(value) for value in values], [error] * len(values)
    return [(c.kind, c.at, round(c.ratio, 3)) for c in changes_of(y, errors, scatter([y], [errors]), least)]


# --------------------------------------------------------------------------------------- change points


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ([1.0] * 10, []),
        ([1.0] * 5 + [1.05] * 5, [("step", 5, 1.05)]),
        ([1.0] * 6 + [0.9] * 6, [("step", 6, 0.9)]),
        ([1.0] * 5 + [1.2] * 5 + [1.0] * 5, [("step", 5, 1.2), ("step", 10, 0.833)]),
        ([1.0] * 5 + [1.02] * 5, []),  # below the threshold
        ([1.0, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0], [("unconfirmed", 3, 1.5)]),
        ([1.0, 1.0, 1.0, 1.0, 1.5], [("unconfirmed", 4, 1.5)]),
        ([1.0, 1.5], [("unconfirmed", 1, 1.5)]),
        ([1.0, 1.0, 1.0, 1.0, 1.5, 1.5], [("step", 4, 1.5)]),  # the next run confirms it
        # A spike and a step at once are told apart.
        ([1.0] * 4 + [1.5] + [1.1] * 4, [("unconfirmed", 4, 1.5), ("step", 5, 1.1)]),
        ([1.0], []),
        ([], []),
    ],
)
def test_signals_made_by_hand(values: list[float], changes: Found) -> None:
    assert found(values) == changes


def test_two_percent_in_each_of_ten_runs_is_a_creep_against_the_first() -> None:
    y = [math.log(1.02**run) for run in range(10)]
    (change,) = changes_of(y, [0.002] * 10, scatter([y], [[0.002] * 10]), 0.03)
    assert (change.kind, change.since, change.at) == ("creep", 0, 9)
    assert change.ratio == pytest.approx(1.02**9, rel=1e-6) and change.low > 1.1


def test_a_creep_between_two_levels_is_no_row_of_steps() -> None:
    kinds = [kind for kind, _, _ in found([1.0] * 5 + [1.02**i for i in range(1, 11)] + [1.02**10] * 5)]
    assert kinds == ["creep"]


def test_a_spike_on_a_creep_is_held_against_the_line_where_it_stands() -> None:
    values = [1.02**run for run in range(12)]
    values[6] *= 1.4
    kinds = {kind: (at, ratio) for kind, at, ratio in found(values)}
    assert kinds["unconfirmed"] == (6, pytest.approx(1.4, rel=0.02)) and kinds["creep"][0] == 11


def test_the_interval_of_a_spike_holds_its_own_error() -> None:
    y, errors = [0.0, 0.0, 0.0, math.log(1.5), 0.0, 0.0, 0.0], [0.001, 0.001, 0.001, 0.05, 0.001, 0.001, 0.001]
    (change,) = changes_of(y, errors, 1.0, 0.03)
    assert math.log(change.high / change.ratio) == pytest.approx(
        2.576 * math.hypot(0.05, 0.01 / math.sqrt(6)), rel=0.05
    )


def test_a_points_error_is_a_quarter_of_its_interval() -> None:
    """Two standard errors either way are 95%."""
    point = Point("run", None, 2.0, 1.9, 2.1, "", Surroundings.of({}), frozenset())
    assert point.error == pytest.approx(0.05 / 1.96, rel=1e-3)


def test_intervals_hold_what_was_put_in() -> None:
    source = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        values = np.exp(source.normal(0, 0.01, 20))
        values[10:] *= 1.10
        y, errors = np.log(values).tolist(), [0.002] * 20
        steps = [c for c in changes_of(y, errors, scatter([y], [errors]), 0.03) if c.kind == "step"]
        assert len(steps) == 1
        hits += abs(steps[0].at - 10) == 0 and steps[0].low <= 1.10 <= steps[0].high
    assert hits >= 97


@pytest.mark.parametrize(("noise", "most"), [(0.005, 0), (0.01, 1), (0.02, 8)])
def test_noise_is_no_change(noise: float, most: int) -> None:
    """noise: between runs; kernels of one code lie half a percent to two percent apart."""
    source = np.random.default_rng(2)
    wrong = 0
    for runs in (4, 8, 20):
        for _ in range(50):
            changes = found(np.exp(source.normal(0, noise, runs)).tolist())
            wrong += any(kind != "unconfirmed" for kind, _, _ in changes)
    assert wrong <= most  # of 150


def test_a_run_that_was_measured_badly_weighs_little() -> None:
    """The same spike is a spike of a good run, and nothing of one whose own error is as large."""
    y = [0.0, 0.0, 0.0, math.log(1.2), 0.0, 0.0, 0.0]
    sharp, blunt = [0.002] * 7, [0.002, 0.002, 0.002, 0.2, 0.002, 0.002, 0.002]
    assert [c.kind for c in changes_of(y, sharp, 1.0, 0.03)] == ["unconfirmed"]
    assert changes_of(y, blunt, 1.0, 0.03) == []


def test_the_cut_is_the_cheapest_there_is() -> None:
    """Against all ways to cut eight runs, one by one."""
    from itertools import combinations

    from kbench.history.segments import FLOOR, PENALTY, RAMP

    source = np.random.default_rng(3)
    for _ in range(20):
        y = source.normal(0, 0.02, 8) + np.repeat([0.0, 0.05], 4)

        def cost(start: int, end: int, y: np.ndarray = y) -> float:
            part, x = y[start:end], np.arange(start, end)
            level = float(np.sum((part - part.mean()) ** 2)) / FLOOR**2
            if end - start < RAMP:
                return level
            line = float(np.sum((part - np.polyval(np.polyfit(x, part, 1), x)) ** 2)) / FLOOR**2
            return min(level, line + PENALTY * math.log(8))

        ways = [(0, *cut, 8) for count in range(8) for cut in combinations(range(1, 8), count)]
        best = min(
            sum(cost(a, b) for a, b in zip(way, way[1:], strict=False)) + PENALTY * math.log(8) * (len(way) - 2)
            for way in ways
        )
        from kbench.history import segments

        parts = segments._cut(y.tolist(), [0.0] * 8, 1.0, range(8))
        mine = sum(cost(s.runs[0], s.runs[-1] + 1) for s in parts) + PENALTY * math.log(8) * (len(parts) - 1)
        assert mine == pytest.approx(best)


def test_three_runs_are_no_creep() -> None:
    parts, aside = segments_of([0.0, 0.1, 0.2], [0.002] * 3, 1.0)
    assert not any(part.ramp for part in parts) and aside == [1]


def test_single_runs_are_set_aside_until_none_is_left() -> None:
    y = [0.0, 0.0, 0.0, 0.4, 0.8, 0.0, 0.0, 0.0]
    parts, aside = segments_of(y, [0.002] * 8, 1.0)
    assert aside == [3, 4] and [part.runs for part in parts] == [(0, 1, 2, 5, 6, 7)]


# ------------------------------------------------------------------------------------------- sparkline


def test_sparklines() -> None:
    assert sparkline([1, 2, 4, 8], BLOCKS) == "▁▃▆█"
    assert sparkline([1.0, 1.001, 0.999], BLOCKS) == "▅▅▄"  # noise looks flat
    assert sparkline([3.0], BLOCKS) == "▅" and sparkline([], BLOCKS) == ""
    assert len(sparkline(list(range(1, 1000)), BLOCKS)) == WIDEST
    assert sparkline([0, 0, 5], BLOCKS) == "▁▁█"
    assert set(sparkline([1, 2, 4, 8], PLAIN)) <= set(PLAIN)


# ------------------------------------------------------------------------------------------- run files


DEVICE: dict[str, Any] = {"kind": "cuda", "name": "Test GPU", "arch": "sm_90", "driver": "1.0", "compiler": "NVRTC 13"}
START = datetime(2026, 1, 1, tzinfo=UTC)


def add_run(folder: Path, number: int, *rows: Row, driver: str = "1.0", name: str = "", **device: str) -> Path:
    started = START + timedelta(days=number)
    header = {
        "kind": "header", "schema": SCHEMA_VERSION, "kbench": "0.1.0", "id": name or f"run{number:02}",
        "started": started.isoformat(), "command": ["kbench", "sweep"], "options": {"seed": 7},
        "device": {**DEVICE, "driver": driver, **device},
    }  # fmt: skip
    path = folder / "runs" / f"{header['id']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(dumps(line) + "\n" for line in (header, *({"kind": "row", **r.to_dict()} for r in rows))))
    return path


def row(ms: float, version: int = 1, **more: Any) -> Row:
    return make_row(version, measurement=measured(ms, 0.002), **more)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KBENCH_RESULTS", str(tmp_path))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = run_command(["history", *words])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_a_series_is_oldest_first_whatever_the_files_are_called(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        source = "a" if number < 4 else "b"
        add_run(folder, number, row(1.0 if number < 4 else 1.1, source=source), name=f"z{9 - number}")
    status, out, err = call(capsys, "toy", "--json")
    assert status == Exit.OK and not err
    (series,) = json.loads(out)["series"]
    assert [point["run"] for point in series["points"]] == [f"z{9 - number}" for number in range(8)]
    (change,) = series["changes"]
    assert change["kind"] == "step" and change["run"] == "z5" and change["worse"] and change["source_changed"]
    assert series["ratio"] == pytest.approx(1.1)
    shown = " ".join(call(capsys, "toy:1")[1].split())
    assert "slower +10%" in shown and "since run z5; the version's files changed" in shown


def test_another_driver_is_no_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10):
        add_run(folder, number, row(1.0 if number < 5 else 1.3), driver="1.0" if number < 5 else "2.0")
    status, out, _ = call(capsys, "toy")
    shown = " ".join(out.split())
    assert status == Exit.OK
    assert "not comparable with the runs before: run run05 (driver 1.0, then 2.0)" in shown and "slower" not in shown
    (series,) = json.loads(call(capsys, "toy", "--json")[1])["series"]
    assert series["changes"] == [] and series["points"][5]["incomparable"] == "driver 1.0, then 2.0"
    assert series["ratio"] == pytest.approx(1.0)  # of what can be compared


def test_every_experiment_is_a_series_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(1.0), row(1.0, 2), row(1.0, block=64), row(1.0, dtype="bf16"), row(1.0, sizes={"N": 128}),
        row(1.0, params={"ROWS": 2}), row(1.0, cache_mode="hot"), row(1.0, device="Other GPU"),
        row(1.0, family="other"),
    ]  # fmt: skip
    for number in range(2):
        add_run(folder, number, *rows)
    series = json.loads(call(capsys, "toy", "--json")[1])["series"]
    assert len(series) == 8 and all(len(each["points"]) == 2 for each in series)
    for words, count in (
        (["toy:2"], 1), (["toy", "--block-sizes", "64"], 1), (["toy", "--dtype", "bf16"], 1),
        (["toy", "--size", "N=128"], 1), (["toy", "--dtype", "all"], 8), (["other"], 1),
    ):  # fmt: skip
        assert len(json.loads(call(capsys, *words, "--json")[1])["series"]) == count, words
    out = call(capsys, "toy")[1]
    assert max(map(len, out.splitlines())) <= 80 and "on Other GPU" in out and "hot L2" in out


def test_wrong_and_overridden_rows_are_no_points(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_run(folder, 0, row(1.0))
    add_run(folder, 1, failed(1))
    add_run(folder, 2, row(9.0, overridden=True))
    add_run(folder, 3, row(1.0))
    (series,) = json.loads(call(capsys, "toy", "--json")[1])["series"]
    assert [point["run"] for point in series["points"]] == ["run00", "run03"]
    assert series["failed"] == [{"run": "run01", "status": "fail"}]
    assert "fail in run run01" in " ".join(call(capsys, "toy")[1].split())


def test_rounds_of_a_run_are_one_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_run(folder, 0, *(row(1.0 + number / 10, round=number) for number in range(3)))
    (series,) = json.loads(call(capsys, "toy", "--json")[1])["series"]
    assert len(series["points"]) == 1 and series["points"][0]["value"] == pytest.approx(1.1)


def test_counts_change_where_they_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, registers in enumerate((32, 32, 40, 32)):
        kernels = [{"name": "k", "grid": [1], "block": [64], "shared": 0, "registers": registers}]
        add_run(folder, number, row(1.0, kernels=kernels))
    (series,) = json.loads(call(capsys, "toy", "--metric", "registers", "--json")[1])["series"]
    assert [(c["kind"], c["run"], c["worse"]) for c in series["changes"]] == [
        ("step", "run02", True), ("step", "run03", False)
    ]  # fmt: skip
    assert series["kernel"] == "k"
    status, _, err = call(capsys, "toy", "--metric", "nonsense")
    assert status == Exit.NOTHING and "has nonsense; what these rows have, for --metric: " in err and "registers" in err


def test_counts_have_all_of_their_digits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, count in enumerate((1234567, 1234568)):
        add_run(folder, number, row(1.0, metrics={"": {"global_bytes": count}}))
    page = folder / "page.html"
    out = " ".join(call(capsys, "toy", "--metric", "global_bytes", "--html", str(page))[1].split())
    assert " 2 1234567 1234568 " in out and "(1234567 to 1234568)" in out
    assert "1234568</title>" in page.read_text()


def test_counts_of_another_compiler_are_no_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, registers in enumerate((32, 40)):
        kernels = [{"name": "k", "grid": [1], "block": [64], "shared": 0, "registers": registers}]
        add_run(folder, number, row(1.0, kernels=kernels), driver=str(number), compiler=f"NVRTC {number}")
    (series,) = json.loads(call(capsys, "toy", "--metric", "registers", "--json")[1])["series"]
    assert series["changes"] == [] and series["points"][1]["incomparable"] == "compiler NVRTC 0, then NVRTC 1"


def test_a_baseline_joins_in_and_a_copy_does_not_count_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = save_baseline(folder, "first", add_run(folder, 0, row(1.0)))
    gone = save_baseline(folder, "older", add_run(folder, -9, row(1.0), name="gone"))
    (folder / "runs" / "gone.jsonl").unlink()
    add_run(folder, 1, row(1.0))
    words = ["toy", "--json", "--baseline", "first", "--baseline", str(gone)]
    (series,) = json.loads(call(capsys, *words)[1])["series"]
    assert [point["run"] for point in series["points"]] == ["gone", "run00", "run01"]
    assert kept.exists()
    assert call(capsys, "toy", "--baseline", "nothing")[0] == Exit.USAGE
    assert call(capsys, "toy", "--baseline", "no/such/file.jsonl.gz")[0] == Exit.USAGE


def test_files_that_cannot_be_read_are_named_and_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_run(folder, 0, row(1.0))
    (folder / "runs" / "foreign.jsonl").write_text("hello\n")
    bad = row(1.0)
    assert bad.measurement is not None
    bad.measurement["low_ms"] = "text"
    add_run(folder, 1, bad)
    status, out, err = call(capsys, "toy", "--json")
    assert status == Exit.OK and len(json.loads(out)["series"][0]["points"]) == 1
    assert "left out: " in err and "foreign.jsonl" in err and "01.jsonl: left out 1 damaged rows" in err


def test_nothing_to_show_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "toy")
    assert status == Exit.NOTHING and "holds no runs" in err
    add_run(folder, 0, row(1.0))
    status, _, err = call(capsys, "toys")
    assert status == Exit.NOTHING and "did you mean toy?" in err
    status, _, err = call(capsys, "toy:7")
    assert status == Exit.NOTHING and "proven time" in err
    assert call(capsys, "toy", "--threshold", "3")[0] == Exit.USAGE
    assert call(capsys, "toy", "--html", "page.txt")[0] == Exit.USAGE


def test_the_page_has_a_picture_of_each_series(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = 'G<script>&"PU'
    for number in range(12):
        add_run(
            folder, number, row(1.0, device=nasty), row(1.0 if number < 6 else 1.2, 2, device=nasty),
            driver="1.0" if number < 10 else "2.0",
        )  # fmt: skip
    page = folder / "page.html"
    assert call(capsys, "toy", "--html", str(page))[0] == Exit.OK
    text = page.read_text()
    assert text.count("<svg") == 2 and text.count('class="break"') == 2 and text.count('class="turn"') == 1
    assert "<script>" not in text and "G&lt;script&gt;" in text
    assert "slower +20%" in text


@pytest.mark.parametrize(("slower", "least", "most"), [(1.03, 20, 60), (1.002, 0, 5), (1.0, 0, 0), (2.0, 150, 300)])
def test_a_picture_shows_a_few_percent_and_no_mountains(
    folder: Path, slower: float, least: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        add_run(folder, number, row(0.07 if number < 6 else 0.07 * slower))
    page = folder / "page.html"
    assert call(capsys, "toy", "--html", str(page))[0] == Exit.OK
    text = page.read_text()
    heights = [float(height) for height in re.findall(r'class="dot" cx="[\d.]+" cy="([\d.]+)"', text)]
    assert len(heights) == 12 and least <= heights[0] - heights[-1] <= most  # pixels of some 300; upwards is less
    ticks = re.findall(r'text-anchor="end">([\d.]+)<', text)
    assert len({len(tick.partition(".")[2]) for tick in ticks}) == 1, f"as many decimals each: {ticks}"


def test_a_terminal_without_blocks_gets_ascii(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert set(sparkline([1.0, 2.0])) <= set(PLAIN)
