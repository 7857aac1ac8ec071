"""The words and numbers that all surfaces share, so that a row reads the same wherever it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kbench.printable import printable
from kbench.report.model import FAIL_ON, VERDICTS, Change, Metric, Report, Side, Subject
from kbench.results.tables import count_text, milliseconds

# What a reader calls the rows of a verdict.
TITLES = {
    "wrong": "Wrong",
    "slower": "Regressions",
    "over budget": "Over budget",
    "unclear": "Unclear",
    "incomparable": "Not comparable",
    "gone": "Gone: only before",
    "new": "New: only after",
    "faster": "Improvements",  # fewer registers are no speed
    "same": "Unchanged",
}
NONE = "-"  # in the place of a number that a side does not have
REGRESSIONS = ("slower", "over budget")
# The facts of a side in the order in which a reader asks for them; others follow as they come.
_FACTS = ("revision", "committed", "device", "arch", "driver", "compiler", "kbench", "started")
_FACT_NAME = 24  # characters: a name is the first column of a table whose others hold the values


def plain(text: object, limit: int = 0) -> str:
    """Text from outside in one line: blanks for line breaks, and what cannot be shown as its escape, such as "\\x1b".

    What is left holds no control character, no half of a pair of surrogates and nothing else that XML or UTF-8 lacks.
    limit: the most characters, an ellipsis included; 0 for any number.
    """
    words = printable(" ".join(str(text).split()))
    return shortened(words, limit) if limit else words


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def headline(report: Report) -> str:
    """The verdict in one line, such as "1 wrong, 2 regressions; 3 unclear, 57 unchanged"."""
    counts = report.counts
    bad = [f"{counts['wrong']} wrong"] if counts["wrong"] else []
    if counts["slower"]:
        bad.append(counted(counts["slower"], "regression"))
    if counts["over budget"]:
        bad.append(f"{counts['over budget']} over budget")
    names = {"incomparable": "not comparable", "faster": "improved", "same": "unchanged"}
    rest = [f"{counts[name]} {names.get(name, name)}" for name in VERDICTS[3:] if counts[name]]
    if report.verdict == "nothing":
        return "nothing was compared" + (f": {', '.join(rest)}" if rest else "")
    return "; ".join(part for part in (", ".join(bad) or "no regression", ", ".join(rest)) if part)


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sections(report: Report) -> list[tuple[str, list[Change]]]:
    """The changes by verdict, in the order of `VERDICTS`, without those that nothing has."""
    found: dict[str, list[Change]] = {name: [] for name in VERDICTS}
    for change in report.changes:
        found.setdefault(change.verdict, []).append(change)
    return [(name, changes) for name, changes in found.items() if changes]


def failing(report: Report) -> frozenset[str]:
    """The verdicts that the user makes an error of: wrong results always are one."""
    return frozenset(["wrong", *(name for kind in report.fail_on for name in FAIL_ON.get(kind, ()))])


def sides(report: Report) -> list[tuple[str, str, str]]:
    """What was compared: a fact's name, and its values before and after ("" where not known). Cells are plain."""
    rows = [("records", _records(report.before), _records(report.after))]
    known = (report.before.facts, report.after.facts)
    names = [name for name in dict.fromkeys([*_FACTS, *known[0], *known[1]]) if any(name in facts for facts in known)]
    rows += [(name, _fact(name, known[0]), _fact(name, known[1])) for name in names]
    runs = (report.before.runs, report.after.runs)
    files = (report.before.files, report.after.files)
    # A file of a run carries the run's id in its name, and the records may be named by either.
    if not all(
        any(run in text for text in (*of, side))
        for mine, of, side in zip(runs, files, rows[0][1:], strict=True)
        for run in mine
    ):
        rows.append(_several("run", *runs))
    if any(files) and files != ((report.before.name,), (report.after.name,)):
        rows.append(_several("file", *files))
    rows.append(("rows", str(report.before.rows), str(report.after.rows)))
    return [(plain(name, _FACT_NAME), plain(before), plain(after)) for name, before, after in rows]


def _fact(name: str, facts: Mapping[str, str]) -> str:
    """A fact of a side; of many runs, when the first and the last of them started."""
    text = facts.get(name, "")
    times = sorted(text.split("; "))
    return f"{times[0]} to {times[-1]}" if name == "started" and len(times) > 2 else text


def _records(side: Side) -> str:
    """What the user called them. Of files that were named one by one, which stand below, their number."""
    return f"{len(side.files)} files" if len(side.files) > 1 and side.name == ",".join(side.files) else side.name


