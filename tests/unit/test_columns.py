"""The columns of a sweep's tables: which there are, in what order rows stand, and what fits a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import failed, make_row
from gpu_rows import CardBench, layernorm_rows
from kbench.cli.app import run_command
from kbench.cli.sweep_shown import KEYS, TIMED, UNTIMED
from kbench.cli.table import Column, stacks
from kbench.errors import Exit, UsageError
from kbench.results.columns import BY_NAME, NAMES, bytes_text, parse_columns, parse_order
from kbench.results.facts import Card, facts_of
from kbench.results.schema import Row

Sweep = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Sweep:
    """Sweeps over hand-made rows of an H200; returns exit status, stdout and stderr. columns: of the terminal."""

    def run(options: str = "", columns: int = 80, script: list[Row] | None = None, **settings: Any) -> Any:
        monkeypatch.setattr("kbench.sweep.Bench", type("Bench", (CardBench,), {
            "script": layernorm_rows() if script is None else script, **settings,
        }))  # fmt: skip
        monkeypatch.setenv("COLUMNS", str(columns))
        status = run_command(["sweep", "layernorm_forward", "--results", str(tmp_path / "r"), *options.split()])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def tables(out: str) -> list[list[str]]:
    """Each table's lines, its heading first."""
    lines = out.splitlines()
    found = []
    for at, line in enumerate(lines):
        if line.startswith("──"):
            end = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
            found.append([lines[at - 1], *lines[at + 1 : end]])
    return found


def heading(out: str) -> list[str]:
    return re.split(r"\s{2,}", tables(out)[0][0].strip())


def versions(out: str) -> list[tuple[int, int]]:
    found = [line.lstrip("*~ ").split() for line in tables(out)[0][1:] if re.match(r"[*~ ]+\d", line)]
    return [(int(words[0]), int(words[1])) for words in found]


# ----------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_tables_fit_the_terminal_and_wider_ones_show_more(sweep: Sweep, columns: int) -> None:
    out = sweep("", columns)[1]
    assert all(len(line) <= columns for line in out.splitlines() if not re.search("/r/|again:", line))
    shown = heading(out)
    assert shown[:3] == ["ver", "block", "check"] and {"ms", "median ms"} & {*shown}
    assert len(heading(sweep("", columns + 40)[1])) > len(shown) or columns == 200


def test_80_columns_show_the_check_the_time_and_how_near_it_is(sweep: Sweep) -> None:
    out = sweep()[1]
    assert heading(out) == ["ver", "block", "check", "bound", "ms", "95% interval", "ceiling", "occup"]
    winner = next(line for line in out.splitlines() if line.startswith("*"))
    assert winner.split() == ["*", "6", "256", "pass", "2%", "0.01693", "0.01686..0.01700", "70%", "copy", "75%"]
    assert "\n~    6     64  pass" in out
    assert "* fastest: version 6 at block size 256, 0.01693 ms (0.01686..0.01700)" in out
    assert "\n~ within noise of it: version 6 at 64\n" in out
    flat = " ".join(out.split())
    assert "version 6 is 1.09x (1.08x..1.10x) as fast as version 5 (its best: 0.01850 ms at block size 256)" in flat
    assert 'its idea: "one warp per row, nothing is read twice' in flat


def test_200_columns_show_what_explains_a_row(sweep: Sweep) -> None:
    shown = heading(sweep("", 200)[1])
    assert {"GB/s", "of ceiling", "occupancy", "limited by", "registers", "waves", "tail", "steps"} <= {*shown}
    assert "TFLOP/s" not in shown and "params" not in shown, "of which no row has any"


def test_the_heading_says_how_it_was_timed(sweep: Sweep) -> None:
    for mode, words in (("cold", "cold L2"), ("hot", "hot L2"), ("graph", "one after another in a CUDA graph, hot L2")):
        rows = [replace(row, cache_mode=mode) for row in layernorm_rows()]
        out = sweep(script=rows)[1]
        assert " ".join(out.split()).startswith(f"layernorm_forward: B=8 T=1024 C=768, fp32, {words}, seed 7 on ")
        assert "fastest: version 6" in out
    both = [replace(row, cache_mode=mode) for mode in ("cold", "hot") for row in layernorm_rows()]
    assert len(tables(sweep(script=both)[1])) == 2, "two modes are two contests"


