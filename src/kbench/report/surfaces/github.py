"""A report as commands that GitHub's runner reads from a step's output: annotations at the kernel's line.

The runner keeps ten of each kind a step, and drops the others without a word, so that what matters most comes first and
the rest is counted in a notice.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbench.report.model import Change, Report
from kbench.report.surfaces import words

KEPT = 10  # of each kind, in a step
# Ten of these may be shown on a screen; their whole text is in the other formats.
_MESSAGE = 1000
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = _DATA | {":": "%3A", ",": "%2C"}


def render(report: Report) -> str:
    """Lines for stdout: errors for what the user makes an error of, warnings for other regressions, unclear rows and
    findings, one notice with the verdict."""
    failing = words.failing(report)
    errors = [_annotation("error", change) for change in report.changes if change.verdict in failing]
    warned = {*words.REGRESSIONS, "unclear"} - failing
    warnings = [_command("warning", {"title": "kbench"}, [finding]) for finding in report.findings]
    warnings += [_annotation("warning", change) for change in report.changes if change.verdict in warned]
    rest = [
        f"{words.counted(len(found) - KEPT, 'more ' + kind)} not shown here"
        for kind, found in (("error", errors), ("warning", warnings))
        if len(found) > KEPT
    ]
    notice = _command("notice", {"title": "kbench"}, ["; ".join([words.headline(report), *rest])])
    return "\n".join([*errors[:KEPT], *warnings[:KEPT], notice]) + "\n"


def _annotation(kind: str, change: Change) -> str:
    where = {"file": words.plain(change.subject.file)} if change.subject.file else {}
    if where and change.subject.line > 0:
        where["line"] = str(change.subject.line)
    lines = [words.title(change), words.beyond(change), words.told(change)]
    if change.reproduce:
        lines.append(f"again: {change.reproduce}")
    return _command(kind, {**where, "title": f"kbench: {words.verdict(change)}"}, lines)


def _command(kind: str, properties: dict[str, str], lines: Sequence[str]) -> str:
    """A workflow command whose text has these lines; empty ones are left out."""
    known = ",".join(f"{name}={_escaped(text, _PROPERTY)}" for name, text in properties.items())
    text = "\n".join(line for line in (words.plain(line, _MESSAGE) for line in lines) if line)
    return f"::{kind} {known}::{_escaped(text, _DATA)}"


def _escaped(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(letter, letter) for letter in text)
