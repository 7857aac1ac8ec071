"""A report as SARIF 2.1.0, which code scanning and editors read: results at the kernels' lines.

Only what the user makes an error of, other regressions and unclear rows are results. A row whose line is not known
becomes a notification of the run: GitHub refuses a whole file for one result without a place.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

from kbench import __version__
from kbench.report.model import Change, Report, Subject
from kbench.report.surfaces import words
from kbench.results.strict_json import dumps

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# By verdict: the rule's id, its name, and what it means.
RULES = {
    "wrong": ("kbench/wrong", "WrongResult", "A version gives wrong results, crashes or does not compile."),
    "slower": (
        "kbench/regression",
        "Regression",
        "A version became slower, or needs more of what it is to need less of.",
    ),
    "over budget": ("kbench/over-budget", "OverBudget", "A version exceeds a limit of kbench.toml."),
    "unclear": ("kbench/unclear", "Unclear", "The samples cannot tell whether a version became slower."),
    "incomparable": ("kbench/incomparable", "Incomparable", "Two records cannot be compared."),
    "gone": ("kbench/gone", "Gone", "A version was measured before, and is not now."),
}


def render(report: Report) -> str:
    """One run; strict JSON."""
    failing = words.failing(report)
    told = [change for change in report.changes if change.verdict in failing | {*words.REGRESSIONS, "unclear"}]
    told = [change for change in told if change.verdict in RULES]
    placed = [change for change in told if change.subject.file]
    notes = [_notification("note", words.headline(report))]
    notes += [_notification("warning", finding) for finding in report.findings]
    notes += [_notification(_level(change, failing), *_lines(change)) for change in told if not change.subject.file]
    run = {
        "tool": {
            "driver": {"name": "kbench", "version": __version__, "rules": [_rule(name, failing) for name in RULES]}
        },
        "invocations": [
            {"executionSuccessful": True, "exitCode": report.exit_status, "toolExecutionNotifications": notes}
        ],
        "columnKind": "unicodeCodePoints",
        "results": [_result(change, failing) for change in placed],
    }
    return dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _level(change: Change, failing: frozenset[str]) -> str:
    if change.verdict in failing:
        return "error"
    return "warning" if change.verdict in words.REGRESSIONS else "note"


def _rule(verdict: str, failing: frozenset[str]) -> dict[str, Any]:
    identity, name, meaning = RULES[verdict]
    level = "error" if verdict in failing else "warning" if verdict in words.REGRESSIONS else "note"
    return {
        "id": identity, "name": name, "shortDescription": {"text": meaning}, "fullDescription": {"text": meaning},
        "help": {"text": f"{meaning} The output of kbench report says how that was decided."},
        "defaultConfiguration": {"level": level},
    }  # fmt: skip


def _result(change: Change, failing: frozenset[str]) -> dict[str, Any]:
    identity = RULES[change.verdict][0]
    place: dict[str, Any] = {"artifactLocation": _address(change.subject)}
    if change.subject.line > 0:
        place["region"] = {"startLine": change.subject.line}
    logical = {"name": words.plain(change.subject.kernel or change.subject.family) or "unnamed", "kind": "function"}
    # A place in the code moves with every edit; the row keeps its name, and code scanning with it its history.
    row = "\n".join((identity, change.subject.name, change.metric.name))
    numbers = {
        "before": change.before,
        "after": change.after,
        "ratio": change.ratio,
        "low": change.low,
        "high": change.high,
    }
    return {
        "ruleId": identity, "ruleIndex": list(RULES).index(change.verdict), "level": _level(change, failing),
        "message": _message(*_lines(change)),
        "locations": [{"physicalLocation": place, "logicalLocations": [logical]}],
        "partialFingerprints": {"kbenchRow/v1": hashlib.sha256(row.encode("utf-8", "replace")).hexdigest()},
        "properties": {"metric": words.plain(change.metric.name), **numbers},
    }  # fmt: skip


def _address(subject: Subject) -> dict[str, str]:
    """A file as a URI, relative to the root of the checkout unless its path is absolute."""
    path = subject.file.replace("\\", "/")
    address = quote(path.encode("utf-8", "replace"))
    return {"uri": f"file://{address}"} if path.startswith("/") else {"uri": address, "uriBaseId": "%SRCROOT%"}


def _lines(change: Change) -> list[str]:
    lines = [words.title(change), words.told(change), words.beyond(change)]
    return [*lines, f"again: {change.reproduce}"] if change.reproduce else lines


def _notification(level: str, *lines: str) -> dict[str, Any]:
    return {"level": level, "message": _message(*lines)}


def _message(*lines: str) -> dict[str, str]:
    """A message of these lines in plain text, in which SARIF still sees placeholders ({0}) and links ([text](1))."""
    text = "\n".join(line for line in map(words.plain, lines) if line).replace("{", "{{").replace("}", "}}")
    # A backslash before a bracket makes it one; where no link can be read, the text stays as people write it.
    return {"text": text.replace("[", "\\[").replace("]", "\\]") if "](" in text else text}
