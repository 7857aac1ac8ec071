"""The decision about counts, which have no noise: registers, bytes, instructions."""

from __future__ import annotations

import math

from kbench.report.decision import Decision, Verdict
from kbench.report.model import Metric
from kbench.results.tables import count_text


def decide_exact(before: object, after: object, metric: Metric, *, threshold: float = 0.0) -> Decision:
    """A row of an exact metric: with the same compiler any change is real, and no statistics are asked.

    threshold: the part of `before` that a count may rise or fall by and still be `same`; 0, where any change counts.
    A value that is no count makes the row `not comparable`.
    """
    for name, value in (("before", before), ("after", after)):
        if fault := _fault(value):
            return Decision(Verdict.NOT_COMPARABLE, f"{name}: {metric.name} is {fault}")
    assert isinstance(before, int | float) and isinstance(after, int | float)
    change = after - before
    ratio = after / before if before else None
    if abs(change) <= threshold * before:
        verdict = Verdict.SAME
        reason = "unchanged" if not change else f"{_change(before, after, metric)}, limit {threshold:.4g} of it"
    else:
        verdict = Verdict.WORSE if change * metric.worse > 0 else Verdict.BETTER
        reason = _change(before, after, metric)
    return Decision(verdict, reason, float(before), float(after), ratio)


def _change(before: float, after: float, metric: Metric) -> str:
    return f"{count_text(before)} to {count_text(after)} {metric.unit}".rstrip()


def _fault(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"not a number: {value!r}"
    if not math.isfinite(value) or value < 0:
        return f"not a count: {value}"
    return ""
