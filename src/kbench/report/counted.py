"""Counts of compilers and emulators: what changed, and what breaks a budget.

A kernel has the same registers in every row that launches it. Rows that say the same of a kernel are one change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kbench.measure.statistics import median, valid_samples
from kbench.report.budget import Budget
from kbench.report.decision import Verdict
from kbench.report.exact import decide_exact
from kbench.report.metrics import TIME, Values, metric_of
from kbench.report.model import Change, Metric, Subject
from kbench.report.records import Experiment
from kbench.results.tables import count_text

_VERDICTS = {Verdict.BETTER: "faster", Verdict.WORSE: "slower", Verdict.NOT_COMPARABLE: "incomparable"}
Placed = Callable[[Experiment, str], Subject]
"""The subject of an experiment's kernel, with its place in the source."""


@dataclass(slots=True)
class _Group:
    """Rows that say the same of a kernel. first: the first of them. differ: in what the others do."""

    first: Experiment
    kernel: str
    rows: int = 0
    differ: set[str] = field(default_factory=set)

    def add(self, experiment: Experiment) -> None:
        self.rows += 1
        one, two = self.first.key, experiment.key
        if one is not two:
            pairs = (("problem", one[2], two[2]), ("block", one[4], two[4]), ("params", one[5], two[5]))
            self.differ.update(name for name, mine, other in pairs if mine != other)

    def subject(self, placed: Placed) -> Subject:
        """Without what is not the same in all of them."""
        blank: dict[str, str | int] = {"problem": "", "block": 0, "params": ""}
        subject = placed(self.first, self.kernel)
        return replace(subject, **{name: blank[name] for name in self.differ})  # type: ignore[arg-type]  # by name

    @property
    def remark(self) -> str:
        return f", in {self.rows} rows" if self.rows > 1 else ""


class Counted:
    """Takes pairs of experiments one by one; then tells their changes."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], tuple[_Group, Metric, float, float]] = {}
        self._metrics: dict[str, Metric] = {}

    def add(self, before: Experiment, after: Experiment) -> None:
        for kernel, name, one, two in _common(before.counts, after.counts):
            metric = self._metrics.get(name) or self._metrics.setdefault(name, metric_of(name))
            key = (*_whose(after), kernel, name, one, two)
            if key not in self._groups:
                self._groups[key] = (_Group(after, kernel), metric, one, two)
            self._groups[key][0].add(after)

    def changes(self, place: Placed, quiet: Placed) -> Iterator[Change]:
        """place, quiet: make subjects, of changes and of what stayed the same."""
        for group, metric, before, after in self._groups.values():
            decision = decide_exact(before, after, metric)
            verdict = _VERDICTS.get(decision.verdict, "same")
            same = verdict == "same"
            subject = group.subject(quiet if same else place)
            yield Change(
                subject, metric, verdict, decision.before, decision.after, decision.ratio,
                reason="" if same else decision.reason + group.remark,
                reproduce="" if same else group.first.worst.reproduce,
            )  # fmt: skip


def _whose(experiment: Experiment) -> tuple[object, ...]:
    family, version, _, dtype, _, _, mode = experiment.key
    return family, version, dtype, mode, experiment.device


def _common(before: Values, after: Values) -> Iterator[tuple[str, str, float, float]]:
    """Kernel, metric and both values of what both sides have. A single kernel that was given another name is held
    against the one that it replaced."""
    if before is after:
        yield from ((kernel, name, value, value) for (kernel, name), value in after.items())
        return
    olds, news = ({kernel for kernel, _ in values} for values in (before, after))
    renamed = dict(zip(news - olds, olds - news, strict=True)) if len(news - olds) == len(olds - news) == 1 else {}
    for (kernel, name), value in after.items():
        place = (renamed.get(kernel, kernel), name)
        if place in before:
            yield kernel, name, before[place], value


def over_budget(
    experiments: Iterable[Experiment], budgets: Sequence[Budget], place: Placed
) -> tuple[list[Change], int, list[Budget]]:
    """The broken budgets as changes, how many numbers were held against a budget, and the budgets that met none."""
    groups: dict[tuple[object, ...], tuple[_Group, Budget, float]] = {}
    idle = {budget.key: budget for budget in budgets}
    wanted = {budget.metric.name for budget in budgets}
    for experiment in experiments if budgets else ():
        if experiment.worst.status != "pass":
            continue
        family, version = experiment.key[:2]
        for (kernel, name), value in _values(experiment, wanted).items():
            for budget in budgets:
                if name in wanted and budget.about(family, version, name):
                    idle.pop(budget.key, None)
                    key = (*_whose(experiment), kernel, budget.key, value)
                    if key not in groups:
                        groups[key] = (_Group(experiment, kernel), budget, value)
                    groups[key][0].add(experiment)
    broken = [
        Change(
            group.subject(place), budget.metric, "over budget", None, value,
            reason=f"{count_text(value)} breaks the budget {budget}{group.remark}",
            reproduce=group.first.worst.reproduce,
        )
        for group, budget, value in groups.values()
        if not budget.holds(value)
    ]  # fmt: skip
    return broken, sum(group.rows for group, _, _ in groups.values()), list(idle.values())


def _values(experiment: Experiment, wanted: set[str]) -> Values:
    """Its counts, and its time where a budget asks for that."""
    counts = experiment.counts
    if TIME.name not in wanted:
        return counts
    samples = [sample for side in experiment.samples for sample in side if isinstance(sample, float)]
    if not valid_samples(samples):
        return counts
    return {**counts, ("", TIME.name): median(samples)}
