"""Whether the gate fires at all: AFTER with one kernel made twice as slow has to be an error."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from kbench.errors import Exit
from kbench.report.build import Settings, build
from kbench.report.classify import standing
from kbench.report.metrics import Values, metric_of
from kbench.report.model import Change
from kbench.report.pair import pairs
from kbench.report.records import Experiment, Loaded, Samples

FACTOR = 2.0


@dataclass(frozen=True)
class SelfTest:
    """fires: whether the report of the slowed kernel ends in a regression. told: a sentence for people."""

    fires: bool
    told: str


def self_test(before: Loaded, after: Loaded, settings: Settings) -> SelfTest:
    """Slow the first kernel whose numbers can be compared, in memory. `after` is not to be used any more."""
    chosen = next(
        (each.after for each in pairs(before, after) if (stands := standing(each)).times or stands.counts), None
    )
    if chosen is None:
        return SelfTest(False, "no row can be compared, so that nothing could be found slower")
    family, version = chosen.key[:2]
    rows = _slow(after, family, version)
    report = build(before, after, settings).report
    mine = [c for c in report.changes if (c.subject.family, c.subject.version) == (family, version)]
    found = sum(change.verdict == "slower" for change in mine)
    what = f"{family}:{version} made {FACTOR:g} times as slow in {rows} rows"
    if report.exit_status == Exit.REGRESSION and found:
        return SelfTest(True, f"{what} is found in {found} numbers and ends in exit status {report.exit_status}")
    return SelfTest(False, f"{what} ends in exit status {report.exit_status}: {_why(mine, found, settings)}")


def _why(mine: list[Change], found: int, settings: Settings) -> str:
    if found and "regression" not in settings.fail_on:
        return f"it is found in {found}, and --fail-on does not name regression"
    other = next((change for change in mine if change.verdict not in ("same", "slower")), None)
    return f"it is {other.verdict}: {other.reason}" if other is not None else "something else outranks it"


def _slow(after: Loaded, family: str, version: int) -> int:
    """Make every row of a version slower, and its counts worse; returns how many rows there were."""
    rows = 0
    for key, by_device in after.experiments.items():
        if key[:2] == (family, version):
            for experiment in by_device.values():
                rows += 1
                _worsen(experiment)
    return rows


def _worsen(experiment: Experiment) -> None:
    experiment.counts = _counts(experiment.counts)
    for at, record in experiment.rounds.items():
        # Other code, or it would be known that it cannot have become slower.
        experiment.rounds[at] = replace(record, code="", samples=_slower(record.samples))


def _slower(samples: Samples | None) -> Samples | None:
    return array("d", (FACTOR * sample for sample in samples)) if isinstance(samples, array) else samples


def _counts(counts: Values) -> Values:
    return {
        (kernel, name): FACTOR * value + 1 if metric_of(name).worse > 0 else value / FACTOR
        for (kernel, name), value in counts.items()
    }
