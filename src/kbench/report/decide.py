"""The one function that decides rows of a report, from raw samples. See docs/report_decisions.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from kbench.report.decision import FLOOR_MS, Decision, Rule, Verdict
from kbench.report.estimate import Estimates, estimate
from kbench.report.family_wise import REPORT_ERROR, Shift
from kbench.report.judge import VERDICTS, Judgement, Limits, judge
from kbench.report.model import TIME, Metric
from kbench.report.side import Side, fault_of, flat
from kbench.report.wording import Numbers, decision_of

_DEFAULT = Rule()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides of a row.

    identical: the same machine code, launched in the same way, on both sides. kernel: what rows have in common that one
    edit slows together (family and version); "" for a row that has nothing in common with others.
    """

    before: Side
    after: Side
    rule: Rule = _DEFAULT
    metric: Metric = TIME
    identical: bool = False
    kernel: str = ""


@dataclass(frozen=True)
class Outcome:
    """The decisions of all rows, in their order, and what the rows say together.

    shift: rows that moved alike; if `shift.machine_differs`, that is a finding of the whole report and stands before
    its rows. decided: rows among which the report's error is divided. between: relative standard deviation between
    rounds. session: between the two sides beyond that, as rows of unchanged machine code show it. noise_floor: the
    largest change of such a row, as a part (0.02 is 2%); None where there is none.
    """

    decisions: list[Decision]
    shift: Shift = field(default_factory=Shift)
    decided: int = 0
    between: float = 0.0
    session: float = 0.0
    noise_floor: float | None = None


def decide(
    before: Side, after: Side, rule: Rule = _DEFAULT, *, metric: Metric = TIME, identical: bool = False
) -> Decision:
    """One row alone. In a report use `decide_all`: rows together know more of the noise, and have to be surer."""
    return decide_all([Comparison(before, after, rule, metric, identical)]).decisions[0]


def decide_all(rows: Sequence[Comparison], *, report_error: float = REPORT_ERROR, rerun_before: bool = True) -> Outcome:
    """All rows of a report, of metrics that are measured (`kbench.report.exact` has the others).

    report_error: how often any interval of the report may miss. rerun_before: what an unclear row needs is told for
    both sides; else as if the first side could not be measured again.
    Rows with unusable samples (none, zero, negative, not finite, not numbers) become `not comparable`, with the
    first bad sample in the reason, and take no part in the statistics.
    """
    if not 0.0 < report_error < 1.0:
        raise ValueError(f"report_error must lie between 0 and 1, not {report_error}")
    samples = _values(rows)
    if samples is not None:
        return _decided(rows, samples, report_error, rerun_before)
    faults = [_fault(row) for row in rows]
    good = [row for row, fault in zip(rows, faults, strict=True) if not fault]
    values = _values(good)
    assert values is not None, "the quick look at samples and the thorough one disagree"
    outcome = _decided(good, values, report_error, rerun_before)
    decisions = iter(outcome.decisions)
    whole = [Decision(Verdict.NOT_COMPARABLE, fault) if fault else next(decisions) for fault in faults]
    return Outcome(whole, outcome.shift, outcome.decided, outcome.between, outcome.session, outcome.noise_floor)


def _fault(row: Comparison) -> str:
    for name, side in (("before", row.before), ("after", row.after)):
        if fault := fault_of(side):
            return f"{name}: {fault}"
    return ""


@dataclass(frozen=True)
class _Samples:
    values: np.ndarray
    sizes: list[int]
    rounds: list[int]


def _values(rows: Sequence[Comparison]) -> _Samples | None:
    """All samples in one array, with the sizes of rounds; None if something in them may be unusable."""
    try:
        sides = [
            [samples for samples in side.rounds if len(samples)] for row in rows for side in (row.before, row.after)
        ]
    except TypeError:
        return None
    rounds = list(map(len, sides))
    if 0 in rounds:
        return None
    together = list(chain.from_iterable(sides))
    values = flat(together)
    return None if values is None else _Samples(values, list(map(len, together)), rounds)


def _decided(rows: Sequence[Comparison], samples: _Samples, report_error: float, rerun_before: bool) -> Outcome:
    if not rows:
        return Outcome([])
    estimates = estimate(samples.values, samples.sizes, samples.rounds)
    limits = _limits(rows)
    judgement = judge(estimates, limits, report_error, rerun_before)
    unchanged = np.abs(judgement.worse[limits.identical])
    return Outcome(
        _worded(rows, estimates, judgement), judgement.shift, judgement.decided, judgement.noise.between,
        judgement.session, math.expm1(float(unchanged.max())) if len(unchanged) else None,
    )  # fmt: skip


def _limits(rows: Sequence[Comparison]) -> Limits:
    rules = [row.rule for row in rows]
    return Limits(
        np.array([float(row.metric.worse) for row in rows]),
        np.array([rule.threshold for rule in rules], dtype=np.float64),
        np.array([floor_of(row.rule, row.metric) for row in rows]),
        np.array([rule.min_rounds for rule in rules]),
        np.array([rule.min_samples for rule in rules]),
        np.array([row.identical for row in rows], dtype=bool),
        _numbered([row.kernel for row in rows]),
    )


def _numbered(kernels: list[str]) -> np.ndarray:
    """A number for each kernel; rows without one have a number of their own."""
    numbers = {kernel: -number for number, kernel in enumerate(dict.fromkeys(kernels), 1)}
    return np.array([numbers[kernel] if kernel else number for number, kernel in enumerate(kernels)])


def floor_of(rule: Rule, metric: Metric) -> float:
    """The least difference that counts, in the metric's unit."""
    if rule.floor is not None:
        return rule.floor
    return FLOOR_MS if metric == TIME else 0.0


def _worded(rows: Sequence[Comparison], estimates: Estimates, judgement: Judgement) -> list[Decision]:
    levels = np.exp(estimates.location)
    verdicts = [VERDICTS[place] for place in judgement.verdict.tolist()]
    columns = zip(
        verdicts, judgement.worse.tolist(), judgement.deviation.tolist(), judgement.half.tolist(),
        judgement.margin.tolist(), judgement.enough.tolist(), judgement.needed_rounds.tolist(),
        judgement.needed_samples.tolist(), levels[:, 0].tolist(), levels[:, 1].tolist(),
        map(tuple, estimates.rounds.tolist()), map(tuple, estimates.samples.tolist()), strict=True,
    )  # fmt: skip
    return [
        decision_of(Numbers(*numbers), row.rule, row.metric, row.identical, judgement.shift)
        for row, numbers in zip(rows, columns, strict=True)
    ]
