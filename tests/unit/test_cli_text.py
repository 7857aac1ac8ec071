"""Text on the screen: tables that fit, prose that wraps, which failures are shown, progress on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from fakes import failed, make_row
from kbench.cli.failures import choose, show_failures, show_reasons, show_refusals
from kbench.cli.output import report_error
from kbench.cli.screen import Screen
from kbench.cli.table import Column, fit, render, width
from kbench.errors import UsageError

IDEA = "one warp per eight columns, where each loaded row serves eight sums, and longest rows come first"
LADDER = [
    Column(""),
    Column("ver", "right"),
    Column("idea", flexible=True),
    Column("block", "right", drop=3),
    Column("check"),
    Column("bound", "right", drop=1),
    Column("median ms", "right", short="ms"),
    Column("+-", "right", drop=2),
]
RUNGS = [["*", "12", IDEA, "1024", "unlaunchable", ">999%", "0.000123", "0.4%"]]


# ----------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("room", "titles"),
    [
        # 1 + 3 + 20 of the idea + 5 + 12 + 5 + 9 + 4, and two between each of them.
        (73, ["", "ver", "idea", "block", "check", "bound", "median ms", "+-"]),
        (72, ["", "ver", "idea", "block", "check", "bound", "ms", "+-"]),
        (71, ["", "ver", "idea", "block", "check", "ms", "+-"]),
        (64, ["", "ver", "idea", "block", "check", "ms"]),
        (58, ["", "ver", "idea", "check", "ms"]),
        (40, ["", "ver", "idea", "check", "ms"]),
    ],
)
def test_headings_are_shortened_before_columns_go(room: int, titles: list[str]) -> None:
    columns, rows = fit(LADDER, RUNGS, room)
    assert [column.title for column in columns] == titles
    assert len(rows[0]) == len(columns) and rows[0][2] == IDEA


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_ideas_wrap_whole_and_numbers_stay_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = render(LADDER, RUNGS)
    lines = text.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert "0.000123" in lines[2] and "unlaunchable" in lines[2] and "…" not in text
    start, end = lines[0].index("idea"), lines[0].index(" block" if " block" in lines[0] else " check")
    assert " ".join(line[start:end].strip() for line in lines[2:]) == IDEA


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_table_that_is_too_wide_cuts_no_number(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [Column(f"n{i}", "right") for i in range(9)]
    row = [str(100_000 + i) for i in range(9)]
    for family in ("family", "漢字" * 5):
        lines = render([Column("family"), *names, Column("what", flexible=True)], [[family, *row, IDEA]]).splitlines()
        assert lines[2].split()[:10] == [family, *row]


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_history_and_a_list_of_runs_cut_no_number(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.cli.history import COLUMNS
    from kbench.cli.results_shown import LIST_COLUMNS

    monkeypatch.setenv("COLUMNS", str(columns))
    cells = ["10", "1024", "", "14", "0.03978", "0.03907", "-1.8%", "▄" * 14, "unconfirmed +41%"]
    lines = render(COLUMNS, [cells]).splitlines()
    shown = [cell for cell in cells if cell]
    assert lines[0].split()[:2] == ["ver", "block"] and all(len(line) <= columns for line in lines)
    assert all(cell in shown or cell in shown[-1].split() for cell in lines[2].split())
    assert {"10", "1024", "-1.8%", "+41%"} <= set(lines[2].split())
    lines = render(LIST_COLUMNS, [["20261130T030605Z-nvidia-h200-62ce37", "1,048 pass", "2.36 MB"]]).splitlines()
    assert lines[2].startswith("20261130T030605Z-nvidia-h200-62ce37") and all(len(line) <= columns for line in lines)


def test_a_column_without_title_and_content_is_left_out() -> None:
    assert render([Column(""), Column("ver")], [["", "1"], ["", "2"]]).splitlines()[0] == "ver"
    assert render([Column(""), Column("ver")], [["*", "1"], ["", "2"]]).splitlines()[0] == "   ver"


def test_an_indented_table_is_no_wider() -> None:
    text = render([Column("what", flexible=True)], [["word " * 40]], indent=4)
    assert all(line.startswith("    ") and len(line) <= 80 for line in text.splitlines())


def test_rules_are_drawn_with_what_the_encoding_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "─" in render([Column("a")], [["1"]])
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert render([Column("a"), Column("b")], [["1", "2"]]) == "a  b\n----\n1  2\n"


def test_the_width_has_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "3")
    assert width() == 40


# ------------------------------------------------------------------------------------------------ prose


def test_prose_wraps_at_words_and_never_cuts_one(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/very/long/path" * 10
    Screen().prose("some words " * 10 + path + " end", "  check    ")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  check    some words") and len(lines[0]) <= 80
    assert lines[1].startswith(" " * 11 + "some words")
    assert " " * 11 + path in lines


def test_nothing_from_a_record_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a \x1b]0;title\x07 \x1b[2J\x9b31m \u202e b"
    screen = Screen()
    screen.prose(evil, "first ")
    screen.say(f"{evil}\n\tkbench run")
    screen.note(evil)
    screen.table([Column("a"), Column("b", flexible=True)], [[evil, f"{evil}\nnext"]])
    report_error(UsageError(evil, evil))
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert not set("\x1b\x07\x9b\u202e") & set(text)
        assert "\\x1b]0;title\\x07" in text.replace("\n", "") and "\\u202e" in text
    assert "\n\tkbench run\n" in told.out


def test_statuses_are_coloured_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in ("FAIL", "CRASHED", "HUNG"):
        Screen().prose(f"{status}: why", status=status)
    assert capsys.readouterr().out == "FAIL: why\nCRASHED: why\nHUNG: why\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    Screen().prose("FAIL: why", status="FAIL")
    Screen().prose("pass, 2 launches", "  check  ", status="pass")
    assert capsys.readouterr().out == "\x1b[1;31mFAIL\x1b[0m: why\n  check  \x1b[32mpass\x1b[0m, 2 launches\n"
    monkeypatch.setenv("NO_COLOR", "1")
    Screen().prose("FAIL: why", status="FAIL")
    assert capsys.readouterr().out == "FAIL: why\n"


# --------------------------------------------------------------------------------------------- failures


def test_wrong_rows_come_first_and_each_kind_of_reason_before_a_repeat() -> None:
    same = [failed(1, reason=f"out: {n} of 64 elements wrong, worst at [n={n}]: got {n}.5e-06") for n in range(4)]
    nan, hung = failed(1, reason="out: 1 of 64 elements wrong (nan)"), failed(1, "hung", "took over 30 s")
    rows = [hung, *same, nan]
    assert [row.reason for row in choose(rows, 3)] == [same[0].reason, nan.reason, hung.reason]
    assert [row.reason for row in choose(rows, 2)] == [same[0].reason, nan.reason]
    assert [row.reason for row in choose(rows, 4)] == [same[0].reason, same[1].reason, nan.reason, hung.reason]
    assert choose(rows, 6) == [*same, nan, hung]


def test_what_is_not_shown_is_counted_by_status(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [failed(2, "hung", "endless"), *(failed(3, block=32 * n) for n in range(1, 6))]
    rows += [failed(3, "hung", "endless"), failed(3, "hung", "endless"), failed(3, "refused", "no")]
    show_failures(rows, Screen(), whole=False)
    out = capsys.readouterr().out
    assert "version 3: not shown are 3 fail, 1 hung; --debug shows all rows" in out
    assert out.index("toy version 3") < out.index("toy version 2")  # the wrong version first
    assert "version 2: not shown" not in out
    show_failures(rows, Screen(), whole=True)
    out = capsys.readouterr().out
    assert out.count("FAIL toy version 3") == 5 and out.count("HUNG") == 3 and "not shown" not in out


def test_the_same_failure_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = ["toy.cu:3: error: expected ]", "  x[i = 0;"]
    rows = [failed(2, "invalid", "toy.cu:3: expected ]", block=32 * n, details=log) for n in (1, 2, 4)]
    rows.insert(2, failed(2, "crashed", "took the process with it", block=512))
    show_failures(rows, Screen(), whole=False)
    out = capsys.readouterr().out
    assert out.count("x[i = 0;") == 1 and "INVALID toy version 2, N=64, fp32, block size 32\n" in out
    assert "CRASHED" in out and "version 2: not shown are 2 invalid; --debug" in out
    show_failures(rows, Screen(), whole=True)
    assert capsys.readouterr().out.count("x[i = 0;") == 3


def test_of_a_family_that_cannot_be_loaded_nothing_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = (failed(0, "invalid", "toy.py:1: no module", block=0, sizes={}, reproduce="kbench list toy"),)
    show_failures([row], Screen(), whole=False)
    assert capsys.readouterr().out == "INVALID toy\n  toy.py:1: no module\n  again:   kbench list toy\n\n"
    show_reasons([row], Screen())
    assert capsys.readouterr().out == "toy invalid: toy.py:1: no module\n    again:   kbench list toy\n"


def test_reasons_are_said_once_for_the_block_sizes_that_share_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [failed(1, "refused", "fixed block size 64", block=block) for block in (32, 96)]
    rows += [make_row(1, block=64), failed(2, block=32, reason="zeros", reproduce="kbench again")]
    rows += [make_row(3, block=32, reason="slow: timed at one block size only")]
    show_reasons(rows, Screen())
    assert capsys.readouterr().out.splitlines() == [
        "version 1 refused at block sizes 32, 96: fixed block size 64",
        "version 2 fail at block size 32: zeros",
        "    again:   kbench again",
        "version 3 at block size 32: slow: timed at one block size only",
    ]


def test_refusals_are_explained_of_versions_that_ran_nowhere_and_whatever_was_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [failed(1, "refused", "needs T even")] * 3 + [failed(2, "refused", "too small"), make_row(2)]
    rows += [failed(2, "skipped", "needs 8 GPUs, this process sees 1")] * 2
    show_refusals([*rows, failed(3, "skipped", "tensor cores")], Screen())
    text = "version 1 refused: needs T even (3 rows)\n"
    text += "version 2 skipped: needs 8 GPUs, this process sees 1 (2 rows)\nversion 3 skipped: tensor cores\n"
    assert capsys.readouterr().out == text


# --------------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("names", [["toy:1 N=64 block 256"], ["toy:1 N=64 block 256", "toy:2 N=64 block 256"]])
def test_progress_names_the_row_that_runs_and_disappears(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), Screen().progress(names) as advance:
        for _ in names[:-1]:
            advance()
        raise KeyboardInterrupt
    shown = terminal.getvalue()
    assert names[-1] in shown and "0:00:00" in shown
    assert ("1/2" in shown) == (len(names) == 2)
    assert shown.endswith("\x1b[2K")  # the last thing is the erasure of its line


def test_a_line_of_progress_leaves_room_for_what_the_terminal_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb-but-a-terminal")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    names = [f"attention_backward:{n} B=2 T=1024 C=768 NH=12 block 256" for n in range(100)]
    with Screen().progress(names) as advance:
        advance()
    lines = [line for line in terminal.getvalue().replace("\x1b", "\n\x1b").splitlines() if "1/100" in line]
    assert lines and all(len(line.split("K")[-1]) <= 58 and "0:00:0" in line for line in lines)


def test_progress_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().progress(["a", "b"]) as advance:
        advance()
        Screen().note("a note")
    assert capsys.readouterr().err == "kbench: a note\n"
