"""What can be said of a pair of rows before any number is compared."""

from __future__ import annotations

from dataclasses import dataclass

from kbench.report.pair import Pair
from kbench.report.records import Experiment
from kbench.report.surroundings import Difference

# What became of rows, as a report sees it: it went wrong; it did not run, which is nobody's fault; it passed.
BAD = ("fail", "crashed", "hung", "invalid", "unlaunchable", "internal")
NOT_RUN = ("refused", "skipped", "unable")


@dataclass(frozen=True, slots=True)
class Standing:
    """verdict: "wrong", "gone", "new" or "incomparable"; "" where there is none. reason: its sentence.

    times, counts: whether the numbers of both sides may be compared. left: why a pair is not in the report at all.
    """

    verdict: str = ""
    reason: str = ""
    times: bool = False
    counts: bool = False
    left: str = ""


REFUSED = "refused or skipped"
PROVEN = "proven, and without a number to compare"


def standing(pair: Pair) -> Standing:
    """The standing of a pair."""
    before, after = pair.before, pair.after
    if after is None:
        assert before is not None
        return _only_before(before)
    record = after.worst
    was = before.worst if before is not None else None
    if record.status in BAD:
        # A block that is too large for the device stays so.
        if record.status == "unlaunchable" and was is not None and was.status == "unlaunchable":
            return Standing(left=REFUSED)
        again = "" if was is None or was.status not in BAD else f" (before: {was.status})"
        return Standing("wrong", f"{record.status}: {record.reason or 'it does not say why'}{again}")
    if record.status in NOT_RUN:
        if was is None or was.status in NOT_RUN:
            return Standing(left=REFUSED)
        return Standing("gone", f"{_now(record.status)}: {record.reason}{_was(was.status)}")
    if was is None:
        return Standing("new", "no such row before")
    if was.status != "pass":
        fixed = "fixed: " if was.status in BAD else ""
        return Standing("new", f"{fixed}was {was.status} before: {was.reason}")
    assert before is not None
    return _both(before, after, pair.other_device)


def _now(status: str) -> str:
    return "could not run" if status == "unable" else f"is {status} now"


def _was(status: str) -> str:
    return f" (before: {status})" if status != "pass" else ""


def _only_before(before: Experiment) -> Standing:
    record = before.worst
    if record.status in NOT_RUN:
        return Standing(left=REFUSED)
    return Standing("gone", f"no such row after{_was(record.status)}")


def _both(before: Experiment, after: Experiment, other_device: bool) -> Standing:
    """Of a pair that passed on both sides."""
    if other_device:
        return Standing("incomparable", f"on {before.device} before, on {after.device} after")
    for name, side in (("before", before), ("after", after)):
        if any(record.overridden for record in side.rounds.values()):
            return Standing("incomparable", f"judged by --rtol or --atol {name}, not by the family's bound")
        if why := side.mixed:
            return Standing("incomparable", f"{name}: {why}")
    one, two = before.worst, after.worst
    difference: Difference = one.around.against(two.around, one.uses | two.uses)
    timed = [side.timed for side in (before, after)]
    counted = bool(before.counts and after.counts)
    counts = counted and difference.counts is None
    if any(timed):
        if not all(timed):
            name, record = ("after", two) if timed[0] else ("before", one)
            why = f": {record.reason}" if record.reason else ""
            return Standing("incomparable", f"not timed {name}{why}", counts=counts)
        if difference.times is not None:
            return Standing("incomparable", str(difference.times), counts=counts)
        return Standing(times=True, counts=counts)
    if counted and difference.counts is not None:
        return Standing("incomparable", str(difference.counts))
    return Standing(counts=True) if counts else Standing(left=PROVEN)
