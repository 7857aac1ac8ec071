"""How large a change has to be to count, and which verdicts end in an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kbench.errors import UsageError
from kbench.report.decision import THRESHOLD
from kbench.report.model import FAIL_ON

FORM = "write a percentage such as 3% or 0.5%"
NONE = "none"
_PERCENT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)%", re.ASCII)


def parse_threshold(text: object, what: str) -> float:
    """The share that "3%" is: 0.03. There is no other spelling, because 0.05 might be a twentieth or half a permille.

    what: where it stands, for the error. 0% makes any change count that the samples show, above half a microsecond.
    Raises UsageError.
    """
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        shown = repr(text) if isinstance(text, str) else str(text)
        raise UsageError(f"{what} {shown} is not a threshold", FORM)
    return float(match[1]) / 100.0


@dataclass(frozen=True)
class Thresholds:
    """The least change that counts, as a share: of all families, and of those that have their own."""

    usual: float = THRESHOLD
    by_family: Mapping[str, float] = field(default_factory=dict)

    def of(self, family: str) -> float:
        return self.by_family.get(family, self.usual)


def parse_fail_on(text: str, what: str = "--fail-on") -> tuple[str, ...]:
    """The names of "regression,unclear" in their order; none of "none". Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    if names == [NONE]:
        return ()
    for name in names:
        if name not in FAIL_ON:
            raise UsageError(
                f"{what}: {name!r} is nothing to fail on", f"write some of {', '.join(FAIL_ON)}, or {NONE}"
            )
    return tuple(dict.fromkeys(names))


def percentage(share: float) -> str:
    return f"{100 * share:.6g}%"
