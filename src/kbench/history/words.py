"""What a series did, in words: one for a table, a sentence for below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from kbench.history.ratio import percent
from kbench.history.segments import Change
from kbench.history.series import Point, Series
from kbench.results.tables import count_text


def finding(series: Series) -> str:
    """The newest that there is to say, for a table: "slower +5.1%", "creep +20%", "unconfirmed +50%", "steady"."""
    if len(series.points) < 2:
        return "one run"
    if len(series.points) - 1 in series.breaks:
        return "not comparable"
    newest = max(series.changes, key=lambda change: change.at, default=None)
    if newest is None:
        return "steady"
    return f"{_word(series, newest)} {percent(newest.ratio)}"


def sentences(series: Series, breaks: bool = True) -> Iterator[str]:
    """Everything that there is to say, oldest first. breaks: also which runs cannot be compared."""
    told: list[tuple[int, str]] = [(change.at, _told(series, change)) for change in series.changes]
    if breaks:
        told += [(at, _broken(series, at, why)) for at, why in series.breaks.items()]
    yield from (text for _, text in sorted(told, key=lambda pair: pair[0]))
    for run, status in series.failed:
        yield f"{status} in run {run}: no number there"


def when(point: Point) -> str:
    """Of which run; its name begins with the time at which it started. And of which commit, where that is known."""
    return f"run {point.run} at {point.revision}" if point.revision else f"run {point.run}"


def reach(found: Iterable[Series]) -> str:
    """The commits of the first and the last run of all these series; "" where neither is known."""
    points = [point for series in found for point in series.points]
    never = datetime.min.replace(tzinfo=UTC)
    points.sort(key=lambda point: (point.started or never, point.run))
    if not points or not (points[0].revision or points[-1].revision):
        return ""
    first, last = (point.revision or "an unknown commit" for point in (points[0], points[-1]))
    if points[0].run == points[-1].run:
        return f"at {first}"
    return f"first run at {first}, last run at {last}" if first != last else f"first and last run at {first}"


def _word(series: Series, change: Change) -> str:
    if change.kind != "step":
        return change.kind
    if series.metric.name == "time":
        return "slower" if series.is_worse(change) else "faster"
    return "worse" if series.is_worse(change) else "better"


def _told(series: Series, change: Change) -> str:
    size = percent(change.ratio)
    if series.metric.exact:
        before, after = series.points[change.at - 1].value, series.points[change.at].value
        reach = f"{count_text(before)} to {count_text(after)}"
    else:
        reach = f"99% interval {percent(change.low)} to {percent(change.high)}"
    where = when(series.points[change.at])
    if change.kind == "unconfirmed":
        last = change.at == len(series.points) - 1
        how = "no run after it yet" if last else "the runs after it are as before"
        return f"unconfirmed {size} in {where}: {how}"
    if change.kind == "creep":
        assert change.since is not None
        first = series.points[change.since]
        return f"creep {size} ({reach}) from {when(first)} to {where}, no single run of which stands out"
    return f"{_word(series, change)} {size} ({reach}) since {where}{_cause(series, change)}"


def _cause(series: Series, change: Change) -> str:
    changed = series.source_changed(change)
    if changed is None:
        return ""
    return "; the version's files changed" if changed else "; the version's files did not change"


def _broken(series: Series, at: int, why: str) -> str:
    before, after = series.points[at - 1], series.points[at]
    size = f", {percent(after.value / before.value)}" if before.value > 0 else ""
    return f"not comparable since {when(after)}: {why}{size}"
