"""What is asked of all rows of a report together: how sure each has to be, and whether the machine is another one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kbench.report.noise import MIN_REFERENCE

# How often intervals of a whole report may miss, on either side: half of it are rows that look slower. Regressions have
# to be above the threshold too, so at most about one report in 200 without any change has a false one.
REPORT_ERROR = 0.01

# A smaller shift is what two cards of one model, or a warmer day, may differ by: it widens intervals and no more.
SHIFT_FLOOR = 0.01
# Kernels that have to move alike where none is known to be unchanged: one edit slows all rows of the kernel it is in.
MIN_KERNELS = 4
# Standard errors by which a shift is off zero.
_CLEARLY = 5.0
# Part of the rows that have to move alike: within half the shift of it, or their own error.
_MOST = 0.75
# Standard error of a median, as a multiple of the mean's, for a normal distribution.
_MEDIAN = math.sqrt(math.pi / 2.0)
_MAD_TO_DEVIATION = 1.4826


def tail_of(rows: int, report_error: float = REPORT_ERROR) -> float:
    """The probability that each side of one row's interval may miss with, where `rows` are decided (Bonferroni).

    Holm's procedure would widen intervals less, but only for rows that come after other regressions, and would make one
    row's interval depend on what the others show.
    """
    return report_error / (2.0 * max(rows, 1))


@dataclass(frozen=True)
class Shift:
    """Rows that moved alike.

    log: their median log ratio, above 0 where the second side is worse; 0 where no shift is clear. error: its standard
    error. rows: how many it was seen in. unchanged: these are rows of the same machine code, so that the shift can
    only be the machine's; else a change of all kernels (a compiler option) would look the same.
    """

    log: float = 0.0
    error: float = 0.0
    rows: int = 0
    unchanged: bool = False

    @property
    def machine_differs(self) -> bool:
        return abs(self.log) >= math.log1p(SHIFT_FLOOR)

    def __str__(self) -> str:
        if not self.rows:
            return "rows do not move alike"
        change = math.expm1(self.log)
        who = f"{self.rows} rows of unchanged machine code" if self.unchanged else f"most of {self.rows} rows"
        return f"{who} are {abs(change):.1%} {'slower' if change > 0 else 'faster'}"


def reference_rows(identical: np.ndarray) -> np.ndarray:
    """The rows that say whether the machine differs: those of unchanged code if there are enough, else all."""
    return identical if identical.sum() >= MIN_REFERENCE else np.ones(len(identical), dtype=bool)


def shift_of(worse: np.ndarray, errors: np.ndarray, identical: np.ndarray, kernels: np.ndarray) -> Shift:
    """The clear uniform shift of a report's rows, if there is one.

    worse: log ratios, above 0 where the second side is worse. errors: their standard errors, nan where unknown.
    kernels: a number for each kernel that rows are of.
    """
    chosen = reference_rows(identical)
    unchanged = bool(identical[chosen].all())
    if not unchanged and len(np.unique(kernels[chosen])) < MIN_KERNELS:
        return Shift()
    worse, errors = worse[chosen], np.nan_to_num(errors[chosen])
    if len(worse) < MIN_REFERENCE:
        return Shift()
    middle = float(np.median(worse))
    distances = np.abs(worse - middle)
    deviation = max(_MAD_TO_DEVIATION * float(np.median(distances)), float(np.median(errors)))
    error = _MEDIAN * deviation / math.sqrt(len(worse))
    alike = distances <= np.maximum(abs(middle) / 2.0, 3.0 * errors)
    if abs(middle) <= _CLEARLY * error or alike.mean() < _MOST:
        return Shift()
    return Shift(middle, error, len(worse), unchanged)
