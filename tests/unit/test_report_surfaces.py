"""A report in each of its formats: what stands where, what is an error, what fits, and that no name breaks out."""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

import reports
from kbench.cli import report_shown
from kbench.cli.screen import Screen
from kbench.report.model import FAIL_ON, VERDICTS, Change, Metric, Report, Side
from kbench.report.surfaces import github, html, junit, markdown, picture, sarif, words
from kbench.results.strict_json import dumps
from reports import NASTY

VOID = {"meta", "br"}


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


class Parsed(HTMLParser):
    """The elements of a page in order, its text, and whether every one of them is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open):
            self.text += data

    def all(self, tag: str, name: str) -> list[str]:
        return [attrs[name] or "" for found, attrs in self.tags if found == tag and name in attrs]


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


def test_a_run_is_not_named_twice() -> None:
    known = [fact for fact, _, _ in words.sides(reports.everything())]
    assert "run" in known, "the baseline's file does not say which run it was"
    run = Side("latest", ("results/runs/ID-1.jsonl",), ("ID-1",))
    assert "run" not in [fact for fact, _, _ in words.sides(reports.report(before=run, after=run))]
    many = Side("x", tuple(f"{i}.jsonl" for i in range(9)), ())
    assert ("files", "0.jsonl, 1.jsonl, 2.jsonl and 6 more", "results/runs/ID-1.jsonl") in words.sides(
        reports.report(before=many, after=run)
    )


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
    assert text.count("<details>") == text.count("</details>") == 4


def test_a_summary_may_be_longer_than_a_comment() -> None:
    text = markdown.render(reports.many(), limit=1 << 20)
    assert text.count("| `residual_forward:") == 1000 and "no room" not in text


# --- JUnit


def suite(report: Report) -> ElementTree.Element:
    root = ElementTree.fromstring(junit.render(report).encode())
    assert root.tag == "testsuites" and not root.attrib and [child.tag for child in root] == ["testsuite"]
    return root[0]


@pytest.mark.parametrize("which", REPORTS)
def test_junit_has_what_its_schema_asks_for(which: str) -> None:
    report = getattr(reports, which)()
    found = suite(report)
    asked = {"name", "tests", "failures", "errors", "skipped", "time", "hostname", "id", "package"}
    assert set(found.attrib) - {"timestamp"} == asked
    assert all(found.attrib.values())
    inside = [child.tag for child in found]
    assert inside == ["properties", *["testcase"] * len(report.changes), "system-out", "system-err"]
    assert all(set(one.attrib) == {"name", "value"} and one.attrib["name"] for one in found[0])
    cases = found.findall("testcase")
    for case in cases:
        assert set(case.attrib) == {"name", "classname", "time"}
        assert re.fullmatch(r"\d+\.\d+", case.attrib["time"])
        assert [child.tag for child in case] in ([], ["failure"], ["skipped"])
    assert all(set(one.attrib) == {"message", "type"} for one in found.iter("failure"))
    for name, tag in (("failures", "failure"), ("skipped", "skipped")):
        assert int(found.attrib[name]) == len(list(found.iter(tag)))
    assert int(found.attrib["tests"]) == len(cases)


def test_junit_has_the_start_of_the_run_as_its_schema_writes_times() -> None:
    assert suite(reports.everything()).attrib["timestamp"] == "2025-03-08T09:30:00"
    assert "timestamp" not in suite(reports.nasty()).attrib


def test_junit_keeps_names_whole() -> None:
    case = suite(reports.nasty()).find("testcase")
    assert case is not None
    assert case.attrib["name"].startswith(words.plain(NASTY) + ":3 @64")
    assert case.attrib["classname"].count(".") == 1, "servers make folders of dots"


def outcomes(report: Report) -> dict[str, str]:
    """By verdict, what became of its first test case."""
    found: dict[str, str] = {}
    for change, case in zip(report.changes, suite(report).findall("testcase"), strict=True):
        found.setdefault(change.verdict, case[0].tag if len(case) else "passed")
    return found


def test_junit_fails_what_the_user_makes_an_error_of() -> None:
    assert outcomes(reports.everything()) == {
        "wrong": "failure", "slower": "failure", "over budget": "failure", "unclear": "skipped",
        "incomparable": "skipped", "gone": "skipped", "new": "skipped", "faster": "passed", "same": "passed",
    }  # fmt: skip
    strict = outcomes(replace(reports.everything(), fail_on=("unclear", "incomparable", "gone")))
    assert [strict[name] for name in ("wrong", "unclear", "incomparable", "gone")] == ["failure"] * 4
    assert strict["slower"] == "passed", "a regression that is no error cannot fail where the status does not"
    assert "layernorm_forward:6" in (suite(replace(reports.everything(), fail_on=())).findtext("system-out") or "")


# --- annotations


def annotations(report: Report) -> list[tuple[str, dict[str, str], str]]:
    """Kind, properties and message of each line, as the runner reads it."""

    def read(text: str, names: str) -> str:
        for letter in names + "%":
            text = text.replace(f"%{ord(letter):02X}", letter)
        return text

    found = []
    for line in github.render(report).splitlines():
        start, head, message = line.split("::", 2)
        assert not start
        kind, properties = head.split(" ", 1)
        pairs = [pair.split("=", 1) for pair in properties.split(",")]
        found.append((kind, {name: read(text, ":,\r\n") for name, text in pairs}, read(message, "\r\n")))
    return found


def test_annotations_stand_at_the_kernels_line() -> None:
    kind, where, message = annotations(reports.everything())[1]
    assert (kind, where["file"], where["line"]) == ("error", "dev_kernels/layernorm_forward.cu", "106")
    assert message.splitlines()[:2] == [
        "layernorm_forward:6 @256 bf16 B=8 T=1024 C=768",
        "+4.2% (+3.1% to +5.4%), limit 3%",
    ]
    nowhere = replace(reports.SLOWER, subject=reports.subject(file="", line=0))
    assert set(annotations(reports.report(nowhere))[0][1]) == {"title"}
    assert set(annotations(reports.report(replace(nowhere, subject=reports.subject(line=0))))[0][1]) == {
        "file",
        "title",
    }


def test_annotations_read_back_as_they_were_written() -> None:
    change = replace(reports.SLOWER, subject=reports.subject(file="a,b:c%2C%.cu", line=3), reason="50%,\n100%25: x::y")
    _, where, message = annotations(reports.report(change))[0]
    assert where["file"] == "a,b:c%2C%.cu"
    assert "50%, 100%25: x::y" in message


def test_no_name_gives_the_runner_another_command() -> None:
    lines = github.render(reports.nasty()).splitlines()
    assert all(re.match(r"::(error|warning|notice) ", line) for line in lines)
    properties = [line.split("::")[1] for line in lines]
    assert all(re.fullmatch(r"\w+ (\w+=[^,:\r\n]*)(,\w+=[^,:\r\n]*)*", one) for one in properties)


def test_ten_of_a_kind_are_kept_the_most_important_first() -> None:
    changes = [replace(reports.WRONG, subject=reports.subject(version=index)) for index in range(3)]
    changes += [replace(reports.SLOWER, subject=reports.subject(version=100 + index)) for index in range(253)]
    changes += [replace(reports.UNCLEAR, subject=reports.subject(version=index)) for index in range(11)]
    report = reports.report(*changes, findings=("the machine differs",))
    found = annotations(report)
    assert [kind for kind, _, _ in found] == ["error"] * 10 + ["warning"] * 10 + ["notice"]
    assert [where["title"] for _, where, _ in found[:4]] == ["kbench: wrong"] * 3 + ["kbench: slower"]
    assert found[10][2] == "the machine differs"
    assert found[-1][2].endswith("246 more errors not shown here; 2 more warnings not shown here")


@pytest.mark.parametrize(
    ("fail_on", "kinds"),
    [(("regression",), {"slower": "error", "unclear": "warning"}), ((), {"slower": "warning", "unclear": "warning"}),
     (("unclear",), {"slower": "warning", "unclear": "error"})],
)  # fmt: skip
def test_annotations_are_errors_where_the_status_is_one(fail_on: tuple[str, ...], kinds: dict[str, str]) -> None:
    found = annotations(replace(reports.everything(), fail_on=fail_on))
    by_title = {where["title"].removeprefix("kbench: "): kind for kind, where, _ in found}
    assert by_title["wrong"] == "error"
    assert {name: by_title[name] for name in kinds} == kinds


# --- SARIF


def run_of(report: Report) -> dict[str, Any]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    log = json.loads(sarif.render(report), parse_constant=refuse)
    assert log["version"] == "2.1.0" and len(log["runs"]) == 1
    return dict(log["runs"][0])


@pytest.mark.parametrize("which", REPORTS)
def test_sarif_has_what_its_schema_and_code_scanning_ask_for(which: str) -> None:
    run = run_of(getattr(reports, which)())
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "kbench"
    assert all(rule["id"] and rule["shortDescription"]["text"] for rule in rules)
    for found in run["results"]:
        assert rules[found["ruleIndex"]]["id"] == found["ruleId"]
        assert found["level"] in ("error", "warning", "note") and found["message"]["text"]
        (place,) = found["locations"]
        address = place["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9/._~%-]+", address), "a URI"
        assert place["physicalLocation"]["region"]["startLine"] >= 1


def test_sarif_levels_follow_what_is_an_error() -> None:
    levels = {found["ruleId"]: found["level"] for found in run_of(reports.everything())["results"]}
    assert levels == {"kbench/wrong": "error", "kbench/regression": "error", "kbench/over-budget": "error",
                      "kbench/unclear": "note"}  # fmt: skip
    run = run_of(replace(reports.everything(), fail_on=("gone", "unclear")))
    levels = {found["ruleId"]: found["level"] for found in run["results"]}
    assert (levels["kbench/regression"], levels["kbench/gone"], levels["kbench/unclear"]) == (
        "warning",
        "error",
        "error",
    )


def test_a_row_without_a_place_is_told_without_spoiling_the_file() -> None:
    nowhere = replace(reports.WRONG, subject=reports.subject("elsewhere", file="", line=0))
    run = run_of(reports.report(nowhere, reports.SLOWER, findings=("machine differs",), exit_status=3))
    assert len(run["results"]) == 1
    (invocation,) = run["invocations"]
    assert invocation["exitCode"] == 3 and invocation["executionSuccessful"] is True
    told = [(note["level"], note["message"]["text"]) for note in invocation["toolExecutionNotifications"]]
    assert told[1] == ("warning", "machine differs")
    assert told[2][0] == "error" and told[2][1].startswith("elsewhere:6")


def test_a_row_keeps_its_fingerprint_when_its_line_moves() -> None:
    def prints(change: Change) -> list[str]:
        return [found["partialFingerprints"]["kbenchRow/v1"] for found in run_of(reports.report(change))["results"]]

    moved = replace(reports.SLOWER, subject=reports.subject(line=999))
    assert prints(reports.SLOWER) == prints(moved)
    assert prints(reports.SLOWER) != prints(replace(reports.SLOWER, metric=reports.SPILLS))
    assert prints(reports.SLOWER) != prints(replace(reports.SLOWER, verdict="wrong"))


def test_no_message_of_sarif_is_a_placeholder_or_a_link() -> None:
    odd = replace(reports.SLOWER, reason="{0} [here](1)")
    assert "{{0}} \\[here\\](1)" in run_of(reports.report(odd))["results"][0]["message"]["text"]
    plain = replace(reports.SLOWER, reason="out[0, 3] is wrong")
    assert "out[0, 3] is wrong" in run_of(reports.report(plain))["results"][0]["message"]["text"]


def test_sarif_addresses_are_relative_to_the_checkout_unless_absolute() -> None:
    files = {
        "a b/ü:1.cu": ("a%20b/%C3%BC%3A1.cu", "%SRCROOT%"),
        "/x/y.cu": ("file:///x/y.cu", None),
        "a\\b.cu": ("a/b.cu", "%SRCROOT%"),
    }
    for file, known in files.items():
        (found,) = run_of(reports.report(replace(reports.SLOWER, subject=reports.subject(file=file))))["results"]
        address = found["locations"][0]["physicalLocation"]["artifactLocation"]
        assert (address["uri"], address.get("uriBaseId")) == known


# --- HTML


@pytest.mark.parametrize("which", [*REPORTS, "many"])
def test_a_page_is_whole_and_fetches_nothing(which: str) -> None:
    text = html.render(getattr(reports, which)())
    page = Parsed(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "b", "object"}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name in ("src", "action")]
    assert "default-src 'none'" in text
    places = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(places) == len(set(places))
    links = page.all("a", "href")
    assert all(link.startswith("#") and link[1:] in places for link in links)
    assert len(text) < 3_000_000


def test_a_page_shows_names_as_they_are() -> None:
    page = Parsed(html.render(reports.nasty()))
    assert page.text.count(words.plain(NASTY)) > 50


def test_a_page_has_every_row_once_and_the_unchanged_behind_a_click() -> None:
    text = html.render(reports.everything())
    assert text.count('<tr class="row') == len(reports.everything().changes)
    assert text.count('<tr class="row same') == text[text.index("<details>") :].count('<tr class="row') == 6


def test_an_anchor_hides_the_rows_of_other_verdicts_and_families() -> None:
    text = html.render(reports.everything())
    for place, style in (("only-slower", "slower"), ("only-over-budget", "over-budget"), ("family-0", "f0")):
        assert f"#{place}:target ~ * tr.row:not(.{style}) {{ display: none }}" in text
        assert f'<a href="#{place}">' in text
    assert '<tr class="row slower f0"><td>layernorm_forward:6' in text


def test_only_facts_that_should_agree_stand_out() -> None:
    text = html.render(reports.machine_differs())
    assert '<td class="differs">NVIDIA H100 80GB HBM3</td>' in text
    assert "<td>9e0d771</td>" in text


def test_a_page_draws_rows_that_have_samples_and_says_how_to_read_it() -> None:
    text = html.render(reports.everything())
    assert text.count("<svg") == 3, "slower, unclear, faster: counts and other rows have no samples"
    assert text.count(picture.EXPLAINED) == 1
    assert picture.EXPLAINED not in html.render(reports.fine())
    assert html.render(reports.many(500)).count("<svg") == html.PICTURES


def pixels(svg: str, style: str) -> list[tuple[float, float]]:
    found = re.search(rf'<path class="{style}" d="([^"]*)"', svg)
    assert found, style
    return [(float(x), float(y)) for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)", found[1])]


def test_a_picture_has_a_dot_for_each_sample_and_a_row_of_them_for_each_round() -> None:
    svg = picture.picture(reports.SLOWER)
    for style in ("dots c0", "dots c1"):
        dots = pixels(svg, style)
        assert len(dots) == 60 and len({y for _, y in dots}) == 5
        assert all(picture.LEFT <= x <= picture.WIDTH for x, _ in dots)
    (before, _), (after, _), (limit, _) = (pixels(svg, style)[0] for style in ("estimate c0", "estimate c1", "limit"))
    assert before < limit < after
    (left, _) = pixels(svg, "reach")[0]
    assert limit < left < after, "the interval lies beyond the limit: that is what made it a regression"
    faster = picture.picture(reports.FASTER)
    assert pixels(faster, "estimate c2")[0] < pixels(faster, "limit")[0] < pixels(faster, "estimate c0")[0]


def test_one_disturbed_sample_does_not_squeeze_the_others() -> None:
    calm = picture.picture(reports.SLOWER)
    rounds = [list(samples) for samples in reports.SLOWER.rounds_after]
    rounds[0][0] = 50.0
    svg = picture.picture(replace(reports.SLOWER, rounds_after=rounds))
    apart = [pixels(one, "estimate c1")[0][0] - pixels(one, "estimate c0")[0][0] for one in (calm, svg)]
    assert apart[1] > 0.8 * apart[0]
    assert re.search(r"\d+ samples? beyond the edges", svg)


@pytest.mark.parametrize("rounds", [(), [[]], [[0.5]], [[float("nan"), -1.0, 0.0, float("inf")]]])
def test_there_is_no_picture_of_nothing(rounds: list[list[float]]) -> None:
    assert picture.picture(replace(reports.SLOWER, rounds_before=rounds)) == ""


def test_a_picture_of_equal_samples_or_of_very_many_is_drawn() -> None:
    same = [[0.5] * 10] * 3
    assert "<svg" in picture.picture(
        replace(reports.SAME, rounds_before=same, rounds_after=same, before=0.5, after=0.5)
    )
    much = [[0.5 + 0.001 * i for i in range(64)] for _ in range(200)]
    svg = picture.picture(replace(reports.SLOWER, rounds_before=much))
    assert len(pixels(svg, "dots c0")) <= picture.DOTS and "one sample of 22 drawn" in svg


def test_surfaces_load_nothing_heavy() -> None:
    import subprocess

    code = (
        "import sys\nfrom kbench.report.surfaces import github, html, junit, markdown, sarif\n"
        "print([name for name in ('pandas', 'cupy', 'rich', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