def _several(name: str, before: Sequence[str], after: Sequence[str]) -> tuple[str, str, str]:
    return (name if max(len(before), len(after)) == 1 else f"{name}s", _listed(before), _listed(after))


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def limits(report: Report) -> str:
    """The limits that decided, such as "time 3%; confidence 99.9%"; what is an error; and the exit status."""
    used = [f"{name} {value}" for name, value in _plain(report.limits).items()]
    fatal = ", ".join(["wrong", *map(plain, report.fail_on)])
    return "; ".join([*used, f"errors: {fatal}", f"exit status {report.exit_status}"])


def _plain(texts: Mapping[str, str]) -> dict[str, str]:
    return {plain(name): plain(value) for name, value in texts.items()}


def value(number: float | None, metric: Metric) -> str:
    """A number with its unit: "0.4970 ms", "44", "1024 bytes"."""
    text = figure(number, metric)
    unit = plain(metric.unit)
    return text if text == NONE or not unit or unit == plain(metric.name) else f"{text} {unit}"


def figure(number: float | None, metric: Metric) -> str:
    """A number without its unit: a count as it is, anything else with four digits."""
    if number is None or not math.isfinite(number):
        return NONE
    return count_text(number) if metric.exact or number == 0 else milliseconds(number)


def ratio(change: Change) -> str:
    """After over before, "1.042x"; of counts, which have no interval, what was added or taken: "+4"; "" without."""
    if change.metric.exact:
        if change.before is None or change.after is None:
            return ""
        apart = change.after - change.before
        if not math.isfinite(apart):
            return ""
        return f"{int(apart):+d}" if float(apart).is_integer() else f"{apart:+.6g}"
    text = times(change.ratio)
    return f"{text}x" if text else ""


def times(factor: float | None) -> str:
    """A ratio with three places, fewer where it is large: "1.042", "12.3", "1500"; "" without one."""
    if factor is None or not math.isfinite(factor):
        return ""
    return f"{factor:.3f}" if factor < 10 else f"{factor:.1f}" if factor < 1000 else f"{factor:.0f}"


def interval(change: Change) -> str:
    """The interval of the ratio, "1.031..1.054"; "" where there is none."""
    low, high = times(change.low), times(change.high)
    return f"{low}..{high}" if low and high and not change.metric.exact else ""


def name(change: Change) -> str:
    """The subject's name as a plain line."""
    return plain(change.subject.name)


def title(change: Change) -> str:
    """The name of a row: its subject and what is compared, unless that is the time."""
    metric = plain(change.metric.name)
    return name(change) if metric == "time" else f"{name(change)}: {metric}"


def metric_name(change: Change) -> str:
    """What the numbers of a row are; `NONE` where it has none, such as a row that was only compiled and is new."""
    return plain(change.metric.name) if change.before is not None or change.after is not None else NONE


def verdict(change: Change) -> str:
    """The verdict of a row as a plain word: of a count, which has no speed, "worse" and "better"."""
    word = plain(change.verdict)
    return {"slower": "worse", "faster": "better"}.get(word, word) if change.metric.exact else word


def place(subject: Subject) -> str:
    """ "FILE:LINE", as far as it is known."""
    return plain(f"{subject.file}:{subject.line}" if subject.file and subject.line > 0 else subject.file)


def beyond(change: Change) -> str:
    """The reason as a plain line, without the two numbers that a count's begins with: for where `told` stands too."""
    reason = plain(change.reason)
    if change.metric.exact and change.before is not None and change.after is not None:
        after = f"{figure(change.after, change.metric)} {plain(change.metric.unit)}".rstrip()
        reason = reason.removeprefix(f"{figure(change.before, change.metric)} to {after}").removeprefix(", ")
    return reason


def told(change: Change) -> str:
    """The numbers of a row in words: "0.4970 ms -> 0.5180 ms (1.042x, 1.031..1.054)"; "" where it has none."""
    if change.verdict == "over budget" and change.before is None:
        return value(change.after, change.metric)  # held against this side alone: on the other nothing is missing
    if change.before is None and change.after is None:
        return ""
    after_before = ", ".join(part for part in (ratio(change), interval(change)) if part)
    numbers = " -> ".join(
        "none" if number is None else value(number, change.metric) for number in (change.before, change.after)
    )
    return f"{numbers} ({after_before})" if after_before else numbers
