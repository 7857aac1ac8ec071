"""Whether the rows of a file hold what rows hold: JSON is checked line by line on reading, what stands in it is not."""

from __future__ import annotations

from kbench.errors import UsageError
from kbench.results.schema import Row
from kbench.results.store import Run


def require_sound(run: Run) -> None:
    """Raises UsageError, naming the row, for one that cannot be shown: somebody has edited the file."""
    for number, row in enumerate(run.rows, start=1):
        if not is_sound(row):
            raise UsageError(f"{run.path}: row {number} is damaged: {row.family} version {row.version}", "sweep again")


def is_sound(row: Row) -> bool:
    """Whether a row can be shown and drawn."""
    try:
        taken = row.measurement
        numbers = [row.version, row.block, *row.sizes.values(), *row.params.values()]
        rates = [rate for rate in (row.traffic, row.flops) if rate is not None]
        return (
            all(isinstance(number, int) for number in numbers)
            and 0 < row.block < 1 << 31
            and all(isinstance(text, str) for text in (row.family, row.idea, row.dtype, row.reason, row.cache_mode))
            and all(0 <= rate < float("inf") for rate in rates)
            and not row.time_fault
            and not row.kernel_fault
            and (taken is None or 0 < taken["low_ms"] <= taken["median_ms"] <= taken["high_ms"] < float("inf"))
        )
    except (AttributeError, KeyError, TypeError):
        return False
