"""A report out of two sides: every pair of rows gets its verdict, and all of them together an exit status."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from kbench.errors import Exit, worst
from kbench.measure.statistics import median, valid_samples
from kbench.report import pair as pairing
from kbench.report.classify import PROVEN, REFUSED, Standing, standing
from kbench.report.config import Config
from kbench.report.counted import Counted, Placed, over_budget
from kbench.report.decide import Comparison, Outcome, decide_all
from kbench.report.decision import FLOOR_MS, MIN_ROUNDS, MIN_SAMPLES, Decision, Rule, Verdict
from kbench.report.family_wise import REPORT_ERROR
from kbench.report.metrics import COUNTS, TIME
from kbench.report.model import FAIL_ON, VERDICTS, Change, Report, Side, Subject
from kbench.report.pair import Pair
from kbench.report.records import Experiment, Loaded, Samples
from kbench.report.side import Samples as DecidedSamples
from kbench.report.side import Side as DecidedSide
from kbench.report.subjects import Places, subject_of
from kbench.report.thresholds import percentage

# Where a reader will look at the kernel's source.
_PLACED = ("wrong", "slower", "over budget", "unclear")
_FROM_DECISION = {Verdict.NOT_COMPARABLE: "incomparable"}
# Reasons of rows that are not comparable, of which a report says how often it gives them.
_MOST_REASONS = 3


@dataclass(frozen=True)
class Settings:
    """How a report judges. config: limits. fail_on: what is an error beside wrong rows. folders: of users' families.
    rerun_before: unclear rows say what they need if both sides can be measured again."""

    config: Config = Config()
    fail_on: tuple[str, ...] = ("regression",)
    folders: Sequence[Path] = ()
    rerun_before: bool = True


@dataclass(frozen=True)
class Unclear:
    """A row that more rounds would settle: how many, None where none would, or nobody knows."""

    experiment: Experiment
    rounds: int | None


@dataclass
class _Building:
    """What the pairs gave so far."""

    changes: list[Change] = field(default_factory=list)
    timed: list[Pair] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    left: Counter[str] = field(default_factory=Counter)
    statuses: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Built:
    """A report, and the rows that could be settled by measuring AFTER again."""

    report: Report
    unclear: tuple[Unclear, ...]


def build(before: Loaded | None, after: Loaded, settings: Settings) -> Built:
    """The report. before: None on a first run. Raises UsageError for limits on what nothing has."""
    places = Places(settings.folders)
    first_run = before is None
    before = before if before is not None else Loaded(Side("none yet"))
    _require_known(settings.config, places, (before, after))

    building = _Building()
    for each in pairing.pairs(before, after):
        _take(each, building, places)
    outcome = _decide(building.timed, settings)
    building.changes += _timed_changes(building.timed, outcome, settings, places)
    building.changes += building.counted.changes(_placed(places), subject_of)
    broken, held, idle = over_budget(_experiments(after), settings.config.budgets, _placed(places))
    building.changes += broken

    changes = tuple(sorted(building.changes, key=_order))
    findings = [
        *(f"BEFORE: {text}" for text in before.findings), *(f"AFTER: {text}" for text in after.findings),
        *_findings(before, after, building, outcome),
        *(f"the budget {budget} ({settings.config.path}) met no row" for budget in idle),
    ]  # fmt: skip
    if first_run:
        findings.insert(0, "first run: there is nothing yet to compare with (kbench sweep --save writes a baseline)")
    status = _exit_status(changes, building.statuses, settings.fail_on, bool(held) or first_run)
    report = Report(
        before.side, after.side, changes, tuple(findings), _limits(settings.config, building, outcome),
        settings.fail_on, int(status), held, first_run,
    )  # fmt: skip
    unclear = [
        Unclear(cast(Experiment, each.after), decision.needed_rounds)
        for each, decision in zip(building.timed, outcome.decisions, strict=True)
        if decision.verdict is Verdict.UNCLEAR
    ]
    return Built(report, tuple(unclear))


def _experiments(loaded: Loaded) -> Iterable[Experiment]:
    return (experiment for by_device in loaded.experiments.values() for experiment in by_device.values())


def _require_known(config: Config, places: Places, sides: Sequence[Loaded]) -> None:
    if not (config.budgets or config.thresholds.by_family):
        return
    families: Collection[str] = {*places.families, *(key[0] for side in sides for key in side.experiments)}
    found = {name for side in sides for each in _experiments(side) for _, name in each.counts}
    config.require_known(families, {TIME.name, *COUNTS, *found})


# ---------------------------------------------------------------------------------------------- pairs


def _take(each: Pair, building: _Building, places: Places) -> None:
    """Put a pair where it belongs: among the changes, or among those whose numbers are to be compared."""
    stands = standing(each)
    if stands.left:
        building.left[stands.left] += 1
        return
    if stands.counts and each.before is not None and each.after is not None:
        building.counted.add(each.before, each.after)
    if stands.times:
        building.timed.append(each)
    if stands.verdict:
        building.changes.append(_stated(each, stands, places))
        if stands.verdict == "incomparable":
            building.reasons[stands.reason] += 1
        if stands.verdict == "wrong" and each.after is not None:
            building.statuses.add(each.after.worst.status)


def _stated(each: Pair, stands: Standing, places: Places) -> Change:
    """The change of a pair whose numbers are not compared."""
    experiment = each.after if each.after is not None else cast(Experiment, each.before)
    subject = _subject(experiment, stands.verdict, places)
    values = [_middle(side) if side is not None else None for side in (each.before, each.after)]
    return Change(
        subject, TIME, stands.verdict, values[0], values[1], reason=stands.reason,
        reproduce=experiment.worst.reproduce if stands.verdict == "wrong" else "",
    )  # fmt: skip


def _middle(experiment: Experiment) -> float | None:
    """The median of all samples, None without a usable one."""
    samples = [s for side in experiment.samples for s in side if isinstance(s, float)]
    return median(samples) if valid_samples(samples) else None


def _subject(experiment: Experiment, verdict: str, places: Places) -> Subject:
    return subject_of(experiment, places=places if verdict in _PLACED else None)


def _placed(places: Places) -> Placed:
    return lambda experiment, kernel: subject_of(experiment, kernel, places)


# ---------------------------------------------------------------------------------------------- times


def _decide(timed: Sequence[Pair], settings: Settings) -> Outcome:
    rules: dict[tuple[float, int], Rule] = {}
    rows = []
    for each in timed:
        before, after = cast(Experiment, each.before), cast(Experiment, each.after)
        key = (settings.config.thresholds.of(after.key[0]), after.worst.runs)
        if key not in rules:
            # A sample of a graph is the time of many runs, divided by them: so is what the timer cannot resolve.
            rules[key] = Rule(key[0], floor=FLOOR_MS / key[1] if key[1] > 1 else None)
        rows.append(
            Comparison(
                _side(before),
                _side(after),
                rules[key],
                identical=bool(after.code) and before.code == after.code,
                kernel=f"{after.key[0]}:{after.key[1]}",
            )  # fmt: skip
        )
    return decide_all(rows, rerun_before=settings.rerun_before)


def _side(experiment: Experiment) -> DecidedSide:
    return DecidedSide(list(map(_array, experiment.samples)))


def _array(samples: Samples) -> DecidedSamples:
    # What is no array is no list of numbers either: the decision says why.
    return np.frombuffer(samples, dtype=np.float64) if isinstance(samples, array) else cast(DecidedSamples, samples)


def _timed_changes(timed: Sequence[Pair], outcome: Outcome, settings: Settings, places: Places) -> Iterable[Change]:
    confidence = 1.0 - REPORT_ERROR
    for each, decision in zip(timed, outcome.decisions, strict=True):
        before, after = cast(Experiment, each.before), cast(Experiment, each.after)
        verdict = _FROM_DECISION.get(decision.verdict, str(decision.verdict))
        yield Change(
            _subject(after, verdict, places), TIME, verdict, decision.before, decision.after, decision.ratio,
            decision.low, decision.high, None if decision.low is None else confidence,
            settings.config.thresholds.of(after.key[0]), decision.reason, _reproduce(decision, after),
            *((), ()) if verdict == "incomparable" else (before.samples, after.samples),
        )  # fmt: skip


def _reproduce(decision: Decision, after: Experiment) -> str:
    return "" if decision.verdict in (Verdict.SAME, Verdict.FASTER) else after.worst.reproduce


# ---------------------------------------------------------------------------------------------- all together


def _order(change: Change) -> tuple[object, ...]:
    """By verdict, then the largest change first, then by name."""
    subject = change.subject
    size = 0.0
    if change.verdict in ("slower", "faster", "unclear"):
        size = math.inf if not change.ratio else abs(math.log(change.ratio))
    name = (subject.family, subject.version, subject.problem, subject.dtype, subject.block, subject.params)
    return (VERDICTS.index(change.verdict), -size, *name, subject.cache_mode, subject.device, change.metric.name)


def _findings(before: Loaded, after: Loaded, building: _Building, outcome: Outcome) -> list[str]:
    found = []
    if outcome.shift.machine_differs:
        found.append(f"the machine differs: {outcome.shift}")
    if before.side.runs and set(before.side.runs) == set(after.side.runs):
        found.append("both sides are the same run: nothing can have changed")
    for reason, count in building.reasons.most_common(_MOST_REASONS):
        if count > 1:
            found.append(f"{count} rows are not comparable: {reason}")
    if count := building.left[PROVEN]:
        device = after.side.facts.get("device", "")
        why = ": the emulator has no times" if "emulator" in device.lower() else ""
        found.append(f"{count} rows were {PROVEN}{why}")
    return found


def _limits(config: Config, building: _Building, outcome: Outcome) -> dict[str, str]:
    """What the report was judged by, as text."""
    limits = {"time": percentage(config.thresholds.usual)}
    families = {each.after.key[0] for each in building.timed if each.after is not None}
    limits |= {
        f"time of {family}": percentage(share)
        for family, share in config.thresholds.by_family.items()
        if family in families
    }
    limits |= {
        "least time": f"{1000 * FLOOR_MS:g} us",
        "each side": f"{MIN_ROUNDS} rounds, {MIN_SAMPLES} samples",
        "confidence": f"{1 - REPORT_ERROR:.0%} for all rows together",
        "counts": "any change",
    }
    if config.budgets:
        limits["budgets"] = str(len(config.budgets))
    if outcome.noise_floor is not None:
        limits["noise"] = f"up to {outcome.noise_floor:.1%} in rows of unchanged machine code"
    if count := building.left[REFUSED]:
        limits["left out"] = f"{count} rows {REFUSED}"
    return limits


def _exit_status(changes: Sequence[Change], statuses: set[str], fail_on: Sequence[str], judged: bool) -> Exit:
    """judged: something was held against a limit though nothing was compared, or nothing had to be."""
    found = {change.verdict for change in changes}
    exits = [Exit.WRONG if status == "fail" else Exit.CRASHED for status in statuses]
    if any(verdict in found for name in fail_on for verdict in FAIL_ON[name]):
        exits.append(Exit.REGRESSION)
    if not judged and not found & {"slower", "over budget", "unclear", "faster", "same"}:
        exits.append(Exit.NOTHING)
    return worst(exits)
