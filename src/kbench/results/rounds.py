"""Rounds: the same experiment measured several times in one run, far apart in time, and its rounds as one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kbench.errors import Exit, worst
from kbench.measure.statistics import confidence_interval, median, quartiles, valid_samples
from kbench.results.schema import Row
from kbench.results.store import newest, row_key

_DIGITS = 6  # of a millisecond: 1 ns


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for each experiment, in the order in which they first came; one that has a single round stays itself.

    The samples of all rounds count alike. An experiment that went wrong in any of its rounds went wrong: its row is
    the round that did. Of a round that was repeated the last row counts.
    """
    groups: dict[object, list[Row]] = {}
    for row in newest(rows):
        groups.setdefault(row_key(row), []).append(row)
    return [merge(group) for group in groups.values()]


def merge(rounds: Sequence[Row]) -> Row:
    """The rows of one experiment as one; see `merged`."""
    if len(rounds) == 1:
        return rounds[0]
    rows = sorted(rounds, key=lambda row: row.round)
    gravest = worst([row.exit_status for row in rows])
    bad = next((row for row in rows if row.exit_status == gravest), rows[0])
    if gravest != Exit.OK:
        return replace(bad, seconds=sum(row.seconds for row in rows))
    timed = [row for row in rows if row.measurement is not None]
    if not timed:
        return rows[0]
    measurement = merged_measurement([row.measurement for row in timed if row.measurement is not None])
    return replace(timed[0], measurement=measurement, seconds=sum(row.seconds for row in rows))


def merged_measurement(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The measurements of several rounds as one: their samples one after the other, statistics and interval of all.

    What cannot be put together (the second timer, warm-ups) is that of the first round. `rounds` says how many.
    """
    samples = [sample for taken in rounds for sample in taken.get("samples_ms") or ()]
    first = dict(rounds[0])
    if not valid_samples(samples):  # of a file that was edited: the first round's statistics stand
        return first
    interval = confidence_interval(samples)
    low, high = quartiles(samples)
    return {
        **first,
        "samples_ms": samples,
        "median_ms": round(median(samples), _DIGITS),
        "low_ms": round(interval.low, _DIGITS),
        "high_ms": round(interval.high, _DIGITS),
        "confidence": round(interval.confidence, _DIGITS),
        "q1_ms": round(low, _DIGITS),
        "q3_ms": round(high, _DIGITS),
        "count": sum(taken.get("count") or len(taken.get("samples_ms") or ()) for taken in rounds),
        "note": _joined(rounds, "note"),
        "stopped": _joined(rounds, "stopped"),
        "conditions": _conditions([taken.get("conditions") or {} for taken in rounds]),
        "rounds": len(rounds),
    }


def _joined(rounds: Sequence[Mapping[str, Any]], name: str) -> str:
    return "; ".join(dict.fromkeys(text for taken in rounds if (text := taken.get(name))))


def _conditions(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Those of the first round, with what reaches over all: clocks, and how often the card held itself back."""
    known: dict[str, Any] = dict(found[0])
    if clocks := [clock for each in found for clock in each.get("sm_mhz", ())]:
        known["sm_mhz"] = [min(clocks), max(clocks)]
    for name in ("throttle_waits", "throttled"):
        if any(name in each for each in found):
            known[name] = sum(each.get(name, 0) for each in found)
    if any("throttles" in each for each in found):
        known["throttles"] = sorted({reason for each in found for reason in each.get("throttles", ())})
    return known