def test_parameters_are_a_column_where_a_row_has_some(sweep: Sweep) -> None:
    rows = layernorm_rows()
    rows[-2].params = {"ROWS": 2}
    out = sweep(script=rows)[1]
    assert heading(out)[2] == "params" and "* fastest: version 6 at block size 256 ROWS=2" in out
    assert re.search(r"\*\s+6\s+256\s+ROWS=2\s+pass", out)


def test_columns_are_those_that_were_asked_for_in_that_order(sweep: Sweep) -> None:
    out = sweep("--columns version,time,gbs,waves,time")[1]
    assert heading(out) == ["ver", "median ms", "GB/s", "waves"]
    first = tables(out)[0][1].split()
    assert first == ["1", "0.3011", "167", "0.04"]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_all_columns_stand_below_each_other(sweep: Sweep, columns: int) -> None:
    out = sweep("--columns all", columns)[1]
    assert all(len(line) <= columns for line in out.splitlines() if not re.search("/r/|again:", line))
    parts = tables(out)
    assert len(parts) > 1 and all("ver" in part[0] and "block" in part[0] for part in parts)
    text = " ".join(part[0] for part in parts)
    # What no row has any of: params, and what only rows have that were compiled or counted.
    counts = {"instructions", "asked", "sectors", "used", "wavefronts", "conflicts", "barriers", "atomics"}
    empty = {"params", "tflops", "seconds"} | counts
    for fact in BY_NAME.values():
        assert fact.name in empty or fact.title in text or fact.short in text
    assert "30,720" in out and "0.01686..0.01700" in out and "layernorm_forward6<float, true>" in out


def test_a_table_in_parts_repeats_what_tells_rows_apart() -> None:
    columns = [Column("key"), *(Column(f"c{i}") for i in range(5))]
    cells = [["k", *["12345678"] * 5]]
    assert stacks(columns, cells, 100, [0]) == [[0, 1, 2, 3, 4, 5]]
    assert stacks(columns, cells, 25, [0]) == [[0, 1, 2], [0, 3, 4], [0, 5]]
    assert stacks(columns, cells, 5, [0]) == [[0, i] for i in range(1, 6)], "one too wide has a part of its own"
    assert stacks(columns[:1], [["k"]], 5, [0]) == [[0]]


def test_names_of_columns_are_known_and_documented() -> None:
    assert {*TIMED, *UNTIMED, *KEYS} <= {*NAMES}
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    titles = {fact.name: ", ".join(dict.fromkeys(filter(None, (fact.title, fact.short)))) for fact in BY_NAME.values()}
    assert table == [(fact.name, titles[fact.name], fact.meaning) for fact in BY_NAME.values()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--columns tme", "--columns: there is no column 'tme'; did you mean time? columns: version, block"),
        ("--columns time,", "there is no column ''"),
        ("--columns all,time", "there is no column 'all'"),
        ("--columns Time", "there is no column 'Time'; did you mean time?"),
        ("--columns steps", "there is no column 'steps'; did you mean launches?"),
        ("--sort regs", "there is no column 'regs'; did you mean registers?"),
        ("--sort speed", "--sort: there is no column 'speed'; "),
        ("--sort --time", "there is no column '-time'; did you mean time?"),
        ("--sort time,gbs", "there is no column 'time,gbs'"),
        ("--top 0", "--top '0' is not a number of rows; give a whole number above 0"),
        ("--top -1", "--top '-1' is not a number"),
        ("--top 1.5", "--top '1.5' is not a number"),
    ],
)
def test_bad_choices_are_one_line_before_any_work(sweep: Sweep, tmp_path: Path, options: str, words: str) -> None:
    status, out, err = sweep(options)
    assert status == Exit.USAGE and out == "" and err.count("\n") == 1 and words in err
    assert not (tmp_path / "r").exists()


# ------------------------------------------------------------------------------------------------ order


def test_rows_are_sorted_with_those_without_a_value_last(sweep: Sweep) -> None:
    by_time = versions(sweep("--sort time")[1])
    assert by_time[:3] == [(6, 256), (6, 64), (5, 256)] and by_time[-1] == (6, 1024)
    slowest = versions(sweep("--sort -time")[1])
    assert slowest == [*reversed(by_time[:-1]), (6, 1024)]
    assert versions(sweep("--sort version")[1])[0] == (1, 64)
    assert versions(sweep("--sort -gbs")[1])[0] == (6, 256)
    assert versions(sweep("--sort block")[1])[:4] == [(1, 64), (2, 64), (5, 64), (6, 64)], "equal ones as they ran"


