"""Budgets: limits on what AFTER may take, whatever it took before: `"layernorm_forward.6.registers" = "<= 40"`."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kbench.errors import UsageError
from kbench.report.metrics import metric_of
from kbench.report.model import Metric
from kbench.results.tables import count_text

ANY = "*"
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, "<": operator.lt, "==": operator.eq, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
_KEY = re.compile(r"(\*|\w+)(?:\.(\*|\d{1,9}))?\.([a-z]\w*)", re.ASCII)
_LIMIT = re.compile(r"(<=|==|>=|<|>)\s*(\d{1,15}(?:\.\d{1,9})?)(?:\s*([A-Za-z]+))?", re.ASCII)
KEY_FORM = 'write "FAMILY.VERSION.METRIC" or "FAMILY.METRIC", * for any, such as "layernorm_forward.6.registers"'
LIMIT_FORM = 'write <=, <, ==, >= or > and a number, such as "<= 40"'


@dataclass(frozen=True)
class Budget:
    """One limit. family: a name, or "*"; version: None for any. key: as it was written."""

    key: str
    family: str
    version: int | None
    metric: Metric
    relation: str
    limit: float

    def about(self, family: str, version: int, metric: str) -> bool:
        """Whether it limits this metric of this version."""
        return self.metric.name == metric and self.family in (ANY, family) and self.version in (None, version)

    def holds(self, value: float) -> bool:
        return OPERATORS[self.relation](value, self.limit)

    def __str__(self) -> str:
        return (
            f"{self.key} {self.relation} {count_text(self.limit)}{f' {self.metric.unit}' if self.metric.unit else ''}"
        )


def parse_budget(key: str, text: object, where: str) -> Budget:
    """A line of budgets. where: the file, for errors, which name the key too. Raises UsageError."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        raise UsageError(f"{where}: {key!r} is no budget's name", KEY_FORM)
    limit = _LIMIT.fullmatch(text.strip()) if isinstance(text, str) else None
    if limit is None:
        shown = repr(text) if isinstance(text, str) else str(text)
        raise UsageError(f"{where}: {key} = {shown} is no limit", LIMIT_FORM)
    metric = metric_of(parts[3])
    if limit[3] and limit[3] != metric.unit:
        unit = f"is in {metric.unit}" if metric.unit else "has no unit"
        raise UsageError(f"{where}: {key} = {text!r}: {metric.name} {unit}", "leave the unit out, or write that one")
    version = None if parts[2] in (None, ANY) else int(parts[2])
    return Budget(key, parts[1], version, metric, limit[1], float(limit[2]))


def require_known(budget: Budget, families: Collection[str], metrics: Collection[str], where: str) -> None:
    """Raises UsageError for a family or metric that nothing has: such a limit would never be broken."""
    if budget.family != ANY and budget.family not in families:
        raise UsageError(f"{where}: {budget.key}: unknown family {budget.family!r}", _near(budget.family, families))
    if budget.metric.name not in metrics:
        raise UsageError(
            f"{where}: {budget.key}: unknown metric {budget.metric.name!r}", _near(budget.metric.name, metrics)
        )


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
