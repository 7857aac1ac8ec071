"""A report as JUnit XML: a test case for each change, by which a CI server keeps its history.

What the servers agree on is the schema of Ant's writer: https://github.com/windyroad/JUnit-Schema. It asks for a time
stamp, which is the start of the run after; where no record knows it, it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from xml.sax.saxutils import escape, quoteattr

from kbench.report.model import Change, Report, Side
from kbench.report.surfaces import words

SKIPPED = ("unclear", "incomparable", "new", "gone")  # nothing was shown about these, unless they are errors
NO_HOST = "localhost"  # what the schema asks for where the host is not known


def render(report: Report) -> str:
    """The report as one test suite. Failures are what the user makes an error of.

    A regression that is no error passes, as does a gain: both are told in the suite's output, because the schema has
    none for a test case.
    """
    failing = words.failing(report)
    cases = [_case(change, failing) for change in report.changes]
    failures = sum(change.verdict in failing for change in report.changes)
    skipped = sum(change.verdict in SKIPPED and change.verdict not in failing for change in report.changes)
    total = sum(_seconds(change) for change in report.changes)
    facts = {
        "name": "kbench report", "tests": str(len(cases)), "failures": str(failures), "errors": "0",
        "skipped": str(skipped), "time": f"{total:.9f}", **_when(report.after),
        "hostname": words.plain(report.after.facts.get("host", "")) or NO_HOST, "id": "0", "package": "kbench",
    }  # fmt: skip
    suite = "".join(f" {name}={quoteattr(text)}" for name, text in facts.items())
    known = [("verdict", report.verdict), ("summary", words.headline(report)), *_properties(report)]
    properties = [f"<property name={quoteattr(name)} value={quoteattr(text)}/>" for name, text in known]
    passed = [change for change in report.changes if change.verdict not in {*SKIPPED, *failing, "same"}]
    told = list(map(words.plain, report.findings))
    told += [f"{words.title(change)}: {'; '.join(_told(change))}" for change in passed]
    output = escape("\n".join(told))
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', "<testsuites>", f"<testsuite{suite}>"]
    lines += ["<properties>", *properties, "</properties>", *cases]
    lines += [f"<system-out>{output}</system-out>", "<system-err></system-err>", "</testsuite>", "</testsuites>"]
    return "\n".join(lines) + "\n"


def _properties(report: Report) -> list[tuple[str, str]]:
    known = [
        (f"{side} {fact}", text)
        for fact, *both in words.sides(report)
        for side, text in zip(("before", "after"), both, strict=True)
    ]
    return [*((name, text) for name, text in known if text), ("limits", words.limits(report))]


def _when(side: Side) -> dict[str, str]:
    """The time stamp of the schema, which has no zone and no fraction of a second."""
    try:
        started = datetime.fromisoformat(side.facts.get("started", ""))
    except ValueError:
        return {}
    return {"timestamp": started.strftime("%Y-%m-%dT%H:%M:%S")} if started.year >= 1000 else {}


def _seconds(change: Change) -> float:
    """What the version takes, for those that draw a history of it; 0 for what is no time."""
    return change.after / 1e3 if change.metric.unit == "ms" and change.after and _finite(change.after) else 0.0


def _finite(number: float) -> bool:
    return 0 <= number < float("inf")


def _case(change: Change, failing: frozenset[str]) -> str:
    # Servers make folders of the dots in a class name.
    group = "kbench." + re.sub(r"[.\s]+", "_", words.plain(change.subject.family) or "unnamed")
    # The same count may be a case of its own: held against the other side.
    title = words.title(change) + (", budget" if change.verdict == "over budget" else "")
    names = f'name={quoteattr(title)} classname={quoteattr(group)} time="{_seconds(change):.9f}"'
    if change.verdict in failing:
        message = quoteattr(words.plain(change.reason) or words.plain(change.verdict))
        text = escape("\n".join(_told(change)))
        inside = f"<failure message={message} type={quoteattr(words.plain(change.verdict))}>{text}</failure>"
        return f"<testcase {names}>{inside}</testcase>"
    if change.verdict in SKIPPED:
        return f"<testcase {names}><skipped message={quoteattr(_sentence(change))}/></testcase>"
    return f"<testcase {names}/>"


def _sentence(change: Change) -> str:
    reason = words.plain(change.reason)
    return f"{words.plain(change.verdict)}: {reason}" if reason else words.plain(change.verdict)


def _told(change: Change) -> Sequence[str]:
    """What is worth reading of a row, one line each."""
    found = [words.plain(f"{words.verdict(change)}; {change.metric.name} {words.told(change)}"), words.beyond(change)]
    if change.reproduce:
        found.append(f"again: {words.plain(change.reproduce)}")
    if change.subject.file:
        found.append(f"at: {words.place(change.subject)}")
    return [line for line in found if line]
