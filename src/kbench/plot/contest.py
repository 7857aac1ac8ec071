"""The rows of a run as pictures need them: checked, and in contests of one problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kbench.errors import UsageError
from kbench.results.best import contest, median, ties
from kbench.results.rounds import merged
from kbench.results.schema import UNPROVEN, Row
from kbench.results.sound import require_sound
from kbench.results.store import Run

Series = tuple[int, tuple[tuple[str, int], ...]]  # a version, and the other parameters that it ran with


@dataclass(frozen=True)
class Contest:
    """The rows that compete: one family, problem, dtype and cache mode. No experiment is in it twice."""

    rows: Sequence[Row]

    @property
    def name(self) -> str:
        first = self.rows[0]
        return f"{first.family} {first.problem} {first.dtype}"

    @cached_property
    def timed(self) -> list[Row]:
        """Rows that are proven and timed, by the family's own bound."""
        return [row for row in self.rows if row.may_win]

    @cached_property
    def winner(self) -> Row | None:
        return min(self.timed, key=median, default=None)

    @property
    def tied(self) -> int:
        """How many rows the measurement does not tell apart from the winner."""
        return sum(ties(row, self.winner) for row in self.timed) if self.winner else 0

    @property
    def blocks(self) -> list[int]:
        return sorted({row.block for row in self.rows})

    @cached_property
    def series(self) -> dict[Series, dict[int, Row]]:
        """By version and parameters, in their order: the row of each block size."""
        found: dict[Series, dict[int, Row]] = {}
        for row in sorted(self.rows, key=lambda row: (series_of(row), row.block)):
            found.setdefault(series_of(row), {})[row.block] = row
        return found


def series_of(row: Row) -> Series:
    return row.version, tuple(sorted(row.params.items()))


def label(series: Series) -> str:
    """Such as "v5", or "v5 ROWS=2"."""
    version, params = series
    return " ".join([f"v{version}", *(f"{name}={value}" for name, value in params)])


def contests(run: Run) -> list[Contest]:
    """The contests of a run, in the order in which they came; of an experiment that was repeated, the last row.

    Raises UsageError for a run without rows, and for a row whose times are no times.
    """
    if not run.rows:
        raise UsageError(f"{run.path} holds no rows, so there is nothing to plot", "`kbench sweep` writes some")
    require_sound(run)
    groups: dict[object, list[Row]] = {}
    drawn = [row for row in run.rows if row.cache_mode not in UNPROVEN]
    if not drawn:
        what = f"{run.path} holds what was {UNPROVEN[run.rows[0].cache_mode]}: neither verdicts nor times to plot"
        raise UsageError(what, "`kbench report` compares such runs")
    for row in merged(drawn):
        groups.setdefault(contest(row), []).append(row)
    return [Contest(rows) for rows in groups.values()]
