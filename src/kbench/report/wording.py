"""A judged row as a `Decision`: one line that says why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kbench.report.decision import Decision, Rule, Verdict
from kbench.report.family_wise import Shift
from kbench.report.model import Metric
from kbench.report.needed import NEVER

# Kernels do become five times faster; more often such a gain is work that is no longer done.
SUSPICIOUS = 5.0


@dataclass(frozen=True, slots=True)
class Numbers:
    """What `Judgement` and `Estimates` hold of one row."""

    verdict: Verdict
    worse: float
    deviation: float
    half: float
    margin: float
    enough: bool
    needed_rounds: int
    needed_samples: int
    before: float
    after: float
    rounds: tuple[int, int]
    samples: tuple[int, int]


def decision_of(row: Numbers, rule: Rule, metric: Metric, identical: bool, shift: Shift) -> Decision:
    """The decision with its reason; ratios turned back to after over before."""
    sign = float(metric.worse)
    log = sign * row.worse
    low = high = None
    if math.isfinite(row.half):
        low, high = math.exp(log - row.half), math.exp(log + row.half)
    suspicious = row.verdict is Verdict.FASTER and row.worse < -math.log(SUSPICIOUS)
    needs = _needs(row, rule)
    return Decision(
        row.verdict,
        _reason(row, rule, metric, identical, shift, low, high, needs) + (SUSPECT if suspicious else ""),
        row.before, row.after, math.exp(log), low, high, row.margin, row.rounds, row.samples, *needs, suspicious,
    )  # fmt: skip


SUSPECT = "; suspiciously large: see whether it still does the work"


def _needs(row: Numbers, rule: Rule) -> tuple[int | None, int | None]:
    """Further rounds and samples a side."""
    if row.verdict is not Verdict.UNCLEAR:
        return None, None
    if not row.enough:
        rounds = max(rule.min_rounds - min(row.rounds), 0)
        samples = max(rule.min_samples - min(row.samples), 0)
        return rounds, samples
    return (
        None if row.needed_rounds == NEVER else row.needed_rounds,
        None if row.needed_samples == NEVER else row.needed_samples,
    )


def _reason(
    row: Numbers,
    rule: Rule,
    metric: Metric,
    identical: bool,
    shift: Shift,
    low: float | None,
    high: float | None,
    needs: tuple[int | None, int | None],
) -> str:
    change = percent(math.exp(metric.worse * row.worse))
    if row.verdict is Verdict.NOT_COMPARABLE:
        return f"machine differs: {change} where {shift}"
    if identical and row.verdict is Verdict.SAME:
        return f"same machine code; {change} is noise"
    if not row.enough:
        return _too_few(row, rule)
    assert low is not None and high is not None or row.verdict is Verdict.UNCLEAR
    if low is None or high is None:
        return "how rounds differ is not known"
    interval = f"{change} ({percent(low)} to {percent(high)}), limit {_limit(row, rule, metric)}"
    if row.verdict is Verdict.UNCLEAR:
        return f"{interval}; {_advice(*needs)}"
    if shift.machine_differs:
        return f"{interval}; {percent(math.exp(row.deviation))} beside the machine's {percent(math.exp(shift.log))}"
    return interval


def percent(ratio: float) -> str:
    """+4.2% for 1.042; 12x from ten times on."""
    return f"{ratio:.3g}x" if ratio >= 10.0 else f"{ratio - 1.0:+.1%}"


def _too_few(row: Numbers, rule: Rule) -> str:
    texts = []
    for side, rounds, samples in zip(("before", "after"), row.rounds, row.samples, strict=True):
        has = [_count(rounds, "round")] if rounds < rule.min_rounds else []
        has += [_count(samples, "sample")] if samples < rule.min_samples else []
        if has:
            texts.append(f"{' and '.join(has)} {side}")
    needed = f"a side needs {_count(rule.min_rounds, 'round')} and {_count(rule.min_samples, 'sample')}"
    return f"too few: {', '.join(texts)}; {needed} (kbench sweep --rounds)"


def _limit(row: Numbers, rule: Rule, metric: Metric) -> str:
    if row.margin > math.log1p(rule.threshold) * (1.0 + 1e-9):
        floor = math.expm1(row.margin) * min(row.before, row.after)
        return f"{floor * 1000.0:.3g} us" if metric.unit == "ms" else f"{floor:.3g} {metric.unit}"
    return f"{rule.threshold:.4g}" if rule.threshold >= 10.0 else f"{100.0 * rule.threshold:.4g}%"


def _advice(rounds: int | None, samples: int | None) -> str:
    if rounds is None and samples is None:
        return "more rounds would not settle it; kbench compare FAMILY:VERSION OLD.cu may"
    ways = []
    if rounds is not None:
        ways.append(_count(rounds, "more round"))
    if samples is not None:
        ways.append(_count(samples, "more sample"))
    return " or ".join(ways) + " a side would settle it"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
