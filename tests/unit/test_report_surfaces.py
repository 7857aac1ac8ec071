"""A report in each of its formats: what stands where, what is an error, what fits, and that no name breaks out."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

import reports
from kbench.cli import report_shown
from kbench.cli.screen import Screen
from kbench.report.model import FAIL_ON, VERDICTS, Change, Metric, Report, Side
from kbench.report.surfaces import github, html, junit, markdown, sarif, words
from kbench.results.strict_json import dumps
from parsed_html import Parsed
from reports import NASTY


def terminal(report: Report, whole: bool = False) -> str:
    paper = io.StringIO()
    with redirect_stdout(paper):
        report_shown.show(report, Screen(), whole)
    return paper.getvalue()


FORMATS: dict[str, Callable[[Report], str]] = {
    "terminal": lambda report: terminal(report, whole=True),
    "markdown": markdown.render,
    "junit": junit.render,
    "github": github.render,
    "sarif": sarif.render,
    "html": html.render,
    "json": lambda report: dumps(report.to_dict()),
}
REPORTS = ("everything", "fine", "empty", "machine_differs", "nasty")


# --- all formats


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("which", REPORTS)
def test_every_format_takes_every_report_and_says_the_same_twice(form: str, which: str) -> None:
    report = getattr(reports, which)()
    text = FORMATS[form](report)
    assert text == FORMATS[form](report)
    assert text.strip()
    assert form == "json" or text.endswith("\n")


@pytest.mark.parametrize("form", sorted(FORMATS.keys() - {"json"}))
def test_no_format_lets_a_control_character_or_a_half_letter_through(form: str) -> None:
    text = FORMATS[form](reports.nasty())
    text.encode("utf-8")
    bad = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")} - {"\n"}
    assert not bad and not set(text) & set("\u202e\ufffe")
    assert "\\x1b[31m" in text.replace("&#92;", "\\").replace("\\\\", "\\").replace("\\[", "[").replace("&#91;", "[")


@pytest.mark.parametrize("form", FORMATS)
def test_wrong_comes_first_and_the_unchanged_last(form: str) -> None:
    text = FORMATS[form](reports.everything())
    text = text[text.index("exit status") if form in ("terminal", "markdown", "html") else 0 :]
    wrong, slower = text.index("layernorm_forward:5"), text.index("layernorm_forward:6 @256")
    assert wrong < slower < text.index("gelu_forward")
    if form not in ("github", "sarif"):
        assert text.index("crossentropy") < text.index("residual_forward")


@pytest.mark.parametrize("form", sorted(FORMATS.keys() - {"json"}))
def test_a_count_is_shown_as_a_count_and_reproducing_takes_one_command(form: str) -> None:
    text = FORMATS[form](reports.everything())
    assert re.search(r"40\D{1,40}44\b", text), "registers before and after"
    assert "40.00" not in text and "1.100" not in text
    assert str(reports.WRONG.reproduce) in text


def test_every_verdict_has_its_words_and_every_error_its_rule() -> None:
    assert tuple(words.TITLES) == VERDICTS
    assert {"wrong", *(verdict for kind in FAIL_ON.values() for verdict in kind)} <= set(sarif.RULES)


# --- words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "nothing was compared"),
        ([reports.NEW, reports.GONE], "nothing was compared: 1 gone, 1 new"),
        ([reports.SAME], "no regression; 1 unchanged"),
        ([reports.SLOWER, reports.SAME], "1 regression; 1 unchanged"),
        ([reports.SLOWER, reports.MORE_REGISTERS, reports.WRONG, reports.OVER],
         "1 wrong, 2 regressions, 1 over budget"),
        ([reports.UNCLEAR, reports.SAME, reports.INCOMPARABLE],
         "no regression; 1 unclear, 1 not comparable, 1 unchanged"),
    ],
)  # fmt: skip
def test_the_headline_is_one_line(changes: list[Change], said: str) -> None:
    assert words.headline(reports.report(*changes)) == said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\r\n lines\ttab", "two lines tab"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\x00b\ud800c\ufffed\U0001fffe", "a\\x00b\\ud800c\\ufffed\\U0001fffe"),
        ("evil\u202etxt", "evil\\u202etxt"),
        ("é 測試 🔥 👩\u200d💻 a\u0301", "é 測試 🔥 👩\u200d💻 a\u0301"),
        (" ", ""),
    ],
)
def test_plain_text_is_one_harmless_line(text: str, shown: str) -> None:
    assert words.plain(text) == shown


def test_plain_text_is_cut_with_an_ellipsis() -> None:
    assert words.plain("abcdef", 4) == "abc…"
    assert words.plain("abcd", 4) == "abcd"


@pytest.mark.parametrize(
    ("number", "metric", "shown"),
    [
        (0.4970, reports.TIME, "0.4970 ms"),
        (123456.7, reports.TIME, "123457 ms"),
        (40.0, reports.REGISTERS, "40"),
        (12345678901.0, reports.SPILLS, "12345678901 bytes"),
        (0.0, reports.SPILLS, "0 bytes"),
        (0.5, Metric("occupancy", "", -1, exact=True), "0.5"),
        (None, reports.TIME, "-"),
        (float("nan"), reports.TIME, "-"),
        (float("inf"), reports.SPILLS, "-"),
        (44.0, Metric("registers", "registers", exact=True), "44"),
    ],
)
def test_numbers_have_their_unit(number: float | None, metric: Metric, shown: str) -> None:
    assert words.value(number, metric) == shown


def test_counts_have_a_difference_and_no_interval() -> None:
    odd = replace(reports.MORE_REGISTERS, low=1.0, high=1.2)
    assert (words.ratio(odd), words.interval(odd)) == ("+4", "")
    assert words.told(odd) == "40 -> 44 (+4)"
    assert words.told(reports.SLOWER) == "0.4970 ms -> 0.5179 ms (1.042x, 1.032..1.052)"
    assert words.told(reports.NEW) == "none -> 0.1900 ms"


def test_what_the_numbers_of_a_count_say_is_not_said_again() -> None:
    more = replace(reports.MORE_REGISTERS, reason="40 to 44, in 3 rows")
    bytes_ = replace(more, metric=reports.SPILLS, before=0, after=1234568, reason="0 to 1234568 bytes")
    assert [words.beyond(change) for change in (more, bytes_, reports.SLOWER)] == [
        "in 3 rows", "", reports.SLOWER.reason
    ]  # fmt: skip
    out = io.StringIO()
    with redirect_stdout(out):
        report_shown.show(reports.report(bytes_), Screen())
    for text in (out.getvalue(), github.render(reports.report(bytes_)), sarif.render(reports.report(bytes_))):
        assert "0 bytes -> 1234568 bytes" in text and "0 to 1234568" not in text


def test_a_count_is_worse_or_better_and_not_slower_or_faster() -> None:
    fewer = replace(reports.MORE_REGISTERS, verdict="faster", before=44, after=40)
    assert [words.verdict(change) for change in (reports.MORE_REGISTERS, fewer, reports.SLOWER)] == [
        "worse", "better", "slower"
    ]  # fmt: skip
    assert "title=kbench%3A worse::" in github.render(reports.report(reports.MORE_REGISTERS))
    assert ">worse; registers 40 -&gt; 44 (+4)" in junit.render(reports.report(reports.MORE_REGISTERS))
    assert words.headline(reports.report(fewer)) == "no regression; 1 improved"
    assert "Improvements (1)" in markdown.render(reports.report(fewer))


def test_a_row_without_numbers_is_of_no_metric() -> None:
    compiled = replace(reports.NEW, after=None)
    for change, shown in ((compiled, "-"), (reports.NEW, "time")):
        assert f"` | {shown} | - |" in markdown.render(reports.report(change))
        assert f'<td class="verdict">{shown}</td>' in html.render(reports.report(change))


def test_a_run_is_not_named_twice() -> None:
    known = [fact for fact, _, _ in words.sides(reports.everything())]
    assert "run" in known, "the baseline's file does not say which run it was"
    run = Side("latest", ("results/runs/ID-1.jsonl",), ("ID-1",))
    assert "run" not in [fact for fact, _, _ in words.sides(reports.report(before=run, after=run))]
    joined = Side("1.jsonl,2.jsonl", ("1.jsonl", "2.jsonl"), ())
    known = words.sides(reports.report(before=joined, after=run))
    assert known[0] == ("records", "2 files", "latest") and ("files", "1.jsonl, 2.jsonl", *run.files) in known
    many = Side("x", tuple(f"{i}.jsonl" for i in range(9)), ())
    assert ("files", "0.jsonl, 1.jsonl, 2.jsonl and 6 more", "results/runs/ID-1.jsonl") in words.sides(
        reports.report(before=many, after=run)
    )


def test_of_many_runs_the_first_and_the_last_start_are_told() -> None:
    def started(*times: str) -> list[tuple[str, str, str]]:
        side = Side("x", facts={"started": "; ".join(times)})
        return [fact for fact in words.sides(reports.report(before=side)) if fact[0] == "started"]

    assert started("03:19", "03:17")[0][1] == "03:19; 03:17"
    assert started("03:19", "03:17", "03:18")[0][1] == "03:17 to 03:19"


# --- terminal


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("which", ["everything", "machine_differs", "empty", "many"])
def test_a_terminal_holds_every_line_but_commands(monkeypatch: pytest.MonkeyPatch, width: int, which: str) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = terminal(getattr(reports, which)()).splitlines()
    assert all(len(line) <= width for line in lines if "again: " not in line)


def test_the_last_line_of_a_terminal_is_the_answer() -> None:
    report = reports.many()
    text = terminal(report)
    assert text.splitlines()[-1] == words.headline(report)
    assert f"and {1000 - report_shown.ROWS_OF_FAILURES} more; --html" in text
    assert "residual_forward" not in text, "unchanged rows are counted only"
    assert terminal(report, whole=True).count("residual_forward:") == 1000


def test_nothing_but_the_document_stands_on_stdout_with_json() -> None:
    paper = io.StringIO()
    with redirect_stdout(paper):
        report_shown.show(reports.everything(), Screen(json=True))
    assert paper.getvalue() == ""


# --- Markdown


def rendered(text: str) -> Parsed:
    """Markdown as a page, by the parser that comes with the library of our tables."""
    from markdown_it import MarkdownIt

    return Parsed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))


def test_a_comment_begins_with_marker_and_verdict_and_says_what_was_compared() -> None:
    report = reports.everything()
    lines = markdown.render(report).splitlines()
    assert lines[:2] == [markdown.MARKER, f"### kbench: {words.headline(report)}"]
    assert "| revision | `3f1c2ab` | `9e0d771` |" in lines
    assert any(line.startswith("Limits: time 3%") and "exit status 3" in line for line in lines)


def test_rows_of_a_comment_stand_right_below_its_verdict() -> None:
    """What was compared is folded away before the first section."""
    text = markdown.render(reports.everything())
    above = text[: text.index("####")]
    assert above.count("<details>") == above.count("</details>") == 1
    assert above.index("<details>") < above.index("| | before | after |") < above.index("Limits") < above.index("</d")


def test_a_row_over_budget_shows_its_own_side_alone() -> None:
    assert words.told(reports.OVER) == "16 bytes"


def test_rows_that_were_only_compiled_differ_by_architecture() -> None:
    names = [reports.subject(cache_mode="static", device=arch).name for arch in ("sm_90", "sm_100")]
    assert [name[name.index("(") :] for name in names] == ["(static, sm_90)", "(static, sm_100)"]
    assert reports.subject(cache_mode="hot").name.endswith("(hot)")


def test_only_what_needs_no_look_is_behind_a_click() -> None:
    shown = re.sub(r"(?s)<details>.*?</details>", "", markdown.render(reports.everything()))
    assert all(
        f"#### {words.TITLES[name]} (" in shown for name in ("wrong", "slower", "over budget", "unclear", "faster")
    )
    assert "residual_forward" not in shown and "softmax_forward" not in shown and "permute" not in shown


@pytest.mark.parametrize("verdict", ["", *VERDICTS])
def test_no_name_is_markup_in_a_comment(verdict: str) -> None:
    page = rendered(markdown.render(reports.nasty(verdict)))
    allowed = {"h3", "h4", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "details", "summary", "pre", "em",
               "blockquote"}  # fmt: skip
    assert {tag for tag, _ in page.tags} <= allowed
    assert all(set(attrs) <= {"style", "class"} for _, attrs in page.tags)
    assert page.text.count(words.plain(NASTY, 240)) >= 2 or verdict not in ("", "slower"), "names are shown as they are"
    em = re.findall(r"<em>.*?</em>", markdown.render(reports.nasty(verdict)))
    assert not em


def test_every_row_of_a_comment_has_as_many_cells_as_its_head() -> None:
    page = rendered(markdown.render(reports.nasty()))
    rows: list[int] = []
    for tag, _ in page.tags:
        if tag == "tr":
            rows.append(0)
        elif tag in ("td", "th"):
            rows[-1] += 1
    assert set(rows) <= {3, 4, 5, 6} and rows.count(6) > 9


@pytest.mark.parametrize("letter", "|`\\<>*_~[]&$#@!-\"'")
def test_no_letter_alone_is_markup_in_a_comment(letter: str) -> None:
    name = f"{letter}a{letter}{letter}b {letter}c{letter}"
    change = replace(reports.SLOWER, subject=reports.subject(name), reason=name, reproduce=letter * 3)
    side = Side(name, facts={name: name})
    page = rendered(markdown.render(reports.report(change, before=side, after=side, findings=(name,))))
    assert page.text.count(name) == 1 + 2 + 3 + 1 + 1, "the finding, both sides, the fact, the row, its reason"
    cells = [tag for tag, _ in page.tags if tag in ("tr", "th", "td")]
    assert "".join("/" if tag == "tr" else "." for tag in cells) == "/..." * 4 + "/......" * 2
    assert letter * 3 in page.text and "Limits" not in page.text[page.text.index("To see it again") :]
    assert not {tag for tag, _ in page.tags} & {"em", "strong", "s", "a", "h1", "li"}


def test_nobody_is_called_and_nothing_is_linked_by_a_comment() -> None:
    text = markdown.render(reports.report(replace(reports.SLOWER, reason="ask @octo/team, see #12 on www.a.example")))
    assert "@<!-- -->octo" in text and "#<!-- -->12" in text and "www<!-- -->.a" in text
    assert not re.search(r"@256", re.sub(r"`[^`]*`", "", text)), "names are code, where nobody is called"


@pytest.mark.parametrize("verdict", ["wrong", "slower", "unclear", "gone"])
def test_a_comment_of_any_report_fits(verdict: str) -> None:
    report = reports.many(1000, verdict)
    text = markdown.render(report)
    assert 60_000 < len(text.encode()) <= markdown.COMMENT
    shown = text.count("| `layernorm_forward:")
    left = int(re.search(r"\*(\d+) more rows, for which", text)[1])  # type: ignore[index]  # None fails as it should
    assert shown + left == 1000
    assert "*1000 rows, for which there is no room here*" in text, "the unchanged are counted too"
    rendered(text)


def test_a_comment_of_the_longest_names_and_letters_fits() -> None:
    long = ("|" * 50 + "測" * 50) * 20
    row = replace(reports.subject(long), problem=long, file=long)
    changes = [
        replace(reports.WRONG, subject=row, verdict=verdict, reason=long, reproduce=long[:500] + str(index))
        for verdict in VERDICTS
        for index in range(40)
    ]
    side = Side(long, (long,) * 9, (long,) * 9, {f"{index}{long}": long for index in range(99)})
    report = reports.report(*changes, before=side, after=side, findings=(long,) * 99, limits={long: long})
    text = markdown.render(report)
    assert len(text.encode()) <= markdown.COMMENT
    assert "91 more findings" in text
    assert text.count("<details>") == text.count("</details>") == 5


def test_a_summary_may_be_longer_than_a_comment() -> None:
    text = markdown.render(reports.many(), limit=1 << 20)
    assert text.count("| `residual_forward:") == 1000 and "no room" not in text


def test_surfaces_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kbench.report.surfaces import github, html, junit, markdown, sarif\n"
        "print([name for name in ('pandas', 'cupy', 'rich', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