@pytest.mark.parametrize("name", NAMES)
def test_every_column_can_be_sorted_by_and_shown(name: str) -> None:
    rows = [*layernorm_rows(), make_row(9), failed(8), make_row(7, median_ms=1.0, params={"A": 1}, seconds=1.0)]
    pairs = [(row, facts_of(row, Card())) for row in rows]
    for text in (name, f"-{name}"):
        assert len(parse_order(text).sort(pairs)) == len(pairs)
    (fact,) = parse_columns(name)
    for row, facts in pairs:
        assert (fact.show(row, facts) == "") == (fact.value(row, facts) is None)


def test_top_says_what_it_leaves_out_and_hides_no_failure(sweep: Sweep) -> None:
    status, out, _ = sweep("--top 2")
    assert versions(out) == [(6, 256), (6, 64)] and status == Exit.CRASHED
    assert "the first 2 of 12 rows by time; not shown: 9 pass, 1 unlaunchable" in out
    assert "version 6 unlaunchable at block size 1024" in out
    out = sweep("--top 3 --sort -time")[1]
    assert versions(out) == [(1, 1024), (1, 256), (1, 64)] and "by time, largest first" in out
    assert "not shown" not in sweep("--top 12")[1]
    assert "* fastest: version 6" in sweep("--top 1 --sort version")[1], "the winner of all rows, shown or not"


def test_json_has_all_rows_whatever_is_shown(sweep: Sweep) -> None:
    document = json.loads(sweep("--top 1 --columns time --json")[1])
    assert len(document["rows"]) == 12
    facts = next(row["facts"] for row in document["rows"] if (row["version"], row["block"]) == (6, 256))
    assert (facts["occupancy"], facts["limiter"], facts["ceiling"]) == (0.75, "registers", "copy")
    assert document["winners"][0]["why"].startswith("version 6 is 1.09x")


# -------------------------------------------------------------------------------------- sweeps in trouble


def test_a_sweep_whose_every_row_fails(sweep: Sweep) -> None:
    rows = [failed(v, family="layernorm_forward", block=block) for v in (1, 2) for block in (64, 128)]
    status, out, err = sweep(script=rows)
    assert status == Exit.WRONG and err == ""
    assert len(tables(out)[0]) == 5 and "versions 1, 2 fail at block sizes 64, 128: out: 3 of 4096" in out
    assert "no winner: no version was proven and timed here" in out and "fastest" not in out and "*" not in out
    document = json.loads(sweep("--json", script=rows)[1])
    assert document["winners"] == [] and document["exit_status"] == Exit.WRONG


def test_the_emulator_has_its_own_columns(sweep: Sweep) -> None:
    rows = [make_row(1, family="layernorm_forward", device="emulator", steps={"Launch": 2}, touched=4e6)]
    out = sweep(script=rows, kind="emulator", card=None)[1]
    assert heading(out) == ["ver", "block", "check", "bound", "same bits", "steps", "touched"]
    assert "no winner:" not in out and "4 MB" in out


def test_all_columns_are_those_that_hold_anything(sweep: Sweep) -> None:
    rows = [make_row(1, family="layernorm_forward", device="emulator", steps={"Launch": 2}, touched=4e6)]
    out = sweep("--columns all", script=rows, kind="emulator", card=None)[1]
    text = " ".join(part[0] for part in tables(out))
    assert "touched" in text and "same" in text
    assert not any(word in text for word in ("ms", "GB/s", "occup", "regs", "waves", "samples"))
    assert "median ms" in sweep("--columns version,time", script=rows, kind="emulator", card=None)[1], "as asked for"


def test_an_order_that_no_row_has_a_value_for_is_not_claimed(sweep: Sweep) -> None:
    rows = [make_row(v, family="layernorm_forward", device="emulator", measurement=None) for v in (1, 2)]
    out = sweep("--sort time --top 1", script=rows, kind="emulator", card=None)[1]
    assert "the first 1 of 2 rows; not shown: 1 pass" in out


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (640, "640 B"), (999.6, "1 kB"), (25_165_824, "25.2 MB"), (5e12, "5,000 GB")]
)
def test_bytes(value: float, text: str) -> None:
    assert bytes_text(value) == text


def test_an_order_that_is_not_known_is_an_error() -> None:
    with pytest.raises(UsageError, match="columns: version, block, params, check"):
        parse_order("")
