"""The formats of a report that programs read: JUnit, annotations and SARIF."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

import reports
from kbench.report.model import Change, Report
from kbench.report.surfaces import github, junit, sarif, words
from reports import NASTY

REPORTS = ("everything", "fine", "empty", "machine_differs", "nasty")


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
    change = replace(
        reports.SLOWER, subject=reports.subject(file="a::b,c=d:e%2C%.cu", line=3), reason="50%,\n100%25: x::y"
    )
    _, where, message = annotations(reports.report(change))[0]
    assert where["file"] == "a::b,c=d:e%2C%.cu"
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


def test_a_count_that_is_unchanged_and_over_budget_is_two_cases() -> None:
    text = junit.render(reports.report(reports.OVER, replace(reports.OVER, verdict="same", before=16)))
    assert len(set(re.findall(r'<testcase name="([^"]*)"', text))) == 2
